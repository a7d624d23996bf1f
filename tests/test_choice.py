"""The chooser of plans, with measured costs and made drafters: what it ends with, and what it
loses until then."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_costs import CONTEXT, Drafter, large_seconds, measured, smol_seconds

from ddbatch.core import ShapePlan
from ddbatch.engine.candidates import rungs, shortlist
from ddbatch.engine.choice import (
    ASK_ROUNDS,
    EXPLORE_ROW_ROUNDS,
    EXPLORE_SHARE,
    MAX_HISTORY,
    MIN_GAIN,
    Chooser,
    Moment,
)
from ddbatch.engine.curves import HALF_LIFE, REFERENCE, AcceptanceCurve, CostCurve

POOR = Drafter(0.1)
SMOL = Drafter(0.42, short_loss=0.05)  # 2.6 tokens a round of 16 nodes
GOOD = Drafter(0.85, depth_fall=0.99)  # 6.5
# Drafters that are not the model's: their ranks or depths fall faster or slower.
ODD = (
    Drafter(0.5, rank_fall=0.45),
    Drafter(0.45, rank_fall=1.0, short_loss=0.08),
    Drafter(0.75, depth_fall=0.9),
    Drafter(0.9, rank_fall=0.5, depth_fall=0.93, short_loss=0.05),
)
TOKENS = 128  # of a sequence


class Run:
    """A made run: rows are always live while sequences last, rounds cost what was measured, and a
    row accepts as many tokens as coins of the drafter's mean fall."""

    def __init__(self, chooser: Chooser, drafter: Drafter, seed: int = 0) -> None:
        self.chooser, self.drafter = chooser, drafter
        self.plan = chooser.plans[0]
        self.tokens = self.seconds = 0.0
        self._accepted: dict[ShapePlan, float] = {}
        self._random = np.random.default_rng(seed)

    def emitted(self, plan: ShapePlan) -> float:
        """The truth that the chooser does not know."""
        if plan not in self._accepted:
            self._accepted[plan] = self.drafter.accepted(plan)
        return 1 + self._accepted[plan]

    def rate(self, plan: ShapePlan) -> float:
        """The truth, of full rows."""
        return plan.rows * self.emitted(plan) / self.chooser.costs.seconds(plan, CONTEXT)

    def rounds(self, moment: Moment, most: int = ASK_ROUNDS) -> int:
        """Ask, do rounds of the answer, `most` at most, tell; returns the tokens that they
        emitted."""
        self.plan = self.chooser.choose(self.plan, moment)
        num_rounds = min(most, self.chooser.num_rounds())
        row_rounds = num_rounds * min(self.plan.rows, moment.num_live)
        accepted = self.emitted(self.plan) - 1
        emitted = row_rounds
        if accepted:
            emitted += int(self._random.negative_binomial(row_rounds, 1 / (1 + accepted)))
        self.chooser.add(
            self.plan,
            num_rounds=num_rounds,
            num_row_rounds=row_rounds,
            num_emitted=emitted,
            context=CONTEXT,
        )
        self.tokens += emitted
        self.seconds += num_rounds * self.chooser.costs.seconds(self.plan, CONTEXT)
        return emitted

    def stream(self, rows: int, tokens: int) -> None:
        """So many tokens, all rows live."""
        left = tokens
        while left > 0:
            waiting = max(0, left - rows * TOKENS // 2) // TOKENS
            left -= self.rounds(moment(rows, waiting))
        # No time is left to explore anything.
        self.plan = self.chooser.choose(self.plan, Moment(rows, 0, CONTEXT, expected_left=rows))


def moment(num_live: int, num_waiting: int = 0) -> Moment:
    return Moment(
        num_live=num_live,
        num_waiting=num_waiting,
        context=CONTEXT,
        expected_left=num_live * TOKENS / 2,
    )


def made_chooser(
    seconds: Callable[[ShapePlan], float], rows: int, max_tokens: int | None = None
) -> Chooser:
    costs = measured(seconds, rows, max_tokens)
    return Chooser(costs, AcceptanceCurve(), shortlist(costs, rungs(rows)))


def best_rates(run: Run) -> tuple[float, float]:
    """Of all candidates, the shortlist or not; of plain decoding."""
    plans = run.chooser.costs.rounds
    return (
        max(run.rate(plan) for plan in plans),
        max(run.rate(plan) for plan in plans if plan.nodes == 1),
    )


@pytest.mark.parametrize("drafter", [POOR, SMOL, GOOD, *ODD])
@pytest.mark.parametrize("rows", [1, 8, 32, 128, 512])
def test_a_run_is_nearly_as_fast_as_the_best_plan_and_never_slower_than_plain_decoding(
    rows: int, drafter: Drafter
) -> None:
    run = Run(made_chooser(smol_seconds, rows), drafter)
    best, plain = best_rates(run)
    run.stream(rows, tokens=8000 * rows)
    assert run.tokens / run.seconds >= 0.95 * best
    assert run.tokens / run.seconds >= 0.98 * plain
    assert run.rate(run.plan) >= 0.95 * best


@pytest.mark.parametrize("drafter", [POOR, SMOL, GOOD])
@pytest.mark.parametrize("rows", [1, 8, 128])
def test_so_it_is_with_a_large_model(rows: int, drafter: Drafter) -> None:
    run = Run(made_chooser(large_seconds, rows), drafter)
    best, plain = best_rates(run)
    run.stream(rows, tokens=8000 * rows)
    assert run.tokens / run.seconds >= max(0.95 * best, 0.98 * plain)


@pytest.mark.parametrize("chance", [0.2, 0.4, 0.5])
def test_a_large_model_decodes_plainly_from_128_rows_on_unless_its_drafter_is_good(
    chance: float,
) -> None:
    drafter = Drafter(chance)
    assert 1 + drafter.accepted(REFERENCE) < 3
    many, one = (Run(made_chooser(large_seconds, rows), drafter) for rows in (128, 1))
    many.stream(128, tokens=4000 * 128)
    one.stream(1, tokens=4000)
    assert many.plan.nodes == 1
    assert one.plan.nodes > 8


def drain(run: Run, rows: int) -> float:
    """Seconds until `rows` sequences of unequal lengths have ended, none following."""
    left = np.random.default_rng(1).integers(20, 2000, rows).astype(float)
    while len(left):
        now = Moment(len(left), 0, CONTEXT, expected_left=float(left.sum()))
        emitted = run.rounds(now, most=4)
        left[: run.plan.rows] -= emitted / min(len(left), run.plan.rows)
        left = left[left > 0]
    return run.seconds


@pytest.mark.parametrize("drafter", [POOR, SMOL, GOOD])
@pytest.mark.parametrize("seconds", [smol_seconds, large_seconds])
def test_a_ladder_of_rows_shortens_the_drain(
    seconds: Callable[[ShapePlan], float], drafter: Drafter
) -> None:
    chooser = made_chooser(seconds, 128)
    top = [plan for plan in chooser.plans if plan.rows == 128]
    with_ladder = drain(Run(chooser, drafter), 128)
    without = drain(Run(Chooser(chooser.costs, AcceptanceCurve(), top), drafter), 128)
    assert with_ladder < 0.95 * without


def test_rows_follow_what_is_live() -> None:
    run = Run(made_chooser(smol_seconds, 512), SMOL)
    run.stream(512, tokens=2000 * 512)
    rows = []
    for num_live in (512, 300, 100, 30, 8, 1):
        run.rounds(moment(num_live))
        rows.append(run.plan.rows)
    assert rows == sorted(rows, reverse=True)
    assert (rows[0], rows[-1]) == (512, 1)
    assert run.plan.nodes > 8
    run.rounds(moment(8, num_waiting=10**4))
    assert run.plan.rows == 512  # prompts that wait are going to fill them


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rows=st.sampled_from([1, 8, 100]), max_tokens=st.sampled_from([100, 1152]))
def test_no_other_plan_than_those_kept_is_ever_chosen(
    data: st.DataObject, rows: int, max_tokens: int
) -> None:
    chooser = made_chooser(smol_seconds, rows, max_tokens)
    current = replace(REFERENCE, rows=7)  # none of them
    for _ in range(8):
        now = Moment(
            num_live=data.draw(st.integers(0, 2 * rows)),
            num_waiting=data.draw(st.integers(0, 10**6)),
            context=data.draw(st.floats(0, 1e5)),
            expected_left=data.draw(st.floats(0, 1e9)),
            warm=data.draw(st.booleans()),
            catch_up_seconds=data.draw(st.floats(0, 10)),
        )
        current = chooser.choose(current, now)
        assert current in chooser.plans
        assert current.rows * current.nodes <= max_tokens
        row_rounds = data.draw(st.integers(0, 5000))
        chooser.add(
            current,
            num_rounds=1,
            num_row_rounds=row_rounds,
            num_emitted=int(row_rounds * data.draw(st.floats(1, current.nodes))),
            context=now.context,
        )


