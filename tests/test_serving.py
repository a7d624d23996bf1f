"""The engine as job=generate has it, on a tiny pair: plans are measured, judged and changed, the
tokens are the target's own, and what was learned outlives an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from decoding import GREEDY, NoStops, drive, random_prompts, token_prompts
from tiny import load_tiny_pair

from ddbatch.core import ShapePlan, TokenPrompt
from ddbatch.data.attempts import end_attempt, start_attempt
from ddbatch.data.folder import RunFolder
from ddbatch.engine import oracle
from ddbatch.engine.curves import AcceptanceCurve, AcceptanceDict, CostCurve
from ddbatch.engine.engine import Engine
from ddbatch.engine.gate import Verdict
from ddbatch.engine.sampling import DrawKind
from ddbatch.jobs.generating import making, planning
from ddbatch.jobs.generating.decoding import acceptance_before
from ddbatch.jobs.generating.making import ServeOptions
from ddbatch.jobs.generating.planning import Wish
from ddbatch.jobs.generating.serving import EngineDecoder
from ddbatch.jobs.generating.trials import Trials
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

VOCAB, BLOCK, ROWS = 13, 4, 2
Pair = tuple[Target, DFlash]
WISH = Wish(
    methods=("ddtree", "chain", "autoregressive"),
    budget=None,
    topk=None,
    rows=ROWS,
    block=BLOCK,
    vocab=VOCAB,
    limit=None,
    device="cpu",
    has_ladder=True,
)
OPTIONS = ServeOptions(
    page=16,
    is_captured=False,
    is_gated=False,
    may_fall_back=True,
    audit_rate=0.2,
    top_logprobs=None,
    sampling=GREEDY,
    least_draw=DrawKind.GREEDY,
)
Serve = Callable[..., EngineDecoder]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, block=BLOCK)


@pytest.fixture
def serve(pair: Pair, tmp_path: Path) -> Serve:
    """Decoders of one run; an attempt's name is what differs."""

    def make(attempt: str = "a", wish: Wish = WISH, **options: Any) -> EngineDecoder:
        target, drafter = pair
        return EngineDecoder(
            target,
            drafter,
            wish,
            len(prompts_of()),
            None,
            NoStops(),
            Trials(RunFolder(tmp_path / "run"), attempt),
            replace(OPTIONS, **options),
            {"device": "cpu"},
        )

    return make


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Costs by which the smallest trees serve alone; the longest sequences of each measurement."""
    lengths: list[int] = []

    def measure(
        target: Target, drafter: DFlash, plans: Sequence[ShapePlan], *, max_len: int, **others: Any
    ) -> CostCurve:
        lengths.append(max_len)
        costs = CostCurve(prefill_tokens=64, prefill_call_seconds=1e-3)
        for plan in plans:
            costs.add(plan, 64, 100.0 if plan.nodes == 1 else plan.nodes)
        return costs

    monkeypatch.setattr(planning, "measure_costs", measure)
    return lengths


def prompts_of(count: int = 11, most: int = 23) -> list[TokenPrompt]:
    lengths = [1 + 7 * place % most for place in range(count)]
    caps = [1 + 17 * place % most for place in range(count)]
    return token_prompts(random_prompts(lengths, VOCAB), caps)


def expected(pair: Pair, prompts: Sequence[TokenPrompt]) -> list[tuple[int, ...]]:
    return [
        tuple(
            step.token_id
            for step in oracle.decode(
                pair[0],
                prompt.token_ids,
                max_new_tokens=prompt.max_new_tokens,
                stop_token_ids=(),
            )
        )
        for prompt in prompts
    ]


def tokens_of(decoder: EngineDecoder, prompts: Sequence[TokenPrompt]) -> list[tuple[int, ...]]:
    found = [done.token_ids for done in drive(decoder, prompts)]
    decoder.finish()
    return found


def engine_of(decoder: EngineDecoder) -> Engine:
    assert decoder.engine is not None
    return decoder.engine


def learned(decoder: EngineDecoder) -> AcceptanceCurve:
    """What is noted of acceptance, as a later attempt reads it."""
    told = json.loads(json.dumps(decoder.found))["planner"]["acceptance"]
    return AcceptanceCurve.from_dict(cast(AcceptanceDict, told))


@pytest.mark.parametrize("is_gated", [False, True])
def test_whatever_plans_serve_the_tokens_are_the_targets(
    pair: Pair, serve: Serve, monkeypatch: pytest.MonkeyPatch, is_gated: bool
) -> None:
    monkeypatch.setattr(making, "JUDGE_SECONDS", 0.5)
    decoder, prompts = serve(is_gated=is_gated), prompts_of()
    decoder.grow(48)
    assert {plan.rows for plan in engine_of(decoder).plans} == {2, 1}
    assert tokens_of(decoder, prompts) == expected(pair, prompts)
    assert sum(decoder.rounds.values()) == decoder.figures.rounds > 0
    assert decoder.figures.output_tokens == sum(prompt.max_new_tokens for prompt in prompts)
    assert learned(decoder).counts.keys() <= {
        replace(plan, rows=1) for plan in engine_of(decoder).plans
    }
    assert decoder.choice is not None
    assert "tokens a round" in decoder.choice
    assert "\n" not in decoder.choice
    assert "audited" in decoder.notes[0]


def test_a_plan_that_the_gate_refuses_is_not_used_while_others_are(
    pair: Pair, serve: Serve, made_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[ShapePlan] = []

    def usual(plan: ShapePlan) -> bool:
        return plan.rows == ROWS and plan.nodes == 4

    def judge(engine: Engine, **others: Any) -> Verdict:
        judged.append(engine.plan)
        return Verdict(not usual(engine.plan), "tokens: they are others", {}, 0.1)

    monkeypatch.setattr(making, "judge", judge)
    decoder, prompts = serve(is_gated=True), prompts_of()
    decoder.grow(48)
    assert sum(map(usual, judged)) == 1
    assert engine_of(decoder).plans == [plan for plan in judged if not usual(plan)]
    assert tokens_of(decoder, prompts) == expected(pair, prompts)
    assert any(plan.nodes > 1 for plan in decoder.rounds)
    assert not any(map(usual, decoder.rounds))


def test_a_wish_without_a_ladder_has_one_plan_and_no_pilot(
    pair: Pair, serve: Serve, made_up: list[int]
) -> None:
    wish = replace(WISH, has_ladder=False)
    decoder, prompts = serve(wish=wish), prompts_of()
    decoder.grow(48)
    assert engine_of(decoder).plans == [wish.shape(ROWS)] == [decoder.plan]
    assert tokens_of(decoder, prompts) == expected(pair, prompts)
    assert (decoder.found, decoder.choice, made_up) == ({}, None, [])
    assert decoder.rounds == {decoder.plan: decoder.figures.rounds}


def test_longer_sequences_come_and_what_was_learned_of_acceptance_stays(
    pair: Pair, serve: Serve, made_up: list[int]
) -> None:
    decoder, early, late = serve(), prompts_of(5, most=10), prompts_of(7, most=40)
    decoder.grow(32)
    early_tokens = [done.token_ids for done in drive(decoder, early)]
    row_rounds = decoder.figures.live_row_rounds
    decoder.grow(96)
    assert sum(learned(decoder).row_rounds(plan) for plan in [*learned(decoder).counts]) == (
        pytest.approx(row_rounds, rel=1e-3)
    )
    assert early_tokens == expected(pair, early)
    assert tokens_of(decoder, late) == expected(pair, late)
    count = sum(learned(decoder).row_rounds(plan) for plan in [*learned(decoder).counts])
    assert count == pytest.approx(decoder.figures.live_row_rounds, rel=1e-3)
    assert sum(decoder.rounds.values()) == decoder.figures.rounds


def test_a_later_attempt_begins_with_what_was_learned(
    serve: Serve, made_up: list[int], tmp_path: Path
) -> None:
    decoder, folder = serve(), RunFolder(tmp_path / "run")
    assert acceptance_before(Trials(folder, "b")) is None
    start_attempt(folder, "a", {})
    decoder.grow(48)
    tokens_of(decoder, prompts_of())
    end_attempt(folder, "a", 0, "done", decoder.found)
    assert learned(decoder).counts
    assert acceptance_before(Trials(folder, "b")) == learned(decoder)


@pytest.mark.parametrize(
    "told",
    [
        7,
        {},
        {"acceptance": {"counts": 7}},
        {"acceptance": {"counts": [[1, 2]]}},
        {"acceptance": {"counts": [[[1, 17, 16], [9.0, 20.0]]]}},
        {"acceptance": {"counts": [[[1, 17, 16, 15, 16], [9.0, "20"]]]}},
        {"acceptance": {"counts": [[[1, 17, 16, 15, 16], [9.0, 3.0]]]}},
    ],
)
def test_what_another_version_noted_of_acceptance_is_nothing(tmp_path: Path, told: object) -> None:
    folder = RunFolder(tmp_path)
    start_attempt(folder, "a", {})
    end_attempt(folder, "a", 0, "done", {"planner": told})
    assert acceptance_before(Trials(folder, "b")) is None


def test_costs_are_measured_once_for_sequences_of_a_length(
    serve: Serve, made_up: list[int]
) -> None:
    decoder = serve()
    for max_len in (32, 96, 96):
        decoder.grow(max_len)
    serve("b").grow(32)
    assert made_up == [32, 96]
