"""Which engine serves: the first plan that passes, what is remembered, and what a fault leaves out.

Engines here are stand-ins: what a verdict is made of is tested in test_gate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Built:
    """Stands for an engine of some arms."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms, self.arm = list(arms), arms[0]

    @property
    def plans(self) -> list[ShapePlan]:
        return [arm.plan for arm in self.arms]

    def change(self, plan: ShapePlan) -> None:
        (self.arm,) = [arm for arm in self.arms if arm.plan == plan]

    def keep(self, plans: Sequence[ShapePlan]) -> None:
        assert self.arm.plan in plans
        self.arms = [arm for arm in self.arms if arm.plan in plans]


class Bench:
    """Builds and judges; bad: arms that fail, by place in ARMS; fatal: one that ends in a fault.
    groups: places of arms that share an engine."""

    def __init__(
        self,
        folder: Path,
        bad: set[int] | None = None,
        fatal: int | None = None,
        groups: Sequence[Sequence[int]] = ((0,), (1,), (2,), (3,)),
    ) -> None:
        self.folder, self.bad, self.fatal = RunFolder(folder), bad or set(), fatal
        self.groups = [[ARMS[place] for place in group] for group in groups]
        self.judged: list[int] = []
        self.firsts: list[bool] = []

    def start(self, attempt: str, *, may_fall_back: bool = True, about: str = "H200") -> Built:
        start_attempt(self.folder, attempt, {})
        engine = choose_engine(
            self.groups,
            cast(Callable[[Sequence[Arm]], Engine], Built),
            self._judge,
            Trials(self.folder, attempt),
            about={"device": about},
            may_fall_back=may_fall_back,
        )
        return cast(Built, engine)

    def choose(self, attempt: str, *, may_fall_back: bool = True, about: str = "H200") -> Arm:
        return self.start(attempt, may_fall_back=may_fall_back, about=about).arm

    def _judge(self, engine: Engine, is_first: bool) -> Verdict:
        place = ARMS.index(cast(Built, engine).arm)
        self.judged.append(place)
        self.firsts.append(is_first)
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


def test_arms_of_a_group_share_an_engine_that_keeps_those_that_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path, bad={0}, groups=((0, 2), (1,), (3,)))
    engine = bench.start("a")
    assert (bench.judged, bench.firsts) == ([0, 2], [True, False])
    assert engine.plans == [PLAIN]
    assert engine.arm == ARMS[2]
    assert "gate: 2 rows x 1 nodes, captured: as plain decoding" in capsys.readouterr().err
    again = bench.start("b")
    assert bench.judged == [0, 2]
    assert again.plans == [PLAIN]


def test_a_group_whose_arms_all_pass_starts_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Bench(tmp_path, groups=((0, 2), (1,))).start("a")
    assert engine.plans == [TREE, PLAIN]
    assert engine.arm == ARMS[0]
    told = capsys.readouterr().err
    assert "gate: 2 plans, the first 2 rows x 17 nodes, captured: as plain decoding" in told


def test_the_next_group_is_tried_where_none_of_a_group_passes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, bad={0, 2}, groups=((0, 2), (1,), (3,)))
    assert bench.choose("a") == ARMS[1]
    assert bench.judged == [0, 2, 1]
