"""An engine of interpreted kernels says what an engine of references says, tokens and histories."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import KERNEL_DEVICE
from decoding import make_engine, random_prompts, run_all, token_prompts
from interpreted import use_kernels
from tiny import load_tiny_pair

from ddbatch.core import PrefillPlan, Sampling

VOCAB = 29
OWN = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.1, top_k=9, top_p=0.8, seed=5),
    Sampling(stop_token_ids=(4, 11)),
]

needs_interpreter = pytest.mark.skipif(
    KERNEL_DEVICE != "cpu", reason="on a GPU every engine runs the kernels"
)


@needs_interpreter
@pytest.mark.parametrize(("method", "budget"), [("autoregressive", None), ("ddtree", 5)])
def test_kernels_decode_as_references_do(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, method: str, budget: int | None
) -> None:
    pair = load_tiny_pair(tmp_path, vocab=VOCAB, family="qwen3", window=7, full_layers=1)
    prompts = token_prompts(random_prompts([1, 9, 70, 20], VOCAB), [1, 3, 4, 5], OWN)
    sizes = {"method": method, "budget": budget, "rows": 2, "max_len": 96}
    expected = run_all(make_engine(*pair, **sizes), prompts)
    use_kernels(monkeypatch)
    found = run_all(make_engine(*pair, **sizes), prompts)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.accepted == theirs.accepted
        assert ours.finish_reason == theirs.finish_reason


@needs_interpreter
def test_kernels_take_pieces_of_a_single_token(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = load_tiny_pair(tmp_path, vocab=VOCAB)
    prompts = token_prompts(random_prompts([1, 9, 4], VOCAB), 1)
    sizes = {"method": "autoregressive", "rows": 2, "prefill_plan": PrefillPlan(3, 1, True)}
    expected = run_all(make_engine(*pair, **sizes), prompts)
    use_kernels(monkeypatch)
    found = run_all(make_engine(*pair, **sizes), prompts)
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
