"""What a round costs and what it emits, as measured: the two curves that a choice of plan rests on.

A round's seconds follow its shapes and the keys that it looks at. What it emits follows the text
and the drafter, not the rows, so that acceptance is kept of a shape whatever its rows. Knows
nothing about tensors or text, nor which plan is the best.

The model of acceptance has one number, q: the chance that the drafter's best candidate of a
position is right, given that the path so far is. Its r-th candidate is right with chance q f^(r-1),
where f = 0.75 (1 - q): a tree's expected accepted tokens are the sum, over its nodes, of their
paths' chances, and the tree has the most probable paths.

With q fitted to each of 19 pairs and texts (chains and trees, 0.2 to 9 accepted tokens a round) it
is off by 3.5% (root mean square), at most by 11%. SmolLM2-135M, trees of 2, 3, 4, 5 and 8: 1.58,
1.74, 1.82, 1.90, 2.07 tokens a round, measured 1.61, 1.72, 1.82, 1.89, 2.04; Qwen3-8B, chain of 15,
trees of 16, 32 and 64: 8.2, 8.2, 9.0, 10.0, measured 7.8, 8.6, 9.25, 9.75. A q that falls with the
depth, or that differs from round to round, fits no better.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ddbatch.core import ShapePlan

Floats = NDArray[np.float64]

RANK_FALL = 0.75  # f / (1 - q)
# The values of q that are tried, evenly spaced in log-odds: a step changes no prediction by 3%.
CHANCES: Floats = 1 / (1 + np.exp(-np.linspace(-6.0, 6.0, 241)))
# Tokens a round of 16 nodes over a block of 16 before anything is measured: what is expected of an
# unknown drafter, what a good one would give, and one that does not fit.
REFERENCE = ShapePlan(rows=1, nodes=17, block=16, draft_depth=15, topk=16)
USUAL_EMITTED, HOPED_EMITTED, FEARED_EMITTED = 2.6, 6.0, 1.0
# The row-rounds that such an expectation counts for, q's and a shape's. A shape departs from the
# model by some 5%, its rounds from their mean by 80%: beyond 256 its own mean is the better one.
PRIOR_ROW_ROUNDS = 256.0
PLAN_SPREAD = 1.25  # what a shape emits may be so many times what the model says, or a part of it
# Other prompts may follow. After so many row-rounds, of whichever plan, a count is worth half.
HALF_LIFE = 200_000.0

PlanTuple = list[int]  # a ShapePlan's fields, for JSON


class CostDict(TypedDict):
    """A CostCurve, for JSON. rounds: of each plan its (context, seconds)."""

    rounds: list[tuple[PlanTuple, list[list[float]]]]
    prefill_tokens: int
    prefill_call_seconds: float


class AcceptanceDict(TypedDict):
    """An AcceptanceCurve, for JSON. counts: of each shape row-rounds and emitted tokens."""

    counts: list[tuple[PlanTuple, list[float]]]


class Point(NamedTuple):
    """One measurement: mean keys a row, and the seconds of a round."""

    context: float
    seconds: float


@dataclass
class CostCurve:
    """Seconds of a round of each measured plan, and of a prefill call.

    rounds: of each plan at least one point, by rising context. prefill_tokens: those of a call.
    """

    prefill_tokens: int
    prefill_call_seconds: float
    rounds: dict[ShapePlan, list[Point]] = field(default_factory=dict)

    def add(self, plan: ShapePlan, context: float, seconds: float) -> None:
        """A round of this plan took so long; what was measured at this context is replaced."""
        assert seconds > 0, (plan, context, seconds)
        others = [point for point in self.rounds.get(plan, []) if point.context != context]
        self.rounds[plan] = sorted([*others, Point(context, seconds)])

    def seconds(self, plan: ShapePlan, context: float) -> float:
        """Of one round: straight lines between what was measured, the end ones drawn on, and never
        less than the least that was measured."""
        assert plan in self.rounds, f"not measured: {plan}"
        points = self.rounds[plan]
        if len(points) == 1:
            return points[0].seconds
        at = bisect.bisect_left(points, (context,), 1, len(points) - 1)
        low, high = points[at - 1], points[at]
        share = (context - low.context) / (high.context - low.context)
        least = min(point.seconds for point in points)
        return max(least, low.seconds + share * (high.seconds - low.seconds))

    def prefill_seconds(self, tokens: float) -> float:
        """Of the whole calls that this many prompt tokens need."""
        return math.ceil(tokens / self.prefill_tokens) * self.prefill_call_seconds

    def as_dict(self) -> CostDict:
        """For JSON."""
        return {
            "rounds": [
                (list(astuple(plan)), [list(point) for point in points])
                for plan, points in self.rounds.items()
            ],
            "prefill_tokens": self.prefill_tokens,
            "prefill_call_seconds": self.prefill_call_seconds,
        }

    @classmethod
    def from_dict(cls, told: CostDict) -> CostCurve:
        """What as_dict made."""
        curve = cls(told["prefill_tokens"], told["prefill_call_seconds"])
        for fields, points in told["rounds"]:
            curve.rounds[ShapePlan(*fields)] = [Point(*point) for point in points]
        return curve


def expected_emitted(plan: ShapePlan) -> Floats:
    """Tokens a row-round of this shape by the model, for each of CHANCES."""
    return _expected_emitted(plan.nodes - 1, plan.draft_depth, plan.topk)


@cache
def _expected_emitted(budget: int, depth: int, topk: int) -> Floats:
    """All paths of a depth whose ranks add up to the same have one chance: cells of such paths are
    taken in the order of their chances, until the budget is spent."""
    if budget == 0:
        return np.ones_like(CHANCES)
    num_paths = _num_paths(budget, min(depth, budget), min(topk, budget)).ravel()
    depths, falls = np.divmod(np.arange(len(num_paths)), budget)
    fall = np.log(RANK_FALL * (1 - CHANCES))
    log_chance = np.outer(np.log(CHANCES), depths + 1) + np.outer(fall, falls)
    order = np.argsort(-log_chance, axis=1, kind="stable")
    before = np.cumsum(num_paths[order], axis=1) - num_paths[order]
    taken = np.clip(budget - before, 0, num_paths[order])
    chance = np.exp(np.take_along_axis(log_chance, order, axis=1))
    return np.asarray(1 + (taken * chance).sum(axis=1))


def _num_paths(budget: int, depth: int, topk: int) -> Floats:
    """[depth - 1, sum of (rank - 1)]: paths of a tree of that depth and topk. Those beyond the
    budget are never asked for."""
    counts = np.zeros((depth, budget))
    paths = np.eye(1, budget)[0]
    for level in range(depth):
        paths = np.convolve(paths, np.ones(topk))[:budget]
        paths = counts[level] = np.minimum(paths, budget)
    return counts


class Count(NamedTuple):
    """Of one shape: row-rounds, and the tokens that they emitted; old ones count for less."""

    row_rounds: float
    emitted: float


@dataclass
class AcceptanceCurve:
    """Tokens that a row-round of each shape emits: its own mean, shrunk to the model's.

    counts: by shape, a plan of one row.
    """

    counts: dict[ShapePlan, Count] = field(default_factory=dict)
    _fitted: dict[float, int] = field(default_factory=dict, compare=False, repr=False)

    def add(self, plan: ShapePlan, num_row_rounds: int, num_emitted: int) -> None:
        """Live row-rounds of this plan, and the tokens that they emitted. Whatever the plan, all
        that was counted before is older by as many."""
        kept = 0.5 ** (num_row_rounds / HALF_LIFE)
        for shape, (row_rounds, emitted) in self.counts.items():
            self.counts[shape] = Count(row_rounds * kept, emitted * kept)
        if plan.nodes > 1 and num_row_rounds:
            row_rounds, emitted = self.counts.get(_shape(plan), Count(0.0, 0.0))
            self.counts[_shape(plan)] = Count(row_rounds + num_row_rounds, emitted + num_emitted)
        self._fitted.clear()

    def row_rounds(self, plan: ShapePlan) -> float:
        """Row-rounds in which this shape was measured, old ones counted for less."""
        return self.counts.get(_shape(plan), Count(0.0, 0.0)).row_rounds

    def emitted(self, plan: ShapePlan) -> float:
        """Tokens that a row-round of this plan is expected to emit."""
        return self._shrunk(plan, USUAL_EMITTED, 1.0)

    def hoped(self, plan: ShapePlan) -> float:
        """Tokens a row-round that measuring more could still find: with what is not known of the
        drafter, nor of this shape, at its best."""
        return self._shrunk(plan, HOPED_EMITTED, PLAN_SPREAD)

    def feared(self, plan: ShapePlan) -> float:
        """Tokens a row-round if all that is not known turns out at its worst."""
        return max(1.0, self._shrunk(plan, FEARED_EMITTED, 1 / PLAN_SPREAD))

    def chance(self) -> float:
        """The fitted q."""
        return float(CHANCES[self._fit(USUAL_EMITTED)])

    def _shrunk(self, plan: ShapePlan, unknown: float, spread: float) -> float:
        if plan.nodes == 1:
            return 1.0
        by_model = spread * float(expected_emitted(plan)[self._fit(unknown)])
        row_rounds, emitted = self.counts.get(_shape(plan), Count(0.0, 0.0))
        return (emitted + PRIOR_ROW_ROUNDS * by_model) / (row_rounds + PRIOR_ROW_ROUNDS)

    def _fit(self, unknown: float) -> int:
        """Place in CHANCES of the q of least squared relative error, each measurement weighing as
        its row-rounds do. unknown: tokens of REFERENCE that a drafter never measured would emit."""
        if unknown not in self._fitted:
            shapes = [REFERENCE, *self.counts]
            means = [unknown, *(emitted / rounds for rounds, emitted in self.counts.values())]
            weights = [PRIOR_ROW_ROUNDS, *(rounds for rounds, _ in self.counts.values())]
            self._fitted[unknown] = _best_fit(shapes, means, weights)
        return self._fitted[unknown]

    def as_dict(self) -> AcceptanceDict:
        """For JSON."""
        return {
            "counts": [(list(astuple(shape)), list(count)) for shape, count in self.counts.items()]
        }

    @classmethod
    def from_dict(cls, told: AcceptanceDict) -> AcceptanceCurve:
        """What as_dict made."""
        return cls({ShapePlan(*fields): Count(*count) for fields, count in told["counts"]})


def _best_fit(shapes: Sequence[ShapePlan], means: Sequence[float], weights: Sequence[float]) -> int:
    """Place in CHANCES whose predictions are the least wrong."""
    predicted = np.stack([expected_emitted(shape) for shape in shapes])
    error = np.log(predicted / np.array(means)[:, None])
    return int(np.argmin(np.array(weights) @ error**2))


@cache
def _shape(plan: ShapePlan) -> ShapePlan:
    """What acceptance depends on."""
    return replace(plan, rows=1)
