"""What rounds cost on an H200, as docs/speed.md has it, and what a made drafter emits.

Between measurements straight lines, by rows' logarithm, nodes or tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddbatch.core import ShapePlan
from ddbatch.engine.candidates import candidates, rungs
from ddbatch.engine.curves import CostCurve
from ddbatch.engine.plan import Method

CONTEXT = 256
METHODS: tuple[Method, ...] = ("ddtree", "chain", "autoregressive")

_ROWS = (1, 8, 32, 64, 128, 512)
_PLAIN_MS = (0.502, 0.513, 0.578, 0.695, 0.808, 1.77)
_DRAFTED_MS = {  # by nodes
    4: (0.623, 0.666, 0.822, 1.01, 1.41, 3.89),
    6: (0.634, 0.703, 1.03, 1.36, 1.80, 4.96),
    9: (0.640, 0.760, 1.13, 1.41, 2.18, 6.61),
    16: (0.645, 0.785, 1.43, 1.93, 3.41, 9.82),
}


def smol_seconds(plan: ShapePlan) -> float:
    """Of a round of SmolLM2-135M. Beyond 16 nodes each token costs what it did from 9 to 16 with
    512 rows, or half of the round where few rows make it cheaper."""
    if plan.nodes == 1:
        return _by_rows(plan.rows, _PLAIN_MS) / 1e3
    nodes = list(_DRAFTED_MS)
    times = [_by_rows(plan.rows, times) for times in _DRAFTED_MS.values()]
    more = max(0, plan.nodes - 16) * plan.rows * 0.9e-3
    return float(np.interp(plan.nodes, nodes, times) + more) / 1e3


def _by_rows(rows: int, times: Sequence[float]) -> float:
    return float(np.interp(math.log(rows), np.log(_ROWS), times))


def large_seconds(plan: ShapePlan) -> float:
    """Of a round in the shape of Qwen3-8B: each row's keys, all tokens' products, and a draft."""
    tokens = plan.rows * plan.nodes
    keys = 0.0355 * plan.rows
    products = float(np.interp(tokens, (1, 64, 128, 1040, 4096), (4.9, 5.2, 6.47, 28.3, 105)))
    drafted = plan.rows * plan.block
    draft = float(np.interp(drafted, (16, 128, 256, 2048, 8192), (1.09, 1.39, 2.1, 9.2, 35)))
    return (keys + products + (draft if plan.nodes > 1 else 0.0)) / 1e3


def measured(
    seconds: Callable[[ShapePlan], float], rows: int, max_tokens: int | None = None
) -> CostCurve:
    """All candidates of all rungs."""
    costs = CostCurve(prefill_tokens=2048, prefill_call_seconds=0.045)
    for rung in rungs(rows):
        for plan in candidates(
            rung, block=16, vocab=1000, max_tokens=max_tokens, has_drafter=True, methods=METHODS
        ):
            costs.add(plan, CONTEXT, seconds(plan))
    return costs


@dataclass(frozen=True)
class Drafter:
    """A drafter whose best candidate of the first position is right with `chance`; the next ones'
    chance falls by `rank_fall` (1 - chance), each position's by `depth_fall`, and a block cut short
    loses `short_loss` of what is accepted."""

    chance: float
    rank_fall: float = 0.75
    depth_fall: float = 1.0
    short_loss: float = 0.0

    def accepted(self, plan: ShapePlan) -> float:
        """Drafted tokens a row-round, by a heap of paths: a slow twin of the engine's model."""
        budget, fall = plan.nodes - 1, self.rank_fall * (1 - self.chance)
        first = self.chance
        heap = [(-first, 1, 1, first)] if budget else []  # chance of the path, depth, rank, best's
        accepted = 0.0
        for _ in range(budget):
            chance, depth, rank, best = heapq.heappop(heap)
            accepted -= chance
            if rank < plan.topk:
                heapq.heappush(heap, (chance * fall, depth, rank + 1, best))
            if depth < plan.draft_depth:
                child = best * self.depth_fall
                heapq.heappush(heap, (chance * child, depth + 1, 1, child))
        return accepted * (1 - self.short_loss if plan.block < 16 else 1.0)
