"""The gate judges the plans of one engine one by one, and what happens between two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import load_tiny_pair

import ddbatch.engine.engine as engine_module
from ddbatch.core import Sampling, ShapePlan
from ddbatch.engine.catching_up import Context
from ddbatch.engine.engine import Engine
from ddbatch.engine.gate import Verdict, judge
from ddbatch.engine.numerics import FLOAT32_GAP
from ddbatch.engine.plan import plan_cache
from ddbatch.engine.prefill import Piece
from ddbatch.engine.state import RoundState
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.load import set_numerics

WIDE = ShapePlan(rows=3, nodes=1, block=1, draft_depth=0, topk=0)
TREE = ShapePlan(rows=2, nodes=4, block=4, draft_depth=3, topk=3)
LONE = ShapePlan(rows=1, nodes=1, block=1, draft_depth=0, topk=0)
Pair = tuple[Target, DFlash]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    set_numerics()
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), "cpu", vocab=13, block=4)


def verdicts(pair: Pair, plans: tuple[ShapePlan, ...] = (WIDE, TREE, LONE)) -> list[Verdict]:
    engine = Engine(*pair, plans, plan_cache(3, max_len=128, page=16, device="cpu"))
    found = []
    for place, plan in enumerate(plans):
        engine.change(plan)
        own = [Sampling(temperature=0.8)]
        found.append(judge(engine, sampling=own, gap=FLOAT32_GAP, seconds=4, is_first=not place))
    return found


def test_all_plans_of_a_sound_engine_pass_and_changes_are_looked_at(pair: Pair) -> None:
    first, *others = verdicts(pair)
    assert [verdict.reason for verdict in (first, *others)] == ["", "", ""]
    assert "change of plan" not in first.checks
    assert all("canaries" in verdict.checks["change of plan"] for verdict in others)


def lost_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row's sequence is not put back, but the second's twice."""
    original = engine_module.leave

    def leave(state: RoundState) -> None:
        if len(state.slot_B) > 1 and bool(state.active_B[:2].all()):
            state.slot_B[0] = state.slot_B[1]
        original(state)

    monkeypatch.setattr(engine_module, "leave", leave)


def shifted_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is told of tokens one place too far on."""

    original = Context.tell

    def tell(*args: Any) -> list[Piece]:
        return [
            piece._replace(token_ids=(piece.token_ids[0], *piece.token_ids[:-1]))
            for piece in original(*args)
        ]

    monkeypatch.setattr(Context, "tell", tell)


@pytest.mark.parametrize("plant", [lost_row, shifted_context])
def test_a_fault_between_two_plans_is_stopped(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    first, second, _ = verdicts(pair)
    assert first.is_sound
    assert not second.is_sound


def test_a_later_plan_need_not_fill_every_slot(pair: Pair) -> None:
    engine = Engine(*pair, (TREE, LONE), plan_cache(9, max_len=64, page=16, device="cpu"))
    engine.change(LONE)
    verdict = judge(engine, sampling=[], gap=FLOAT32_GAP, seconds=2, is_first=False)
    assert verdict.is_sound
    assert verdict.checks["captured == eager"]
    assert int(verdict.checks["canaries"].split()[0]) < 3 * engine.cache_plan.slots
    assert torch.all(engine.state.slot_B == engine.state.nobody)
