"""Attention over pages and own tokens equals softmax by its formula, and reads nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from conftest import KERNEL_DEVICE
from torch import Tensor

from ddbatch_kernels.ancestors import pack_ancestors, unpack_ancestors
from ddbatch_kernels.attention import RowKeys, attention_ref
from ddbatch_kernels.attention.kernel import attention_triton
from ddbatch_kernels.attention.tiles import Setting

pytestmark = pytest.mark.usefixtures("like_a_gpu")

Attention = Callable[..., Tensor]
IS_NATIVE = KERNEL_DEVICE == "cuda"
SHORT_SPLITS = Setting(16, 32, 64, warps=4, stages=2, two_loops=True)
short_splits = partial(attention_triton, setting=SHORT_SPLITS)
BOTH = [
    pytest.param((attention_ref, "cpu"), id="reference"),
    pytest.param((attention_triton, KERNEL_DEVICE), id="kernel"),
]
# (rows, queries, longest prefix, page)
SHAPES = [(1, 1, 1, 64), (3, 7, 20, 8), (2, 33, 150, 64), (3, 1, 600, 16), (1, 70, 90, 64)]
BUDGETS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64]
EVERY_BUDGET = range(1, 129) if IS_NATIVE else BUDGETS


@dataclass
class Case:
    """Inputs, and what each query of each row sees: cells by row."""

    q_BQHE: Tensor
    k_XGE: Tensor
    v_XGE: Tensor
    keys: RowKeys
    scale: float = 0.3

    def run(self, attention: Attention) -> Tensor:
        return attention(self.q_BQHE, self.k_XGE, self.v_XGE, self.keys, scale=self.scale)

    def to(self, device: str, dtype: torch.dtype = torch.float32) -> Case:
        moved = {
            name: value.to(device)
            for name, value in vars(self.keys).items()
            if isinstance(value, Tensor) and name != "dense"
        }
        planes = (self.k_XGE.to(device, dtype), self.v_XGE.to(device, dtype))
        keys = replace(self.keys, **moved)
        return Case(self.q_BQHE.to(device, dtype), *planes, keys, self.scale)

    def visible(self, row: int, query: int) -> list[int]:
        """Cells that the query sees, by the definition."""
        keys, Q = self.keys, self.q_BQHE.shape[1]
        first = 0 if keys.first_BQ is None else int(keys.first_BQ[row, query])
        table = keys.page_table_SP[keys.slot_B[row]].tolist()
        cells = [
            table[pos // keys.page] * keys.page + pos % keys.page
            for pos in range(first, int(keys.stop_BQ[row, query]))
        ]
        if keys.own_BQW is not None:
            words = keys.own_BQW[row, query].tolist()
            own = [j for j in range(Q) if words[j // 32] >> (j % 32) & 1]
            cells += [keys.own_cell + row * Q + j for j in own]
        return cells

    def formula(self) -> Tensor:
        """float64, key by key; zeros where nothing is visible."""
        B, Q, H, _ = self.q_BQHE.shape
        group = H // self.k_XGE.shape[1]
        out = torch.zeros(self.q_BQHE.shape, dtype=torch.float64)
        for row in range(B):
            for query in range(Q):
                cells = self.visible(row, query)
                for head in range(H if cells else 0):
                    k, v = (p[cells, head // group].double() for p in (self.k_XGE, self.v_XGE))
                    score = k @ self.q_BQHE[row, query, head].double() * self.scale
                    out[row, query, head] = score.softmax(dim=0) @ v
        return out


def random_case(
    rows: int,
    queries: int,
    longest: int,
    *,
    page: int = 64,
    heads: int = 6,
    kv_heads: int = 3,
    width: int = 10,
    kind: str = "tree",
    window: int | None = None,
    seed: int = 0,
) -> Case:
    """Cells that nobody owns are NaN. kind: tree (own tokens by bits) or prefill (in the pages)."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-(longest + queries) // page)
    slots = rows + 2
    table = torch.randperm(slots * pages, generator=generator).view(slots, pages)
    slot_B = torch.randperm(slots, generator=generator)[:rows]
    null_cell, own_cell = slots * pages * page, slots * pages * page + 2
    shape = (own_cell + rows * queries, kv_heads, width)
    k, v = (torch.full(shape, math.nan) for _ in range(2))
    length_B = torch.randint(longest + 1, (rows,), generator=generator)
    length_B[-1] = longest
    pos_BQ = length_B[:, None] + torch.arange(queries)
    stop_BQ, own_BQW = length_B[:, None].expand(rows, queries), None
    if kind == "prefill":
        stop_BQ = pos_BQ + 1
        stop_BQ[0, -1] = 0 if queries > 1 else 1  # padding sees nothing
    else:
        parent = [int(torch.randint(n, (1,), generator=generator)) for n in range(1, queries)]
        sees = torch.eye(queries, dtype=torch.bool)
        for node, above in enumerate(parent, start=1):
            sees[node] |= sees[above]
        own_BQW = pack_ancestors(sees.expand(rows, -1, -1))
    for plane in (k, v):
        plane[null_cell] = 0
        plane[own_cell:] = torch.randn(plane[own_cell:].shape, generator=generator)
        for row in range(rows):
            for pos in range(int(stop_BQ[row].max())):
                cell = int(table[slot_B[row], pos // page]) * page + pos % page
                plane[cell] = torch.randn(plane[cell].shape, generator=generator)
    first_BQ = None if window is None else (pos_BQ - window + 1).clamp(min=0)
    # A column of a wider table, as in a prefill call.
    slot_B = torch.stack((slot_B, slot_B * 0 - 1), dim=1)[:, 0]
    keys = RowKeys(
        table, slot_B, page, longest + queries, first_BQ, stop_BQ, own_BQW, own_cell, null_cell
    )
    q = torch.randn(rows, queries, heads, width, generator=generator)
    return Case(q, k, v, keys)


def assert_near(out: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    error = (out.double().cpu() - expected).norm() / expected.norm()
    assert error < tolerance, error


@pytest.mark.parametrize(("way", "device"), [pytest.param(*p.values[0], id=p.id) for p in BOTH])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(1, 1, 20), (9, 3, 10), (4, 1, 64)])
@pytest.mark.parametrize(("rows", "queries", "longest", "page"), SHAPES)
@pytest.mark.parametrize("kind", ["tree", "prefill"])
def test_attention_is_the_formula_over_visible_keys(
    way: Attention,
    device: str,
    heads: int,
    kv_heads: int,
    width: int,
    rows: int,
    queries: int,
    longest: int,
    page: int,
    kind: str,
) -> None:
    case = random_case(
        rows,
        queries,
        longest,
        page=page,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        kind=kind,
        seed=queries,
    )
    assert_near(case.to(device).run(way), case.formula())


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    ("rows", "queries", "longest", "page"), [(2, 33, 150, 64), (3, 1, 300, 16)]
)
@pytest.mark.parametrize("kind", ["tree", "prefill"])
def test_splits_and_loops_may_be_cut_in_any_way(
    rows: int, queries: int, longest: int, page: int, kind: str, window: int | None
) -> None:
    case = random_case(rows, queries, longest, page=page, kind=kind, window=window)
    assert_near(case.to(KERNEL_DEVICE).run(short_splits), case.formula())


