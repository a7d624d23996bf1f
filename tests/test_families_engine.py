"""Pairs of every family in the engine: it says what the oracle decodes, token for token, with the
oracle's trees. Stop ids come from every file that names some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from decoding import decode, make_engine, random_prompts
from families import random_ids
from tiny import FORMS, edit_config, load_tiny_pair, read_drafter, read_target

from ddbatch.config import Config
from ddbatch.core import PrefillPlan
from ddbatch.engine import oracle, oracle_ddtree
from ddbatch.engine.engine import Engine
from ddbatch.engine.windows import row_keys
from ddbatch.jobs.generating.decoding import open_pair
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

VOCAB = 13  # small, so that a random drafter is often right
NEAR_TIE = 1e-4
LENGTHS = (1, 9, 4, 17, 2, 30, 5)

# Trees are up to 4 deep: under a window of 3 the deepest nodes see neither prefix nor root, under
# one of 7 the border of prefix and tree lies inside.
PAIRS: dict[str, dict[str, Any]] = {
    "llama": {"seed": 1},
    "qwen2": {"family": "qwen2", "seed": 2},
    "qwen2, window 7": {"family": "qwen2", "window": 7, "full_layers": 2, "tied": False, "seed": 3},
    "qwen3": {"family": "qwen3", "seed": 4},
    "qwen3, window 3": {
        "family": "qwen3",
        "window": 3,
        "full_layers": 1,
        "nested_keys": True,
        "seed": 5,
    },
    "mistral": {"family": "mistral", "tied": False, "seed": 6},
    "mistral, window 7": {"family": "mistral", "window": 7, "windows": (3, None), "seed": 7},
    "mistral, window 1": {"family": "mistral", "window": 1, "seed": 8},
}


class Judged(NamedTuple):
    """A pair, and what the oracle says after each prompt."""

    target: Target
    drafter: DFlash
    outputs: list[tuple[int, ...]]


@pytest.fixture(scope="module", params=PAIRS)
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = load_tiny_pair(folder, vocab=VOCAB, block=5, **PAIRS[request.param])
    outputs = []
    for prompt in random_prompts(LENGTHS, VOCAB):
        steps = oracle.decode(target, tuple(prompt), max_new_tokens=20, stop_token_ids=())
        assert min(step.gap for step in steps) > NEAR_TIE, "a near-tie: choose another seed"
        outputs.append(tuple(step.token_id for step in steps))
    return Judged(target, drafter, outputs)


def says(engine: Engine) -> list[tuple[int, ...]]:
    return [c.token_ids for c in decode(engine, random_prompts(LENGTHS, VOCAB))]


@pytest.mark.parametrize("budget", [0, 1, 7, 40])
def test_trees_of_every_family_say_what_plain_decoding_says(judged: Judged, budget: int) -> None:
    engine = make_engine(judged.target, judged.drafter, budget=budget, method="auto")
    assert says(engine) == judged.outputs


@pytest.mark.parametrize(
    ("page", "prefill_plan"),
    [
        (1, PrefillPlan(chunks=2, chunk=64, is_fixed=False)),
        (3, PrefillPlan(chunks=1, chunk=7, is_fixed=True)),
        (16, PrefillPlan(chunks=5, chunk=1, is_fixed=False)),
        (None, PrefillPlan(chunks=3, chunk=5, is_fixed=True)),
    ],
)
def test_pages_and_pieces_of_every_family_change_nothing(
    judged: Judged, page: int | None, prefill_plan: PrefillPlan
) -> None:
    engine = make_engine(
        judged.target, judged.drafter, budget=9, page=page, prefill_plan=prefill_plan
    )
    assert says(engine) == judged.outputs


def test_trees_of_every_family_are_followed_as_far_as_the_oracles(judged: Judged) -> None:
    engine = make_engine(judged.target, judged.drafter, budget=9)
    prompts = random_prompts(LENGTHS, VOCAB)
    done = decode(engine, prompts)
    assert sum(sum(completion.accepted) for completion in done) > 0
    for prompt, output, completion in zip(prompts, judged.outputs, done, strict=True):
        rounds = oracle_ddtree.trace(
            judged.target, judged.drafter, tuple(prompt), output, budget=9, topk=engine.plan.topk
        )
        assert completion.accepted == tuple(len(r.accepted_nodes) - 1 for r in rounds)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FORMS)
def test_a_half_pair_of_every_family_decodes(tmp_path: Path, family: str, dtype: str) -> None:
    load_tiny_pair(tmp_path, vocab=VOCAB, family=family, dtype=getattr(torch, dtype))
    target = read_target(tmp_path / "target", dtype)
    drafter = read_drafter(tmp_path / "drafter", tmp_path / "target", dtype)
    assert {weight.dtype for weight in target.parameters()} == {getattr(torch, dtype)}
    done = decode(make_engine(target, drafter), random_prompts(LENGTHS, VOCAB))
    assert {len(completion.token_ids) for completion in done} == {20}


def test_a_window_hides_what_lies_behind_it(tmp_path: Path) -> None:
    """Guards the comparisons above: windows that did nothing would pass them all the same way."""
    outputs = set()
    prompt = tuple(random_ids(17, VOCAB, seed=3))
    for window in (None, 3, 7):
        target, drafter = load_tiny_pair(
            tmp_path / str(window), vocab=VOCAB, family="mistral", window=window, seed=9
        )
        (done,) = decode(make_engine(target, drafter), [prompt])
        outputs.add(done.token_ids)
    assert len(outputs) == 3


def test_without_a_window_no_second_mask_is_made(tmp_path: Path) -> None:
    state = make_engine(*load_tiny_pair(tmp_path, vocab=VOCAB)).state
    own_BQW = torch.ones(1, 3, 1, dtype=torch.int32)
    pos_BQ = torch.arange(3).expand(state.plan.rows, 3)
    for window, has_one in ((None, True), (5, False)):
        keys = row_keys(state, pos_BQ, own_BQW, 7, window=window)
        assert (keys.sliding is keys.full) == has_one


@pytest.mark.parametrize("family", FORMS)
def test_stop_ids_are_those_of_every_file_that_names_some(tmp_path: Path, family: str) -> None:
    """Qwen's config.json names one id, its generation_config.json a list."""
    load_tiny_pair(tmp_path, vocab=VOCAB, family=family)
    edit_config(tmp_path / "target", eos_token_id=[5, 7])
    generation = {"eos_token_id": [7, 11], "temperature": 0.6}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(generation))
    config = Config()
    config.model.path, config.drafter.path = str(tmp_path / "target"), str(tmp_path / "drafter")
    assert open_pair(config, eos_token_id=3).eos_token_ids == (3, 5, 7, 11)
    assert open_pair(config, eos_token_id=None).eos_token_ids == (5, 7, 11)
