"""Plans: sizes follow from options in one place, and no plan exceeds its limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddbatch.core import CachePlan, PrefillPlan, ShapePlan
from ddbatch.engine.limits import GemmLimit
from ddbatch.engine.plan import (
    KEY_STEP,
    MAX_CHUNKS,
    MIN_CHUNKS,
    MIN_KEYS_CUDA,
    USUAL_CHUNKS,
    Method,
    auto_rows,
    choose_methods,
    plan_cache,
    plan_prefill,
    plan_shapes,
    rows_under,
)

METHODS = st.sampled_from(["ddtree", "chain", "autoregressive"])


def plan(
    method: Method = "ddtree",
    *,
    budget: int | None = None,
    topk: int | None = None,
    rows: int = 3,
    block: int = 16,
    vocab: int = 1000,
    gemm_limit: int | None = None,
    source: str = "engine.gemm_limit",
) -> ShapePlan:
    return plan_shapes(
        method,
        budget=budget,
        topk=topk,
        rows=rows,
        block=block,
        vocab=vocab,
        gemm_limit=None if gemm_limit is None else GemmLimit(gemm_limit, source),
    )


@pytest.mark.parametrize(
    ("method", "budget", "has_drafter", "chosen"),
    [
        ("auto", None, True, ("ddtree", "chain", "autoregressive")),
        ("auto", 8, True, ("ddtree",)),
        ("auto", None, False, ("autoregressive",)),
        ("auto", 0, True, ("autoregressive",)),
        ("chain", None, True, ("chain",)),
        ("ddtree", 8, True, ("ddtree",)),
        ("ddtree", None, True, ("ddtree",)),
        ("autoregressive", None, True, ("autoregressive",)),
    ],
)
def test_auto_leaves_every_method_open_where_there_is_a_drafter(
    method: str, budget: int | None, has_drafter: bool, chosen: tuple[Method, ...]
) -> None:
    assert choose_methods(method, budget, has_drafter) == chosen


def test_rows_that_nobody_asks_for_are_no_more_than_the_prompts() -> None:
    assert auto_rows("cpu", None, has_ladder=False) == 8
    assert auto_rows("cuda", None, has_ladder=False) == 32
    assert auto_rows("cuda", None, has_ladder=True) == 512
    assert auto_rows("cuda", 7, has_ladder=True) == 7
    assert auto_rows("cpu", 0, has_ladder=False) == 1


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


def test_a_refused_plan_names_rows_budget_limit_its_source_and_the_most_rows() -> None:
    with pytest.raises(ValueError, match="tokens exceed") as caught:
        plan(budget=6, rows=4, gemm_limit=20, source="job=probe on NVIDIA H200, 2026-12-01")
    assert str(caught.value) == (
        "engine.rows=4 x (engine.budget=6 + 1) = 28 tokens exceed engine.gemm_limit=auto, which is "
        "20 here (job=probe on NVIDIA H200, 2026-12-01); allowed: at most 2 rows for this budget"
    )


@pytest.mark.parametrize(
    ("method", "rows", "limit", "nodes"),
    [
        ("ddtree", 20, 100, 5),
        ("chain", 20, 100, 5),
        ("ddtree", 60, 120, 2),  # no tree has less than one draft
        ("ddtree", 32, 1152, 17),  # room enough
    ],
)
def test_a_budget_that_is_left_to_the_planner_is_lowered_to_the_limit(
    method: Method, rows: int, limit: int, nodes: int
) -> None:
    assert plan(method, rows=rows, gemm_limit=limit).nodes == nodes


@given(limit=st.integers(1, 3000), rows=st.integers(1, 600), nodes=st.integers(1, 70))
def test_rows_are_lowered_no_further_than_to_the_limit(limit: int, rows: int, nodes: int) -> None:
    found = rows_under(GemmLimit(limit, "test"), rows, nodes)
    assert 1 <= found <= rows
    assert found * nodes <= limit or found == 1
    assert found == rows or (found + 1) * nodes > limit
    assert rows_under(None, rows, nodes) == rows


@given(
    method=METHODS,
    budget=st.none() | st.integers(1, 300),
    rows=st.integers(1, 600),
    block=st.integers(2, 32),
    vocab=st.integers(1, 200),
    limit=st.integers(1, 3000),
    topk=st.none() | st.integers(1, 100),
)
def test_no_plan_exceeds_its_limit(
    method: Method,
    budget: int | None,
    rows: int,
    block: int,
    vocab: int,
    limit: int,
    topk: int | None,
) -> None:
    """A plan that fits stays as it is; a budget of the planner's is lowered, others are refused."""
    options = {"budget": budget, "rows": rows, "block": block, "vocab": vocab, "topk": topk}
    whole = plan(method, **options)
    least_nodes = whole.nodes if budget is not None else min(whole.nodes, 2)
    if rows * least_nodes > limit:
        refused = (
            f"engine.gemm_limit={limit}; allowed: (at most|a budget of at most|engine.budget=0)"
        )
        with pytest.raises(ValueError, match=refused):
            plan(method, **options, gemm_limit=limit)
    else:
        made = plan(method, **options, gemm_limit=limit)
        assert made.rows * made.nodes <= limit
        assert made.rows == rows
        assert made.nodes == whole.nodes or budget is None
        assert made == whole or rows * whole.nodes > limit
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
    on_cpu = plan_cache(3, max_len=65, page=None, device="cpu")
    assert on_cpu == CachePlan(6, 6, 65, 65, (64, 65))
    on_cuda = plan_cache(3, max_len=65, page=None, device="cuda")
    assert on_cuda == CachePlan(6, 12, 64, 128, (128,))


