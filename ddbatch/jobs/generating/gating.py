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
    arms: Sequence[Arm],
    build: Callable[[Arm], Engine],
    judge: Callable[[Engine], Verdict],
    trials: Trials,
    *,
    about: Mapping[str, object],
    may_fall_back: bool,
) -> Engine:
    """The engine of the first arm that passes. about: all else that a verdict depends on.

    RunError where none does, or where the first fails and the next may not be tried.
    """
    reasons = []
    excluded = trials.excluded()
    for arm in arms:
        name = json.dumps({**about, **asdict(arm)}, sort_keys=True)
        if name in excluded:
            reason = "left out: a process died, or was killed, while it was tried"
        else:
            known = trials.verdict(name)
            if known is not None and known.get("is_sound"):
                return build(arm)
            if known is not None:
                reason = str(known.get("reason"))
            else:
                with trials.trying(name):
                    engine = build(arm)
                    verdict = judge(engine)
                trials.keep(name, asdict(verdict))
                if verdict.is_sound:
                    say(f"gate: {arm}: as plain decoding ({verdict.seconds:.0f} s)")
                    return engine
                del engine
                reason = verdict.reason
        reasons.append(f"{arm}: {reason}")
        say(f"note: the gate refuses a plan: {reasons[-1]}")
        if not may_fall_back:
            break
    raise RunError(
        f"no plan passes the gate ({'; '.join(reasons)}); what these would have written cannot be "
        "trusted"
    )
