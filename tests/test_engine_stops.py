"""Stop strings in the engine: cut at the first match in token order, however late it is looked at;
and log-probabilities of what was emitted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from decoding import decode, make_engine, random_prompts
from hypothesis import given
from hypothesis import strategies as st
from tiny import load_tiny_pair

from ddbatch.core import Completion, Key, Rejected, Sampling, StopMatch, TokenLogprobs, TokenPrompt
from ddbatch.engine.oracle import Oracle
from ddbatch.engine.stop_watch import cut
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

Pair = tuple[Target, DFlash]

VOCAB, CAP = 97, 24
LENGTHS = [1, 7, 2, 12, 5, 3, 9, 4, 21, 6, 8]
HOT = Sampling(temperature=1.0)
METHODS = ["autoregressive", "chain", "ddtree"]
_chance = random.Random(3)
PIECES = [
    "".join(_chance.choice("abc") for _ in range(_chance.choice([1, 1, 2, 3])))
    for _ in range(VOCAB)
]


@dataclass
class Letters:
    """A StopFinder: token i stands for PIECES[i]. late: seconds that a look may take."""

    late: float = 0.0
    num_looks: int = 0

    def flagged(self, stop: tuple[str, ...]) -> Sequence[int]:
        return [i for i, piece in enumerate(PIECES) if any(s[-1] in piece for s in stop)]

    def watch(self, stop: tuple[str, ...]) -> Callable[[Sequence[int]], StopMatch | None]:
        text, num_tokens = "", 0

        def look(token_ids: Sequence[int]) -> StopMatch | None:
            nonlocal text, num_tokens
            self.num_looks += 1
            time.sleep(random.random() * self.late)
            for token_id in token_ids:
                text += PIECES[token_id]
                num_tokens += 1
                found = [string for string in stop if string in text]
                if found:
                    return StopMatch(min(found, key=text.find), num_tokens)
            return None

        return look


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, block=6)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, VOCAB, seed=2)


@pytest.fixture(scope="module")
def whole_by_method(pair: Pair, prompts: list[list[int]]) -> dict[str, list[Completion]]:
    """What is said without stop strings."""
    return {
        method: decode(make_engine(*pair, method=method, rows=3), prompts, CAP, sampling=HOT)
        for method in METHODS
    }


def first_match(token_ids: Sequence[int], stop: tuple[str, ...]) -> StopMatch | None:
    return Letters().watch(stop)(token_ids)


def same(done: Completion) -> Completion:
    """What does not depend on time and place."""
    return replace(done, seconds=0.0, slot=0)


@pytest.mark.parametrize("stop", [("cab",), ("bb", "ccca"), ("aaaa",), ("a",), ("abcabc", "zz")])
@pytest.mark.parametrize("late", [0.0, 0.02])
@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_cuts_where_it_is_first_completed_however_late_it_is_found(
    pair: Pair,
    prompts: list[list[int]],
    whole_by_method: dict[str, list[Completion]],
    method: str,
    late: float,
    stop: tuple[str, ...],
) -> None:
    finder = Letters(late)
    engine = make_engine(*pair, method=method, rows=3, finder=finder)
    done = decode(engine, prompts, CAP, sampling=replace(HOT, stop=stop))
    for full, ours in zip(whole_by_method[method], done, strict=True):
        match = first_match(full.token_ids, stop)
        assert same(ours) == same(full if match is None else cut(full, match))
    assert not engine.is_busy


def test_rows_with_and_without_strings_share_a_batch_and_slots(
    pair: Pair, prompts: list[list[int]]
) -> None:
    own = [replace(HOT, stop=(("bc",) if place % 2 else ())) for place in range(len(prompts))]
    engine = make_engine(*pair, rows=2, finder=Letters())
    whole = decode(make_engine(*pair, rows=2), prompts, CAP, sampling=HOT)
    for _ in range(2):  # the second time in slots that held the others
        for place, done in enumerate(decode(engine, prompts, CAP, sampling=own)):
            match = first_match(whole[place].token_ids, ("bc",)) if place % 2 else None
            assert same(done) == same(whole[place] if match is None else cut(whole[place], match))
        own.reverse()
        own = [replace(HOT, stop=(("bc",) if place % 2 else ())) for place in range(len(prompts))]


def test_a_stop_id_before_the_string_is_complete_wins_and_its_text_does_not_count(
    pair: Pair, prompts: list[list[int]], whole_by_method: dict[str, list[Completion]]
) -> None:
    for full, prompt in zip(whole_by_method["ddtree"], prompts, strict=True):
        row = full.key.row_id
        token = full.token_ids[9]
        string = PIECES[token]
        own = replace(HOT, stop=(string,), stop_token_ids=(token,))
        engine = make_engine(*pair, finder=Letters(0.01))
        (done,) = engine.run(iter([TokenPrompt(Key(row, 0, 0), tuple(prompt), CAP, own)]))
        assert isinstance(done, Completion)
        end = full.token_ids.index(token)
        match = first_match(full.token_ids[:end], (string,))
        if match is None:
            assert (done.token_ids, done.stop_token_id) == (full.token_ids[: end + 1], token)
            assert done.stop_string is None
        else:
            assert same(done) == same(cut(full, match))


def test_a_match_at_the_cap_is_a_stop(
    pair: Pair, prompts: list[list[int]], whole_by_method: dict[str, list[Completion]]
) -> None:
    stop = ("cab",)
    matches = [first_match(full.token_ids, stop) for full in whole_by_method["ddtree"]]
    caps = [CAP if match is None else match.num_tokens for match in matches]
    engine = make_engine(*pair, finder=Letters())
    done = decode(engine, prompts, caps, sampling=replace(HOT, stop=stop))
    for match, ours in zip(matches, done, strict=True):
        assert ours.finish_reason == ("length" if match is None else "stop")
    assert sum(match is not None for match in matches) > 3


def test_only_flagged_rows_are_looked_at(pair: Pair, prompts: list[list[int]]) -> None:
    finder = Letters()
    engine = make_engine(*pair, finder=finder)
    decode(engine, prompts, CAP, sampling=replace(HOT, stop=("z",)))
    assert finder.num_looks == 0


def test_a_string_before_a_nan_score_ends_the_row_and_after_it_rejects_the_row(
    tmp_path: Path,
) -> None:
    """Whether decoding ran on past the string must not show."""
    target, drafter = load_tiny_pair(tmp_path, vocab=VOCAB, tied=False)
    clean = decode(make_engine(target, drafter), [[3, 5]], CAP, sampling=HOT)[0]
    bad = next(i for i, t in enumerate(clean.token_ids) if i > 7 and t not in clean.token_ids[:i])
    target.embed.data[clean.token_ids[bad]] = torch.nan
    text = "".join(PIECES[token] for token in clean.token_ids[: bad + 1])
    for string in (text[:4], text[-4:], text + "b"):
        prompt = TokenPrompt(Key(0, 0, 0), (3, 5), CAP, replace(HOT, stop=(string,)))
        for method in ("autoregressive", "ddtree"):
            engine = make_engine(target, drafter, method=method, finder=Letters(0.02))
            (done,) = engine.run(iter([prompt]))
            match = first_match(clean.token_ids[: bad + 1], (string,))
            if match is None:
                assert isinstance(done, Rejected)
                assert f"after {bad + 1} output tokens" in done.reason
            else:
                assert isinstance(done, Completion)
                assert done.token_ids == clean.token_ids[: match.num_tokens]


def test_a_stop_token_before_a_nan_score_of_the_same_path_is_a_stop(tmp_path: Path) -> None:
    """Plain decoding never comes to that score, so a tree must not either."""
    target, drafter = load_tiny_pair(tmp_path, vocab=VOCAB, tied=False)
    clean = decode(make_engine(target, drafter), [[3, 5]], CAP)[0]
    target.embed.data[clean.token_ids[9]] = torch.nan
    first = clean.token_ids.index(clean.token_ids[9])
    for stop in set(clean.token_ids[: first + 1]):
        own = Sampling(stop_token_ids=(stop,))
        for method in METHODS:
            engine = make_engine(target, drafter, method=method)
            done = decode(engine, [[3, 5]], CAP, sampling=own)[0]
            assert done.token_ids == clean.token_ids[: clean.token_ids.index(stop) + 1]


@given(st.lists(st.integers(0, 4), max_size=6), st.data())
def test_a_cut_leaves_the_rounds_that_emitted_what_is_left(
    accepted: list[int], data: st.DataObject
) -> None:
    emitted = 1 + sum(count + 1 for count in accepted)
    done = Completion(
        Key(0, 0, 0),
        tuple(range(emitted)),
        "length",
        None,
        tuple(accepted),
        (4,) * len(accepted),
        (7,) * len(accepted),
        0.5,
        0,
        None,
        TokenLogprobs([-1.0] * emitted, [[]] * emitted, [[]] * emitted),
    )
    end = data.draw(st.integers(1, emitted))
    ours = cut(done, StopMatch("x", end))
    assert ours.token_ids == tuple(range(end))
    assert len(ours.drafted) == len(ours.depth) == len(ours.accepted)
    assert ours.logprobs is not None
    assert len(ours.logprobs.token) == len(ours.logprobs.top) == end
    assert sum(ours.accepted) + len(ours.accepted) - (end - 1) in ((0, 1) if end > 1 else (0,))
    assert len(ours.depth) == len(ours.accepted)
    assert (ours.finish_reason, ours.stop_string, ours.stop_token_id) == ("stop", "x", None)


@pytest.mark.parametrize("top", [0, 1, 5, VOCAB])
@pytest.mark.parametrize("method", METHODS)
def test_log_probs_are_the_oracles_of_the_emitted_tokens(
    pair: Pair, prompts: list[list[int]], method: str, top: int
) -> None:
    """Of the raw softmax: temperature and filters do not show."""
    own = [
        Sampling(temperature=0.7 * (place % 3), top_k=4, top_p=0.9) for place in range(len(prompts))
    ]
    engine = make_engine(*pair, method=method, top_logprobs=top)
    caps = [1 + 5 * place % CAP for place in range(len(prompts))]
    for prompt, done in zip(prompts, decode(engine, prompts, caps, own), strict=True):
        told = done.logprobs
        assert told is not None
        scores = Oracle(pair[0]).scores([*prompt, *done.token_ids[:-1]])[len(prompt) - 1 :]
        expected = scores.log_softmax(dim=-1)
        ids = torch.tensor(done.token_ids)
        ours = torch.tensor(told.token)
        assert ours.shape == ids.shape
        assert (ours <= 0).all()
        assert (ours - expected.gather(1, ids[:, None]).squeeze(1)).abs().max() < 1e-4
        assert len(told.top_ids) == len(told.top) == len(ids)
        # In the oracle's eyes too they are the best, up to rounding, each once.
        best = expected.sort(dim=1, descending=True).values[:, :top]
        top_ids = torch.tensor(told.top_ids).long()
        assert (expected.gather(1, top_ids) - best).abs().max().item() < 1e-4 if top else True
        assert all(len(set(row)) == top for row in told.top_ids)
        # float16: three digits
        assert torch.allclose(torch.tensor(told.top), best, rtol=1e-3, atol=1e-4)


def test_log_probs_do_not_change_what_is_drawn(pair: Pair, prompts: list[list[int]]) -> None:
    told = decode(make_engine(*pair, top_logprobs=3), prompts, CAP, sampling=HOT)
    silent = decode(make_engine(*pair), prompts, CAP, sampling=HOT)
    assert [same(replace(done, logprobs=None)) for done in told] == [same(d) for d in silent]


def test_log_probs_end_with_the_ids_at_a_stop_string(pair: Pair, prompts: list[list[int]]) -> None:
    engine = make_engine(*pair, top_logprobs=2, finder=Letters(0.01))
    done = decode(engine, prompts, CAP, sampling=replace(HOT, stop=("bc",)))
    assert any(item.stop_string for item in done)
    for item in done:
        assert item.logprobs is not None
        assert len(item.token_ids) == len(item.logprobs.token) == len(item.logprobs.top_ids)
