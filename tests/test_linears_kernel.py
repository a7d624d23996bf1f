"""Products of few tokens in one kernel against their references: linear_add, gated_linear and
normed_linear; and embed_normed. The norm between two products is begun by one and ended by the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_errors import assert_no_worse
from torch import Tensor

from ddbatch_kernels.embed_normed import embed_normed_ref
from ddbatch_kernels.embed_normed.kernel import embed_normed_triton
from ddbatch_kernels.gated_linear import gated_linear_ref
from ddbatch_kernels.gated_linear.kernel import (
    gated_linear_fused,
    gated_linear_split,
    gated_linear_triton,
)
from ddbatch_kernels.linear_add import linear_add_ref
from ddbatch_kernels.linear_add.kernel import linear_add_fused, linear_add_triton
from ddbatch_kernels.normed import Normed
from ddbatch_kernels.product_table import Op, Tile, tile_of
from ddbatch_kernels.project_heads.normed_linear import normed_linear

pytestmark = pytest.mark.usefixtures("like_a_gpu")

EPS = 1e-5
# Tokens, width, rows of the weight: a whole number of blocks, and none.
SIZES = [(1, 64, 48), (2, 60, 20), (3, 128, 33), (17, 192, 34), (65, 60, 40)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawer(device: str, dtype: torch.dtype, seed: int) -> Callable[..., Tensor]:
    """Makes normal tensors; a row of a matrix is part of a longer one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        wide = torch.randn((*shape[:-1], shape[-1] + 4), generator=generator) * scale
        return wide.to(device, dtype)[..., 4:] if len(shape) > 1 else wide.to(device, dtype)[:-4]

    return normal


def assert_like_reference(found: Tensor, expected: Tensor, truth: Tensor) -> None:
    assert found.shape == expected.shape
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert_no_worse(found, expected, truth)


def begun(x_TD: Tensor, weight_D: Tensor, tiles: int = 1) -> Normed:
    """The norm as it leaves a kernel that has this many tiles."""
    square_TD = x_TD.float().square()
    parts = [part.sum(dim=1) for part in square_TD.tensor_split(tiles, dim=1)]
    return Normed(x_TD, weight_D, EPS, x_TD * weight_D, torch.stack(parts, dim=1))


def exact(normed: Normed) -> Normed:
    """The same, not begun, in float64."""
    return Normed(normed.x_TD.double(), normed.weight_D.double(), EPS)


def assert_begun(normed: Normed) -> None:
    """What was made of the norm is that of x as it was rounded."""
    x, weight = normed.x_TD.float(), normed.weight_D.float()
    assert normed.scaled_TD is not None
    assert normed.square_TY is not None
    assert torch.equal(normed.scaled_TD, (x * weight).to(normed.x_TD.dtype))
    torch.testing.assert_close(normed.square_TY.sum(dim=1), x.square().sum(dim=1))


