"""What rounds cost: every plan is measured once, under its guard, and what was found lasts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny import load_tiny_pair

from ddbatch.core import RunError, ShapePlan
from ddbatch.data.attempts import end_attempt, start_attempt
from ddbatch.data.folder import RunFolder
from ddbatch.engine import costs as costs_module
from ddbatch.engine import programs
from ddbatch.engine import round as round_module
from ddbatch.engine.costs import CONTEXTS, measure_costs
from ddbatch.engine.curves import CostCurve
from ddbatch.engine.engine import Engine
from ddbatch.engine.sampling import DrawKind
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.jobs.generating import planning
from ddbatch.jobs.generating.planning import costs_of
from ddbatch.jobs.generating.trials import Trials
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

WIDE = ShapePlan(rows=3, nodes=1, block=1, draft_depth=0, topk=0)
TREE = ShapePlan(rows=3, nodes=8, block=5, draft_depth=4, topk=7)
CHAIN = ShapePlan(rows=2, nodes=3, block=3, draft_depth=2, topk=1)
LONE = ShapePlan(rows=1, nodes=1, block=1, draft_depth=0, topk=0)
PLANS = [WIDE, TREE, CHAIN, LONE]
Pair = tuple[Target, DFlash]
Guard = Callable[[ShapePlan], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), vocab=13, block=5)


def measured(pair: Pair, guard: Guard, max_len: int = 160) -> CostCurve:
    return measure_costs(
        *pair, PLANS, max_len=max_len, pool=None, draw=DrawKind.GREEDY, guard=guard
    )


def test_each_plan_is_measured_at_each_context_and_under_its_guard_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded: list[ShapePlan] = []
    inside: list[ShapePlan] = []
    run_round = round_module.run_round

    @contextmanager
    def guard(plan: ShapePlan) -> Iterator[None]:
        guarded.append(plan)
        inside.append(plan)
        yield
        inside.pop()

    def watched(
        target: Target, drafter: DFlash | None, state: RoundState, shape: RoundShape
    ) -> None:
        assert inside == [state.plan]
        run_round(target, drafter, state, shape)

    monkeypatch.setattr(programs, "run_round", watched)
    costs = measured(pair, guard)
    assert sorted(map(str, guarded)) == sorted(map(str, PLANS))
    deepest = 1 + max(plan.draft_depth for plan in PLANS)
    contexts = [CONTEXTS[0], 160 - deepest]
    assert {plan: [p.context for p in points] for plan, points in costs.rounds.items()} == (
        dict.fromkeys(guarded, contexts)
    )
    assert all(point.seconds > 0 for points in costs.rounds.values() for point in points)
    assert costs.prefill_call_seconds > 0
    assert costs.prefill_tokens > 0


def test_short_sequences_are_measured_where_they_fit_and_one_engine_is_there_at_a_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once may take more memory than the run's own."""
    made: list[weakref.ref[Engine]] = []

    def make(*args: Any, **options: Any) -> Engine:
        assert [engine() for engine in made] == [None] * len(made)
        engine = Engine(*args, **options)
        made.append(weakref.ref(engine))
        return engine

    @contextmanager
    def guard(plan: ShapePlan) -> Iterator[None]:
        yield

    monkeypatch.setattr(costs_module, "Engine", make)
    costs = measured(pair, guard, max_len=20)
    assert len(made) == 3
    assert {point.context for points in costs.rounds.values() for point in points} == {15}


class Bench:
    """Costs of attempts at a run; measuring is a stand-in, in which a plan may be fatal."""

    def __init__(self, folder: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.pair = RunFolder(folder), pair
        self.fatal: ShapePlan | None = None
        self.measured: list[list[ShapePlan]] = []
        monkeypatch.setattr(planning, "measure_costs", self._measure)

    def costs(
        self, attempt: str, plans: Sequence[ShapePlan] = PLANS, max_len: int = 160, about: str = "a"
    ) -> CostCurve:
        start_attempt(self.folder, attempt, {})
        try:
            return costs_of(
                list(plans),
                *self.pair,
                Trials(self.folder, attempt),
                max_len=max_len,
                pool=None,
                draw=DrawKind.GREEDY,
                about={"device": about},
            )
        finally:
            end_attempt(self.folder, attempt, 0, "done")

    def _measure(
        self,
        target: Target,
        drafter: DFlash | None,
        plans: Sequence[ShapePlan],
        *,
        guard: Guard,
        **others: object,
    ) -> CostCurve:
        self.measured.append(list(plans))
        costs = CostCurve(prefill_tokens=64, prefill_call_seconds=0.25)
        for plan in plans:
            with guard(plan):
                if plan == self.fatal:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                costs.add(plan, 128, 1 / len(self.measured) / plan.rows)
        return costs


@pytest.fixture
def bench(tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path / "run", pair, monkeypatch)


def test_what_an_attempt_measured_is_not_measured_again(bench: Bench) -> None:
    first = bench.costs("a")
    assert bench.costs("b") == first
    assert bench.measured == [PLANS]
    bench.costs("c", max_len=161)
    bench.costs("d", plans=PLANS[1:])
    bench.costs("e", about="another")
    assert bench.measured == [PLANS, PLANS, PLANS[1:], PLANS]


def test_a_plan_that_killed_an_attempt_is_not_measured_by_the_next(bench: Bench) -> None:
    bench.fatal = CHAIN
    with pytest.raises(RuntimeError, match="CUDA error"):
        bench.costs("a")
    assert list(bench.costs("b").rounds) == [WIDE, TREE, LONE]
    bench.fatal = None
    assert list(bench.costs("c").rounds) == PLANS
    bench.fatal = LONE
    with pytest.raises(RuntimeError, match="CUDA error"):
        bench.costs("d", plans=[LONE])
    with pytest.raises(RunError, match="while each of the plans was tried"):
        bench.costs("e", plans=[LONE])
