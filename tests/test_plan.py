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
    choose_method,
    plan_cache,
    plan_prefill,
    plan_shapes,
)

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
    source: str = "engine.gemm_limit",
    device: str = "cpu",
    num_prompts: int | None = None,
) -> ShapePlan:
    return plan_shapes(
        method,
        budget=budget,
        topk=topk,
        rows=rows,
        block=block,
        vocab=vocab,
        gemm_limit=None if gemm_limit is None else GemmLimit(gemm_limit, source),
        device=device,
        num_prompts=num_prompts,
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


def test_a_refused_plan_names_rows_budget_limit_its_source_and_the_most_rows() -> None:
    with pytest.raises(ValueError, match="tokens exceed") as caught:
        plan(budget=6, rows=4, gemm_limit=20, source="job=probe on NVIDIA H200, 2026-12-01")
    assert str(caught.value) == (
        "engine.rows=4 x (engine.budget=6 + 1) = 28 tokens exceed engine.gemm_limit=auto, which is "
        "20 here (job=probe on NVIDIA H200, 2026-12-01); allowed: at most 2 rows for this budget"
    )


@pytest.mark.parametrize(
    ("method", "options", "rows_and_nodes"),
    [
        ("ddtree", {"budget": 8, "rows": None, "gemm_limit": 100}, (11, 9)),
        ("ddtree", {"budget": None, "rows": None, "gemm_limit": 100}, (5, 17)),  # rows first
        ("ddtree", {"budget": None, "rows": None, "gemm_limit": 10}, (1, 10)),
        ("ddtree", {"budget": None, "rows": 20, "gemm_limit": 100}, (20, 5)),
        ("chain", {"budget": None, "rows": 20, "gemm_limit": 100}, (20, 5)),
        ("chain", {"budget": None, "rows": None, "gemm_limit": 100}, (6, 16)),
        ("autoregressive", {"rows": None, "gemm_limit": 20}, (20, 1)),
        ("ddtree", {"budget": 8, "rows": None, "gemm_limit": 100, "num_prompts": 3}, (3, 9)),
        ("ddtree", {"budget": None, "rows": None, "gemm_limit": 1152}, (32, 17)),  # room enough
    ],
)
def test_what_is_left_to_the_planner_is_lowered_to_the_limit(
    method: Method, options: dict[str, int | None], rows_and_nodes: tuple[int, int]
) -> None:
    made = plan(method, device="cuda", **options)  # type: ignore[arg-type]
    assert (made.rows, made.nodes) == rows_and_nodes


@given(
    method=METHODS,
    budget=st.none() | st.integers(1, 300),
    rows=st.none() | st.integers(1, 600),
    block=st.integers(2, 32),
    vocab=st.integers(1, 200),
    limit=st.integers(1, 3000),
    topk=st.none() | st.integers(1, 100),
    num_prompts=st.none() | st.integers(0, 40),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_no_plan_exceeds_its_limit(
    method: Method,
    budget: int | None,
    rows: int | None,
    block: int,
    vocab: int,
    limit: int,
    topk: int | None,
    num_prompts: int | None,
    device: str,
) -> None:
    """A plan that fits stays as it is; of others only what was asked for by number is refused."""
    options = {"block": block, "vocab": vocab, "topk": topk, "num_prompts": num_prompts}
    whole = plan(method, budget=budget, rows=rows, device=device, **options)
    # No fewer rows than are asked for, and no tree with less than one draft.
    least_rows = 1 if rows is None else rows
    least_nodes = whole.nodes if budget is not None else min(whole.nodes, 2)
    if least_rows * least_nodes > limit:
        with pytest.raises(ValueError, match=f"engine.gemm_limit={limit}; allowed: .*at most"):
            plan(method, budget=budget, rows=rows, device=device, gemm_limit=limit, **options)
    else:
        made = plan(method, budget=budget, rows=rows, device=device, gemm_limit=limit, **options)
        assert made.rows * made.nodes <= limit
        assert made.rows == whole.rows or rows is None
        assert made.nodes == whole.nodes or budget is None
        if whole.rows * whole.nodes <= limit:
            assert made == whole
        elif rows is None and made.nodes == whole.nodes:
            assert (made.rows + 1) * made.nodes > limit  # no lower than it must be
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
