"""Plans: sizes follow from options in one place, and no plan exceeds its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddbatch.core import CachePlan, ShapePlan
from ddbatch.engine.plan import Method, choose_method, plan_cache, plan_shapes

METHODS = st.sampled_from(["ddtree", "chain", "autoregressive"])


def plan(
    method: Method = "ddtree",
    *,
    budget: int | None = None,
    topk: int | None = None,
    rows: int | None = 3,
    block: int = 16,
    vocab: int = 1000,
    gemm_limit: int | None = None,
    device: str = "cpu",
) -> ShapePlan:
    return plan_shapes(
        method,
        budget=budget,
        topk=topk,
        rows=rows,
        block=block,
        vocab=vocab,
        gemm_limit=gemm_limit,
        device=device,
    )


@pytest.mark.parametrize(
    ("method", "budget", "has_drafter", "chosen"),
    [
        ("auto", None, True, "ddtree"),
        ("auto", None, False, "autoregressive"),
        ("auto", 0, True, "autoregressive"),
        ("chain", None, True, "chain"),
        ("ddtree", 8, True, "ddtree"),
        ("autoregressive", None, True, "autoregressive"),
    ],
)
def test_auto_means_the_tree_where_there_is_a_drafter(
    method: str, budget: int | None, has_drafter: bool, chosen: Method
) -> None:
    assert choose_method(method, budget, has_drafter) == chosen


@pytest.mark.parametrize(
    ("method", "budget", "block", "shapes"),
    [
        ("ddtree", 16, 16, (17, 15, 16)),
        ("ddtree", 8, 16, (9, 8, 8)),  # no tree of 8 nodes is deeper than 8
        ("ddtree", 128, 16, (129, 15, 64)),
        ("ddtree", 500, 2, (65, 1, 64)),  # one drafted position holds 64 candidates
        ("chain", None, 16, (16, 15, 1)),
        ("chain", 5, 16, (6, 5, 1)),
        ("chain", 99, 16, (16, 15, 1)),
        ("autoregressive", 7, 16, (1, 0, 0)),
    ],
)
def test_shapes_follow_from_method_budget_and_block(
    method: Method, budget: int | None, block: int, shapes: tuple[int, int, int]
) -> None:
    made = plan(method, budget=budget, block=block)
    assert (made.nodes, made.draft_depth, made.topk) == shapes


def test_candidates_never_outnumber_the_vocabulary() -> None:
    made = plan(budget=40, block=3, vocab=5)
    assert (made.topk, made.nodes) == (5, 31)


def test_a_limit_below_one_row_of_this_budget_names_the_budget_that_fits() -> None:
    with pytest.raises(ValueError, match="a budget of at most 4 for this many rows"):
        plan(budget=16, rows=2, gemm_limit=10)


@given(
    method=METHODS,
    budget=st.none() | st.integers(1, 300),
    rows=st.none() | st.integers(1, 600),
    block=st.integers(2, 32),
    vocab=st.integers(1, 200),
    limit=st.integers(1, 3000),
    topk=st.none() | st.integers(1, 100),
)
def test_no_plan_exceeds_its_limit(
    method: Method,
    budget: int | None,
    rows: int | None,
    block: int,
    vocab: int,
    limit: int,
    topk: int | None,
) -> None:
    options = {"budget": budget, "rows": rows, "block": block, "vocab": vocab, "topk": topk}
    whole = plan(method, **options)
    if whole.rows * whole.nodes > limit:
        most_rows, most_budget = limit // whole.nodes, max(0, limit // whole.rows - 1)
        allowed = f"{most_rows} rows" if most_rows else f"budget of at most {most_budget}"
        with pytest.raises(ValueError, match=allowed) as caught:
            plan(method, **options, gemm_limit=limit)
        assert f"engine.gemm_limit={limit}" in str(caught.value)
    else:
        assert plan(method, **options, gemm_limit=limit) == whole
    if budget is not None:
        assert whole.nodes <= budget + 1
    assert whole.draft_depth < block


@given(rows=st.integers(1, 20), max_len=st.integers(1, 500), page=st.none() | st.integers(1, 600))
def test_every_slot_has_pages_for_its_longest_sequence(
    rows: int, max_len: int, page: int | None
) -> None:
    for device in ("cpu", "cuda"):
        made = plan_cache(rows, max_len=max_len, page=page, device=device)
        assert made.max_len >= max_len
        assert made.pages * made.page == made.slots * made.max_len
        assert made.slots >= rows


def test_slots_are_contiguous_on_a_cpu() -> None:
    assert plan_cache(3, max_len=65, page=None, device="cpu") == CachePlan(6, 6, 65, 65)
    assert plan_cache(3, max_len=65, page=None, device="cuda") == CachePlan(6, 12, 64, 128)
