"""Sums in order: a prompt's tokens and log-probs have the same bits whatever is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import KERNEL_DEVICE
from decoding import make_engine, random_prompts, run_all, token_prompts
from interpreted import use_kernels
from tiny import load_tiny_pair

from ddbatch.core import Completion, Sampling
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.load import load_target

VOCAB = 29
IS_NATIVE = KERNEL_DEVICE == "cuda"
OWN = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.1, top_k=9, seed=5)]
# Of a prompt: one piece, and more than one.
LENGTHS = [1, 70, 9, 64, 33, 130, 2, 250, 300] if IS_NATIVE else [66, 3]
PLANS: list[dict[str, Any]] = [
    {"budget": 0, "rows": 1},
    {"budget": 5, "rows": 2},
    {"method": "chain", "rows": 3},
]
if IS_NATIVE:
    PLANS += [{"budget": budget, "rows": rows} for budget in (0, 8, 16, 32) for rows in (1, 7, 64)]
DTYPES = ["float32", "bfloat16", "float16"] if IS_NATIVE else ["float32"]


def bits(done: Completion) -> tuple[Any, ...]:
    assert done.logprobs is not None
    return (done.token_ids, done.finish_reason, tuple(done.logprobs.token))


def open_pair(folder: Path, dtype: str, **sizes: Any) -> tuple[Target, DFlash]:
    """A pair whose target sums in order."""
    target, drafter = load_tiny_pair(folder, KERNEL_DEVICE, dtype, vocab=VOCAB, **sizes)
    own = load_target(
        folder / "target",
        target.dims,
        dtype,  # type: ignore[arg-type]
        torch.device(KERNEL_DEVICE),
        target.rope_P2E.shape[0],
        in_order=True,
    )
    return own, drafter


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"] if IS_NATIVE else ["qwen3"])
def test_all_plans_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    window = {} if family == "llama" else {"window": 7, "full_layers": 1}
    pair = open_pair(tmp_path, dtype, family=family, **window)
    use_kernels(monkeypatch)
    cap = 24 if IS_NATIVE else 3
    prompts = token_prompts(
        random_prompts(LENGTHS, VOCAB), cap, [OWN[n % 3] for n in range(len(LENGTHS))]
    )
    found = []
    for plan in PLANS:
        engine = make_engine(*pair, max_len=384, page=64, top_logprobs=2, **plan)
        found.append([bits(done) for done in run_all(engine, prompts)])
    for plan, told in zip(PLANS[1:], found[1:], strict=True):
        assert told == found[0], plan
