"""The pilot: plans change as the chooser says, and the chooser is told of every round once."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from decoding import drive, random_prompts, token_prompts
from tiny import load_tiny_pair

from ddbatch.core import Completion, Sampling, ShapePlan, TokenPrompt
from ddbatch.engine.choice import Chooser, Moment
from ddbatch.engine.curves import AcceptanceCurve, CostCurve
from ddbatch.engine.engine import Engine
from ddbatch.engine.plan import plan_cache
from ddbatch.engine.record import Facts
from ddbatch.engine.seats import Load
from ddbatch.jobs.generating.piloting import MIN_ENDED, Pilot
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

VOCAB, BLOCK = 13, 5
WIDE = ShapePlan(rows=6, nodes=1, block=1, draft_depth=0, topk=0)
BUSH = ShapePlan(rows=6, nodes=4, block=BLOCK, draft_depth=3, topk=3)
TREE = ShapePlan(rows=3, nodes=8, block=BLOCK, draft_depth=4, topk=7)
LONE = ShapePlan(rows=1, nodes=17, block=BLOCK, draft_depth=4, topk=VOCAB)
THIN = ShapePlan(rows=1, nodes=1, block=1, draft_depth=0, topk=0)
PLANS = (WIDE, BUSH, TREE, LONE, THIN)
CAP = 60
PREFILL_TOKENS, CALL_SECONDS = 32, 1e-3
# By what costs are made up: plain decoding alone, a tree always, or few rows once few are live.
LADDER = "fewer and fewer rows"
COSTS = {
    "plain": (1.0, 90.0, 90.0, 90.0, 0.5),
    "tree": (9.0, 1.0, 9.0, 9.0, 9.0),
    LADDER: (1.0, 9.0, 1.5, 0.6, 0.9),
}
Pair = tuple[Target, DFlash]


class Heard(Chooser):
    """Notes what it is told and asked."""

    def __init__(self, costs: CostCurve, engine: Engine) -> None:
        super().__init__(costs, AcceptanceCurve(), PLANS)
        self.engine = engine
        self.told = Counter[tuple[ShapePlan, str]]()
        self.asked: list[tuple[Moment, Load]] = []
        self.chosen: list[ShapePlan] = []

    def add(
        self, plan: ShapePlan, *, num_rounds: int, num_row_rounds: int, num_emitted: int,
        context: float,
    ) -> None:  # fmt: skip
        counts = {"rounds": num_rounds, "row-rounds": num_row_rounds, "tokens": num_emitted}
        self.told.update({(plan, name): count for name, count in counts.items()})
        super().add(
            plan,
            num_rounds=num_rounds,
            num_row_rounds=num_row_rounds,
            num_emitted=num_emitted,
            context=context,
        )

    def choose(self, current: ShapePlan, moment: Moment) -> ShapePlan:
        assert current == self.engine.plan
        self.asked.append((moment, self.engine.load))
        self.chosen.append(super().choose(current, moment))
        return self.chosen[-1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, block=BLOCK)


def prompts_of(count: int = 20) -> list[TokenPrompt]:
    lengths = [1 + 7 * place % 50 for place in range(count)]
    caps = [1 + 17 * place % CAP for place in range(count)]
    sampling = [Sampling(temperature=place % 2, seed=3) for place in range(count)]
    return token_prompts(random_prompts(lengths, VOCAB), caps, sampling)


def make(pair: Pair) -> Engine:
    return Engine(*pair, PLANS, plan_cache(6, max_len=128, page=16, device="cpu", spare=2))


def piloted(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch, lag: int = 0
) -> tuple[Heard, list[Completion]]:
    """The chooser and completions of a run; what the chooser is told is what was done. lag: rounds
    that are not read yet, as on a GPU."""
    engine, prompts = make(pair), prompts_of()
    costs = CostCurve(PREFILL_TOKENS, CALL_SECONDS)
    for plan, one in zip(PLANS, COSTS[name], strict=True):
        costs.add(plan, 64, one)
    chooser = Heard(costs, engine)
    pilot = Pilot(chooser, mean_cap=CAP)
    did = Counter[tuple[ShapePlan, str]]()
    take = engine._take_round

    def counted(facts: Facts) -> None:
        """A round is read while its plan is in force."""
        take(facts)
        did[engine.plan, "row-rounds"] += int((facts.emitted_L > 0).sum())
        did[engine.plan, "tokens"] += int(facts.emitted_L.sum())

    def look() -> None:
        num_seated = 1 + max(seat.placed.prompt.key.row_id for seat in engine.seats.values())
        pilot.look(engine, len(prompts) - num_seated)
        did[engine.plan, "rounds"] += 1

    monkeypatch.setattr(engine, "_take_round", counted)
    monkeypatch.setattr(engine, "_lag", lag)
    done = drive(engine, prompts, look, pilot.see)
    pilot.tell(engine)
    assert +chooser.told == +did
    stats = engine.stats
    totals = {"rounds": stats.rounds, "row-rounds": stats.live_row_rounds}
    totals["tokens"] = stats.round_tokens
    assert {name: sum(did[plan, name] for plan in PLANS) for name in totals} == totals
    return chooser, done


@pytest.mark.parametrize(("name", "lag"), [*((name, 0) for name in COSTS), (LADDER, 1)])
def test_tokens_are_those_of_plain_decoding_and_every_round_is_told_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str, lag: int
) -> None:
    chooser, done = piloted(pair, name, monkeypatch, lag)
    plain = drive(make(pair), prompts_of())
    assert [item.token_ids for item in done] == [item.token_ids for item in plain]
    used = set(chooser.chosen)
    assert (
        used
        == {
            "plain": {WIDE, THIN},
            "tree": {BUSH},
            "fewer and fewer rows": {WIDE, TREE, LONE},
        }[name]
    )


def test_rows_become_fewer_as_prompts_run_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser, _ = piloted(pair, LADDER, monkeypatch)
    assert all(before.rows >= after.rows for before, after in pairwise(chooser.chosen))
    for moment, load in chooser.asked:
        assert (moment.num_waiting == 0) == load.is_dry
        assert (moment.num_live, moment.context) == (load.num_live, load.mean_length)
    first = [load.is_dry for _, load in chooser.asked].index(True)
    assert {plan.rows for plan in chooser.chosen[:first]} == {WIDE.rows}
    assert chooser.chosen[-1] == LONE


def test_a_drafter_that_slept_costs_a_catch_up_and_one_that_is_told_none(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser, _ = piloted(pair, LADDER, monkeypatch)
    before = [WIDE, *chooser.chosen]  # what was in force when the question came
    for plan, (moment, load) in zip(before, chooser.asked, strict=False):
        if plan.nodes > 1:
            assert (moment.warm, moment.catch_up_seconds) == (True, 0.0)
        else:
            num_calls = math.ceil(load.num_untold / PREFILL_TOKENS)
            assert load.num_untold >= load.num_live * load.mean_length > 0
            assert (moment.warm, moment.catch_up_seconds) == (False, num_calls * CALL_SECONDS)


def test_sequences_are_as_long_as_those_that_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser, done = piloted(pair, "plain", monkeypatch)
    assert chooser.asked[0][0].expected_left == chooser.asked[0][0].num_live * CAP
    moment, _ = chooser.asked[-1]
    mean = moment.expected_left / moment.num_live
    lengths = sorted(len(item.token_ids) for item in done)
    assert len(done) > MIN_ENDED
    assert lengths[0] < mean < lengths[-1]
    assert mean < CAP
