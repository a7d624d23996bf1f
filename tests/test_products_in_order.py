"""Products whose sums are in order: how many tokens there are decides no bit of any of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import KERNEL_DEVICE
from test_linears_kernel import EPS, assert_like_reference, begun, drawer, exact
from torch import Tensor

from ddbatch_kernels.gated_linear import gated_linear_ref
from ddbatch_kernels.gated_linear.kernel import gated_linear_triton
from ddbatch_kernels.linear_add import linear_add_ref
from ddbatch_kernels.linear_add.kernel import linear_add_triton
from ddbatch_kernels.linear_float32.kernel import linear_float32_triton
from ddbatch_kernels.normed import Normed
from ddbatch_kernels.project_heads import Heads
from ddbatch_kernels.project_heads.kernel import project_heads_triton

pytestmark = pytest.mark.usefixtures("like_a_gpu")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Width and rows of a weight: a whole number of tiles, none, and (the last) what counts as large.
SIZES = [(64, 128), (60, 44)] + ([(2048, 4096)] if KERNEL_DEVICE == "cuda" else [])
# On a GPU tiles of more tokens take over.
TOKENS = (1, 5, 63, 70, 127) if KERNEL_DEVICE == "cpu" else (1, 63, 70, 130, 300, 600, 900)
MOST = TOKENS[-1]


def part(normed: Normed, T: int) -> Normed:
    """Of the first T tokens."""
    found = [item[:T] if item is not None else None for item in normed[3:]]
    return Normed(normed.x_TD[:T], normed.weight_D, normed.eps, *found)


def assert_tokens_decide_no_bit(run: Callable[[int], Tensor]) -> None:
    """run: the result for the first so many tokens."""
    most = run(MOST)
    for count in TOKENS[:-1]:
        assert torch.equal(run(count), most[:count]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows"), SIZES)
def test_a_layers_products(width: int, rows: int, dtype: torch.dtype, kernel_device: str) -> None:
    normal = drawer(kernel_device, dtype, rows)
    x, norm, residual = normal(MOST, width), normal(width), normal(MOST, rows)
    weight, next_norm = normal(rows, width, scale=width**-0.5), normal(rows)
    stream = Normed(x, norm, EPS) if dtype == torch.float16 else begun(x, norm, 3)

    def add(T: int) -> Tensor:
        made = linear_add_triton(x[:T], weight, residual[:T], next_norm, EPS, in_order=True)
        squares = made.square_TY
        return made.x_TD if squares is None else torch.cat((made.x_TD.float(), squares), dim=1)

    def gate(T: int) -> Tensor:
        return gated_linear_triton(part(stream, T), weight, in_order=True)

    for run in (add, gate):
        assert_tokens_decide_no_bit(run)
    found = linear_add_triton(x, weight, residual, next_norm, EPS, in_order=True).x_TD
    truth = linear_add_ref(*(item.double() for item in (x, weight, residual, next_norm)), EPS)
    expected = linear_add_ref(x, weight, residual, next_norm, EPS)
    assert_like_reference(found, expected.x_TD, truth.x_TD)
    exact_gate = gated_linear_ref(exact(stream), weight.double())
    assert_like_reference(gate(MOST), gated_linear_ref(stream, weight), exact_gate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("width", "rows"), SIZES)
def test_heads(
    width: int, rows: int, has_norms: bool, dtype: torch.dtype, kernel_device: str
) -> None:
    head_width = rows // 4 // 2 * 2
    normal = drawer(kernel_device, dtype, rows + has_norms)
    x, norm = normal(MOST, width), normal(width)
    weight = normal(4 * head_width, width, scale=width**-0.5)
    stream = Normed(x, norm, EPS) if dtype == torch.float16 else begun(x, norm, 2)
    angle = torch.linspace(0, 3, MOST * head_width // 2, device=kernel_device)
    angle = angle.view(MOST, 1, -1).repeat(1, 1, 2)
    rope = torch.cat((angle.cos(), angle.sin()), dim=1)
    head_norms = (normal(1, head_width), normal(1, head_width)) if has_norms else (None, None)
    place = torch.arange(MOST, device=kernel_device)

    def run(T: int) -> Tensor:
        k, v = (
            torch.zeros(1, MOST, 1, head_width, dtype=dtype, device=kernel_device) for _ in "kv"
        )
        heads = Heads(*head_norms, EPS, rope, place[:T], k, v, place[:T])
        q = project_heads_triton(part(stream, T), weight, None, heads, in_order=True)
        return torch.cat((q, k[0, :T], v[0, :T]), dim=1)

    assert_tokens_decide_no_bit(run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows"), SIZES)
def test_scores(width: int, rows: int, dtype: torch.dtype, kernel_device: str) -> None:
    normal = drawer(kernel_device, dtype, rows)
    x, weight = normal(MOST, width), normal(rows, width, scale=width**-0.5)
    assert_tokens_decide_no_bit(lambda T: linear_float32_triton(x[:T], weight, in_order=True))
    found = linear_float32_triton(x, weight, in_order=True)
    assert found.dtype == torch.float32
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
