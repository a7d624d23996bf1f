"""An engine is made: planned for the device, timed where plans are chosen, gated before it serves.

Knows the order of these. Knows nothing about options' names, text, files, nor what is served.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddbatch.core import CachePlan, Sampling, ShapePlan, StopFinder
from ddbatch.engine.choice import Chooser
from ddbatch.engine.curves import AcceptanceCurve
from ddbatch.engine.engine import Engine
from ddbatch.engine.gate import Verdict, judge
from ddbatch.engine.memory import Sizes
from ddbatch.engine.programs import GraphPool
from ddbatch.engine.sampling import DrawKind
from ddbatch.jobs.generating.gating import Arm, choose_engine
from ddbatch.jobs.generating.piloting import Pilot
from ddbatch.jobs.generating.planning import (
    Wish,
    costs_of,
    fit_memory,
    free_memory,
    serving_plans,
)
from ddbatch.jobs.generating.trials import Trials
from ddbatch.jobs.show import say
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

# Of judging all plans of an engine; each gets its share, and the first as much as all others.
JUDGE_SECONDS = 24.0


@dataclass(frozen=True)
class ServeOptions:
    """How the engine serves. page: tokens a page, None = the planner's. is_captured: rounds are
    CUDA graphs. is_gated: a plan is judged before it gets a row, and may_fall_back to another.
    sampling: the run's. top_logprobs, least_draw: of Engine."""

    page: int | None
    is_captured: bool
    is_gated: bool
    may_fall_back: bool
    audit_rate: float
    top_logprobs: int | None
    sampling: Sampling
    least_draw: DrawKind


@dataclass
class EngineMaker:
    """Makes the engines of one run, one after the other: only one may be there. gap: what explains
    another token (engine/numerics.py). fingerprint: what verdicts and costs depend on beside
    plans."""

    _target: Target
    _drafter: DFlash | None
    _wish: Wish
    _gap: float
    _finder: StopFinder
    _trials: Trials
    _options: ServeOptions
    _fingerprint: Mapping[str, object]

    def __post_init__(self) -> None:
        self._pool = GraphPool() if self._options.is_captured else None

    def make(self, max_len: int, acceptance: AcceptanceCurve) -> tuple[Engine, Pilot | None]:
        """For sequences of up to max_len tokens; with a pilot where it may change plans.
        acceptance: what is known of the run's text. RunError where no plan works."""
        started = time.monotonic()
        options, wish, target = self._options, self._wish, self._target
        plans, cache_plan = fit_memory(
            wish,
            self._sizes,
            max_len=max_len,
            page=options.page,
            free=free_memory(target.embed.device),
        )
        costs = None
        if wish.has_ladder:
            costs = costs_of(
                plans,
                target,
                self._drafter,
                self._trials,
                max_len=cache_plan.max_len,
                pool=self._pool,
                draw=options.least_draw,
                about=self._fingerprint,
            )
            measured, plans = len(costs.rounds), serving_plans(wish, costs)
            say(
                f"plans: {len(plans)} of {measured} that were measured are kept "
                f"({time.monotonic() - started:.0f} s)"
            )
        engine = self._gated(plans, cache_plan)
        known = [plan for plan in engine.plans if costs is not None and plan in costs.rounds]
        if costs is None or len(known) < 2:
            return engine, None
        return engine, Pilot(Chooser(costs, acceptance, known), mean_cap=max_len / 2)

    def _gated(self, plans: Sequence[ShapePlan], cache_plan: CachePlan) -> Engine:
        """The engine of the plans that pass; else of one that is run as it is, or of plain
        decoding."""
        options, rows = self._options, max(plan.rows for plan in plans)
        first, plain = plans[0], ShapePlan(rows=rows, nodes=1, block=1, draft_depth=0, topk=0)
        ways = [(plans, True), ([first], False), ([plain], True), ([plain], False)]
        if not options.is_captured:
            ways = [(plans, False), ([plain], False)]
        groups = [
            tuple(Arm(plan, cache_plan, is_captured) for plan in group)
            for group, is_captured in ways
        ]
        if not options.is_gated:
            return self._build(groups[0])
        return choose_engine(
            list(dict.fromkeys(groups)),
            self._build,
            lambda engine, is_first: self._judge(engine, is_first, len(plans)),
            self._trials,
            about=self._fingerprint,
            may_fall_back=options.may_fall_back,
        )

    def _build(self, arms: Sequence[Arm]) -> Engine:
        plans = [arm.plan for arm in arms]
        return Engine(
            self._target,
            self._drafter if any(plan.nodes > 1 for plan in plans) else None,
            plans,
            arms[0].cache_plan,
            pool=self._pool if arms[0].is_captured else None,
            finder=self._finder,
            top_logprobs=self._options.top_logprobs,
            least_draw=self._options.least_draw,
        )

    def _judge(self, engine: Engine, is_first: bool, count: int) -> Verdict:
        share = 0.5 if is_first else 0.5 / max(1, count - 1)
        return judge(
            engine,
            sampling=[self._options.sampling],
            gap=self._gap,
            seconds=share * JUDGE_SECONDS,
            is_first=is_first,
        )

    @property
    def _sizes(self) -> Sizes:
        return Sizes(
            self._target.dims,
            None if self._drafter is None else self._drafter.dims,
            self._target.embed.dtype,
            self._options.top_logprobs,
            is_audited=self._options.audit_rate > 0 or self._options.is_gated,
        )
