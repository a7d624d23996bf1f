"""Keyed sampling in the engine: each token is the draw that the oracle makes of its own scores, and
no draw depends on neighbours, order, refill, pages, budget, method or calls of prefill."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from decoding import decode, make_engine, random_prompts, run_all
from tiny import load_tiny_pair

from ddbatch.core import Completion, Key, PrefillPlan, Sampling, TokenPrompt
from ddbatch.engine.oracle import Oracle
from ddbatch.engine.oracle_draw import draw_scores
from ddbatch.engine.sampling import key_hash
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

Pair = tuple[Target, DFlash]

VOCAB, CAP = 97, 17
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS = (
    Sampling(),
    Sampling(top_k=5),
    Sampling(top_p=0.8),
    Sampling(min_p=0.05),
    Sampling(top_k=9, top_p=0.9, min_p=0.02),
)
MIXED = [
    replace(filters, temperature=temperature, seed=3 * place)
    for place, (temperature, filters) in enumerate(product(TEMPERATURES, FILTERS))
] + [Sampling()]  # a greedy row among them
LENGTHS = [1 + 5 * place % 23 for place in range(len(MIXED))]
CLOSE = 1e-4  # the numerics rule: perturbed scores closer than this may part


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, block=6)


def prompts_of(own: Sequence[Sampling] = MIXED, sample: int = 0) -> list[TokenPrompt]:
    ids = random_prompts(LENGTHS, VOCAB, seed=5)
    return [
        TokenPrompt(Key(7 * place, place % 3, sample), tuple(prompt), CAP, sampling)
        for place, (prompt, sampling) in enumerate(zip(ids, own, strict=True))
    ]


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[Completion]:
    """Each prompt alone, without a drafter."""
    engine = make_engine(pair[0], None, method="autoregressive", rows=1)
    return [run_all(engine, [prompt])[0] for prompt in prompts_of()]


def outputs_of(done: Sequence[Completion]) -> dict[Key, tuple[int, ...]]:
    return {completion.key: completion.token_ids for completion in done}


def test_each_token_is_the_draw_of_the_oracles_scores(pair: Pair, plain: list[Completion]) -> None:
    """At every temperature with every filter; a near-tie would be listed here."""
    close: list[tuple[Key, int]] = []
    for prompt, done in zip(prompts_of(), sorted(plain, key=lambda d: d.key), strict=True):
        scores = Oracle(pair[0]).scores([*prompt.token_ids, *done.token_ids[:-1]])
        drawn = draw_scores(scores[len(prompt.token_ids) - 1 :], prompt.sampling, prompt.key, 0)
        assert drawn.tokens.tolist() == list(done.token_ids), prompt
        close += [(prompt.key, place) for place in drawn.is_close(CLOSE).nonzero().flatten()]
    assert close == []


def test_the_cases_draw_what_greedy_decoding_would_not(plain: list[Completion], pair: Pair) -> None:
    engine = make_engine(pair[0], None, method="autoregressive", rows=7)
    greedy = outputs_of(run_all(engine, prompts_of([Sampling()] * len(MIXED))))
    assert sum(greedy[done.key] != done.token_ids for done in plain) >= len(MIXED) - 3


@pytest.mark.parametrize(
    ("method", "budget", "topk"),
    [("chain", 2, None), ("chain", None, None), ("ddtree", 1, None), ("ddtree", 7, 3)]
    + [("ddtree", budget, None) for budget in (8, 16, 33)],
)
def test_a_draw_does_not_depend_on_method_and_budget(
    pair: Pair, plain: list[Completion], method: str, budget: int | None, topk: int | None
) -> None:
    engine = make_engine(*pair, method=method, budget=budget, topk=topk, rows=5)
    assert outputs_of(run_all(engine, prompts_of())) == outputs_of(plain)


@pytest.mark.parametrize(
    ("rows", "page", "prefill_plan"),
    [
        (1, None, PrefillPlan(chunks=4, chunk=16, is_fixed=False)),
        (2, 1, PrefillPlan(chunks=1, chunk=7, is_fixed=False)),
        (3, 16, PrefillPlan(chunks=2, chunk=32, is_fixed=True)),
        (30, 3, PrefillPlan(chunks=5, chunk=1, is_fixed=True)),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_draw_does_not_depend_on_neighbours_order_refill_and_pages(
    pair: Pair,
    plain: list[Completion],
    rows: int,
    page: int | None,
    prefill_plan: PrefillPlan,
    seed: int,
) -> None:
    engine = make_engine(*pair, budget=9, rows=rows, page=page, prefill_plan=prefill_plan)
    shuffled = prompts_of()
    random.Random(seed).shuffle(shuffled)
    assert outputs_of(run_all(engine, shuffled)) == outputs_of(plain)


def test_a_slot_that_held_a_greedy_row_draws_as_a_fresh_one(
    pair: Pair, plain: list[Completion]
) -> None:
    engine = make_engine(*pair, rows=1)
    decode(engine, random_prompts([5, 9, 2], VOCAB))
    assert outputs_of(run_all(engine, prompts_of())) == outputs_of(plain)
    greedy = decode(engine, random_prompts([5], VOCAB))
    assert greedy == [
        replace(
            decode(make_engine(*pair, rows=1), random_prompts([5], VOCAB))[0],
            seconds=greedy[0].seconds,
            slot=greedy[0].slot,
        )
    ]


def test_rows_samples_turns_and_seeds_draw_for_themselves(pair: Pair) -> None:
    """The same prompt with the same options but another key or seed says something else."""
    hot = Sampling(temperature=1.5)
    base = TokenPrompt(Key(0, 0, 0), (3, 1, 4), CAP, hot)
    others = [
        replace(base, key=key) for key in (Key(1, 0, 0), Key(0, 1, 0), Key(0, 0, 1), Key(1, 1, 1))
    ]
    # Another high word of the seed, and one that differs in the highest bit.
    seeds = [1, 1 << 32, 1 << 62]
    engine = make_engine(*pair, rows=4)
    done = outputs_of(run_all(engine, [base, *others]))
    told = {output[:3] for output in done.values()}
    for seed in seeds:
        told.add(
            run_all(engine, [replace(base, sampling=replace(hot, seed=seed))])[0].token_ids[:3]
        )
    assert len(told) == 5 + len(seeds)
    assert run_all(engine, [base])[0].token_ids == done[base.key]


def test_a_filter_that_keeps_one_token_is_greedy_at_any_temperature(pair: Pair) -> None:
    greedy = outputs_of(run_all(make_engine(*pair), prompts_of([Sampling()] * len(MIXED))))
    for filters in (Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(min_p=1.0)):
        own = [replace(filters, temperature=1.5, seed=place) for place in range(len(MIXED))]
        assert outputs_of(run_all(make_engine(*pair), prompts_of(own))) == greedy


def test_a_batch_without_a_sampled_row_makes_no_noise(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("noise for a greedy batch")

    monkeypatch.setattr("ddbatch.engine.choose.keyed_draw", refuse)
    decode(make_engine(*pair), random_prompts([3, 8], VOCAB))
    with pytest.raises(AssertionError, match="noise"):
        decode(make_engine(*pair), random_prompts([3], VOCAB), sampling=Sampling(temperature=1))


def test_a_nan_score_rejects_a_sampled_row_alone(tmp_path: Path) -> None:
    target, drafter = load_tiny_pair(tmp_path, vocab=VOCAB, tied=False)
    poisoned = 40
    target.embed.data[poisoned] = torch.nan
    ids = [[3, 5], [3, poisoned], [9, 9, 2]]
    prompts = [
        TokenPrompt(Key(place, 0, 0), tuple(prompt), CAP, Sampling(temperature=0.7, top_p=0.9))
        for place, prompt in enumerate(ids)
    ]
    alone = [next(make_engine(target, drafter).run(iter([prompt]))) for prompt in prompts]
    found = {item.key: item for item in make_engine(target, drafter).run(iter(prompts))}
    assert [isinstance(found[prompt.key], Completion) for prompt in prompts] == [
        isinstance(item, Completion) for item in alone
    ]
    assert not isinstance(found[prompts[1].key], Completion)
    for prompt, item in zip(prompts, alone, strict=True):
        if isinstance(item, Completion):
            assert outputs_of([found[prompt.key]]) == outputs_of([item])  # type: ignore[list-item]


def test_the_hash_of_a_key_never_changes() -> None:
    """Completions of earlier releases depend on it."""
    assert [key_hash(key) for key in (Key(0, 0, 0), Key(1, 0, 0), Key(0, 1, 0), Key(0, 0, 1))] == [
        2558736989570252433,
        12793040940332582595,
        4964578127960768432,
        3400964856525257824,
    ]
