"""The two measured curves: what a round costs, and what it emits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_costs import Drafter

from ddbatch.core import ShapePlan
from ddbatch.engine.curves import (
    CHANCES,
    HALF_LIFE,
    PRIOR_ROW_ROUNDS,
    REFERENCE,
    USUAL_EMITTED,
    AcceptanceCurve,
    CostCurve,
    expected_emitted,
)
from ddbatch.engine.plan import plan_shapes

PLAIN = ShapePlan(rows=3, nodes=1, block=1, draft_depth=0, topk=0)
MANY = 100_000


def tree(budget: int, block: int = 16, rows: int = 3) -> ShapePlan:
    return plan_shapes(
        "ddtree" if budget else "autoregressive",
        budget=budget,
        topk=None,
        rows=rows,
        block=block,
        vocab=1000,
        gemm_limit=None,
    )


CHAIN = ShapePlan(rows=3, nodes=16, block=16, draft_depth=15, topk=1)
SHORT_CHAIN = ShapePlan(rows=3, nodes=8, block=8, draft_depth=7, topk=1)
SHAPES = st.builds(
    ShapePlan,
    rows=st.integers(1, 9),
    nodes=st.integers(2, 40),
    block=st.just(16),
    draft_depth=st.integers(1, 15),
    topk=st.integers(1, 40),
)
# Tokens a round as they were measured: SmolLM2-135M with three sets of prompts, the demo's pair of
# blocks of 8, and Qwen3-8B (DDTree's figures).
MEASURED = (
    {tree(2, 3): 1.61, tree(3, 4): 1.72, tree(4, 5): 1.82, tree(5, 6): 1.89, tree(8, 9): 2.04},
    {CHAIN: 2.3, tree(3, 4): 2.05, tree(5, 6): 2.25, tree(8): 2.7, tree(16): 2.9},
    {CHAIN: 2.73, tree(8): 3.05, tree(12): 3.14, tree(16): 3.28},
    {SHORT_CHAIN: 2.48, tree(4, 8): 2.61, tree(8, 8): 2.97, tree(16, 8): 3.32},
    {CHAIN: 7.79, tree(16): 8.6, tree(32): 9.25, tree(64): 9.75},
)


def emitted_tokens(row_rounds: int, mean: float) -> int:
    return round(row_rounds * mean)


def cost_curve(*points: tuple[float, float]) -> CostCurve:
    curve = CostCurve(prefill_tokens=2048, prefill_call_seconds=0.5)
    for context, seconds in points:
        curve.add(PLAIN, context, seconds)
    return curve


def test_seconds_are_straight_lines_between_measurements_and_beyond_them() -> None:
    curve = cost_curve((300, 5.0), (100, 2.0), (200, 3.0))
    contexts = (100, 150, 200, 275, 300, 400, 100)
    assert [curve.seconds(PLAIN, context) for context in contexts] == pytest.approx(
        [2.0, 2.5, 3.0, 4.5, 5.0, 7.0, 2.0]
    )


def test_no_round_is_cheaper_than_the_cheapest_that_was_measured() -> None:
    assert cost_curve((100, 2.0), (200, 3.0)).seconds(PLAIN, 0) == 2.0
    assert cost_curve((100, 2.0), (200, 1.5)).seconds(PLAIN, 900) == 1.5


def test_one_measurement_holds_everywhere_and_a_later_one_replaces_it() -> None:
    curve = cost_curve((100, 2.0), (100, 3.0))
    assert curve.seconds(PLAIN, 0) == curve.seconds(PLAIN, 5000) == 3.0


def test_an_unmeasured_plan_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not measured"):
        cost_curve((100, 2.0)).seconds(tree(8), 100)


def test_prefill_takes_whole_calls() -> None:
    curve = cost_curve()
    assert [curve.prefill_seconds(tokens) for tokens in (0, 1, 2048, 2049)] == [0, 0.5, 0.5, 1.0]


@given(
    points=st.lists(
        st.tuples(SHAPES, st.floats(0, 1e5), st.floats(1e-5, 10)), min_size=1, max_size=20
    )
)
def test_costs_survive_json(points: list[tuple[ShapePlan, float, float]]) -> None:
    curve = CostCurve(prefill_tokens=77, prefill_call_seconds=0.01)
    for point in points:
        curve.add(*point)
    told = CostCurve.from_dict(json.loads(json.dumps(curve.as_dict())))
    assert told == curve
    plan, context, _ = points[0]
    assert told.seconds(plan, context / 3) == curve.seconds(plan, context / 3)


@settings(max_examples=50)
@given(plan=SHAPES, place=st.integers(0, len(CHANCES) - 1))
def test_the_models_tree_is_that_of_a_heap(plan: ShapePlan, place: int) -> None:
    plan_capacity = sum(min(plan.topk, 40) ** depth for depth in range(1, plan.draft_depth + 1))
    if plan.nodes - 1 > plan_capacity:
        return  # no plan asks for more than its tree can hold
    drafter = Drafter(float(CHANCES[place]))
    assert expected_emitted(plan)[place] == pytest.approx(1 + drafter.accepted(plan), rel=1e-9)


@given(plan=SHAPES)
def test_a_better_drafter_is_expected_to_emit_more_and_never_beyond_the_depth(
    plan: ShapePlan,
) -> None:
    expected = expected_emitted(plan)
    assert (np.diff(expected) > 0).all()
    assert expected[0] >= 1
    assert expected[-1] <= 1 + plan.draft_depth


@pytest.mark.parametrize("taus", MEASURED)
def test_one_measured_plan_predicts_the_others_within_17_percent(
    taus: dict[ShapePlan, float],
) -> None:
    for known, tau in taus.items():
        curve = AcceptanceCurve()
        curve.add(known, MANY, emitted_tokens(MANY, tau))
        predicted = [curve.emitted(plan) for plan in taus]
        assert predicted == pytest.approx(list(taus.values()), rel=0.17)


def test_plain_decoding_emits_one_token_whatever_was_measured() -> None:
    curve = AcceptanceCurve()
    curve.add(PLAIN, 100, 100)
    curve.add(tree(8), 100, 300)
    assert (curve.emitted(PLAIN), curve.hoped(PLAIN), curve.feared(PLAIN)) == (1.0, 1.0, 1.0)
    assert curve.row_rounds(PLAIN) == 0


def test_an_unknown_drafter_is_a_usual_one_and_may_be_a_good_one_or_none() -> None:
    curve = AcceptanceCurve()
    assert curve.emitted(REFERENCE) == pytest.approx(USUAL_EMITTED, rel=0.02)
    assert curve.hoped(REFERENCE) > 2 * USUAL_EMITTED
    assert curve.feared(REFERENCE) == 1.0


def test_a_shapes_own_mean_outweighs_the_model_as_row_rounds_grow() -> None:
    """Two shapes that no drafter of the model could have."""
    few, many = AcceptanceCurve(), AcceptanceCurve()
    for curve, row_rounds in ((few, int(PRIOR_ROW_ROUNDS // 16)), (many, 10_000)):
        curve.add(tree(8), row_rounds, emitted_tokens(row_rounds, 4.0))
        curve.add(tree(16), row_rounds, emitted_tokens(row_rounds, 2.0))
    assert few.emitted(tree(16)) > few.emitted(tree(8))
    assert many.emitted(tree(8)) == pytest.approx(4.0, rel=0.03)
    assert many.emitted(tree(16)) == pytest.approx(2.0, rel=0.03)


def test_acceptance_does_not_depend_on_rows() -> None:
    curve = AcceptanceCurve()
    curve.add(tree(8, rows=512), 512, 1500)
    assert curve.row_rounds(tree(8, rows=1)) == 512
    assert curve.emitted(tree(8, rows=1)) == curve.emitted(tree(8, rows=512))


def test_hope_and_fear_end_as_all_is_measured_and_return_as_it_gets_old() -> None:
    curve = AcceptanceCurve()
    curve.add(tree(8), MANY, emitted_tokens(MANY, 1.1))
    assert curve.hoped(tree(8)) == pytest.approx(1.1, rel=0.01)
    assert curve.feared(tree(8)) == pytest.approx(1.1, rel=0.01)
    assert curve.hoped(tree(16)) < 1.6
    for _ in range(16):
        curve.add(PLAIN, int(HALF_LIFE), int(HALF_LIFE))
    assert curve.row_rounds(tree(8)) < 2
    assert curve.hoped(tree(16)) > 2 * USUAL_EMITTED
    assert curve.emitted(REFERENCE) == pytest.approx(USUAL_EMITTED, rel=0.02)


def test_what_is_very_old_is_forgotten_and_leaves_no_trace() -> None:
    curve = AcceptanceCurve()
    curve.add(tree(8), MANY, emitted_tokens(MANY, 1.1))
    for _ in range(3):
        curve.add(PLAIN, 10**9, 10**9)
    assert curve == AcceptanceCurve()
    assert curve.emitted(tree(8)) == AcceptanceCurve().emitted(tree(8))


def test_a_live_row_that_emits_nothing_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        AcceptanceCurve().add(tree(8), 10, 9)


def test_other_prompts_are_followed_in_all_shapes() -> None:
    curve = AcceptanceCurve()
    for mean, row_rounds in ((3.0, 50_000), (1.5, 4 * int(HALF_LIFE))):
        before = curve.emitted(tree(16))
        for _ in range(100):
            curve.add(tree(8), row_rounds // 100, emitted_tokens(row_rounds // 100, mean))
            curve.add(tree(3, 4), 10, emitted_tokens(10, mean * 0.7))
    assert curve.emitted(tree(8)) == pytest.approx(1.5, rel=0.1)
    assert curve.emitted(tree(16)) < before / 1.5


@given(
    added=st.lists(st.tuples(SHAPES, st.integers(1, 5000), st.floats(1, 9)), max_size=12),
    plan=SHAPES,
)
def test_acceptance_survives_json(
    added: list[tuple[ShapePlan, int, float]], plan: ShapePlan
) -> None:
    curve = AcceptanceCurve()
    for shape, row_rounds, mean in added:
        curve.add(shape, row_rounds, emitted_tokens(row_rounds, mean))
    told = AcceptanceCurve.from_dict(json.loads(json.dumps(curve.as_dict())))
    assert told == curve
    assert told.emitted(plan) == curve.emitted(plan)
    assert told.feared(plan) <= told.emitted(plan) <= told.hoped(plan)
