"""The engine on a CUDA device: what the CPU tests say holds there too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import decode, make_engine, random_prompts, run_all
from tiny import write_drafter, write_target

from ddbatch.core import Key, Sampling, StopMatch, TokenPrompt
from ddbatch.engine import oracle, oracle_ddtree
from ddbatch.engine.numerics import find_partings, measure_numerics
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash, read_drafter_dims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import load_drafter, load_target, set_numerics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCAB = 13
LENGTHS = (1, 9, 4, 17, 2, 30, 5)
MIXED = [
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.5, seed=5),
    Sampling(temperature=1.0, top_k=4, min_p=0.02),
    Sampling(temperature=0.3, stop=("even",)),
    Sampling(temperature=1.0, stop=("even",), stop_token_ids=(3,)),
    Sampling(temperature=1.0, top_k=5, top_p=0.8, min_p=0.01),
]
Pair = tuple[Target, DFlash]


class Even:
    """A StopFinder: the third even token ends the string."""

    def flagged(self, stop: tuple[str, ...]) -> Sequence[int]:
        return range(0, VOCAB, 2)

    def watch(self, stop: tuple[str, ...]) -> Callable[[Sequence[int]], StopMatch | None]:
        seen: list[int] = []

        def look(token_ids: Sequence[int]) -> StopMatch | None:
            for token_id in token_ids:
                seen.append(token_id)
                if token_id % 2 == 0 and sum(item % 2 == 0 for item in seen) == 3:
                    return StopMatch(stop[0], len(seen))
            return None

        return look


def load_pair(folder: Path, dtype: str, **sizes: Any) -> Pair:
    """The tiny pair of the CPU tests, on the GPU."""
    set_numerics()
    device = torch.device("cuda")
    target = write_target(folder / "target", vocab=VOCAB, **sizes)
    drafter = write_drafter(folder / "drafter", target_folder=target, block=5)
    return (
        load_target(target, read_target_dims(target), dtype, device, 600),
        load_drafter(drafter, read_drafter_dims(drafter), dtype, device, 600),
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_pair(tmp_path_factory.mktemp("pair"), "float32")


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("page", [None, 3])
@pytest.mark.parametrize(
    ("method", "budget"),
    [("autoregressive", None), ("chain", None), ("ddtree", 1), ("ddtree", 7), ("ddtree", 33)],
)
def test_every_method_says_what_plain_decoding_says_on_a_gpu(
    pair: Pair, method: str, budget: int | None, page: int | None, rows: int
) -> None:
    engine = make_engine(*pair, method=method, budget=budget, rows=rows, page=page)
    prompts = random_prompts(LENGTHS, VOCAB)
    for prompt, done in zip(prompts, decode(engine, prompts), strict=True):
        steps = oracle.decode(pair[0], tuple(prompt), max_new_tokens=20, stop_token_ids=())
        assert min(step.gap for step in steps) > 1e-4
        assert done.token_ids == tuple(step.token_id for step in steps)
        if method != "autoregressive":
            rounds = oracle_ddtree.trace(
                *pair,
                tuple(prompt),
                done.token_ids,
                budget=engine.plan.nodes - 1,
                topk=engine.plan.topk,
            )
            assert done.accepted == tuple(len(r.accepted_nodes) - 1 for r in rounds)


@pytest.mark.parametrize("method", ["autoregressive", "chain", "ddtree"])
def test_sampled_tokens_are_the_oracles_draws_on_a_gpu(pair: Pair, method: str) -> None:
    """Rows of all temperatures and filters in one batch, with stop strings and log-probs."""
    prompts = [
        TokenPrompt(Key(place, 0, 0), tuple(ids), 20, own)
        for place, (ids, own) in enumerate(zip(random_prompts(LENGTHS, VOCAB), MIXED, strict=True))
    ]
    engine = make_engine(*pair, method=method, rows=3, finder=Even(), top_logprobs=3)
    for prompt, done in zip(prompts, run_all(engine, prompts), strict=True):
        assert find_partings(pair[0], prompt, done.token_ids) == []
        assert done.stop_string is None or done.token_ids[-1] % 2 == 0
        scores = oracle.Oracle(pair[0]).scores([*prompt.token_ids, *done.token_ids[:-1]])
        exact = scores[len(prompt.token_ids) - 1 :].log_softmax(dim=-1)
        assert done.logprobs is not None
        for place, token_id in enumerate(done.token_ids):
            assert abs(done.logprobs.token[place] - exact[place, token_id].item()) < 1e-4
            best = exact[place].topk(3).values.tolist()
            assert done.logprobs.top[place] == pytest.approx(best, abs=5e-3)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_says_what_its_oracle_says_on_a_gpu(tmp_path: Path, family: str) -> None:
    window = None if family == "llama" else 7
    pair = load_pair(tmp_path, "float32", family=family, window=window)
    prompts = random_prompts(LENGTHS, VOCAB)
    for budget in (0, 9):
        for place, done in enumerate(decode(make_engine(*pair, budget=budget), prompts)):
            prompt = TokenPrompt(Key(place, 0, 0), tuple(prompts[place]), 20)
            assert find_partings(pair[0], prompt, done.token_ids) == []


@pytest.mark.parametrize("own", MIXED[:3], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_a_short_dtype_every_parting_is_explained_on_a_gpu(
    tmp_path: Path, dtype: str, own: Sampling
) -> None:
    target, drafter = load_pair(tmp_path, dtype)
    engine = make_engine(target, drafter)
    numerics = measure_numerics(target, drafter, engine.plan)
    assert numerics.is_sound
    prompts = random_prompts(LENGTHS, VOCAB)
    for place, done in enumerate(decode(engine, prompts, sampling=own)):
        prompt = TokenPrompt(Key(place, 0, 0), tuple(prompts[place]), 20, own)
        for parting in find_partings(target, prompt, done.token_ids):
            assert parting.slack <= numerics.gap
