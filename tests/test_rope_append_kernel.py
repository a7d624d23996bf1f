"""The kernels of rope_append and silu_mul do what their references do, and write nothing else."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from kernel_errors import assert_no_worse
from torch import Tensor

from ddbatch_kernels.rope_append import Heads, rope_append_ref
from ddbatch_kernels.rope_append.kernel import rope_append_triton
from ddbatch_kernels.silu_mul import silu_mul_ref
from ddbatch_kernels.silu_mul.kernel import silu_mul_triton

pytestmark = pytest.mark.usefixtures("like_a_gpu")

POSITIONS, CELLS = 37, 90


class Case(NamedTuple):
    """Arguments of rope_append, one by one."""

    qkv_LTX: Tensor
    q_norm_LE: Tensor | None
    k_norm_LE: Tensor | None
    norm_eps: float
    rope_P2E: Tensor
    pos_T: Tensor
    k_cache_LXGE: Tensor
    v_cache_LXGE: Tensor
    cell_T: Tensor

    @property
    def args(self) -> tuple[Tensor, Heads]:
        """As rope_append takes them."""
        return self.qkv_LTX, Heads(*self[1:])

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another dtype, in memory of their own; the rope table stays."""
        return Case(
            *(
                field.to(dtype, copy=True)
                if isinstance(field, Tensor) and field.is_floating_point() and name != "rope_P2E"
                else field
                for name, field in self._asdict().items()
            )
        )


def make_case(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    layers: int = 1,
    tokens: int = 5,
    heads: int = 3,
    kv_heads: int = 1,
    head_width: int = 64,
    has_norms: bool = True,
) -> Case:
    """Rows that are a view of wider ones, [T, L, wide] turned round, and planes of garbage."""
    generator = torch.Generator().manual_seed(layers + 10 * tokens + 100 * head_width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    width = (heads + 2 * kv_heads) * head_width
    wide = normal(tokens, layers, width + 6)
    angle = torch.rand(POSITIONS, 1, head_width // 2, generator=generator).repeat(1, 1, 2) * 6
    plane = (layers, CELLS, kv_heads, head_width)
    return Case(
        wide[..., 6:].transpose(0, 1),
        normal(layers, head_width) if has_norms else None,
        normal(layers, head_width) if has_norms else None,
        1e-5,
        torch.cat((angle.cos(), angle.sin()), dim=1).to(device),
        torch.randint(POSITIONS, (tokens,), generator=generator).to(device),
        normal(*plane),
        normal(*plane),
        torch.randperm(CELLS, generator=generator)[:tokens].to(device),
    )


def assert_like_reference(case: Case) -> None:
    """Outputs and planes against the reference in the same dtype, and no worse than it against
    float64; cells that are not named keep their bits."""
    own, exact = case.to(case.qkv_LTX.dtype), case.to(torch.float64)
    before = case.k_cache_LXGE.clone(), case.v_cache_LXGE.clone()
    found = rope_append_triton(*case.args), case.k_cache_LXGE, case.v_cache_LXGE
    expected = rope_append_ref(*own.args), own.k_cache_LXGE, own.v_cache_LXGE
    truth = rope_append_ref(*exact.args), exact.k_cache_LXGE, exact.v_cache_LXGE
    assert found[0].shape == expected[0].shape
    assert found[0].dtype == expected[0].dtype
    others = torch.ones(CELLS, dtype=torch.bool, device=case.cell_T.device)
    others[case.cell_T] = False
    for plane, old in zip(found[1:], before, strict=True):
        assert torch.equal(plane[:, others], old[:, others])
    assert torch.equal(found[2], expected[2])  # values are copied
    for one, two, three in zip(found, expected, truth, strict=True):
        if one.numel() == 0:
            continue
        if one.dtype == torch.float32:
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
        else:
            assert_no_worse(one, two, three)


@pytest.mark.parametrize("head_width", [2, 20, 60, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("has_norms", [True, False])
def test_any_head_width_with_and_without_norms(
    head_width: int, has_norms: bool, kernel_device: str
) -> None:
    case = make_case(kernel_device, head_width=head_width, has_norms=has_norms)
    assert_like_reference(case)


@pytest.mark.parametrize("tokens", [1, 2, 17, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_number_of_tokens(tokens: int, dtype: torch.dtype, kernel_device: str) -> None:
    assert_like_reference(make_case(kernel_device, dtype, tokens=tokens, kv_heads=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_context_of_several_layers_has_no_queries(dtype: torch.dtype, kernel_device: str) -> None:
    case = make_case(kernel_device, dtype, layers=3, tokens=7, heads=0, kv_heads=2)
    assert rope_append_triton(*case.to(dtype).args).shape == (3, 7, 0, 64)
    assert_like_reference(case)
    assert_like_reference(case._replace(q_norm_LE=None))


def test_keys_alone_may_have_a_norm(kernel_device: str) -> None:
    assert_like_reference(make_case(kernel_device, heads=4)._replace(q_norm_LE=None))


def test_trash_cell_may_be_named_by_many(kernel_device: str) -> None:
    case = make_case(kernel_device, tokens=9)
    case.cell_T[[2, 4, 8]] = 7
    own = case.to(torch.float32)
    found, expected = rope_append_triton(*case.args), rope_append_ref(*own.args)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    kept = torch.arange(CELLS) != 7
    torch.testing.assert_close(
        case.k_cache_LXGE[:, kept], own.k_cache_LXGE[:, kept], rtol=1e-5, atol=1e-5
    )


def test_cells_and_positions_that_do_not_exist_touch_nothing(kernel_device: str) -> None:
    case = make_case(kernel_device, tokens=6)
    wild = torch.tensor([-1, CELLS, 1 << 40, -(1 << 40), 3, 4], device=kernel_device)
    before = case.k_cache_LXGE.clone(), case.v_cache_LXGE.clone()
    rope_append_triton(*case._replace(pos_T=wild, cell_T=wild).args)
    others = torch.ones(CELLS, dtype=torch.bool)
    others[[3, 4]] = False
    assert torch.equal(case.k_cache_LXGE[:, others], before[0][:, others])
    assert torch.equal(case.v_cache_LXGE[:, others], before[1][:, others])


def test_not_a_number_stays_with_its_token(kernel_device: str) -> None:
    case = make_case(kernel_device, tokens=20)
    clean = case.to(torch.float32)
    expected = rope_append_triton(*clean.args)
    case.qkv_LTX[:, 6] = math.nan
    found = rope_append_triton(*case.args)
    others = torch.arange(20) != 6
    assert found[:, 6].isnan().all()
    assert torch.equal(found[:, others], expected[:, others])
    cells = case.cell_T[others]
    assert torch.equal(case.k_cache_LXGE[:, cells], clean.k_cache_LXGE[:, cells])


@pytest.mark.parametrize("width", [1, 7, 512, 515])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_is_no_worse_than_its_reference(
    width: int, dtype: torch.dtype, kernel_device: str
) -> None:
    generator = torch.Generator().manual_seed(width)
    gate_up = 5 * torch.randn((3, 2 * width), generator=generator).to(kernel_device, dtype)
    found, expected = silu_mul_triton(gate_up), silu_mul_ref(gate_up)
    truth = silu_mul_ref(gate_up.double())
    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert_no_worse(found, expected, truth)


def test_silu_of_large_scores_is_finite(kernel_device: str) -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0]], device=kernel_device)
    torch.testing.assert_close(silu_mul_triton(gate_up), silu_mul_ref(gate_up))