def two_plans(drafted_ms: float, rows: int = 8) -> tuple[Chooser, ShapePlan, ShapePlan]:
    """Plain decoding of 1 ms, and a tree that is known to emit 2 tokens a round."""
    plain = ShapePlan(rows=rows, nodes=1, block=1, draft_depth=0, topk=0)
    tree = ShapePlan(rows=rows, nodes=9, block=16, draft_depth=8, topk=8)
    costs = CostCurve(prefill_tokens=2048, prefill_call_seconds=0.045)
    costs.add(plain, CONTEXT, 1e-3)
    costs.add(tree, CONTEXT, drafted_ms / 1e3)
    acceptance = AcceptanceCurve()
    acceptance.add(tree, 10**6, 2 * 10**6)
    return Chooser(costs, acceptance, [plain, tree]), plain, tree


def test_a_plan_is_left_for_a_clear_gain_only() -> None:
    chooser, plain, tree = two_plans(2.0 * (1 - MIN_GAIN / 2))
    assert [chooser.choose(plan, moment(8)) for plan in (plain, tree)] == [plain, tree]
    chooser, plain, tree = two_plans(2.0 * (1 - 3 * MIN_GAIN))
    assert [chooser.choose(plan, moment(8)) for plan in (plain, tree)] == [tree, tree]


