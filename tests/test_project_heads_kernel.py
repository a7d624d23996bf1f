"""project_heads by each of its ways against its reference, which writes the same cells."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from kernel_errors import assert_no_worse
from torch import Tensor

from ddbatch_kernels.normed import Normed
from ddbatch_kernels.product_table import Op, Tile, Way, tile_of, way_of
from ddbatch_kernels.project_heads import Heads, project_heads_ref
from ddbatch_kernels.project_heads import kernel as project_heads_kernel
from ddbatch_kernels.project_heads.kernel import project_heads_fused, project_heads_triton

pytestmark = pytest.mark.usefixtures("like_a_gpu")

POSITIONS, CELLS = 37, 90
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Case(NamedTuple):
    """Arguments of project_heads, one by one."""

    normed: Normed
    qkv_weight_XD: Tensor
    qkv_bias_X: Tensor | None
    q_norm_E: Tensor | None
    k_norm_E: Tensor | None
    rope_P2E: Tensor
    pos_T: Tensor
    k_cache_XGE: Tensor
    v_cache_XGE: Tensor
    cell_T: Tensor

    @property
    def args(self) -> tuple[Normed, Tensor, Tensor | None, Heads]:
        """As project_heads takes them."""
        layer = [None if item is None else item[None] for item in (self.q_norm_E, self.k_norm_E)]
        planes = (self.k_cache_XGE[None], self.v_cache_XGE[None])
        heads = Heads(*layer, self.normed.eps, self.rope_P2E, self.pos_T, *planes, self.cell_T)
        return *self[:3], heads

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another dtype, in memory of their own; the rope table stays."""
        x, norm, eps = self.normed[:3]
        made = (
            field.to(dtype, copy=True)
            if isinstance(field, Tensor) and field.is_floating_point() and name != "rope_P2E"
            else field
            for name, field in self._asdict().items()
        )
        return Case(*made)._replace(normed=begun(x.to(dtype, copy=True), norm.to(dtype), eps))

    @property
    def dtype(self) -> torch.dtype:
        """Of all but the rope table."""
        return self.normed.x_TD.dtype

    @property
    def tile(self) -> Tile:
        """What the table says of this op, with or without norms of heads."""
        (tokens, width), rows = self.normed.x_TD.shape, self.qkv_weight_XD.shape[0]
        op = Op.HEADS if self.q_norm_E is None and self.k_norm_E is None else Op.NORMED_HEADS
        head_width = self.k_cache_XGE.shape[2]
        return tile_of(op, tokens, rows, width, self.dtype, head_width=head_width)

    def fused(self, tile: Tile | None = None) -> Tensor:
        """Queries, by one launch."""
        return project_heads_fused(*self.args, tile or self.tile)


def begun(x_TD: Tensor, weight_D: Tensor, eps: float) -> Normed:
    """The norm as it leaves the kernel of another op: in float16 not even begun."""
    if x_TD.dtype == torch.float16:
        return Normed(x_TD, weight_D, eps)
    parts = [part.sum(dim=1) for part in x_TD.float().square().tensor_split(3, dim=1)]
    return Normed(x_TD, weight_D, eps, x_TD * weight_D, torch.stack(parts, dim=1))


def make_case(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    tokens: int = 5,
    width: int = 60,
    heads: int = 3,
    kv_heads: int = 1,
    head_width: int = 64,
    has_bias: bool = False,
    has_norms: bool = False,
) -> Case:
    """Planes of garbage; x is part of longer rows."""
    generator = torch.Generator().manual_seed(width + 10 * tokens + 100 * head_width)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    rows = (heads + 2 * kv_heads) * head_width
    angle = torch.rand(POSITIONS, 1, head_width // 2, generator=generator).repeat(1, 1, 2) * 6
    return Case(
        begun(normal(tokens, width + 4, scale=2.0)[:, 4:], normal(width), 1e-5),
        normal(rows, width, scale=width**-0.5),
        normal(rows) if has_bias else None,
        normal(head_width) if has_norms else None,
        normal(head_width) if has_norms else None,
        torch.cat((angle.cos(), angle.sin()), dim=1).to(device),
        torch.randint(POSITIONS, (tokens,), generator=generator).to(device),
        normal(CELLS, kv_heads, head_width),
        normal(CELLS, kv_heads, head_width),
        torch.randperm(CELLS, generator=generator)[:tokens].to(device),
    )


def assert_like_reference(case: Case, found_q: Tensor) -> None:
    """Queries and planes, which `case` holds now; cells that are not named keep their bits."""
    own, exact = case.to(case.dtype), case.to(torch.float64)
    named = torch.zeros(CELLS, dtype=torch.bool, device=case.cell_T.device)
    named[case.cell_T] = True
    found = found_q, case.k_cache_XGE[named], case.v_cache_XGE[named]
    expected = project_heads_ref(*own.args), own.k_cache_XGE[named], own.v_cache_XGE[named]
    truth = project_heads_ref(*exact.args), exact.k_cache_XGE[named], exact.v_cache_XGE[named]
    for one, two, three in zip(found, expected, truth, strict=True):
        assert one.shape == two.shape
        if one.dtype == torch.float32:
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
        else:
            assert_no_worse(one, two, three)


def check_fused(case: Case, tile: Tile | None = None) -> None:
    before = case.k_cache_XGE.clone(), case.v_cache_XGE.clone()
    assert_like_reference(case, case.fused(tile))
    others = torch.ones(CELLS, dtype=torch.bool, device=case.cell_T.device)
    others[case.cell_T] = False
    for plane, old in zip((case.k_cache_XGE, case.v_cache_XGE), before, strict=True):
        assert torch.equal(plane[others], old[others])


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 65])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False])
def test_any_number_of_tokens(
    tokens: int, dtype: torch.dtype, has_norms: bool, kernel_device: str
) -> None:
    check_fused(make_case(kernel_device, dtype, tokens=tokens, kv_heads=2, has_norms=has_norms))


