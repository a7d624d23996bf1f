"""RoundState: every tensor of the engine, allocated once, written in place, never re-bound.

A slot is a sequence's home (pages, length, output, histories); a row is a lane of the round that
works on one slot. The address of (slot, position) is page_table[slot, position // page] * page +
position % page. Knows nothing about models beyond their sizes.

Two cells follow the pages: the null cell stays zero and stands for every key that is not there, the
trash cell takes the writes of lanes that have nothing to write. One slot follows the slots:
nobody's, the home of inert rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.core import CachePlan, ShapePlan
from ddbatch.engine.sampling import SlotSampling, allocate_slot_sampling
from ddbatch.models.dims import ModelDims
from ddbatch.models.layers import Planes, VisibleKeys


class Finish(IntEnum):
    """Why a slot stopped; 0 while it is live."""

    LIVE = 0
    STOP = 1
    LENGTH = 2
    NAN_LOGITS = 3


class Logprobs(NamedTuple):
    """Of the token chosen at each node (round) or emitted at each place (slot), under the target's
    raw softmax. token: float32. top_id: int32, top: float16, M most probable tokens, best first.
    """

    token: Tensor
    top_id: Tensor
    top: Tensor


class DraftTree(NamedTuple):
    """The round's tree, node 0 = anchor.

    token_BN, parent_BN (-1 for the root), depth_BN: int64. ancestor_BNW: int32 bit words.
    """

    token_BN: Tensor
    parent_BN: Tensor
    depth_BN: Tensor
    ancestor_BNW: Tensor


@dataclass
class RoundState:
    """Static tensors of the engine; int64 unless stated. S slots incl. nobody's (the last)."""

    plan: ShapePlan
    cache_plan: CachePlan
    # Caches and the scratch of one forward.
    target_cache: Planes
    drafter_cache: Planes | None
    scratch: Planes  # keys and values of this forward's tokens
    page_table_SP: Tensor
    num_keys: int  # keys that attention looks at: no live sequence is longer
    # Per slot.
    length_S: Tensor  # committed tokens, those whose keys are in the cache
    anchor_S: Tensor  # last emitted token
    cap_S: Tensor  # tokens the slot may emit
    num_out_S: Tensor
    output_SO: Tensor
    finish_S: Tensor  # Finish
    flag_end_S: Tensor  # tokens up to the last emitted one that may end a stop string, 0 = none
    num_rounds_S: Tensor
    accepted_SO: Tensor  # drafted tokens kept, per round
    depth_SO: Tensor  # deepest node offered, per round
    sampling: SlotSampling
    logprobs_SO: Logprobs | None  # [S, O], [S, O, M]
    # Slots that are prefilled and wait for a row: a ring with one spare place for what is not
    # pushed.
    ready_S: Tensor
    ready_head: Tensor
    ready_tail: Tensor
    # Per row.
    slot_B: Tensor
    active_B: Tensor  # bool
    # The round.
    candidate_BDM: Tensor
    edge_BDM: Tensor  # float32 log-probs
    tree: DraftTree
    choice_BN: Tensor
    is_finite_BN: Tensor  # bool: is the best score of a node a number
    logprobs_BN: Logprobs | None  # [B, N], [B, N, M]
    scores_BNV: Tensor | None  # float32, kept only to be measured
    feature_TC: Tensor  # tapped states of the verified nodes, model dtype
    path_BK: Tensor
    num_accepted_B: Tensor
    emitted_BK: Tensor
    num_emitted_B: Tensor
    finish_B: Tensor

    @property
    def nobody(self) -> int:
        """The slot of inert rows."""
        return self.cache_plan.slots

    @property
    def null_cell(self) -> int:
        """The cell that stays zero."""
        return self.cache_plan.pages * self.cache_plan.page

    @property
    def trash_cell(self) -> int:
        """The cell that takes writes of nothing."""
        return self.null_cell + 1


