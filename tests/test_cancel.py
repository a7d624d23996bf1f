"""A sequence in which a stop string was found is cancelled: wherever it waits it ends with its text
cut, its row and its slot go to others, and what they say does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from decoding import decode, make_engine, random_prompts, token_prompts
from tiny import load_tiny_pair

from ddbatch.core import Completion, Rejected, Sampling, StopMatch
from ddbatch.engine.engine import Engine
from ddbatch.engine.stop_watch import cut
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

Pair = tuple[Target, DFlash]

VOCAB, CAP = 97, 60
METHODS = ["autoregressive", "chain", "ddtree"]
HOT = Sampling(temperature=1.0)


class Numbers:
    """A StopFinder: a token's text is its number, and a stop string is one of them.
    flags_all: more tokens are flagged than could complete one."""

    def __init__(self, *, flags_all: bool = False) -> None:
        self._flags_all = flags_all

    def flagged(self, stop: tuple[str, ...]) -> Sequence[int]:
        return range(VOCAB) if self._flags_all else [int(string) for string in stop]

    def watch(self, stop: tuple[str, ...]) -> Callable[[Sequence[int]], StopMatch | None]:
        num_tokens = 0

        def look(token_ids: Sequence[int]) -> StopMatch | None:
            nonlocal num_tokens
            for token_id in token_ids:
                num_tokens += 1
                if str(token_id) in stop:
                    return StopMatch(str(token_id), num_tokens)
            return None

        return look


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, block=6)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts([5, 9, 2, 7, 12, 1], VOCAB, seed=3)


def engine_of(pair: Pair, *, flags_all: bool = False, **options: object) -> Engine:
    finder = Numbers(flags_all=flags_all)
    return make_engine(*pair, rows=1, max_len=128, finder=finder, **options)  # type: ignore[arg-type]


def same(done: Completion) -> Completion:
    """What does not depend on time and place."""
    return replace(done, seconds=0.0, slot=0)


def wait_for_looks(engine: Engine) -> None:
    """Until all text that was handed to the worker thread is looked at."""
    for seat in engine.seats.values():
        if seat.watched is not None:
            seat.watched.match()


def run_to_the_end(engine: Engine) -> Iterator[Completion | Rejected]:
    while engine.is_busy:
        engine.step()
        yield from engine.collect()
        wait_for_looks(engine)


def stopping_at(done: Completion, num_tokens: int) -> Sampling:
    """Its own stop string: the token that is the num_tokens-th here."""
    return replace(HOT, stop=(str(done.token_ids[num_tokens - 1]),))


def stopped(full: Completion, own: Sampling) -> Completion:
    """What is to come of the sequence with these stop strings."""
    match = Numbers().watch(own.stop)(full.token_ids)
    return same(full if match is None else cut(full, match))


def test_a_sequence_cancelled_in_the_ready_ring_ends_with_its_first_round(
    pair: Pair, prompts: list[list[int]]
) -> None:
    """One row: the second prompt waits behind the first, and its first token says it all."""
    engine = engine_of(pair)
    long, short = decode(engine_of(pair), prompts[:2], CAP, HOT)
    own = [HOT, stopping_at(short, 1)]
    engine.fill(iter(token_prompts(prompts[:2], CAP, own)))
    state = engine.state
    for _ in range(2):
        engine.step()
        assert list(engine.collect()) == []
        wait_for_looks(engine)
    assert state.is_cancelled_S.tolist() == [False, True, False]
    assert int(state.ready_tail - state.ready_head) == 1
    first, second = run_to_the_end(engine)
    assert isinstance(first, Completion)
    assert isinstance(second, Completion)
    assert same(first) == same(long)
    assert same(second) == stopped(short, own[1])
    assert (second.token_ids, second.accepted) == (short.token_ids[:1], ())
    # It takes a row for one round, in which it emits nothing.
    assert engine.stats.live_row_rounds == len(first.accepted)
    assert engine.stats.rounds == len(first.accepted) + 1
    assert int(state.active_B) == 0
    assert int(state.length_S[1]) == len(prompts[1])


@pytest.mark.parametrize("flags_all", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 7, 20])
@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_cancelled_in_its_row_ends_soon_after_its_string(
    pair: Pair, prompts: list[list[int]], method: str, num_tokens: int, flags_all: bool
) -> None:
    for prompt in prompts:
        (full,) = decode(engine_of(pair, method=method), [prompt], CAP, HOT)
        own = stopping_at(full, num_tokens)
        engine = engine_of(pair, method=method, flags_all=flags_all)
        engine.fill(iter(token_prompts([prompt], CAP, own)))
        (done,) = run_to_the_end(engine)
        assert isinstance(done, Completion)
        assert same(done) == stopped(full, own)
        # One round until the look is asked for, one beside it, one that finds it cancelled.
        num_rounds = len(done.accepted)
        assert num_rounds < engine.stats.rounds <= num_rounds + 3 < len(full.accepted)
        assert engine.stats.output_tokens == len(done.token_ids)


def test_slots_of_cancelled_sequences_serve_others(pair: Pair, prompts: list[list[int]]) -> None:
    """Two slots, and every second prompt is cancelled: what comes after one in its slot is as from
    a fresh engine, and so is the next that is cancelled there."""
    many = [prompt for prompt in prompts[:3] for _ in range(2)]
    whole = decode(engine_of(pair), many, CAP, HOT)
    own = [stopping_at(done, 5) if done.key.row_id % 2 else HOT for done in whole]
    engine = engine_of(pair)
    for order in (1, -1):
        asked = token_prompts(many, CAP, own)[::order]
        source = iter(asked)
        found: list[Completion | Rejected] = []
        engine.fill(source)
        while engine.is_busy:
            engine.step()
            found += engine.collect()
            wait_for_looks(engine)
            engine.fill(source)
        found.sort(key=lambda item: item.key)
        assert len(found) == len(whole)
        for full, done in zip(whole, found, strict=True):
            assert isinstance(done, Completion)
            assert same(done) == stopped(full, own[full.key.row_id])
            assert (done.stop_string is not None) == bool(full.key.row_id % 2)
            assert done.slot in (0, 1)
    assert engine.state.generation_S[:2].sum() == 2 * len(many)
    for _ in range(2):  # in the one slot, then in the other
        assert same(decode(engine, many[:1], CAP, HOT)[0]) == same(whole[0])
    assert not engine.state.is_cancelled_S.any()


def test_a_sequence_that_was_cancelled_gives_its_pages_back(
    pair: Pair, prompts: list[list[int]]
) -> None:
    """As many prompts as would need six times the pool."""
    whole = decode(engine_of(pair), prompts, CAP, HOT)
    own = [stopping_at(done, 4) for done in whole]
    engine = engine_of(pair, page=8, pages=10)  # the longest prompt needs 9
    for _ in range(2):
        for full, done in zip(whole, decode(engine, prompts, CAP, own), strict=True):
            assert same(done) == stopped(full, own[full.key.row_id])
            assert done.stop_string is not None