@pytest.mark.parametrize("head_width", [2, 20, 60, 64, 80, 96, 128])
@pytest.mark.parametrize("has_norms", [True, False])
def test_any_head_width_with_a_bias(head_width: int, has_norms: bool, kernel_device: str) -> None:
    check_fused(
        make_case(
            kernel_device, width=35, head_width=head_width, has_bias=True, has_norms=has_norms
        )
    )


def test_keys_alone_are_projected(kernel_device: str) -> None:
    check_fused(make_case(kernel_device, heads=0, has_bias=True))


def test_queries_or_keys_alone_may_have_a_norm(kernel_device: str) -> None:
    case = make_case(kernel_device, has_norms=True)
    check_fused(case._replace(q_norm_E=None))
    check_fused(case._replace(k_norm_E=None))


@pytest.mark.parametrize("tile", [Tile(16, 16, 32, 4, 2), Tile(32, 64, 64, 4, 3)])
def test_any_part_of_a_head_may_be_a_tile(tile: Tile, kernel_device: str) -> None:
    check_fused(make_case(kernel_device, tokens=35, head_width=80), tile)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ways_agree(
    way: Way,
    has_norms: bool,
    dtype: torch.dtype,
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(project_heads_kernel, "way_of", lambda *sizes, in_order: way)
    case = make_case(kernel_device, dtype, tokens=9, has_bias=True, has_norms=has_norms)
    assert_like_reference(case, project_heads_triton(*case.args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_do_not_depend_on_place_or_neighbours(
    dtype: torch.dtype, kernel_device: str
) -> None:
    """Not even where these are no numbers."""
    case = make_case(kernel_device, dtype, tokens=40, has_norms=True)
    own = case.to(dtype)
    own_q = own.fused()
    for row, place in ((0, 0), (5, 39), (38, 16)):
        other = case.to(dtype)
        for old, new in zip(case.normed, other.normed, strict=True):
            if isinstance(old, Tensor) and isinstance(new, Tensor) and old.ndim == 2:
                new[:] = math.nan
                new[place] = old[row]
        pos, cell = other.pos_T.clone(), other.cell_T.clone()
        pos[place], cell[[place, row]] = pos[row].clone(), cell[[row, place]].clone()
        other = other._replace(pos_T=pos, cell_T=cell)
        other_q = other.fused()
        assert torch.equal(own_q[row], other_q[place])
        assert other_q[torch.arange(40) != place].isnan().all()
        for name in ("k_cache_XGE", "v_cache_XGE"):
            mine, theirs = getattr(own, name), getattr(other, name)
            assert torch.equal(mine[cell[place]], theirs[cell[place]])


def test_queries_are_written_whole(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(shape: tuple[int, ...], **options: object) -> Tensor:
        return torch.full(shape, math.nan, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", poisoned)
    for head_width in (60, 96):
        case = make_case(kernel_device, torch.bfloat16, tokens=19, head_width=head_width)
        assert case.fused().isfinite().all()


def test_cells_and_positions_that_do_not_exist_touch_nothing(kernel_device: str) -> None:
    case = make_case(kernel_device, tokens=6)
    wild = torch.tensor([-1, CELLS, 1 << 40, -(1 << 40), 3, 4], device=kernel_device)
    before = case.k_cache_XGE.clone(), case.v_cache_XGE.clone()
    case._replace(pos_T=wild, cell_T=wild).fused()
    others = torch.ones(CELLS, dtype=torch.bool)
    others[[3, 4]] = False
    assert torch.equal(case.k_cache_XGE[others], before[0][others])
    assert torch.equal(case.v_cache_XGE[others], before[1][others])


def test_way_is_a_function_of_sizes() -> None:
    """Few tokens: one launch, or two where heads have norms and the weight is large."""
    small, large = (960, 576), (6144, 4096)
    assert way_of(Op.HEADS, 1, *small, torch.bfloat16) is Way.ONE_LAUNCH
    assert way_of(Op.NORMED_HEADS, 1, *small, torch.bfloat16) is Way.ONE_LAUNCH
    for op in (Op.ADD, Op.GATED, Op.HEADS, Op.NORMED_HEADS):
        assert way_of(op, 1 << 14, *large, torch.bfloat16) is Way.CUBLAS
        assert way_of(op, 1, *large, torch.float32) is Way.CUBLAS
