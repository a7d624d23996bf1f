"""Draft stage: one drafter forward per round proposes M candidates for each of D positions.

In: anchors, lengths, the drafter's context planes. Out: candidate_BDM, edge_BDM. Knows nothing
about trees.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.engine.state import RoundState, scratch_cells
from ddbatch.engine.windows import row_keys
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.ancestors import pack_ancestors
from ddbatch_kernels.top_candidates import top_candidates


def draft(target: Target, drafter: DFlash, state: RoundState, num_keys: int) -> None:
    """Write candidate_BDM and edge_BDM (log-probs) of the positions after each row's anchor."""
    plan, dims = state.plan, drafter.dims
    B, K, D = plan.rows, plan.block, plan.draft_depth
    assert state.drafter_cache is not None
    block = block_constants(K, state.slot_B.device)
    length_B, anchor_B = state.length_S[state.slot_B], state.anchor_S[state.slot_B]
    token_BK = torch.where(block.is_anchor_K, anchor_B[:, None], dims.mask_token_id)
    pos_BK = length_B[:, None] + block.place_K
    keys = row_keys(state, pos_BK, block.sees_1KW, num_keys, window=dims.decoder.window)
    cell_BK = scratch_cells(state, B, K)
    hidden_TD = drafter(
        token_BK.flatten(),
        target.embed,
        pos_BK.flatten(),
        state.drafter_cache,
        cell_BK.flatten(),
        keys,
    )
    # No tree is deeper than D, so later positions need no scores.
    hidden_BDD = hidden_TD.unflatten(0, (B, K))[:, 1 : D + 1]
    logits_BDV = target.logits(hidden_BDD.flatten(0, 1)).unflatten(0, (B, D))
    token_BDM, logprob_BDM = top_candidates(logits_BDV, plan.topk)
    state.candidate_BDM.copy_(token_BDM)
    state.edge_BDM.copy_(logprob_BDM)


class BlockConstants(NamedTuple):
    """place_K: int64, 0.. is_anchor_K: bool, the first. sees_1KW: bit words of tokens that all see
    each other."""

    place_K: Tensor
    is_anchor_K: Tensor
    sees_1KW: Tensor


@cache  # a captured round goes on reading these
def block_constants(block: int, device: torch.device) -> BlockConstants:
    """Of blocks of this size."""
    place_K = torch.arange(block, device=device)
    whole = torch.ones(1, block, block, dtype=torch.bool, device=device)
    return BlockConstants(place_K, place_K == 0, pack_ancestors(whole))
