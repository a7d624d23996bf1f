"""The engine as job=generate uses it: gated before it serves, audited while it does, and made anew
where longer sequences come.

Knows nothing about options' names, text, files of prompts or parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields

from ddbatch.core import (
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
from ddbatch.engine.engine import Engine
from ddbatch.engine.gate import Verdict, judge
from ddbatch.engine.numerics import FLOAT32_GAP, Numerics
from ddbatch.engine.plan import plan_cache
from ddbatch.engine.programs import GraphPool
from ddbatch.engine.sampling import DrawKind
from ddbatch.jobs.generating.gating import Arm, choose_engine
from ddbatch.jobs.generating.trials import Trials, is_out_of_memory
from ddbatch.jobs.show import plural, say
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

ALARM_ROUNDS = 256  # how often acceptance is looked at


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
    """An engine whose state is made anew for longer sequences (the protocol Decoder)."""

    def __init__(
        self,
        target: Target,
        drafter: DFlash | None,
        plan: ShapePlan,
        numerics: Numerics | None,
        finder: StopFinder,
        trials: Trials,
        options: ServeOptions,
        fingerprint: Mapping[str, object],
    ) -> None:
        self._target, self._drafter, self._plan = target, drafter, plan
        self._options, self._fingerprint = options, fingerprint
        self._numerics, self._finder, self._trials = numerics, finder, trials
        self._gap = FLOAT32_GAP if numerics is None else numerics.gap
        self._pool = GraphPool() if options.is_captured else None
        self._auditor = Auditor(target, rate=options.audit_rate, gap=self._gap)
        self._engine: Engine | None = None
        self._prompts: dict[Key, TokenPrompt] = {}  # in flight
        self._max_len = 0
        self.seconds_judged = 0.0
        self._past = EngineStats()  # of the states before this one

    @property
    def plan(self) -> ShapePlan:
        """Shapes of a round."""
        return self._plan if self._engine is None else self._engine.plan

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
        self._past = self.figures
        self._engine = None  # its memory first
        try:
            self._engine = self._new_engine(max_len)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"engine.rows={self._plan.rows}: no memory for so many rows with room for "
                f"{max_len} tokens each ({str(error).splitlines()[0]}); choose fewer rows or a "
                "smaller engine.max_len"
            ) from error
        self._max_len = max_len
        self.seconds_judged += time.monotonic() - started

    def _new_engine(self, max_len: int) -> Engine:
        options, rows = self._options, self._plan.rows
        device = self._target.embed.device.type
        cache_plan = plan_cache(rows, max_len=max_len, page=options.page, device=device)
        plain = ShapePlan(rows=rows, nodes=1, block=1, draft_depth=0, topk=0)
        arms = [
            Arm(plan, cache_plan, is_captured)
            for plan in dict.fromkeys((self._plan, plain))
            for is_captured in ((True, False) if options.is_captured else (False,))
        ]
        if not options.is_gated:
            return self._build(arms[0])
        return choose_engine(
            arms,
            self._build,
            self._judge,
            self._trials,
            about=self._fingerprint,
            may_fall_back=options.may_fall_back,
        )

    def _build(self, arm: Arm) -> Engine:
        return Engine(
            self._target,
            self._drafter if arm.plan.nodes > 1 else None,
            arm.plan,
            arm.cache_plan,
            pool=self._pool if arm.is_captured else None,
            finder=self._finder,
            top_logprobs=self._options.top_logprobs,
            least_draw=self._options.least_draw,
        )

    def _judge(self, engine: Engine) -> Verdict:
        return judge(engine, sampling=[self._options.sampling], gap=self._gap)

    def fill(self, prompts: Iterator[TokenPrompt]) -> None:
        """Take prompts while there are free slots."""
        if self._engine is not None:
            self._engine.fill(self._noted(prompts))

    def _noted(self, prompts: Iterator[TokenPrompt]) -> Iterator[TokenPrompt]:
        for prompt in prompts:
            self._prompts[prompt.key] = prompt
            yield prompt

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is in flight or waits for pages."""
        return self._engine is not None and self._engine.is_busy

    def step(self) -> None:
        """Run one round."""
        assert self._engine is not None
        self._engine.step()

    def collect(self) -> Iterator[Completion | Rejected]:
        """Hand out what has finished; audit a share of it."""
        assert self._engine is not None
        for result in self._engine.collect():
            prompt = self._prompts.pop(result.key)
            if isinstance(result, Completion):
                self._auditor.see(prompt, result)
            yield result
        if self._engine.stats.rounds % ALARM_ROUNDS == 0:
            self._warn()

    def finish(self) -> None:
        """Audit the last rows."""
        self._auditor.finish()
        self._warn()

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
    def figures(self) -> EngineStats:
        """Counters over all states."""
        now = EngineStats() if self._engine is None else self._engine.stats
        return EngineStats(
            *(getattr(self._past, f.name) + getattr(now, f.name) for f in fields(EngineStats))
        )
