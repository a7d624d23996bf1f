"""A real Llama-shaped target, where it can be had: SmolLM2 against transformers."""

from __future__ import annotations

import pytest
import torch
from conftest import RealPair
from families import Runner, Twins, assert_close, open_twins, pieces, random_ids

from ddbatch.engine.oracle import decode


@pytest.fixture(scope="module")
def smollm2(real_pair: RealPair) -> Twins:
    return open_twins(real_pair.target)


@pytest.mark.shared
@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_smollm2_gives_transformers_scores(smollm2: Twins, length: int) -> None:
    ids = random_ids(length, smollm2.ours.dims.vocab, seed=length)
    runner = Runner(smollm2.ours, 1, length, torch.float32)
    ours = torch.cat([runner.extend(piece) for piece in pieces(ids, 16)])
    assert_close(ours, smollm2.expected(ids))


@pytest.mark.shared
def test_smollm2_decodes_as_transformers_generates(smollm2: Twins) -> None:
    ids = random_ids(7, smollm2.ours.dims.vocab, seed=1)
    steps = decode(smollm2.ours, tuple(ids), max_new_tokens=24, stop_token_ids=())
    theirs = smollm2.theirs.generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert min(step.gap for step in steps) > 1e-4, "a near-tie: choose another seed"
    assert [step.token_id for step in steps] == theirs[0, 7:].tolist()
    runner = Runner(smollm2.ours, 1, 64, torch.float32)
    scores = runner.extend(ids)[-1]
    text = list(ids)
    for step in steps:  # token by token through the cache
        assert int(scores.argmax()) == step.token_id
        text.append(step.token_id)
        scores = runner.extend([step.token_id])[-1]
    assert_close(scores, smollm2.expected(text)[-1])
