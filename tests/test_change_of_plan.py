"""Plans that change between rounds: sequences stay in their slots and say what one plan would have
them say, the drafter's context is whole again, and statistics tell which plan offered what."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from decoding import DEVICES, random_prompts, token_prompts
from tiny import load_tiny_pair

from ddbatch.core import Completion, Sampling, ShapePlan, TokenPrompt
from ddbatch.engine.engine import Engine
from ddbatch.engine.findings import Decoded, Findings
from ddbatch.engine.plan import plan_cache
from ddbatch.engine.prefill import Placed
from ddbatch.engine.programs import GraphPool
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.load import set_numerics

VOCAB, BLOCK = 13, 5
NEAR_TIE = 1e-4
LENGTHS = (1, 9, 4, 17, 2, 30, 5, 70, 16, 33)
CAPS = (20, 7, 40, 20, 1, 25, 33, 60, 2, 50)
WIDE = ShapePlan(rows=6, nodes=1, block=1, draft_depth=0, topk=0)
CHAIN = ShapePlan(rows=5, nodes=3, block=3, draft_depth=2, topk=1)
TREE = ShapePlan(rows=3, nodes=8, block=BLOCK, draft_depth=4, topk=7)
LONE = ShapePlan(rows=1, nodes=17, block=BLOCK, draft_depth=4, topk=VOCAB)
PLANS = (WIDE, CHAIN, TREE, LONE)
Pair = tuple[Target, DFlash]


@pytest.fixture(scope="module", params=DEVICES)
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pair:
    """On a GPU rounds are captured."""
    set_numerics()
    folder = tmp_path_factory.mktemp("pair")
    return load_tiny_pair(folder, request.param, vocab=VOCAB, block=BLOCK)


def make(pair: Pair, plans: tuple[ShapePlan, ...] = PLANS, *, rows: int = 6) -> Engine:
    target, drafter = pair
    device = target.embed.device.type
    return Engine(
        target,
        drafter,
        plans,
        plan_cache(rows, max_len=160, page=None, device=device),
        pool=GraphPool() if device == "cuda" else None,
    )


def prompts_of(sampling: Sampling, seed: int = 0) -> list[TokenPrompt]:
    return token_prompts(random_prompts(LENGTHS, VOCAB, seed), CAPS, sampling)


def run(
    engine: Engine, prompts: Iterator[TokenPrompt], next_plan: Callable[[int], ShapePlan]
) -> tuple[list[Completion], dict[int, Placed]]:
    """Completions by key, and who had which slot; next_plan is asked before every round."""
    done: list[Completion] = []
    placed: dict[int, Placed] = {}
    for number in range(10_000):
        engine.fill(prompts)
        placed |= {s.placed.prompt.key.row_id: s.placed for s in engine.seats.values()}
        if not engine.is_busy:
            return sorted(done, key=lambda item: item.key), placed
        engine.change(next_plan(number))
        engine.step()
        for item in engine.collect():
            assert isinstance(item, Completion)
            done.append(item)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, top_p=0.9, seed=3),
        Sampling(temperature=0.7, stop_token_ids=(4,)),
    ],
    ids=["greedy", "sampled", "stops"],
)
def test_tokens_are_those_of_plain_decoding_whatever_plan_serves_which_round(
    pair: Pair, sampling: Sampling, seed: int
) -> None:
    plain, _ = run(make(pair), iter(prompts_of(sampling, seed)), lambda number: WIDE)
    chance = random.Random(seed)
    plans = [chance.choice(PLANS) for _ in range(10_000)]
    ours, _ = run(make(pair), iter(prompts_of(sampling, seed)), lambda number: plans[number // 3])
    assert [item.token_ids for item in ours] == [item.token_ids for item in plain]
    for item in ours:
        offered = zip(item.accepted, item.depth, item.drafted, strict=True)
        assert all(kept <= depth <= nodes for kept, depth, nodes in offered)
    budgets = {nodes for item in ours for nodes in item.drafted}
    assert budgets <= {plan.nodes - 1 for plan in PLANS}
    assert len(budgets) >= 3


@pytest.mark.parametrize(
    ("first", "last"),
    [(WIDE, TREE), (TREE, CHAIN), (CHAIN, LONE), (TREE, TREE)],
    ids=["plain-tree", "tree-chain", "chain-lone", "tree-tree"],
)
def test_what_a_sequence_leaves_in_both_caches_is_what_the_oracle_computes(
    pair: Pair, first: ShapePlan, last: ShapePlan
) -> None:
    """The drafter's context too, which plain rounds did not keep."""
    engine = make(pair, rows=len(LENGTHS))  # nobody's slot is taken again
    plans = [first, WIDE, last]
    done, placed = run(
        engine, iter(prompts_of(Sampling())), lambda number: plans[min(number // 3, 2)]
    )
    findings = Findings(engine, gap=NEAR_TIE)
    assert engine.plan == last
    # Plain decoding tells the drafter nothing of what ends under it.
    held = [item for item in done if item.drafted and item.drafted[-1] == last.nodes - 1]
    assert sum(len(set(item.drafted)) == len(set(plans)) for item in held) >= 2
    for item in held:
        findings.judge(Decoded(placed[item.key.row_id], item, is_held=True), is_forced=True)
    assert findings.faults == {}
    assert findings.texts()["state"].startswith(f"{len(held)} sequences")


def test_a_drafter_that_sleeps_again_and_again_is_told_of_all_that_it_missed(pair: Pair) -> None:
    engine = make(pair, rows=len(LENGTHS))
    done, placed = run(
        engine, iter(prompts_of(Sampling())), lambda number: (WIDE, TREE)[number // 2 % 2]
    )
    findings = Findings(engine, gap=NEAR_TIE)
    held = [item for item in done if item.drafted[-1:] == (TREE.nodes - 1,)]
    assert any(sum(a > b for a, b in pairwise(item.drafted)) >= 2 for item in held)
    for item in held:
        findings.judge(Decoded(placed[item.key.row_id], item, is_held=True), is_forced=True)
    assert findings.faults == {}


def test_a_drafter_that_was_asleep_drafts_as_if_it_had_not_been(pair: Pair) -> None:
    """Once it is told what it missed it proposes what it would have proposed."""
    sampling = Sampling()
    awake, _ = run(make(pair), iter(prompts_of(sampling)), lambda number: TREE)
    slept, _ = run(
        make(pair), iter(prompts_of(sampling)), lambda number: WIDE if number < 4 else TREE
    )
    # Rounds begin in other places: counts differ a little, and sleepers would accept nothing.
    accepted = [sum(map(sum, (item.accepted for item in found))) for found in (awake, slept)]
    rounds = [sum(len(i.accepted) for i in found) for found in (awake, slept)]
    assert accepted[1] > 0.5 * accepted[0] > 0
    assert rounds[0] <= rounds[1]


def test_rows_that_do_not_fit_a_smaller_plan_wait_and_keep_their_order(pair: Pair) -> None:
    engine = make(pair)
    prompts = iter(prompts_of(Sampling()))
    for _ in range(3):
        engine.fill(prompts)
        engine.step()
        list(engine.collect())
    live = engine.load.num_live
    assert live > LONE.rows
    before = engine.state.slot_B.tolist()
    is_live = engine.state.active_B.tolist()
    engine.change(LONE)
    assert engine.load.num_live == live
    engine.step()
    list(engine.collect())
    waiting = [slot for slot, live in zip(before, is_live, strict=True) if live][1:]
    head, tail = (int(t) for t in (engine.state.ready_head, engine.state.ready_tail))
    ring = len(engine.state.ready_S) - 1
    queued = [int(engine.state.ready_S[place % ring]) for place in range(head, tail)]
    assert queued[: len(waiting)] == waiting


def test_an_engine_without_a_drafter_changes_rows_alone(pair: Pair) -> None:
    target = pair[0]
    narrow = ShapePlan(rows=2, nodes=1, block=1, draft_depth=0, topk=0)
    cache_plan = plan_cache(6, max_len=160, page=None, device=target.embed.device.type)
    engine = Engine(target, None, (WIDE, narrow), cache_plan)
    ours, _ = run(engine, iter(prompts_of(Sampling())), lambda n: (WIDE, narrow)[n % 2])
    plain, _ = run(make(pair), iter(prompts_of(Sampling())), lambda number: WIDE)
    assert [item.token_ids for item in ours] == [item.token_ids for item in plain]
    assert engine.load.num_untold == 0


def test_the_load_says_what_the_drafter_was_not_told(pair: Pair) -> None:
    engine = make(pair, rows=4)
    prompts = iter(prompts_of(Sampling()))
    for _ in range(3):
        engine.fill(prompts)
        engine.step()
        list(engine.collect())
    load = engine.load
    assert load.num_live >= 4
    assert load.num_untold >= load.num_live * load.mean_length > 0
    assert not load.is_dry
    engine.change(TREE)
    assert engine.load.num_untold == 0
    run(engine, prompts, lambda number: TREE)
    assert engine.load.is_dry


def test_plans_that_are_not_kept_are_forgotten(pair: Pair) -> None:
    engine = make(pair)
    engine.change(TREE)
    engine.keep([TREE, WIDE])
    assert engine.plans == [TREE, WIDE]
    with pytest.raises(KeyError):
        engine.change(LONE)
