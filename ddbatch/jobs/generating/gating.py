"""Which engine serves a run: plans in order, each held against plain decoding before it gets a row.

Knows plans, verdicts and what is said about them. What a verdict is made of stands in
engine/gate.py, what a device did to earlier attempts in trials.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ddbatch.core import CachePlan, RunError, ShapePlan
from ddbatch.engine.engine import Engine
from ddbatch.engine.gate import Verdict
from ddbatch.jobs.generating.trials import Trials
from ddbatch.jobs.show import say


@dataclass(frozen=True)
class Arm:
    """One way to decode: shapes, and whether the rounds are CUDA graphs."""

    plan: ShapePlan
    cache_plan: CachePlan
    is_captured: bool

    def __str__(self) -> str:
        how = "captured" if self.is_captured else "eager"
        return f"{self.plan.rows} rows x {self.plan.nodes} nodes, {how}"


def choose_engine(
    groups: Sequence[Sequence[Arm]],
    build: Callable[[Sequence[Arm]], Engine],
    judge: Callable[[Engine, bool], Verdict],
    trials: Trials,
    *,
    about: Mapping[str, object],
    may_fall_back: bool,
) -> Engine:
    """The engine of the first group with an arm that passes, with the plans of all that do; arms of
    a group share an engine. judge: of the plan in force, and whether it is the engine's first.
    about: all else that a verdict depends on.

    RunError where none passes, or where one fails and others may not be tried.
    """
    reasons: list[str] = []
    for arms in groups:
        found = _Group(build, judge, trials, about)
        for arm in arms:
            reason = found.hear(arm, arms)
            if reason is not None:
                reasons.append(f"{arm}: {reason}")
                say(f"note: the gate refuses a plan: {reasons[-1]}")
                if not may_fall_back:
                    raise _refusal(reasons)
        if found.sound:
            return found.engine()
    raise _refusal(reasons)


def _refusal(reasons: Sequence[str]) -> RunError:
    return RunError(
        f"no plan passes the gate ({'; '.join(reasons)}); what these would have written cannot be "
        "trusted"
    )


class _Group:
    """The hearing of arms that share an engine. sound: those that passed."""

    def __init__(
        self,
        build: Callable[[Sequence[Arm]], Engine],
        judge: Callable[[Engine, bool], Verdict],
        trials: Trials,
        about: Mapping[str, object],
    ) -> None:
        self._build, self._judge, self._trials, self._about = build, judge, trials, about
        self._engine: Engine | None = None
        self._refused: list[Arm] = []
        self._seconds: list[float] = []
        self.sound: list[Arm] = []

    def hear(self, arm: Arm, arms: Sequence[Arm]) -> str | None:
        """Why this one of `arms` is refused; None = it is sound."""
        name = json.dumps({**self._about, **asdict(arm)}, sort_keys=True)
        known = self._trials.verdict(name)
        reason = None
        if name in self._trials.excluded():
            reason = "left out: a process died, or was killed, while it was tried"
        elif known is not None:
            reason = None if known.get("is_sound") else str(known.get("reason"))
        else:
            with self._trials.trying(name):
                engine = self._engine or self._build([a for a in arms if a not in self._refused])
                self._engine = engine
                engine.change(arm.plan)
                verdict = self._judge(engine, not self._seconds)
            self._seconds.append(verdict.seconds)
            self._trials.keep(name, asdict(verdict))
            reason = None if verdict.is_sound else verdict.reason
        if reason is None:
            self.sound.append(arm)
            return None
        self._refused.append(arm)
        others = [a.plan for a in arms if a not in self._refused]
        if self._engine is not None and others:
            self._engine.change(others[0])
            self._engine.keep([plan for plan in self._engine.plans if plan in others])
        return reason

    def engine(self) -> Engine:
        """With the sound plans alone; the first is in force."""
        plans = [arm.plan for arm in self.sound]
        engine = self._engine or self._build(self.sound)
        engine.change(plans[0])
        engine.keep(plans)
        if self._seconds:
            first, seconds = self.sound[0], sum(self._seconds)
            what = str(first) if len(plans) == 1 else f"{len(plans)} plans, the first {first}"
            say(f"gate: {what}: as plain decoding ({seconds:.0f} s)")
        return engine
