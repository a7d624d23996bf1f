"""Which engine serves: the first plan that passes, what is remembered, and what a fault leaves out.

Engines here are stand-ins: what a verdict is made of is tested in test_gate.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from ddbatch.core import CachePlan, RunError, ShapePlan
from ddbatch.data.attempts import end_attempt, start_attempt
from ddbatch.data.folder import RunFolder
from ddbatch.engine.engine import Engine
from ddbatch.engine.gate import Verdict
from ddbatch.jobs.generating.gating import Arm, choose_engine
from ddbatch.jobs.generating.trials import Trials

CACHE = CachePlan(slots=4, pages=8, page=64, max_len=128, key_counts=(128,))
TREE = ShapePlan(rows=2, nodes=17, block=16, draft_depth=15, topk=16)
PLAIN = ShapePlan(rows=2, nodes=1, block=1, draft_depth=0, topk=0)
ARMS = [Arm(plan, CACHE, is_captured) for plan in (TREE, PLAIN) for is_captured in (True, False)]


@dataclass
class Built:
    """Stands for an engine."""

    arm: Arm


class Bench:
    """Builds and judges; bad: arms that fail, by place in ARMS; fatal: one that ends in a fault."""

    def __init__(self, folder: Path, bad: set[int] = frozenset(), fatal: int | None = None) -> None:  # type: ignore[assignment]
        self.folder, self.bad, self.fatal = RunFolder(folder), bad, fatal
        self.judged: list[int] = []

    def choose(self, attempt: str, *, may_fall_back: bool = True, about: str = "H200") -> Arm:
        start_attempt(self.folder, attempt, {})
        engine = choose_engine(
            ARMS,
            cast(Callable[[Arm], Engine], Built),
            self._judge,
            Trials(self.folder, attempt),
            about={"device": about},
            may_fall_back=may_fall_back,
        )
        return cast(Built, engine).arm

    def _judge(self, engine: Engine) -> Verdict:
        place = ARMS.index(cast(Built, engine).arm)
        self.judged.append(place)
        if place == self.fatal:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return Verdict(place not in self.bad, "tokens: 3 are not the target's", {}, 1.0)


def test_the_first_plan_that_passes_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path, bad={0, 1})
    assert bench.choose("a") == ARMS[2]
    assert bench.judged == [0, 1, 2]
    told = capsys.readouterr().err
    assert "the gate refuses a plan: 2 rows x 17 nodes, captured: tokens: 3 are not" in told
    assert "2 rows x 17 nodes, eager: tokens" in told


def test_a_verdict_lasts_for_the_same_plan_on_the_same_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path, bad={0})
    assert bench.choose("a") == bench.choose("b") == ARMS[1]
    assert bench.judged == [0, 1]
    assert bench.choose("c", about="B300") == ARMS[1]
    assert bench.judged == [0, 1, 0, 1]


def test_where_no_other_plan_may_serve_the_run_stops_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no plan passes the gate .*17 nodes, captured: tokens: 3"):
        Bench(tmp_path, bad={0}).choose("a", may_fall_back=False)
    with pytest.raises(RunError, match=r"1 nodes, eager: tokens: 3"):
        Bench(tmp_path, bad={0, 1, 2, 3}).choose("b")


def test_a_plan_that_killed_an_attempt_is_left_out_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path, fatal=0)
    with pytest.raises(RuntimeError, match="CUDA error"):
        bench.choose("a")
    assert bench.judged == [0], "the device is lost: nothing else is tried in this process"
    end_attempt(bench.folder, "a", 4, "CUDA error")
    assert bench.choose("b") == ARMS[1]
    assert "a process died, or was killed, while it was tried" in capsys.readouterr().err
    bench.fatal = None
    assert bench.choose("c") == ARMS[0]


def test_an_error_that_is_no_fault_of_the_device_leaves_no_plan_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.bad = cast(set[int], None)  # a bug of ours
    with pytest.raises(TypeError):
        bench.choose("a")
    end_attempt(bench.folder, "a", 1, "a bug")
    bench.bad = set()
    assert bench.choose("b") == ARMS[0]
