"""What a round launches besides the ops of ddbatch_kernels: PyTorch's own kernels, each a
microsecond or two of a round that should take less than one thousand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from decoding import make_engine, random_prompts, run_all, token_prompts
from interpreted import ops
from tiny import load_tiny_pair
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ddbatch.core import Sampling
from ddbatch.engine import programs
from ddbatch.engine.round import run_round

VOCAB = 29
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)
NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::empty_like")
# Of the models: the last norm of each, the drafter's context (two products and a norm), the tapped
# layers side by side. Of the draft stage: the block without its anchor, where there are many rows.
DRAFTED = ["bmm", "cat", "flatten", "linear", "rms_norm", "rms_norm", "rms_norm"]


class Launches(TorchDispatchMode):
    """Names of the ops that make something, outside ours."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.is_inside = False  # an op of ours

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.is_inside and _is_launch(func, (args, kwargs), found):
            self.names.append(func.name().removeprefix("aten::").split(".")[0])
        return found

    def within(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """The op, of which nothing is counted; its results are dense, as a kernel leaves them."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.is_inside = True
            found = op(*args, **kwargs)
            if not kwargs.get("out"):
                found = tree_map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, found)
            self.is_inside = False
            return found

        return run


def _is_launch(func: Any, given: Any, found: Any) -> bool:
    """Not where what is found is empty, or a view of what was given."""
    made = [tensor for tensor in _tensors(found) if tensor.numel()]
    if func._schema.is_mutable:
        return bool(made)
    held = {tensor.untyped_storage().data_ptr() for tensor in _tensors(given)}
    is_new = any(tensor.untyped_storage().data_ptr() not in held for tensor in made)
    return is_new and func._schema.name not in NO_LAUNCH


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    ("method", "top_logprobs", "expected"),
    [
        ("autoregressive", None, ["rms_norm"]),
        ("chain", None, DRAFTED),
        ("ddtree", None, DRAFTED),
        ("ddtree", 2, [*DRAFTED, "gather", "sub", "clamp"]),
    ],
)
def test_a_round_launches_no_more_than_these_besides_our_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    top_logprobs: int | None,
    expected: list[str],
    sampling: Sampling,
) -> None:
    pair = load_tiny_pair(tmp_path, vocab=VOCAB)
    budget = None if method == "autoregressive" else 7
    sizes = {"method": method, "budget": budget, "rows": 2, "top_logprobs": top_logprobs}
    engine = make_engine(*pair, **sizes, is_captured=False)
    counted = Launches()
    for _, public, _ in ops():
        op = counted.within(public)
        for module in [m for key, m in sys.modules.items() if key.startswith("ddbatch.")]:
            for attribute, value in list(vars(module).items()):
                if value is public:
                    monkeypatch.setattr(module, attribute, op)
    rounds = []

    def run_counted(*args: Any) -> None:
        counted.names.clear()
        with counted:
            run_round(*args)
        rounds.append(sorted(counted.names))

    monkeypatch.setattr(programs, "run_round", run_counted)
    prompts = token_prompts(random_prompts([5, 9], VOCAB), [6, 7], sampling)
    run_all(engine, prompts)
    # The first round makes what all others read.
    assert rounds[1] == sorted(expected)
    assert all(names == rounds[1] for names in rounds[2:])
