"""Which plans a run may have: what the options leave open, what the device has room for, and what
rounds cost on it.

Knows the order of these. Sizes are decided in engine/plan.py, what is worth keeping in
engine/candidates.py. Knows nothing about verdicts, nor which plan serves when.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import cast

import torch

from ddbatch.core import CachePlan, RunError, ShapePlan
from ddbatch.engine.candidates import LEAST_BUDGET, candidates, halves, rungs, shortlist
from ddbatch.engine.costs import measure_costs
from ddbatch.engine.curves import CostCurve, CostDict
from ddbatch.engine.limits import GemmLimit
from ddbatch.engine.memory import Sizes, memory_need
from ddbatch.engine.plan import Method, plan_cache, plan_prefill, plan_shapes, rows_under
from ddbatch.engine.programs import GraphPool
from ddbatch.engine.sampling import DrawKind
from ddbatch.jobs.generating.trials import Trials
from ddbatch.jobs.show import plural, say, size
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

# Slots that are ready while all rows are live: a finished row never waits for one. With less a
# prefill call finds no slot while rows end together.
SPARE_SHARES = (1.0, 0.75, 0.5, 0.25)  # of the rows
_TILE = 8  # rows of a matrix product


@dataclass(frozen=True)
class Wish:
    """What the options ask for; None = the planner decides. methods: those that may serve, the
    first where nothing is measured. block, vocab: the drafter's. limit: of a round's tokens.
    has_ladder: plans change along the run."""

    methods: tuple[Method, ...]
    budget: int | None
    topk: int | None
    rows: int
    block: int
    vocab: int
    limit: GemmLimit | None
    device: str
    has_ladder: bool

    @property
    def is_measured(self) -> bool:
        """Whether the method or the budget is chosen by what it costs here."""
        return self.has_ladder and self.budget is None and self.methods != ("autoregressive",)

    def shape(self, rows: int) -> ShapePlan:
        """The plan that serves where nothing is measured."""
        limit = None if self.is_measured else self.limit  # what is measured keeps to it by itself
        return self._shape(self.methods[0], self.budget, rows, limit)

    def check(self) -> None:
        """ValueError where not even the plan with the fewest nodes is within the limit."""
        self._shape(*self._narrowest, self.rows, self.limit)

    def fitted(self) -> Wish:
        """With no more rows than the limit leaves to that plan."""
        limit = None if self.is_measured else self.limit
        nodes = self._shape(*self._narrowest, 1, limit).nodes
        return replace(self, rows=rows_under(self.limit, self.rows, nodes))

    @property
    def _narrowest(self) -> tuple[Method, int | None]:
        """Method and budget with the fewest nodes that may serve."""
        if not self.is_measured:
            return self.methods[0], self.budget
        if "autoregressive" in self.methods:
            return "autoregressive", None
        return self.methods[0], LEAST_BUDGET

    def _shape(
        self, method: Method, budget: int | None, rows: int, limit: GemmLimit | None
    ) -> ShapePlan:
        return plan_shapes(
            method,
            budget=budget,
            topk=self.topk if method == "ddtree" else None,
            rows=rows,
            block=self.block,
            vocab=self.vocab,
            gemm_limit=limit,
        )

    def plans(self, rows: int) -> list[ShapePlan]:
        """All that could serve with at most so many rows."""
        if not self.has_ladder:
            return [self.shape(rows)]
        steps = halves(rows)
        if not self.is_measured:
            return [self.shape(step) for step in steps]
        # Between the rungs plain decoding alone: it is what many rows use, and costs little to try.
        return [
            plan
            for step in steps
            for plan in candidates(
                step,
                block=self.block,
                vocab=self.vocab,
                max_tokens=None if self.limit is None else self.limit.tokens,
                has_drafter=True,
                methods=[m for m in self.methods if step in rungs(rows) or m == "autoregressive"],
                topk=self.topk,
            )
        ]


def fit_memory(
    wish: Wish, sizes: Sizes, *, max_len: int, page: int | None, free: int | None
) -> tuple[list[ShapePlan], CachePlan]:
    """Plans and a cache that fit into so many free bytes, with as many of the wished rows as
    possible, and then as many ready sequences. free None: not known, all is taken to fit.

    RunError where not even one row has room for max_len tokens.
    """

    def planned(rows: int, spare: int) -> tuple[list[ShapePlan], CachePlan]:
        cache = plan_cache(rows, max_len=max_len, page=page, device=wish.device, spare=spare)
        return wish.plans(rows), cache

    def fits(rows: int, spare: int) -> bool:
        if free is None:
            return True
        plans, cache = planned(rows, spare)
        return memory_need(plans, cache, plan_prefill(rows, wish.device), sizes).total <= free

    def least(rows: int) -> int:
        return max(1, round(min(SPARE_SHARES) * rows))

    # More rows may take less, where fewer nodes are worth a try: none are taken unlooked at.
    # A token takes more than a byte; sizes of yet more rows could not even be told.
    most = wish.rows if free is None else min(wish.rows, free // max_len)
    num_steps = _most(_num_steps(most), lambda count: fits(step := _step(count, most), least(step)))
    if not num_steps:
        raise RunError(
            f"engine.rows={wish.rows}: no memory for a row with room for {max_len} tokens "
            f"({size(free or 0)} are free); choose a smaller engine.max_len"
        )
    rows = _step(num_steps, most)
    if rows < wish.rows:
        say(
            f"note: engine.rows={wish.rows} is lowered to {rows}: the {size(free or 0)} that are "
            f"free hold no more, with room for {max_len:,} tokens each"
        )
    # In few steps: verdicts depend on the cache, and what is free differs a little between starts.
    spares = sorted({max(least(rows), round(rows * share)) for share in SPARE_SHARES}, reverse=True)
    return planned(
        rows, next(spare for spare in spares if spare == spares[-1] or fits(rows, spare))
    )


def _step(count: int, rows: int) -> int:
    """Of the rows that may serve in the place of so many: 1 to 8, whole tiles, and all."""
    return min(rows, count if count <= _TILE else _TILE * (count - _TILE + 1))


def _num_steps(rows: int) -> int:
    """How many steps there are; the last one is all rows."""
    return rows if rows <= _TILE else _TILE - 1 + -(-rows // _TILE)


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """A number of 0..limit that holds, while the next one does not: the largest, where all below
    one that holds do too. 0 is taken to hold."""
    low, high, middle = 0, limit, limit  # all of it, most often
    while low < high:
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
        middle = (low + high + 1) // 2
    return low


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take, besides what others have; None where nothing tells.
    What captured graphs have left is free to the next ones."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held


def costs_of(
    plans: list[ShapePlan],
    target: Target,
    drafter: DFlash | None,
    trials: Trials,
    *,
    max_len: int,
    pool: GraphPool | None,
    draw: DrawKind,
    about: Mapping[str, object],
) -> CostCurve:
    """What rounds of these plans cost here: as an earlier attempt found it, or measured now. Plans
    that a process died of are left out. about: what the costs depend on."""

    def name(what: object) -> str:
        return json.dumps({**about, "draw": draw.name, "costs": what}, sort_keys=True)

    excluded = trials.excluded()
    for plan in [plan for plan in plans if name(asdict(plan)) in excluded]:
        say(
            f"note: {plural(plan.rows, 'row')} x {plural(plan.nodes, 'node')} are left out: a "
            "process died, or was killed, while they were timed"
        )
    plans = [plan for plan in plans if name(asdict(plan)) not in excluded]
    if not plans:
        raise RunError("a process died, or was killed, while each of the plans was tried")
    known = trials.verdict(name([max_len, *map(asdict, plans)]))
    if known is not None:
        return CostCurve.from_dict(cast(CostDict, known))
    found = measure_costs(
        target,
        drafter,
        plans,
        max_len=max_len,
        pool=pool,
        draw=draw,
        guard=lambda plan: trials.trying(name(asdict(plan))),
    )
    trials.keep(name([max_len, *map(asdict, plans)]), cast(Mapping[str, object], found.as_dict()))
    return found


def serving_plans(wish: Wish, costs: CostCurve) -> list[ShapePlan]:
    """Of the measured plans those that are worth a verdict and a graph."""
    steps = sorted({plan.rows for plan in costs.rounds}, reverse=True)
    return shortlist(costs, steps) if wish.is_measured else list(costs.rounds)
