"""The engine against the oracle: every method, budget, batch and page size says what plain decoding
says, token for token in float32, with the oracle's trees and accepted lengths."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from decoding import DEVICES, decode, make_engine, random_prompts, token_prompts
from tiny import load_tiny_pair

from ddbatch.core import Completion, PrefillPlan, Rejected, RunError, Sampling
from ddbatch.engine import oracle, oracle_ddtree
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.load import set_numerics

VOCAB = 13  # small, so that a random drafter is often right
NEAR_TIE = 1e-4
LENGTHS = (1, 9, 4, 17, 2, 30, 5)
Pair = tuple[Target, DFlash]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """On a GPU rounds are captured."""
    set_numerics()
    return str(request.param)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, device: str) -> Pair:
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), device, vocab=VOCAB, block=5)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[tuple[int, ...]]:
    """What the oracle says after each prompt; near-ties would make the comparison meaningless."""
    outputs = []
    for prompt in random_prompts(LENGTHS, VOCAB):
        steps = oracle.decode(pair[0], tuple(prompt), max_new_tokens=20, stop_token_ids=())
        assert min(step.gap for step in steps) > NEAR_TIE
        outputs.append(tuple(step.token_id for step in steps))
    return outputs


def outputs_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    ("method", "budget"),
    [
        ("autoregressive", None),
        ("chain", None),
        ("chain", 2),
        ("ddtree", 1),
        ("ddtree", 2),
        ("ddtree", 7),
        ("ddtree", 16),
        ("ddtree", 40),
        ("auto", 0),
    ],
)
def test_every_method_says_what_plain_decoding_says(
    pair: Pair, expected: list[tuple[int, ...]], method: str, budget: int | None
) -> None:
    engine = make_engine(*pair, method=method, budget=budget)
    done = decode(engine, random_prompts(LENGTHS, VOCAB))
    assert outputs_of(done) == expected
    for completion in done:
        # The first token is the prefill's, every round emits its accepted tokens and a bonus, and
        # only the last round may be cut.
        emitted = sum(completion.accepted) + len(completion.accepted)
        assert emitted - (len(completion.token_ids) - 1) in (0, 1)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("budget", "topk", "block"),
    [
        (1, None, None),
        (4, 1, None),
        (7, None, None),
        (16, 3, None),
        (40, None, None),
        (1, None, 2),
        (7, None, 4),
        (9, 3, 3),
    ],
)
def test_trees_are_followed_as_far_as_the_oracles(
    pair: Pair,
    expected: list[tuple[int, ...]],
    budget: int,
    topk: int | None,
    block: int | None,
) -> None:
    engine = make_engine(*pair, budget=budget, topk=topk, block=block)
    prompts = random_prompts(LENGTHS, VOCAB)
    for prompt, output, completion in zip(prompts, expected, decode(engine, prompts), strict=True):
        rounds = oracle_ddtree.trace(
            *pair,
            tuple(prompt),
            output,
            budget=engine.plan.nodes - 1,
            topk=engine.plan.topk,
            block=block,
        )
        assert completion.accepted == tuple(len(r.accepted_nodes) - 1 for r in rounds)
        assert completion.depth == tuple(max(r.depths) for r in rounds)


def test_every_tree_is_the_oracles(pair: Pair, expected: list[tuple[int, ...]]) -> None:
    engine = make_engine(*pair, budget=11, rows=1)
    for prompt, output in zip(random_prompts(LENGTHS, VOCAB), expected, strict=True):
        engine.fill(iter(token_prompts([prompt], 20)))
        for expected_round in oracle_ddtree.trace(*pair, tuple(prompt), output, budget=11, topk=11):
            engine.step()
            tree = engine.state.tree
            assert tree.token_BN[0, 1:].tolist() == expected_round.token_ids
            assert tree.parent_BN[0, 1:].tolist() == expected_round.parents
            assert tree.depth_BN[0, 1:].tolist() == expected_round.depths
        (done,) = engine.run(iter(()))  # on a GPU the last round is not read yet
        assert isinstance(done, Completion)
        assert done.token_ids == output


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_row_does_not_depend_on_neighbours_order_or_number_of_rows(
    pair: Pair, expected: list[tuple[int, ...]], rows: int, is_reversed: bool
) -> None:
    prompts = random_prompts(LENGTHS, VOCAB)
    step = -1 if is_reversed else 1
    done = decode(make_engine(*pair, rows=rows), prompts[::step])
    assert outputs_of(done) == expected[::step]
    alone = [decode(make_engine(*pair, rows=1), [prompt])[0] for prompt in prompts]
    assert [c.accepted for c in done] == [c.accepted for c in alone][::step]


@pytest.mark.parametrize("page", [1, 3, 16, 96])
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize(("chunks", "chunk"), [(1, 1), (5, 1), (1, 7), (3, 4), (2, 64)])
def test_pages_and_prefill_calls_change_nothing(
    pair: Pair,
    expected: list[tuple[int, ...]],
    page: int,
    chunks: int,
    chunk: int,
    is_fixed: bool,
) -> None:
    engine = make_engine(*pair, page=page, prefill_plan=PrefillPlan(chunks, chunk, is_fixed))
    assert outputs_of(decode(engine, random_prompts(LENGTHS, VOCAB))) == expected


def test_prompts_wait_for_pages_when_the_pool_is_small(
    pair: Pair, expected: list[tuple[int, ...]]
) -> None:
    # No more pages than the longest prompt needs: 30 + 20 tokens.
    engine = make_engine(*pair, rows=3, page=4, pages=13)
    assert outputs_of(decode(engine, random_prompts(LENGTHS, VOCAB))) == expected


def test_memory_that_was_never_written_is_never_read(
    pair: Pair, expected: list[tuple[int, ...]]
) -> None:
    engine = make_engine(*pair, page=8)
    state = engine.state
    assert state.drafter_cache is not None
    for plane in (*state.target_cache, *state.drafter_cache):
        plane.fill_(torch.nan)
        plane[:, state.null_cell] = 0.0
    assert outputs_of(decode(engine, random_prompts(LENGTHS, VOCAB))) == expected
    for plane in (*state.target_cache, *state.drafter_cache):
        assert plane[:, state.null_cell].eq(0.0).all()


def test_a_reused_slot_is_as_good_as_a_fresh_one(pair: Pair) -> None:
    long, short = random_prompts([40, 3], VOCAB, seed=5)
    engine = make_engine(*pair, rows=1)
    fresh = decode(make_engine(*pair, rows=1), [short])[0]
    for order in ([long, short, long, short], [short, short, long, short]):
        last = decode(engine, order)[-1]
        assert (last.token_ids, last.accepted) == (fresh.token_ids, fresh.accepted)


@pytest.mark.parametrize("cap", [1, 2, 3, 5, 6])
def test_a_cap_ends_the_row_at_that_length(
    pair: Pair, expected: list[tuple[int, ...]], cap: int
) -> None:
    done = decode(make_engine(*pair, budget=16), random_prompts(LENGTHS, VOCAB), cap)
    assert outputs_of(done) == [output[:cap] for output in expected]
    assert {completion.finish_reason for completion in done} == {"length"}


def test_finished_rows_among_live_ones_stay_as_they_are(
    pair: Pair, expected: list[tuple[int, ...]]
) -> None:
    caps = [1, 20, 3, 14, 2, 9, 20]
    done = decode(make_engine(*pair, rows=7), random_prompts(LENGTHS, VOCAB), caps)
    assert outputs_of(done) == [out[:cap] for out, cap in zip(expected, caps, strict=True)]


@pytest.mark.parametrize("method", ["autoregressive", "chain", "ddtree"])
@pytest.mark.parametrize("stop", range(VOCAB))
def test_output_ends_with_the_first_stop_token(
    pair: Pair, expected: list[tuple[int, ...]], method: str, stop: int
) -> None:
    """Every token of the vocabulary in turn: first tokens, drafted ones and bonuses among them."""
    engine = make_engine(*pair, method=method, budget=12)
    stops = Sampling(stop_token_ids=(stop, VOCAB + 5))
    found = decode(engine, random_prompts(LENGTHS, VOCAB), sampling=stops)
    for output, done in zip(expected, found, strict=True):
        if stop in output:
            assert done.token_ids == output[: output.index(stop) + 1]
            assert (done.finish_reason, done.stop_token_id) == ("stop", stop)
        else:
            assert done.token_ids == output
            assert (done.finish_reason, done.stop_token_id) == ("length", None)


def test_a_first_token_that_stops_takes_no_round(
    pair: Pair, expected: list[tuple[int, ...]]
) -> None:
    engine = make_engine(*pair, rows=2)
    stops = Sampling(stop_token_ids=(expected[1][0],))
    done = decode(engine, [random_prompts(LENGTHS, VOCAB)[1]], sampling=stops)[0]
    assert done.token_ids == expected[1][:1]
    assert (done.accepted, done.finish_reason) == ((), "stop")


def test_prompts_of_one_token_and_of_all_but_one_position(pair: Pair) -> None:
    prompts = random_prompts([1, 63, 62], VOCAB, seed=3)
    caps = [63, 1, 2]
    engine = make_engine(*pair, max_len=64, budget=16)
    for prompt, cap, done in zip(prompts, caps, decode(engine, prompts, caps), strict=True):
        steps = oracle.decode(pair[0], tuple(prompt), max_new_tokens=cap, stop_token_ids=())
        assert done.token_ids == tuple(step.token_id for step in steps)


def test_no_prompt_gives_no_completion(pair: Pair) -> None:
    assert decode(make_engine(*pair), []) == []


@pytest.mark.parametrize("method", ["autoregressive", "chain"])
def test_a_row_with_scores_that_are_not_finite_is_rejected_alone(
    tmp_path: Path, device: str, method: str
) -> None:
    target, drafter = load_tiny_pair(tmp_path, device, vocab=97, tied=False)
    target.embed[95] = torch.nan  # only prompts that hold this token suffer
    engine = make_engine(target, drafter, method=method, budget=None, rows=2)
    prompts = random_prompts([4, 6, 8], 95, seed=2)
    good = [
        tuple(
            step.token_id
            for step in oracle.decode(target, tuple(prompt), max_new_tokens=20, stop_token_ids=())
        )
        for prompt in prompts
    ]
    assert not any(95 in output for output in good)
    bad = [*prompts[1], 95]
    done = list(engine.run(iter(token_prompts([prompts[0], bad, prompts[2]], 20))))
    by_row = {item.key.row_id: item for item in done}
    rejected = by_row.pop(1)
    assert isinstance(rejected, Rejected)
    assert rejected.code == "nan_logits"
    for row, completion in by_row.items():
        assert isinstance(completion, Completion)
        assert completion.token_ids == good[row]


def test_counters_add_up(pair: Pair) -> None:
    engine = make_engine(*pair, rows=2)
    started = time.monotonic()
    done = decode(engine, random_prompts(LENGTHS, VOCAB))
    seconds = time.monotonic() - started
    stats = engine.stats
    # Rounds take the rest: on a CPU one takes as long as a prefill call of its size.
    assert 0 < stats.prefill_seconds < seconds
    assert stats.output_tokens == sum(len(completion.token_ids) for completion in done)
    assert stats.prompt_tokens == sum(LENGTHS)
    assert stats.live_row_rounds == sum(len(completion.accepted) for completion in done)
    assert stats.row_rounds == 2 * stats.rounds
    # While prompts wait no row is idle: only the drain wastes row-rounds, and on a GPU the rounds
    # that are launched before the end is read.
    longest = max(len(completion.accepted) for completion in done)
    late = 0 if pair[0].embed.device.type == "cpu" else 2 * engine.plan.rows
    assert stats.row_rounds - stats.live_row_rounds <= longest + late


def test_rounds_without_a_poll_between_them_see_every_key(tmp_path: Path, device: str) -> None:
    """How many keys attention looks at is bounded from what the host knows, polled or not."""
    pair = load_tiny_pair(tmp_path, device, vocab=VOCAB, block=5)
    (prompt,) = random_prompts([62], VOCAB, seed=1)
    steps = oracle.decode(pair[0], tuple(prompt), max_new_tokens=40, stop_token_ids=())
    engine = make_engine(*pair, rows=1, max_len=128)
    engine.fill(iter(token_prompts([prompt], 40)))
    for _ in range(40):
        engine.step()
    (done,) = engine.collect()
    assert isinstance(done, Completion)
    assert done.token_ids == tuple(step.token_id for step in steps)


@pytest.mark.parametrize("method", ["autoregressive", "ddtree"])
def test_of_equal_scores_the_lower_token_id_is_drawn(
    tmp_path: Path, device: str, method: str
) -> None:
    target, drafter = load_tiny_pair(tmp_path, device, vocab=97, tied=False)
    target.head.zero_()
    target.head[[5, 40, 90]] = 1.0
    prompts = random_prompts([3, 8], 97)
    for prompt, done in zip(
        prompts, decode(make_engine(target, drafter, method=method), prompts), strict=True
    ):
        steps = oracle.decode(target, tuple(prompt), max_new_tokens=20, stop_token_ids=())
        assert done.token_ids == tuple(step.token_id for step in steps)
        assert set(done.token_ids) <= {0, 5}


@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize(("method", "budget"), [("chain", None), ("ddtree", 7), ("ddtree", 33)])
def test_a_drafter_whose_scores_are_no_numbers_changes_no_token(
    tmp_path: Path,
    device: str,
    expected: list[tuple[int, ...]],
    method: str,
    budget: int | None,
    number: float,
) -> None:
    target, drafter = load_tiny_pair(tmp_path, device, vocab=VOCAB, block=5)
    drafter.norm.weight.fill_(number)
    done = decode(
        make_engine(target, drafter, method=method, budget=budget), random_prompts(LENGTHS, VOCAB)
    )
    assert outputs_of(done) == expected


def test_a_sequence_that_the_device_loses_stops_the_run(pair: Pair) -> None:
    """Its row is inert, so no record tells of it: the engine would wait for ever."""
    engine = make_engine(*pair, rows=2)
    engine.fill(iter(token_prompts(random_prompts(LENGTHS[:3], VOCAB), 20)))
    for _ in range(2):
        engine.step()
        assert not list(engine.collect())
    engine.state.active_B[1] = False
    engine.state.slot_B[1] = engine.state.nobody
    with pytest.raises(RunError, match=r"1 sequences are seated .* the device has lost them"):
        list(engine.run(iter(())))