def test_of_equal_plans_the_one_of_fewer_rows_is_chosen() -> None:
    chooser, plain, _ = two_plans(9.0)
    few = replace(plain, rows=2)
    chooser.costs.add(few, CONTEXT, 1e-3)
    chooser.plans.append(few)
    assert chooser.choose(replace(plain, rows=99), moment(2)) == few
    assert chooser.choose(replace(plain, rows=99), moment(3)) == plain


def test_a_cold_drafters_catch_up_must_pay_within_what_is_left() -> None:
    """Plain decoding makes 8,000 tokens a second, the tree 10,000: 800 tokens come 20 ms sooner."""
    chooser, plain, tree = two_plans(1.6)
    cold = Moment(
        num_live=8,
        num_waiting=0,
        context=CONTEXT,
        expected_left=800,
        warm=False,
        catch_up_seconds=0.015,
    )
    assert chooser.choose(plain, cold) == tree
    assert chooser.choose(plain, replace(cold, catch_up_seconds=0.025)) == plain
    assert chooser.choose(plain, replace(cold, catch_up_seconds=0.025, warm=True)) == tree
    # As many that wait have as much to come, and cost no catching up.
    assert chooser.choose(plain, replace(cold, catch_up_seconds=0.025, num_waiting=8)) == tree


def test_nothing_is_explored_when_few_rounds_are_left() -> None:
    chooser = made_chooser(smol_seconds, 512)
    plain = chooser.plans[0]
    few = replace(moment(512), expected_left=512 * 20)
    assert chooser.choose(plain, few) == plain
    assert chooser.choose(plain, replace(few, num_waiting=100_000)).nodes > 1


def test_nor_at_the_end_of_a_long_run() -> None:
    chooser, plain, tree = two_plans(2.5)
    chooser.add(plain, num_rounds=10**7, num_row_rounds=8 * 10**7, num_emitted=8 * 10**7, context=0)
    assert chooser.choose(plain, replace(moment(8), expected_left=100)) == plain
    assert chooser.choose(plain, replace(moment(8), expected_left=10**5)) == tree


def test_what_is_explored_is_asked_about_sooner_the_more_rows_measure_it() -> None:
    for rows, num_rounds in ((512, 1), (128, 2), (16, 16)):
        run = Run(made_chooser(smol_seconds, rows), GOOD)
        whys = set()
        for _ in range(20):
            run.rounds(moment(rows, 10**5))
            why = run.chooser.as_dict()["choices"][-1]["why"]
            assert run.chooser.num_rounds() == (num_rounds if why == "explored" else ASK_ROUNDS)
            whys.add(why)
        assert whys == {"best", "explored"}


@pytest.mark.parametrize("rows", [8, 128, 512])
def test_exploring_loses_no_more_than_its_share(rows: int) -> None:
    """Nothing is ever accepted: whatever is drafted only measures."""
    run = Run(made_chooser(smol_seconds, rows), Drafter(1e-9))
    plain = run.chooser.plans[0]
    while run.seconds < 5:
        run.rounds(moment(rows, 100), most=2)
    at_plain = run.tokens / (rows / run.chooser.costs.seconds(plain, CONTEXT))
    told = run.chooser.as_dict()
    assert told["lost_seconds"] <= EXPLORE_SHARE * told["seconds"]
    # What is not counted as exploring: a usual drafter's gain was tried.
    tried = 2 * EXPLORE_ROW_ROUNDS / rows * run.chooser.costs.seconds(run.chooser.plans[1], CONTEXT)
    assert run.seconds - at_plain <= told["lost_seconds"] + tried


