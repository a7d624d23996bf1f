"""The engine as job=generate uses it: planned for the device, gated before it serves, audited while
it does, and made anew where longer sequences come.

Knows nothing about options' names, text, files of prompts or parts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from ddbatch.core import (
    CachePlan,
    Completion,
    EngineStats,
    Key,
    Rejected,
    RunError,
    Sampling,
    ShapePlan,
    StopFinder,
    TokenPrompt,
)
from ddbatch.engine.audit import Auditor
from ddbatch.engine.choice import Chooser
from ddbatch.engine.curves import AcceptanceCurve
from ddbatch.engine.engine import Engine
from ddbatch.engine.gate import Verdict, judge
from ddbatch.engine.memory import Sizes
from ddbatch.engine.numerics import FLOAT32_GAP, Numerics
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
from ddbatch.jobs.generating.trials import Trials, is_out_of_memory
from ddbatch.jobs.show import plural, say
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

ALARM_ROUNDS = 256  # how often acceptance is looked at
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


class EngineDecoder:
    """An engine whose state is made anew for longer sequences (the protocol Decoder).

    num_rows: rows to decode. acceptance: what earlier attempts saw, None = nothing.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlash | None,
        wish: Wish,
        num_rows: int,
        numerics: Numerics | None,
        finder: StopFinder,
        trials: Trials,
        options: ServeOptions,
        fingerprint: Mapping[str, object],
        acceptance: AcceptanceCurve | None = None,
    ) -> None:
        self._target, self._drafter, self._wish, self._num_waiting = target, drafter, wish, num_rows
        self._acceptance = AcceptanceCurve() if acceptance is None else acceptance
        self._options, self._fingerprint = options, fingerprint
        self._numerics, self._finder, self._trials = numerics, finder, trials
        self._gap = FLOAT32_GAP if numerics is None else numerics.gap
        self._pool = GraphPool() if options.is_captured else None
        self._auditor = Auditor(target, rate=options.audit_rate, gap=self._gap)
        self._engine: Engine | None = None
        self._pilot: Pilot | None = None
        self._rounds = Counter[ShapePlan]()
        self._prompts: dict[Key, TokenPrompt] = {}  # in flight
        self._max_len = 0
        self.seconds_judged = 0.0
        self._past = EngineStats()  # of the states before this one

    @property
    def plan(self) -> ShapePlan:
        """Shapes of the next round."""
        return self._wish.shape(self._wish.rows) if self._engine is None else self._engine.plan

    @property
    def engine(self) -> Engine | None:
        """None before the first grow."""
        return self._engine

    @property
    def rounds(self) -> Mapping[ShapePlan, int]:
        """How many there were of each plan."""
        return self._rounds

    @property
    def about(self) -> dict[str, object]:
        """The score errors of the model's dtype (engine/numerics.py; float32 has none), and plans
        that are left out because a process died of them."""
        found: dict[str, object] = {}
        if self._numerics is not None:
            found["numerics"] = asdict(self._numerics)
        if self._trials.excluded():
            found["excluded_plans"] = sorted(self._trials.excluded())
        return found

    @property
    def max_len(self) -> int:
        """Prompt and output tokens that a sequence may have."""
        return self._max_len

    def grow(self, max_len: int) -> None:
        """Replace the empty state by a larger one; the weights stay."""
        assert not self.is_busy
        started = time.monotonic()
        self._warn()
        self._tell()
        self._past = self.figures
        self._engine = self._pilot = None  # its memory first
        try:
            self._engine = self._new_engine(max_len)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"engine.rows={self._wish.rows}: no memory for so many rows with room for "
                f"{max_len} tokens each ({str(error).splitlines()[0]}); choose fewer "
                "rows or a smaller engine.max_len"
            ) from error
        self._max_len = max_len
        self.seconds_judged += time.monotonic() - started

    def _new_engine(self, max_len: int) -> Engine:
        """Planned, judged, and with a pilot where it may change plans."""
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
        if costs is not None and len(engine.plans) > 1:
            known = [plan for plan in engine.plans if plan in costs.rounds]
            chooser = Chooser(costs, self._acceptance, known)
            self._pilot = Pilot(chooser, mean_cap=max_len / 2)
        return engine

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

    def fill(self, prompts: Iterator[TokenPrompt]) -> None:
        """Take prompts while there are free slots."""
        if self._engine is not None:
            self._engine.fill(self._noted(prompts))

    def _noted(self, prompts: Iterator[TokenPrompt]) -> Iterator[TokenPrompt]:
        for prompt in prompts:
            self._prompts[prompt.key] = prompt
            self._num_waiting -= 1
            yield prompt

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is in flight or waits for pages."""
        return self._engine is not None and self._engine.is_busy

    def step(self) -> None:
        """Run one round."""
        assert self._engine is not None
        if self._pilot is not None:
            self._pilot.look(self._engine, self._num_waiting)
        self._rounds[self._engine.plan] += 1
        self._engine.step()

    def collect(self) -> Iterator[Completion | Rejected]:
        """Hand out what has finished; audit a share of it."""
        assert self._engine is not None
        for result in self._engine.collect():
            prompt = self._prompts.pop(result.key)
            if isinstance(result, Completion):
                self._auditor.see(prompt, result)
                if self._pilot is not None:
                    self._pilot.see(result)
            yield result
        if self._engine.stats.rounds % ALARM_ROUNDS == 0:
            self._warn()

    def finish(self) -> None:
        """Audit the last rows."""
        self._auditor.finish()
        self._tell()
        self._warn()

    def _tell(self) -> None:
        """Have the chooser know all rounds: what they accepted outlives the engine."""
        if self._engine is not None and self._pilot is not None:
            self._pilot.tell(self._engine)

    def _warn(self) -> None:
        """Say what the acceptance table finds."""
        for note in [] if self._engine is None else self._engine.notes():
            say(f"note: {note}")

    @property
    def notes(self) -> list[str]:
        """What the audit found, for the summary."""
        rows, tokens, explained, seconds = self._auditor.figures
        if not rows:
            return []
        rounding = f", {explained} by rounding" if explained else ""
        return [
            f"audited {plural(rows, 'row')}: all {tokens:,} tokens are the target's own{rounding} "
            f"({seconds:.1f} s)"
        ]

    @property
    def choice(self) -> str | None:
        """What chose the plans, and why, in a line; None where nothing was to choose."""
        return None if self._pilot is None else self._pilot.chooser.summary()

    @property
    def found(self) -> dict[str, object]:
        """The curves that plans were chosen by, and the choices, for the attempt's record."""
        return {} if self._pilot is None else {"planner": self._pilot.chooser.as_dict()}

    @property
    def figures(self) -> EngineStats:
        """Counters over all states."""
        now = EngineStats() if self._engine is None else self._engine.stats
        return EngineStats(
            *(getattr(self._past, f.name) + getattr(now, f.name) for f in fields(EngineStats))
        )
