"""Plans among which `engine.budget=auto` chooses: those worth measuring, and of these the few that
are worth keeping.

Each plan that is measured takes a captured graph and a verdict of the gate, each that is kept also
memory. Knows nothing about tensors, models or text; sizes are plan.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ddbatch.core import ShapePlan
from ddbatch.engine.curves import CHANCES, CostCurve, Floats, expected_emitted
from ddbatch.engine.plan import Method, plan_shapes

# Budgets, and the block that is drafted for them (None: the whole one). No tree is deeper than its
# budget, and the less is drafted the cheaper. Matrix tiles favour 2^k nodes, budgets 2^k.
TREES = (
    *((2, 3), (3, 4), (4, 5), (5, 6), (7, 8)),
    *((8, None), (15, None), (16, None), (31, None), (32, None), (63, None)),
)
LEAST_BUDGET = min(budget for budget, _ in TREES)
# A tree of as many nodes accepts no less than a chain: beside trees only the usual one is tried.
CHAINS = ((2, 3), (4, 5), (7, 8), (None, None))
# Drafted plans that are not worth a measurement: fewer tokens a round cost as much as this many,
# and beyond so many a node costs all of its arithmetic, which few are worth. The smallest tree is
# always tried.
LEAST_TOKENS, MOST_TOKENS = 8, 4096
MAX_RUNGS = 5  # each is measured, and captured for each plan that is kept
MAX_PLANS_A_RUNG = 4
# Drafters for which plans are kept: a tree of 16 nodes emits 1.3 to 13 tokens a round.
PLAUSIBLE = (CHANCES > 0.08) & (CHANCES < 0.97)
MIN_LOSS = 0.02  # a plan is kept for a drafter that would lose more without it


def candidates(
    rows: int,
    *,
    block: int,
    vocab: int,
    max_tokens: int | None,
    has_drafter: bool,
    methods: Collection[Method],
    topk: int | None = None,
) -> list[ShapePlan]:
    """Plans of this many rows that are worth measuring, by rising nodes.

    block, vocab: the drafter's. max_tokens: the most that a round may verify. methods: those that
    the user lets be chosen. topk: what plan_shapes takes. Empty where max_tokens leaves none.
    """
    shapes: list[tuple[Method, int | None, int | None]] = []
    if "autoregressive" in methods:
        shapes.append(("autoregressive", None, None))
    if "ddtree" in methods and has_drafter:
        shapes += [("ddtree", budget, short) for budget, short in TREES]
    if "chain" in methods and has_drafter:
        chains = CHAINS[-1:] if "ddtree" in methods else CHAINS
        shapes += [("chain", budget, short) for budget, short in chains]
    plans = {
        plan_shapes(
            method,
            budget=budget,
            topk=topk,
            rows=rows,
            block=min(block, short or block),
            vocab=vocab,
            gemm_limit=None,
        )
        for method, budget, short in shapes
    }
    allowed = [plan for plan in plans if max_tokens is None or plan.rows * plan.nodes <= max_tokens]
    return sorted(filter(_is_sensible, allowed), key=_order) or sorted(allowed, key=_order)


def _is_sensible(plan: ShapePlan) -> bool:
    most = max(MOST_TOKENS, 3 * plan.rows)
    return plan.nodes == 1 or LEAST_TOKENS <= plan.rows * plan.nodes <= most


def _order(plan: ShapePlan) -> tuple[int, ...]:
    return -plan.rows, plan.nodes, plan.block, plan.topk


def halves(rows: int) -> list[int]:
    """Rows of plans of one shape that follow each other as a queue runs dry."""
    found = [rows]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def rungs(rows: int) -> list[int]:
    """Those among them for which other shapes are measured too: falling, from `rows` to 1 in about
    equal ratios, at most MAX_RUNGS."""
    steps = halves(rows)
    places = np.linspace(0, len(steps) - 1, min(len(steps), MAX_RUNGS))
    return [steps[int(place)] for place in places]


def shortlist(costs: CostCurve, rungs: Sequence[int]) -> list[ShapePlan]:
    """Of the measured plans those to keep, by rungs; plans of a rung must be measured at the same
    contexts."""
    kept: list[ShapePlan] = []
    for rows in rungs:
        plans = sorted((plan for plan in costs.rounds if plan.rows == rows), key=_order)
        if plans:
            kept += sorted(_kept(costs, plans), key=_order)
    return kept


def _kept(costs: CostCurve, plans: Sequence[ShapePlan]) -> list[ShapePlan]:
    """Plain decoding, and as long as a plausible drafter would lose more than MIN_LOSS, the plan
    that lowers the mean loss most."""
    rates = {plan: _plausible_rates(costs, plan) for plan in plans}
    best = np.max([*rates.values()], axis=0)
    kept = [plan for plan in plans if plan.nodes == 1]
    while len(kept) < min(MAX_PLANS_A_RUNG, len(plans)):
        held = np.max([rates[plan] for plan in kept], axis=0) if kept else 0 * best
        if np.all(held >= (1 - MIN_LOSS) * best):
            break
        share = {plan: np.maximum(held, rates[plan]) / best for plan in plans}
        kept.append(max(plans, key=lambda plan: float(share[plan].mean())))
    return kept


def _plausible_rates(costs: CostCurve, plan: ShapePlan) -> Floats:
    """Tokens a second and row: of each measured context, of each plausible drafter."""
    seconds = [point.seconds for point in costs.rounds[plan]]
    return np.outer(1 / np.array(seconds), expected_emitted(plan)[PLAUSIBLE]).ravel()