def test_a_residual_is_overwritten_only_where_that_is_allowed(kernel_device: str) -> None:
    """In the dtype that goes to cuBLAS; the sum is the same."""
    normal = drawer(kernel_device, torch.float32, 1)
    x, weight, residual, norm = normal(3, 64), normal(48, 64), normal(3, 48), normal(48)
    before = residual.clone()
    kept = linear_add_triton(x, weight, residual, norm, EPS).x_TD
    assert torch.equal(residual, before)
    made = linear_add_triton(x, weight, residual, norm, EPS, overwrites=True).x_TD
    assert torch.equal(made, kept)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize(("tokens", "width", "rows"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_add_is_no_worse_than_its_reference(
    tokens: int, width: int, rows: int, dtype: torch.dtype, kernel_device: str
) -> None:
    normal = drawer(kernel_device, dtype, tokens)
    x, weight = normal(tokens, width), normal(rows, width, scale=width**-0.5)
    residual, norm = normal(tokens, rows), normal(rows)
    tile = tile_of(Op.ADD, tokens, rows, width, dtype)
    found = linear_add_fused(x, weight, residual, norm, EPS, tile)
    expected = linear_add_ref(x, weight, residual, norm, EPS).x_TD
    truth = linear_add_ref(x.double(), weight.double(), residual.double(), norm, EPS).x_TD
    assert_like_reference(found.x_TD, expected, truth)
    by_table = linear_add_triton(x, weight, residual, norm, EPS)
    assert_like_reference(by_table.x_TD, expected, truth)
    if dtype == torch.float16:  # x g could overflow
        assert found[3:] == (None, None)
    else:
        assert_begun(found)


@pytest.mark.parametrize(("tokens", "width", "rows"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [0, 1, 5])
def test_gated_linear_is_no_worse_than_its_reference(
    tokens: int, width: int, rows: int, dtype: torch.dtype, tiles: int, kernel_device: str
) -> None:
    """Whether a norm was begun or not."""
    normal = drawer(kernel_device, dtype, tokens)
    x, norm = normal(tokens, width, scale=3.0), normal(width)
    weight = normal(2 * rows, width, scale=width**-0.5)
    normed = begun(x, norm, tiles) if tiles else Normed(x, norm, EPS)
    tile = tile_of(Op.GATED, tokens, 2 * rows, width, dtype)
    expected = gated_linear_ref(normed, weight)
    truth = gated_linear_ref(exact(normed), weight.double())
    assert_like_reference(gated_linear_fused(normed, weight, tile), expected, truth)
    assert_like_reference(gated_linear_split(normed, weight), expected, truth)
    assert_like_reference(gated_linear_triton(normed, weight), expected, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_normed_linear_is_no_worse_than_its_formula(
    dtype: torch.dtype, is_begun: bool, has_bias: bool, kernel_device: str
) -> None:
    normal = drawer(kernel_device, dtype, 5)
    x, norm, weight = normal(5, 40), normal(40), normal(33, 40)
    bias = normal(33) if has_bias else None
    normed = begun(x, norm, 3) if is_begun else Normed(x, norm, EPS)
    found = normed_linear(normed, weight, bias, tile_of(Op.HEADS, 5, 33, 40, dtype))
    expected = torch.nn.functional.linear(normed.made(), weight, bias)
    wide = None if bias is None else bias.double()
    truth = torch.nn.functional.linear(exact(normed).made(), weight.double(), wide)
    assert_like_reference(found, expected, truth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 60), (70, 20)])
def test_embedding_is_gathered_and_its_norm_begun(
    tokens: int, width: int, dtype: torch.dtype, kernel_device: str
) -> None:
    normal = drawer(kernel_device, dtype, tokens)
    embed, norm = normal(23, width), normal(width)
    token = torch.randint(23, (tokens,), generator=torch.Generator().manual_seed(0))
    token = token.to(kernel_device)
    found = embed_normed_triton(token, embed, norm, EPS)
    assert torch.equal(found.x_TD, embed_normed_ref(token, embed, norm, EPS).x_TD)
    if dtype == torch.float16:
        assert found[3:] == (None, None)
    else:
        assert_begun(found)


def test_token_that_does_not_exist_is_zeros(kernel_device: str) -> None:
    normal = drawer(kernel_device, torch.float32, 0)
    embed, norm = normal(9, 20), normal(20)
    token = torch.tensor([3, -1, 9, 1 << 40, -(1 << 40), 8], device=kernel_device)
    found = embed_normed_triton(token, embed, norm, EPS)
    assert torch.equal(found.x_TD[[0, 5]], embed[[3, 8]])
    assert not found.x_TD[1:5].any()
    assert_begun(found)


@pytest.mark.parametrize("tile", [Tile(16, 16, 32, 4, 2), Tile(32, 64, 32, 4, 3)])
def test_tiles_change_nothing_but_the_last_bits(tile: Tile, kernel_device: str) -> None:
    normal = drawer(kernel_device, torch.float32, 3)
    x, norm, weight, residual = normal(37, 72), normal(70), normal(70, 72), normal(37, 70)
    gate_up = normal(90, 70)
    stream = linear_add_fused(x, weight, residual, norm, EPS, tile)
    expected = linear_add_ref(x, weight, residual, norm, EPS)
    assert_begun(stream)
    torch.testing.assert_close(stream.x_TD, expected.x_TD, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        gated_linear_fused(stream, gate_up, tile),
        gated_linear_ref(expected, gate_up),
        rtol=1e-5,
        atol=1e-4,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_do_not_depend_on_place_or_neighbours(
    dtype: torch.dtype, kernel_device: str
) -> None:
    """Not even where these are no numbers."""
    tokens, width, rows = 40, 96, 50
    normal = drawer(kernel_device, dtype, 1)
    x, norm, weight = normal(tokens, width), normal(rows), normal(rows, width)
    residual, gate_up = normal(tokens, rows), normal(2 * rows, rows)
    tile = tile_of(Op.GATED, tokens, rows, width, dtype)

    def outputs(x: Tensor, residual: Tensor) -> list[Tensor]:
        stream = linear_add_fused(x, weight, residual, norm, EPS, tile)
        assert stream.scaled_TD is not None
        assert stream.square_TY is not None
        gated = gated_linear_fused(stream, gate_up, tile)
        return [stream.x_TD, stream.scaled_TD, stream.square_TY, gated]

    for row, place in ((0, 0), (5, 39), (38, 16)):
        other_x, other_residual = torch.full_like(x, math.nan), torch.full_like(residual, math.inf)
        other_x[place], other_residual[place] = x[row], residual[row]
        for own, other in zip(outputs(x, residual), outputs(other_x, other_residual), strict=True):
            assert torch.equal(own[row], other[place])
            others = torch.arange(tokens) != place
            assert not other[others].isfinite().any()


def test_outputs_are_written_whole(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    normal = drawer(kernel_device, torch.bfloat16, 2)
    x, norm, weight, residual = normal(19, 40), normal(66), normal(66, 40), normal(19, 66)
    gate_up, token = normal(70, 66), torch.arange(19, device=kernel_device)

    def poisoned(shape: tuple[int, ...], **options: object) -> Tensor:
        return torch.full(shape, math.nan, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", poisoned)
    tile = Tile(16, 16, 64, 4, 2)
    for normed in (
        linear_add_fused(x, weight, residual, norm, EPS, tile),
        embed_normed_triton(token, weight, normal(40), EPS),
    ):
        assert normed.x_TD.isfinite().all()
        assert_begun(normed)
    stream = linear_add_fused(x, weight, residual, norm, EPS, tile)
    assert gated_linear_fused(stream, gate_up, tile).isfinite().all()
    assert normed_linear(stream, gate_up, None, tile).isfinite().all()
