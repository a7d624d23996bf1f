"""An engine of interpreted kernels says what an engine of references says, tokens and histories."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import KERNEL_DEVICE
from decoding import make_engine, random_prompts, run_all, token_prompts
from tiny import load_tiny_pair

import ddbatch_kernels
from ddbatch.core import Sampling

VOCAB = 29
OWN = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.1, top_k=9, top_p=0.8, seed=5),
    Sampling(stop_token_ids=(4, 11)),
]


def ops() -> Iterator[tuple[str, Any, Any]]:
    """Name, public function and kernel launcher of each op."""
    for module in pkgutil.iter_modules(ddbatch_kernels.__path__):
        if module.ispkg:
            op = importlib.import_module(f"ddbatch_kernels.{module.name}")
            kernel = importlib.import_module(f"ddbatch_kernels.{module.name}.kernel")
            yield module.name, getattr(op, module.name), getattr(kernel, f"{module.name}_triton")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the package calls an op, its kernel is called."""
    if KERNEL_DEVICE != "cpu":
        pytest.skip("on a GPU every engine runs the kernels")
    for name, public, launcher in ops():
        for module in [m for key, m in sys.modules.items() if key.startswith("ddbatch.")]:
            for attribute, value in list(vars(module).items()):
                if value is public:
                    monkeypatch.setattr(module, attribute, launcher)
        assert launcher is not public, name


@pytest.mark.parametrize(("method", "budget"), [("autoregressive", None), ("ddtree", 5)])
def test_kernels_decode_as_references_do(
    tmp_path: Any, request: pytest.FixtureRequest, method: str, budget: int | None
) -> None:
    pair = load_tiny_pair(tmp_path, vocab=VOCAB, family="qwen3", window=7, full_layers=1)
    prompts = token_prompts(random_prompts([1, 9, 70, 20], VOCAB), [1, 4, 5, 7], OWN)
    sizes = {"method": method, "budget": budget, "rows": 2, "max_len": 96}
    expected = run_all(make_engine(*pair, **sizes), prompts)
    request.getfixturevalue("interpreted")
    found = run_all(make_engine(*pair, **sizes), prompts)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.accepted == theirs.accepted
        assert ours.finish_reason == theirs.finish_reason
