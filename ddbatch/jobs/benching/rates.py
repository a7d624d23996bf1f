"""What the hardware gives, measured, and the least that a round must do: bytes and operations.

Knows the stages of a round and the sizes of models. Knows nothing about arms or tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from ddbatch.engine.engine import Engine
from ddbatch.jobs.benching.steady import Run, times_ms


class Rates(NamedTuple):
    """Measured, a second: bytes read, bytes moved by a copy, operations of a matrix product."""

    read: float
    copy: float
    matmul: float

    @property
    def memory(self) -> float:
        """Bytes a second at the better of a read and a copy."""
        return max(self.read, self.copy)

    def __str__(self) -> str:
        return (
            f"read {self.read / 1e12:.3f} TB/s, copy {self.copy / 1e12:.3f} TB/s (read and "
            f"written), matrix product {self.matmul / 1e12:.1f} TFLOP/s"
        )


class Work(NamedTuple):
    """What an op cannot do without."""

    num_bytes: float
    operations: float

    def floor_ms(self, rates: Rates) -> float:
        """Milliseconds at these rates: of its bytes or of its arithmetic, whichever is longer."""
        return 1000 * max(self.num_bytes / rates.memory, self.operations / rates.matmul)


Works = dict[tuple[str, str], Work]  # by stage and kind of op


def total(works: Iterable[Work]) -> Work:
    """All of it."""
    listed = list(works)
    return Work(sum(work.num_bytes for work in listed), sum(work.operations for work in listed))


@torch.inference_mode()
def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """On fresh random data that no cache holds."""
    count, side = 1 << 24, 1024
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        count, side = min(1 << 31, free // (4 * dtype.itemsize)), 8192

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_()

    source, a, b = random(count), random(side, side), random(side, side)
    target = torch.empty_like(source)
    # A product as models have it: of a CPU's bfloat16 the other order is ten times slower.
    runs: list[Run] = [source.sum, lambda: target.copy_(source), lambda: linear(a, b)]
    read, copy, matmul = (
        statistics.median(times) / 1000
        for times in times_ms(runs, device, before=lambda: None, repeats=10)
    )
    size = source.nbytes
    return Rates(size / read, 2 * size / copy, 2 * side**3 / matmul)


def works_of(engine: Engine, context: int) -> Works:
    """What a round must do, by stage and kind: weights once, keys of the context once."""
    plan, target, drafter = engine.plan, engine.target, engine.drafter
    size, head = target.embed.element_size(), target.head.numel()
    found: Works = {}
    forwards = [("verify", target.layers, target.dims, plan.nodes, plan.nodes)]
    if drafter is not None:
        own = drafter.dims.decoder
        forwards.append(("draft", drafter.layers, own, plan.block, plan.draft_depth))
        pair_width = 2 * own.kv_heads * own.head_width  # of a key and a value
        append = drafter.fuse.weight.numel() + own.layers * own.width * pair_width
        tokens = plan.rows * (plan.draft_depth + 1)
        found["commit", "matmul"] = Work(append * size, 2 * append * tokens)
    for stage, layers, dims, queries, scored in forwards:
        weights = sum(weight.numel() for weight in layers.parameters())
        keys = plan.rows * (context + queries) * dims.layers
        found[stage, "matmul"] = Work(weights * size, 2 * weights * plan.rows * queries)
        found[stage, "attention"] = Work(
            keys * 2 * dims.kv_heads * dims.head_width * size,
            keys * queries * 4 * dims.heads * dims.head_width,
        )
        found[stage, "head"] = Work(head * size, 2 * head * plan.rows * scored)
    return found
