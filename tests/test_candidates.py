"""Candidates of `engine.budget=auto`: what is measured, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_costs import METHODS, large_seconds, measured, smol_seconds

from ddbatch.core import ShapePlan
from ddbatch.engine.candidates import (
    MAX_PLANS_A_RUNG,
    MAX_RUNGS,
    MIN_LOSS,
    PLAUSIBLE,
    candidates,
    rungs,
    shortlist,
)
from ddbatch.engine.curves import CostCurve, expected_emitted
from ddbatch.engine.limits import GemmLimit
from ddbatch.engine.plan import Method, plan_shapes

ROWS = (1, 2, 8, 24, 32, 64, 128, 512)


def all_candidates(
    rows: int,
    *,
    methods: tuple[Method, ...] = METHODS,
    max_tokens: int | None = None,
    block: int = 16,
    has_drafter: bool = True,
    topk: int | None = None,
) -> list[ShapePlan]:
    return candidates(
        rows,
        block=block,
        vocab=1000,
        max_tokens=max_tokens,
        has_drafter=has_drafter,
        methods=methods,
        topk=topk,
    )


@pytest.mark.parametrize("rows", ROWS)
def test_a_dozen_plans_are_worth_measuring_plain_decoding_among_them(rows: int) -> None:
    plans = all_candidates(rows)
    assert 5 <= len(plans) <= 13
    assert [plan.nodes for plan in plans].count(1) == 1
    assert {plan.rows for plan in plans} == {rows}


def test_few_rows_get_large_trees_and_many_get_small_ones_over_short_blocks() -> None:
    assert {plan.nodes for plan in all_candidates(1)} == {1, 8, 9, 16, 17, 32, 33, 64}
    assert {plan.nodes for plan in all_candidates(512)} == {1, 3, 4, 5, 6, 8}
    blocks = {plan.nodes: plan.block for plan in all_candidates(32)}
    assert [blocks[nodes] for nodes in (3, 4, 5, 6, 8, 9, 17)] == [3, 4, 5, 6, 8, 16, 16]


@given(
    rows=st.integers(1, 700),
    block=st.integers(2, 32),
    max_tokens=st.none() | st.integers(1, 3000),
    methods=st.sets(st.sampled_from(METHODS), min_size=1),
    topk=st.none() | st.integers(1, 9),
)
def test_candidates_keep_to_the_limit_the_block_and_the_methods(
    rows: int, block: int, max_tokens: int | None, methods: set[Method], topk: int | None
) -> None:
    plans = all_candidates(
        rows, methods=tuple(methods), max_tokens=max_tokens, block=block, topk=topk
    )
    assert len(set(plans)) == len(plans)
    for plan in plans:
        assert max_tokens is None or plan.rows * plan.nodes <= max_tokens
        assert plan.draft_depth < plan.block <= max(1, block)
        assert plan.topk <= (topk or 64)
        method: Method = "autoregressive" if plan.nodes == 1 else "ddtree"
        if method == "ddtree" and plan.topk == 1:
            method = "chain" if "chain" in methods else "ddtree"
        assert method in methods
        assert plan == plan_shapes(
            method,
            budget=plan.nodes - 1,
            topk=plan.topk,
            rows=rows,
            block=plan.block,
            vocab=1000,
            gemm_limit=None if max_tokens is None else GemmLimit(max_tokens, "test"),
        )


def test_a_fixed_method_is_the_only_one() -> None:
    assert [plan.nodes for plan in all_candidates(8, methods=("autoregressive",))] == [1]
    assert {plan.topk for plan in all_candidates(8, methods=("chain",))} == {1}
    assert [plan.nodes for plan in all_candidates(8, methods=("chain",))] == [3, 5, 8, 16]
    assert min(plan.topk for plan in all_candidates(8, methods=("ddtree",))) > 1


def test_a_short_blocks_chain_is_measured_at_one_row_too() -> None:
    assert [plan.nodes for plan in all_candidates(1, methods=("chain",), block=4)] == [3, 4]


def test_a_rung_beyond_the_limit_is_left_out() -> None:
    assert all_candidates(100, methods=("ddtree",), max_tokens=200) == []
    costs = CostCurve(prefill_tokens=1, prefill_call_seconds=1.0)
    few = all_candidates(25, methods=("ddtree",), max_tokens=200)
    for plan in few:
        costs.add(plan, 0, smol_seconds(plan))
    kept = shortlist(costs, [100, 25])
    assert kept
    assert set(kept) <= set(few)


def test_without_a_drafter_only_plain_decoding_is_left() -> None:
    assert [plan.nodes for plan in all_candidates(8, has_drafter=False)] == [1]


@pytest.mark.parametrize(
    ("rows", "ladder"),
    [
        (1, [1]),
        (2, [2, 1]),
        (24, [24, 12, 6, 3, 1]),
        (32, [32, 16, 8, 4, 1]),
        (512, [512, 128, 32, 8, 1]),
    ],
)
def test_rows_fall_by_equal_ratios_to_one(rows: int, ladder: list[int]) -> None:
    assert rungs(rows) == ladder


@given(rows=st.integers(1, 5000))
def test_a_ladder_is_short_and_reaches_from_all_rows_to_one(rows: int) -> None:
    ladder = rungs(rows)
    assert (ladder[0], ladder[-1]) == (rows, 1)
    assert ladder == sorted(set(ladder), reverse=True)
    assert len(ladder) <= MAX_RUNGS


@pytest.mark.parametrize("seconds", [smol_seconds, large_seconds])
@pytest.mark.parametrize("rows", [1, 8, 32, 512])
def test_few_plans_a_rung_are_kept_plain_decoding_always_and_no_plausible_drafter_loses_much(
    seconds: Callable[[ShapePlan], float], rows: int
) -> None:
    costs = measured(seconds, rows)
    kept = shortlist(costs, rungs(rows))
    for rung in rungs(rows):
        plans = [plan for plan in kept if plan.rows == rung]
        assert plans[0].nodes == 1
        assert len(plans) <= MAX_PLANS_A_RUNG

        def rate(plan: ShapePlan, place: int) -> float:
            return float(expected_emitted(plan)[place]) / costs.seconds(plan, 0)

        for place in PLAUSIBLE.nonzero()[0][::10].tolist():
            best = max(rate(plan, place) for plan in costs.rounds if plan.rows == rung)
            assert max(rate(plan, place) for plan in plans) >= (1 - 2 * MIN_LOSS) * best


def test_a_plan_that_another_equals_is_not_kept() -> None:
    costs = CostCurve(prefill_tokens=1, prefill_call_seconds=1.0)
    plain, *drafted = all_candidates(8)
    costs.add(plain, 0, 1.0)
    for plan in drafted:
        costs.add(plan, 0, float(expected_emitted(plan)[120]) / 1.5)
    assert 2 <= len(shortlist(costs, [8])) <= 4
    for plan in drafted:
        costs.add(plan, 0, 20.0)  # which no drafter is worth
    assert shortlist(costs, [8]) == [plain]


def test_a_plan_that_is_best_in_long_contexts_alone_is_kept_too() -> None:
    costs = CostCurve(prefill_tokens=1, prefill_call_seconds=1.0)
    plain, *_, small, large = all_candidates(8, methods=("autoregressive", "ddtree"))
    for plan, short, long in ((plain, 1.0, 9.0), (small, 1.1, 9.0), (large, 9.0, 9.0)):
        costs.add(plan, 100, short)
        costs.add(plan, 9000, long)
    assert shortlist(costs, [8]) == [plain, small, large]


def test_only_what_a_fixed_method_allows_is_kept() -> None:
    costs = CostCurve(prefill_tokens=1, prefill_call_seconds=1.0)
    for plan in all_candidates(128, methods=("ddtree",)):
        costs.add(plan, 0, smol_seconds(plan))
    kept = shortlist(costs, [128])
    assert 1 <= len(kept) <= MAX_PLANS_A_RUNG
    assert min(plan.nodes for plan in kept) > 1
