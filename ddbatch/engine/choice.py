"""Which plan the next rounds use: what `engine.budget=auto` decides, from measured curves.

The plan is chosen that ends soonest: live rows x emitted tokens / seconds of a round, by what was
measured so far. Knows nothing about tensors, models or text, nor where plans come from.

A run is not slower than plain decoding by more than 2%, by the measured costs and in the long run:
a plan is kept that is MIN_GAIN slower than the best at most, and rounds that only measure lose at
most EXPLORE_SHARE of the run's time. What a usual drafter would gain is tried at once: one that is
worse shows within PRIOR_ROW_ROUNDS or so, and these come on top.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple, TypedDict

from ddbatch.core import ShapePlan
from ddbatch.engine.curves import (
    AcceptanceCurve,
    AcceptanceDict,
    CostCurve,
    CostDict,
    PlanTuple,
)

SEATED = 0.9  # of the live sequences, when no prompts wait; others end before these miss a row
MIN_GAIN = 0.01  # a plan that is better by less is not worth a change
# A plan is explored, some row-rounds at a time, until what is known of it leaves no hope, at most
# until so many are known; and again when half of these are too old to count.
EXPLORE_ROW_ROUNDS, KNOWN_ROW_ROUNDS = 256, 1024
EXPLORE_SHARE = 0.01  # of the run's seconds may be lost to rounds that only measure
ASK_ROUNDS = 32  # an answer takes the host as long as half a round of a small model
MAX_HISTORY = 64

Why = Literal["best", "explored"]


@dataclass(frozen=True)
class Moment:
    """What the engine knows when it asks for a plan.

    num_live: sequences that decode or are ready to. num_waiting: prompts known to follow. context:
    mean keys a row. expected_left: tokens still to come of the live sequences, an estimate. warm:
    the drafter has its context of them; otherwise catch_up_seconds would give it.
    """

    num_live: int
    num_waiting: int
    context: float
    expected_left: float
    warm: bool = True
    catch_up_seconds: float = 0.0

    def tokens_left(self) -> float:
        """Of all sequences: one that waits has at least as many to come as one that is live."""
        live = max(1, self.num_live)
        return max(1.0, self.expected_left) * (live + self.num_waiting) / live

    def lanes(self, plan: ShapePlan) -> int:
        """Rows of this plan that have a sequence, at least 1."""
        return max(1, min(plan.rows, self.num_live + self.num_waiting))

    def catch_up(self, plan: ShapePlan) -> float:
        """Seconds until a round of this plan can begin."""
        return 0.0 if self.warm or plan.nodes == 1 else self.catch_up_seconds


class ChoiceDict(TypedDict):
    """A change of plan, for JSON. seconds: of rounds before it. rate: tokens a second expected."""

    seconds: float
    plan: PlanTuple
    rate: float
    why: Why


class ChooserDict(TypedDict):
    """A Chooser, for JSON."""

    costs: CostDict
    acceptance: AcceptanceDict
    plans: list[PlanTuple]
    seconds: float
    lost_seconds: float
    choices: list[ChoiceDict]


class _Last(NamedTuple):
    """The last answer."""

    plan: ShapePlan
    why: Why
    moment: Moment
    best_rate: float


class Chooser:
    """Chooses among `plans`. Told of every round, asked before some."""

    def __init__(
        self, costs: CostCurve, acceptance: AcceptanceCurve, plans: Sequence[ShapePlan]
    ) -> None:
        assert plans, "no plan"
        assert all(plan in costs.rounds for plan in plans), plans
        self.costs, self.acceptance, self.plans = costs, acceptance, list(plans)
        self._seconds = self._lost_seconds = 0.0  # of all rounds; by exploring
        self._last: _Last | None = None
        self._choices: deque[ChoiceDict] = deque(maxlen=MAX_HISTORY)

    def add(
        self, plan: ShapePlan, *, num_rounds: int, num_row_rounds: int, num_emitted: int,
        context: float,
    ) -> None:  # fmt: skip
        """Rounds were done: their live row-rounds, the tokens that these emitted."""
        self.acceptance.add(plan, num_row_rounds, num_emitted)
        seconds = num_rounds * self.costs.seconds(plan, context)
        self._seconds += seconds
        if self._last is not None and (self._last.plan, self._last.why) == (plan, "explored"):
            self._lost_seconds += max(0.0, seconds - num_emitted / self._last.best_rate)

    def rate(self, plan: ShapePlan, moment: Moment, emitted: float | None = None) -> float:
        """Tokens a second of rounds of this plan. emitted: tokens a row-round, if not those that
        are expected."""
        if emitted is None:
            emitted = self.acceptance.emitted(plan)
        return moment.lanes(plan) * emitted / self.costs.seconds(plan, moment.context)

    def choose(self, current: ShapePlan, moment: Moment) -> ShapePlan:
        """The plan that the next rounds should have: one of `plans`."""
        plans = self._seating(moment)
        rates = {plan: self.rate(plan, moment) for plan in plans}
        ends = {
            plan: moment.catch_up(plan) + moment.tokens_left() / rate
            for plan, rate in rates.items()
        }
        best = min(plans, key=lambda plan: (ends[plan], plan.rows))
        if current in ends and ends[current] <= (1 + MIN_GAIN) * ends[best]:
            best = current
        explored = self._explored(best, rates[best], ends[best], moment)
        if explored is None:
            return self._answer(_Last(best, "best", moment, rates[best]))
        return self._answer(_Last(explored, "explored", moment, rates[best]))

    def _seating(self, moment: Moment) -> list[ShapePlan]:
        """Plans that may serve. When no prompts wait all sequences go on together: those left
        without a row would be few at the end, and few rows are slow."""
        least = 0.0 if moment.num_waiting else SEATED * moment.num_live
        least = min(least, max(plan.rows for plan in self.plans))
        return [plan for plan in self.plans if plan.rows >= least]

    def _explored(
        self, best: ShapePlan, rate: float, seconds_left: float, moment: Moment
    ) -> ShapePlan | None:
        """A plan of the best one's rows that may be better for all that is known, and may be tried:
        what is left may repay it, and all rounds that only measure lose at most their share of the
        run, even if it accepts as little as is to be feared."""
        allowed = EXPLORE_SHARE * (self._seconds + seconds_left) - self._lost_seconds
        hoped: dict[ShapePlan, float] = {}
        for plan in self.plans:
            if plan.rows != best.rows or plan == best or not self._is_unknown(plan):
                continue
            most = self.rate(plan, moment, self.acceptance.hoped(plan))
            gain = seconds_left * (1 - rate / most)
            if self._most_lost(plan, rate, moment) <= min(allowed, gain):
                hoped[plan] = most
        return max(hoped, key=lambda plan: (self._is_explored(plan), hoped[plan]), default=None)

    def _is_explored(self, plan: ShapePlan) -> bool:
        return self._last is not None and (self._last.plan, self._last.why) == (plan, "explored")

    def _is_unknown(self, plan: ShapePlan) -> bool:
        least = KNOWN_ROW_ROUNDS if self._is_explored(plan) else KNOWN_ROW_ROUNDS / 2
        return plan.nodes > 1 and self.acceptance.row_rounds(plan) < least

    def _most_lost(self, plan: ShapePlan, rate: float, moment: Moment) -> float:
        """Seconds that EXPLORE_ROW_ROUNDS lose if this plan emits as little as is to be feared."""
        share = self.rate(plan, moment, self.acceptance.feared(plan)) / rate
        seconds = self.costs.seconds(plan, moment.context) * max(0.0, 1 - share)
        return moment.catch_up(plan) + _explore_rounds(plan, moment) * seconds

    def _answer(self, last: _Last) -> ShapePlan:
        if self._last is None or (self._last.plan, self._last.why) != (last.plan, last.why):
            if last.why == "explored":
                self._lost_seconds += last.moment.catch_up(last.plan)
            rate = self.rate(last.plan, last.moment)
            told = ChoiceDict(
                seconds=self._seconds, plan=list(astuple(last.plan)), rate=rate, why=last.why
            )
            self._choices.append(told)
        self._last = last
        return last.plan

    def num_rounds(self) -> int:
        """Rounds after which to ask again: what is explored should not last longer than needed."""
        if self._last is None or self._last.why == "best":
            return ASK_ROUNDS
        return min(ASK_ROUNDS, _explore_rounds(self._last.plan, self._last.moment))

    def summary(self) -> str:
        """The last choice and what the best of the other kind would give, for people."""
        if self._last is None:
            return "no plan was chosen yet"
        plan, why, moment, _ = self._last
        emitted = self.acceptance.emitted(plan)
        seconds = self.costs.seconds(plan, moment.context)
        text = f"{_named(plan)}, {_plural(plan.rows, 'row')}: {emitted:.2f} tokens a round at "
        text += f"{1000 * seconds:.3g} ms"
        text += " (to measure it)" if why == "explored" else ""
        others = [other for other in self.plans if (other.nodes == 1) != (plan.nodes == 1)]
        if others:
            rates = {other: self.rate(other, moment) for other in others}
            other = max(others, key=lambda other: rates[other])
            times = rates[other] / self.rate(plan, moment)
            rows = "" if other.rows == plan.rows else f", {_plural(other.rows, 'row')},"
            text += f"; {_named(other)}{rows} would give {times:.2f}x"
        return text

    def as_dict(self) -> ChooserDict:
        """For JSON: both curves, and the last MAX_HISTORY changes of plan."""
        return {
            "costs": self.costs.as_dict(),
            "acceptance": self.acceptance.as_dict(),
            "plans": [list(astuple(plan)) for plan in self.plans],
            "seconds": self._seconds,
            "lost_seconds": self._lost_seconds,
            "choices": list(self._choices),
        }


def _explore_rounds(plan: ShapePlan, moment: Moment) -> int:
    return math.ceil(EXPLORE_ROW_ROUNDS / moment.lanes(plan))


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def _named(plan: ShapePlan) -> str:
    if plan.nodes == 1:
        return "plain decoding"
    kind = "a chain" if plan.topk == 1 else "a tree"
    return f"{kind} of {_plural(plan.nodes - 1, 'node')} over blocks of {plan.block}"
