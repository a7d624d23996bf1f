"""The engine as job=generate uses it: piloted and audited while it serves, made anew where longer
sequences come.

How it is made stands in making.py. Knows nothing about options' names, text, files of prompts or
parts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields

from ddbatch.core import (
    Completion,
    EngineStats,
    Key,
    Rejected,
    RunError,
    ShapePlan,
    StopFinder,
    TokenPrompt,
)
from ddbatch.engine.audit import Auditor
from ddbatch.engine.curves import AcceptanceCurve
from ddbatch.engine.engine import Engine
from ddbatch.engine.numerics import FLOAT32_GAP, Numerics
from ddbatch.jobs.generating.making import EngineMaker, ServeOptions
from ddbatch.jobs.generating.piloting import Pilot
from ddbatch.jobs.generating.planning import Wish
from ddbatch.jobs.generating.trials import Trials, is_out_of_memory
from ddbatch.jobs.show import plural, say
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

ALARM_ROUNDS = 256  # how often acceptance is looked at


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
        self._wish, self._num_waiting = wish, num_rows
        self._acceptance = AcceptanceCurve() if acceptance is None else acceptance
        self._numerics, self._trials = numerics, trials
        gap = FLOAT32_GAP if numerics is None else numerics.gap
        self._maker = EngineMaker(target, drafter, wish, gap, finder, trials, options, fingerprint)
        self._auditor = Auditor(target, rate=options.audit_rate, gap=gap)
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
            self._engine, self._pilot = self._maker.make(max_len, self._acceptance)
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