@pytest.mark.parametrize(
    ("device", "max_len", "page", "counts"),
    [
        ("cpu", 1, None, (1,)),
        ("cpu", 64, None, (64,)),
        ("cpu", 200, None, (64, 128, 192, 200)),
        ("cpu", 200, 16, (64, 128, 192, 208)),
        ("cuda", 1, None, (64,)),
        ("cuda", 128, None, (128,)),
        ("cuda", 1000, None, (1024,)),
        ("cuda", 1100, None, (1024, 1152)),
        ("cuda", 5000, None, (1024, 2048, 4096, 5056)),
    ],
)
def test_key_counts_are_steps_on_a_cpu_and_powers_of_two_on_a_gpu(
    device: str, max_len: int, page: int | None, counts: tuple[int, ...]
) -> None:
    assert plan_cache(2, max_len=max_len, page=page, device=device).key_counts == counts


@given(max_len=st.integers(1, 5000), page=st.none() | st.integers(1, 600), data=st.data())
def test_every_length_has_a_key_count_and_none_looks_at_many_keys_too_many(
    max_len: int, page: int | None, data: st.DataObject
) -> None:
    """A GPU's ladder is short: a graph is captured for each rung."""
    for device in ("cpu", "cuda"):
        made = plan_cache(3, max_len=max_len, page=page, device=device)
        counts = made.key_counts
        assert list(counts) == sorted(set(counts))
        assert counts[-1] == made.max_len
        length = data.draw(st.integers(1, made.max_len))
        count = next(count for count in counts if count >= length)
        if device == "cpu":
            assert count < length + KEY_STEP
        else:
            assert count < 2 * length or count <= MIN_KEYS_CUDA
            assert len(counts) <= 7


def test_a_gpus_prefill_calls_grow_with_the_rows_up_to_a_size() -> None:
    most = MAX_CHUNKS["cuda"]
    made = [plan_prefill(rows, "cuda") for rows in range(1, 300)]
    chunks = [plan.chunks for plan in made]
    assert chunks == sorted(chunks)
    assert (chunks[0], chunks[-1]) == (MIN_CHUNKS, most)
    assert all(plan.chunks >= min(rows, USUAL_CHUNKS) for rows, plan in enumerate(made, start=1))
    assert len({plan.chunk for plan in made}) == 1  # so the rows change no order of summation


def test_only_a_gpus_prefill_calls_are_of_one_size() -> None:
    assert plan_prefill(1, "cpu") == PrefillPlan(chunks=32, chunk=16, is_fixed=False)
    assert plan_prefill(7, "cpu") == PrefillPlan(chunks=32, chunk=16, is_fixed=False)
    assert plan_prefill(128, "cuda") == PrefillPlan(chunks=32, chunk=64, is_fixed=True)
