"""Allocates the tensors of an engine: caches and slots once, rows and a round's own for each plan.

Knows sizes. Knows nothing about what is written where; what the tensors are for stands in state.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddbatch.core import CachePlan, PrefillPlan, ShapePlan
from ddbatch.engine.sampling import allocate_slot_sampling
from ddbatch.engine.state import Logprobs, RoundState, Told
from ddbatch.models.dims import ModelDims
from ddbatch.models.layers import Planes
from ddbatch_kernels.build_tree import TreeNodes
from ddbatch_kernels.facts import ChunkFact, Fact


class _Sizes(NamedTuple):
    """What tensors of a round take beside a plan."""

    target: ModelDims
    num_taps: int
    top_logprobs: int | None
    keeps_scores: bool
    dtype: torch.dtype
    device: torch.device

    def ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=self.device)

    def bools(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bool, device=self.device)

    def planes(self, dims: ModelDims, cells: int) -> Planes:
        shape = (dims.layers, cells, dims.kv_heads, dims.head_width)
        return Planes(*(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)))

    def logprobs(self, *shape: int) -> Logprobs | None:
        top, device = self.top_logprobs, self.device
        if top is None:
            return None
        return Logprobs(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(*shape, top, dtype=torch.int32, device=device),
            torch.zeros(*shape, top, dtype=torch.float16, device=device),
        )

    def told(self, rows: int, tokens: int) -> Told:
        shape = (rows + 1, len(Fact) + tokens)
        table_BX = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return Told(table_BX, self.logprobs(rows, tokens))


def allocate_states(
    plans: Sequence[ShapePlan],
    cache_plan: CachePlan,
    prefill_plan: PrefillPlan,
    *,
    target: ModelDims,
    drafter: ModelDims | None,
    num_taps: int,
    top_logprobs: int | None,
    keeps_scores: bool = False,
    dtype: torch.dtype,
    device: torch.device,
) -> list[RoundState]:
    """A state for each plan, every row inert: rows and what a round writes are its own, caches and
    slots are common. top_logprobs: how many of the best tokens are told beside the emitted one;
    None = no log-probs."""
    sizes = _Sizes(target, num_taps, top_logprobs, keeps_scores, dtype, device)
    R, S = prefill_plan.chunks, cache_plan.slots + 1
    cells = cache_plan.pages * cache_plan.page + 2
    verified = max(plan.rows * plan.nodes for plan in plans)
    drafted = max(plan.rows * plan.block for plan in plans)
    ints, bools = sizes.ints, sizes.bools
    first = RoundState(
        plan=plans[0],
        cache_plan=cache_plan,
        prefill_plan=prefill_plan,
        target_cache=sizes.planes(target, cells + verified),
        drafter_cache=None if drafter is None else sizes.planes(drafter, cells + drafted),
        page_table_SP=ints(S, cache_plan.max_len // cache_plan.page),
        length_S=ints(S),
        anchor_S=ints(S),
        cap_S=ints(S),
        num_out_S=ints(S),
        generation_S=ints(S),
        is_cancelled_S=bools(S),
        sampling=allocate_slot_sampling(S, target.vocab, device),
        ready_S=ints(S),
        ready_head=ints(1),
        ready_tail=ints(1),
        round_number=ints(1),
        call_number=ints(1),
        chunk_RX=ints(R, len(ChunkFact) + prefill_plan.chunk),
        chunk_told=sizes.told(R, 1),
        **_round_tensors(plans[0], sizes),
    )
    others = [replace(first, plan=plan, **_round_tensors(plan, sizes)) for plan in plans[1:]]
    states = [first, *others]
    for state in states:
        state.reset()
    return states


def _round_tensors(plan: ShapePlan, sizes: _Sizes) -> dict[str, Any]:
    """The fields of RoundState that a plan has for itself."""
    B, N, D, M = plan.rows, plan.nodes, plan.draft_depth, plan.topk
    ints, bools, device = sizes.ints, sizes.bools, sizes.device
    scores_BNV = (
        torch.zeros(B, N, sizes.target.vocab, device=device) if sizes.keeps_scores else None
    )
    num_taps = sizes.num_taps if N > 1 else 0  # plain rounds tap nothing
    return {
        "slot_B": ints(B),
        "active_B": bools(B),
        "candidate_BDM": ints(B, D, M),
        "edge_BDM": torch.zeros(B, D, M, dtype=torch.float32, device=device),
        "tree": TreeNodes(
            ints(B, N),
            ints(B, N),
            ints(B, N),
            torch.zeros(B, N, -(-N // 32), dtype=torch.int32, device=device),
        ),
        "pos_BN": ints(B, N),
        "choice_BN": ints(B, N),
        "is_finite_BN": bools(B, N),
        "logprobs_BN": sizes.logprobs(B, N),
        "scores_BNV": scores_BNV,
        "feature_TC": torch.zeros(
            B * N, num_taps * sizes.target.width, dtype=sizes.dtype, device=device
        ),
        "path_BK": ints(B, D + 1),
        "num_accepted_B": ints(B),
        "emitted_BK": ints(B, D + 1),
        "num_emitted_B": ints(B),
        "finish_B": ints(B),
        "told": sizes.told(B, D + 1),
    }