@pytest.mark.parametrize("budget", EVERY_BUDGET)
def test_every_budget_sees_its_tree(budget: int) -> None:
    case = random_case(2, budget + 1, 70, width=16, heads=2, kv_heads=1, seed=budget)
    assert_near(case.to(KERNEL_DEVICE).run(attention_triton), case.formula())


@pytest.mark.parametrize(("way", "device"), [pytest.param(*p.values[0], id=p.id) for p in BOTH])
@pytest.mark.parametrize("window", [1, 3, 70])
@pytest.mark.parametrize("kind", ["tree", "prefill"])
def test_a_window_hides_what_is_far(way: Attention, device: str, window: int, kind: str) -> None:
    case = random_case(2, 5, 200, kind=kind, window=window)
    assert case.keys.first_BQ is not None
    assert_near(case.to(device).run(way), case.formula())


@pytest.mark.parametrize(("way", "device"), [pytest.param(*p.values[0], id=p.id) for p in BOTH])
def test_a_query_that_sees_nothing_gets_zeros(way: Attention, device: str) -> None:
    case = random_case(3, 4, 9)
    assert case.keys.own_BQW is not None
    words = case.keys.own_BQW.clone()
    words[:, 2] = 0
    stop = case.keys.stop_BQ.clone()
    stop[1] = 0
    case.keys = replace(case.keys, own_BQW=words, stop_BQ=stop)
    out = case.to(device).run(way)
    assert out[1, 2].eq(0).all()
    assert_near(out, case.formula())


