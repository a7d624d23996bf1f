"""The numerics rule: score errors are measured, partings found and explained, faults are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from decoding import make_engine, random_prompts, run_all
from tiny import read_drafter, read_target, write_drafter, write_target

from ddbatch.core import Key, Sampling, TokenPrompt
from ddbatch.engine.numerics import (
    FLOAT32_GAP,
    GAP_FACTOR,
    MAX_RATIO,
    find_partings,
    measure_numerics,
)
from ddbatch.engine.oracle import Oracle
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.dims import DtypeName

Pair = tuple[Target, DFlash]

VOCAB, CAP = 97, 20
KINDS = [
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.0, top_k=7, seed=3),
    Sampling(temperature=1.5, min_p=0.02),
]
ARMS = [("autoregressive", 0), ("chain", None), ("ddtree", 7), ("ddtree", 33)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_target(folder / "target", vocab=VOCAB, scale=1.0)
    write_drafter(folder / "drafter", target_folder=folder / "target", block=6)
    return folder


def load(folder: Path, dtype: DtypeName) -> Pair:
    target, drafter = folder / "target", folder / "drafter"
    return read_target(target, dtype), read_drafter(drafter, target, dtype)


def prompts_of(own: Sampling) -> list[TokenPrompt]:
    ids = random_prompts([1, 9, 4, 17, 6, 2, 12], VOCAB, seed=4)
    return [TokenPrompt(Key(n, 0, 0), tuple(prompt), CAP, own) for n, prompt in enumerate(ids)]


@pytest.mark.parametrize("own", KINDS, ids=str)
def test_in_float32_nothing_parts_from_the_oracle(folder: Path, own: Sampling) -> None:
    pair = load(folder, "float32")
    for method, budget in ARMS:
        prompts = prompts_of(own)
        done = run_all(make_engine(*pair, method=method, budget=budget), prompts)
        for prompt, completion in zip(prompts, done, strict=True):
            assert find_partings(pair[0], prompt, completion.token_ids) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("method", "budget"), ARMS)
def test_in_a_short_dtype_every_parting_is_explained(
    folder: Path, method: str, budget: int | None, dtype: DtypeName
) -> None:
    """Against the oracle in float32 on the same rounded weights."""
    pair = load(folder, dtype)
    engine = make_engine(*pair, method=method, budget=budget)
    numerics = measure_numerics(pair[0], engine.drafter, engine.plan)
    assert numerics.is_sound
    for own in KINDS:
        prompts = prompts_of(own)
        for prompt, completion in zip(prompts, run_all(engine, prompts), strict=True):
            for parting in find_partings(pair[0], prompt, completion.token_ids):
                assert 0 < parting.slack <= numerics.gap, parting


def test_bfloat16_parts_somewhere_and_float16_less(folder: Path) -> None:
    """The cases above are not empty."""
    found = {}
    for dtype in ("bfloat16", "float16"):
        target, drafter = load(folder, dtype)
        own = Sampling(temperature=1.0)
        prompts = [
            replace(prompt, key=Key(n, 1, 0)) for n in range(12) for prompt in prompts_of(own)
        ]
        prompts = [replace(p, key=p.key._replace(sample=n)) for n, p in enumerate(prompts)]
        done = run_all(make_engine(target, drafter, rows=30), prompts)
        by_key = {prompt.key: prompt for prompt in prompts}
        partings = [find_partings(target, by_key[item.key], item.token_ids) for item in done]
        found[dtype] = sum(map(len, partings))
    assert found["bfloat16"] > found["float16"]
    assert found["bfloat16"] > 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_score_errors_are_those_of_the_dtype(folder: Path, dtype: DtypeName) -> None:
    pair = load(folder, dtype)
    engine = make_engine(*pair, budget=7, rows=5)
    numerics = measure_numerics(*pair, engine.plan)
    assert numerics.dtype == dtype
    assert numerics.is_sound
    if dtype == "float32":
        assert (numerics.plain, numerics.gap) == (0.0, FLOAT32_GAP)
        assert numerics.engine < 1e-5
    else:
        unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        assert 0.3 * unit < numerics.plain < 40 * unit
        assert numerics.gap == GAP_FACTOR * numerics.plain
        assert numerics.engine <= MAX_RATIO * numerics.plain
    # The same canaries with fewer rows than canaries, and without a drafter.
    single = make_engine(*pair, budget=7, rows=1).plan
    assert measure_numerics(*pair, single).plain == pytest.approx(numerics.plain, rel=0.5)
    plain = make_engine(pair[0], None, budget=0).plan
    assert measure_numerics(pair[0], None, plain).is_sound


def test_an_engine_that_computes_something_else_is_not_sound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of a few per cent in attention's scores."""
    from ddbatch_kernels.rope_append import reference

    original = reference.apply_rope
    monkeypatch.setattr(reference, "apply_rope", lambda x, rope: original(x * 1.03, rope))
    for dtype in ("float32", "bfloat16"):
        pair = load(folder, dtype)
        numerics = measure_numerics(*pair, make_engine(*pair, budget=7, rows=5).plan)
        assert not numerics.is_sound
        assert "is expected" in str(numerics)


def test_a_wrong_token_is_a_parting_that_no_rounding_explains(folder: Path) -> None:
    target, drafter = load(folder, "bfloat16")
    engine = make_engine(target, drafter)
    gap = measure_numerics(target, drafter, engine.plan).gap
    for own in KINDS:
        prompt = prompts_of(own)[1]
        (done,) = run_all(engine, [prompt])
        for place in (0, 7, CAP - 1):
            wrong = list(done.token_ids)
            scores = Oracle(target).scores([*prompt.token_ids, *wrong[:place]])[-1]
            wrong[place] = int(scores.argmin())
            at_place = [p for p in find_partings(target, prompt, wrong) if p.place == place]
            assert len(at_place) == 1
            assert at_place[0].token_id == wrong[place]
            assert at_place[0].slack > gap


def test_a_context_of_a_few_tokens_has_canaries_too(tmp_path: Path) -> None:
    write_target(tmp_path, vocab=VOCAB, max_positions=4)
    target = read_target(tmp_path, "bfloat16")
    assert measure_numerics(target, None, make_engine(target, None, budget=0).plan).is_sound