def test_catching_up_to_explore_counts_once_and_is_within_the_share() -> None:
    chooser = made_chooser(smol_seconds, 512)
    plain = chooser.plans[0]
    cold = replace(moment(512, 10**6), warm=False, catch_up_seconds=0.5)
    for _ in range(3):
        plan = chooser.choose(plain, cold)
        assert plan.nodes > 1
        assert chooser.as_dict()["lost_seconds"] == 0.5
    seconds_left = cold.tokens_left() / chooser.rate(plain, cold)
    too_long = replace(cold, catch_up_seconds=EXPLORE_SHARE * seconds_left)
    assert made_chooser(smol_seconds, 512).choose(plain, too_long) == plain


def test_a_plan_is_explored_until_it_is_known_and_not_again_before_half_is_forgotten() -> None:
    """A tree of 2 tokens a round at 2.05 times the cost: for all that is known it may be better."""
    chooser, plain, tree = two_plans(2.05)
    much = moment(8, 10**5)
    for known, chosen in ((300, tree), (900, tree), (1030, plain), (900, plain), (500, tree)):
        chooser.acceptance = AcceptanceCurve()
        chooser.acceptance.add(tree, known, 2 * known)
        assert chooser.choose(plain, much) == chosen


def test_a_plan_that_is_explored_is_not_left_for_another_that_promises_more() -> None:
    chooser, plain, tree = two_plans(2.4)
    chooser.acceptance = AcceptanceCurve()
    larger = replace(tree, nodes=17, draft_depth=15, topk=16)
    chooser.costs.add(larger, CONTEXT, 2.7e-3)
    chooser.plans.append(larger)
    much = moment(8, 10**5)
    first = chooser.choose(plain, much)
    (other,) = {tree, larger} - {first}
    seconds = chooser.costs.seconds(first, CONTEXT)
    chooser.add(
        first, num_rounds=32, num_row_rounds=256, num_emitted=int(250e3 * seconds), context=CONTEXT
    )
    hoped = {
        plan: chooser.rate(plan, much, chooser.acceptance.hoped(plan)) for plan in (first, other)
    }
    assert hoped[other] > hoped[first] > chooser.rate(plain, much)
    assert chooser.choose(first, much) == first


def test_acceptance_that_rises_while_plain_decoding_serves_is_found() -> None:
    run = Run(made_chooser(smol_seconds, 128), POOR)
    run.stream(128, tokens=int(HALF_LIFE))
    assert run.plan.nodes == 1
    run = Run(run.chooser, GOOD)
    run.stream(128, tokens=10 * int(HALF_LIFE))
    assert run.plan.nodes > 1


def test_acceptance_that_falls_is_followed() -> None:
    run = Run(made_chooser(smol_seconds, 128), GOOD)
    run.stream(128, tokens=8 * int(HALF_LIFE))
    assert run.plan.nodes > 1
    run = Run(run.chooser, POOR)
    run.stream(128, tokens=4 * int(HALF_LIFE))
    assert run.plan.nodes == 1


def test_a_fixed_method_keeps_to_it_however_slow() -> None:
    chooser = made_chooser(smol_seconds, 512)
    trees = [plan for plan in chooser.plans if plan.nodes > 1]
    run = Run(Chooser(chooser.costs, AcceptanceCurve(), trees), POOR)
    run.stream(512, tokens=500 * 512)
    assert run.plan.nodes > 1


def test_the_summary_says_what_was_chosen_and_what_else_would_give() -> None:
    chooser, plain, tree = two_plans(1.6)
    assert chooser.summary() == "no plan was chosen yet"
    chooser.choose(plain, moment(8))
    assert chooser.summary() == (
        "a tree of 8 nodes over blocks of 16, 8 rows: 2.00 tokens a round at 1.6 ms; "
        "plain decoding would give 0.80x"
    )
    chooser, plain, tree = two_plans(4.0)
    chooser.choose(tree, moment(8))
    assert chooser.summary() == (
        "plain decoding, 8 rows: 1.00 tokens a round at 1 ms; "
        "a tree of 8 nodes over blocks of 16 would give 0.50x"
    )
    chooser, plain, _ = two_plans(1.6, rows=1)
    chooser.choose(plain, moment(1))
    assert chooser.summary().startswith("a tree of 8 nodes over blocks of 16, 1 row: 2.00 tokens")


def test_the_record_is_json_its_curves_can_be_read_and_its_history_is_bounded() -> None:
    run = Run(made_chooser(smol_seconds, 64), SMOL)
    for turn in range(4 * MAX_HISTORY):
        run.rounds(moment(64 if turn % 2 else 1))
    told = json.loads(json.dumps(run.chooser.as_dict()))
    assert len(told["choices"]) == MAX_HISTORY
    assert ShapePlan(*told["choices"][-1]["plan"]) == run.plan
    assert CostCurve.from_dict(told["costs"]) == run.chooser.costs
    assert AcceptanceCurve.from_dict(told["acceptance"]) == run.chooser.acceptance
    assert [ShapePlan(*plan) for plan in told["plans"]] == run.chooser.plans