@pytest.mark.parametrize(("way", "device"), [pytest.param(*p.values[0], id=p.id) for p in BOTH])
def test_not_a_number_in_one_rows_keys_reaches_no_other_row(way: Attention, device: str) -> None:
    sound = random_case(3, 4, 150).to(device)
    expected = sound.run(way)
    broken = random_case(3, 4, 150).to(device)
    first = broken.keys.own_cell + 4  # of row 1
    broken.k_XGE[first : first + 4] = math.nan
    broken.keys.__dict__.pop("dense", None)
    out = broken.run(way)
    assert out[1].isnan().any()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("kind", ["tree", "prefill"])
def test_a_row_does_not_depend_on_neighbours_nor_on_how_many_keys_are_looked_at(kind: str) -> None:
    """Bit for bit: the longest row decides how many splits are launched, each row its own."""
    case = random_case(3, 3, 300, kind=kind, seed=4).to(KERNEL_DEVICE)
    together = case.run(short_splits)
    longer = replace(case.keys, num_keys=2 * case.keys.num_keys, arrivals=None)
    assert longer.num_keys > 3 * SHORT_SPLITS.split
    assert torch.equal(replace(case, keys=longer).run(short_splits), together)
    shortest = int(case.keys.stop_BQ[:, 0].argmin())
    stop = case.keys.stop_BQ.clone()
    others = [row for row in range(3) if row != shortest]
    stop[others] = 1
    alone = replace(case.keys, stop_BQ=stop, num_keys=int(stop.max()), arrivals=None)
    out = replace(case, keys=alone).run(short_splits)
    assert torch.equal(out[shortest], together[shortest])


def test_counters_of_splits_are_left_as_they_were_found() -> None:
    """The next layer counts in the same ones."""
    case = random_case(2, 3, 300).to(KERNEL_DEVICE)
    first = case.run(short_splits)
    arrivals = case.keys.arrivals
    assert arrivals is not None
    assert arrivals.eq(0).all()
    assert torch.equal(case.run(short_splits), first)
    assert case.keys.arrivals is arrivals


def test_tree_words_of_queries_may_be_shared_by_all_rows() -> None:
    case = random_case(3, 5, 40).to(KERNEL_DEVICE)
    assert case.keys.own_BQW is not None
    shared = replace(case.keys, own_BQW=case.keys.own_BQW[:1].expand(3, 5, -1))
    assert unpack_ancestors(case.keys.own_BQW)[0].equal(unpack_ancestors(case.keys.own_BQW)[2])
    out = replace(case, keys=shared).run(attention_triton)
    assert torch.equal(out, case.run(attention_triton))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
def test_short_dtypes_err_by_no_more_than_their_rounding(dtype: torch.dtype, width: int) -> None:
    """Scores and sums are float32: what is left is the rounding of weights and of the result."""
    if not IS_NATIVE and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    case = random_case(2, 9, 140, heads=4, kv_heads=2, width=width, seed=width)
    case.scale = width**-0.5
    case = case.to("cpu", dtype)
    out = case.to(KERNEL_DEVICE, dtype).run(attention_triton)
    assert out.dtype == dtype
    assert_near(out, case.formula(), 2**-8 if dtype == torch.bfloat16 else 2**-10)
