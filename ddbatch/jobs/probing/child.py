"""The process of one candidate: `python -m ddbatch.jobs.probing.child TASK`, TASK a JSON object.

It says what it begins with and what it found, a JSON object a line on stdout. A fault takes the
process along, and nothing else. Knows nothing about other candidates.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ddbatch.engine.plan import AUTO_BUDGET, Method, plan_shapes
from ddbatch.engine.probe import measure_width, random_target, reduced
from ddbatch.jobs.generating.trials import is_out_of_memory
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import set_numerics

BLOCK = 16  # the usual block of drafts: how deep trees are


@dataclass(frozen=True)
class Task:
    """One candidate: so many tokens by a model of this folder's sizes. dtype: its name. budget: of
    a tree, None for the usual one."""

    model: str
    device: str
    dtype: str
    tokens: int
    budget: int | None
    in_order: bool
    is_captured: bool


def main(text: str) -> int:
    """Try one candidate, plain and with trees; the exit code. What is wrong with the values is an
    answer, and no error."""
    task = Task(**json.loads(text))
    set_numerics()
    dims, device = reduced(read_target_dims(Path(task.model))), torch.device(task.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    try:
        target = random_target(dims, getattr(torch, task.dtype), device, in_order=task.in_order)
        for method, budget in _splits(task.budget):
            rows = task.tokens // (budget + 1)
            if not rows:
                continue
            plan = plan_shapes(
                method,
                budget=budget,
                topk=None,
                rows=rows,
                block=BLOCK,
                vocab=dims.vocab,
                gemm_limit=None,
            )
            _say({"rows": plan.rows, "nodes": plan.nodes})
            found = measure_width(target, plan, is_captured=task.is_captured)
            _say({"errors": asdict(found)})
            if not found.is_sound:
                break
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        _say({"no_memory": str(error).splitlines()[0]})
    return 0


def _splits(budget: int | None) -> list[tuple[Method, int]]:
    """Ways to share a round's tokens among rows: without drafts, and with trees of the run's budget
    or the usual one. Without a budget too: what is found holds for all runs of the model."""
    return [("autoregressive", 0), ("ddtree", budget or AUTO_BUDGET)]


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