def allocate_state(
    plan: ShapePlan,
    cache_plan: CachePlan,
    *,
    target: ModelDims,
    drafter: ModelDims | None,
    num_taps: int,
    max_new_tokens: int,
    prefill_tokens: int,
    top_logprobs: int | None,
    keeps_scores: bool = False,
    dtype: torch.dtype,
    device: torch.device,
) -> RoundState:
    """All tensors for one plan, zeroed; every row inert. top_logprobs: how many of the best tokens
    are told beside the emitted one; None = no log-probs."""
    B, N, D, M = plan.rows, plan.nodes, plan.draft_depth, plan.topk
    S, O = cache_plan.slots + 1, max_new_tokens
    cells = cache_plan.pages * cache_plan.page + 2
    tokens = max(B * N, prefill_tokens)

    def ints(*shape: int, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.long, device=device)

    def planes(dims: ModelDims, size: int) -> Planes:
        shape = (dims.layers, size, dims.kv_heads, dims.head_width)
        return Planes(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    def logprobs(*shape: int) -> Logprobs | None:
        if top_logprobs is None:
            return None
        return Logprobs(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(*shape, top_logprobs, dtype=torch.int32, device=device),
            torch.zeros(*shape, top_logprobs, dtype=torch.float16, device=device),
        )

    root = torch.zeros(B, N, -(-N // 32), dtype=torch.int32, device=device)
    root[:, 0, 0] = 1
    return RoundState(
        plan=plan,
        cache_plan=cache_plan,
        target_cache=planes(target, cells),
        drafter_cache=None if drafter is None else planes(drafter, cells),
        scratch=planes(target, tokens),
        page_table_SP=ints(S, cache_plan.max_len // cache_plan.page),
        num_keys=0,
        length_S=ints(S),
        anchor_S=ints(S),
        cap_S=ints(S),
        num_out_S=ints(S),
        output_SO=ints(S, O),
        finish_S=ints(S),
        flag_end_S=ints(S),
        num_rounds_S=ints(S),
        accepted_SO=ints(S, O),
        depth_SO=ints(S, O),
        sampling=allocate_slot_sampling(S, target.vocab, device),
        logprobs_SO=logprobs(S, O),
        ready_S=ints(S),
        ready_head=ints(1),
        ready_tail=ints(1),
        slot_B=ints(B, fill=cache_plan.slots),
        active_B=torch.zeros(B, dtype=torch.bool, device=device),
        candidate_BDM=ints(B, D, M),
        edge_BDM=torch.zeros(B, D, M, dtype=torch.float32, device=device),
        tree=DraftTree(ints(B, N), ints(B, N, fill=-1), ints(B, N), root),
        choice_BN=ints(B, N),
        is_finite_BN=torch.ones(B, N, dtype=torch.bool, device=device),
        logprobs_BN=logprobs(B, N),
        scores_BNV=torch.zeros(B, N, target.vocab, device=device) if keeps_scores else None,
        feature_TC=torch.zeros(B * N, num_taps * target.width, dtype=dtype, device=device),
        path_BK=ints(B, D + 1),
        num_accepted_B=ints(B),
        emitted_BK=ints(B, D + 1),
        num_emitted_B=ints(B),
        finish_B=ints(B),
    )


def cell_of(state: RoundState, slot: Tensor, pos: Tensor) -> Tensor:
    """Cells of (slot, position) pairs, two int64 tensors of one shape."""
    page = state.cache_plan.page
    return state.page_table_SP[slot, pos // page] * page + pos % page


def prefix_keys(
    state: RoundState, slot_B: Tensor, length_B: Tensor, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Cells of the first num_keys keys of each slot [B, S], and which of them exist (bool): those
    before length_B. What does not is the null cell: memory of another row is never read, not even
    masked.
    """
    pos_S = torch.arange(num_keys, device=slot_B.device)
    exists_BS = pos_S < length_B[:, None]
    addr_BS = cell_of(state, slot_B[:, None], pos_S[None])
    return torch.where(exists_BS, addr_BS, state.null_cell), exists_BS


def visible_keys(addr_BS: Tensor, is_visible_BQZ: Tensor, dtype: torch.dtype) -> VisibleKeys:
    """Turn a bool mask over [cached keys, new keys] into the additive one that attention takes."""
    bias = torch.zeros(is_visible_BQZ.shape, dtype=dtype, device=addr_BS.device)
    return VisibleKeys(addr_BS, bias.masked_fill_(~is_visible_BQZ, -torch.inf))
