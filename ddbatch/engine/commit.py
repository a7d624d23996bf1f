"""Commit stage: move what was accepted from scratch to its slot.

In: path_BK, emitted_BK, num_emitted_B, finish_B, scratch, feature_TC. Out: both caches, lengths,
anchors, outputs, histories; finished rows become inert. Knows nothing about how tokens were chosen.

As many keys are committed as tokens were emitted: the anchor's and those of all emitted tokens but
the last, which becomes the next anchor. The drafter's context grows here too, in the same step and
from the same path, so its length can never part from the target's.
"""

import torch
from torch import Tensor

from ddbatch.engine.state import RoundState, cell_of
from ddbatch.models.dflash import DFlash
from ddbatch.models.layers import Planes


def commit(drafter: DFlash | None, state: RoundState) -> None:
    """Write caches, lengths, anchors, outputs and histories of the live rows."""
    slot_B, count_B = state.slot_B, state.num_emitted_B
    B, N, K = state.plan.rows, state.plan.nodes, state.path_BK.shape[1]
    length_B = state.length_S[slot_B]
    place_K = torch.arange(K, device=slot_B.device)
    is_kept_BK = place_K < count_B[:, None]
    pos_BK = length_B[:, None] + place_K
    safe_pos_BK = torch.where(is_kept_BK, pos_BK, 0)
    cell_BK = torch.where(
        is_kept_BK, cell_of(state, slot_B[:, None], safe_pos_BK), state.trash_cell
    )
    row_B = torch.arange(B, device=slot_B.device)
    node_T = (row_B[:, None] * N + state.path_BK).flatten()
    write_cells(
        state.target_cache,
        cell_BK.flatten(),
        Planes(*(plane[:, node_T] for plane in state.scratch)),
    )
    if drafter is not None:
        append_context(
            drafter, state, state.feature_TC[node_T], safe_pos_BK.flatten(), cell_BK.flatten()
        )
    _record(state, slot_B, count_B, is_kept_BK, place_K)
    state.length_S[slot_B] = length_B + count_B
    state.finish_S[slot_B] = state.finish_B
    state.active_B &= state.finish_B == 0
    state.slot_B.copy_(torch.where(state.active_B, slot_B, state.nobody))


def append_context(
    drafter: DFlash, state: RoundState, feature_TC: Tensor, pos_T: Tensor, cell_T: Tensor
) -> None:
    """Write the drafter's context keys and values of committed tokens into its planes."""
    assert state.drafter_cache is not None
    write_cells(state.drafter_cache, cell_T, drafter.context(feature_TC, pos_T))


def write_cells(cache: Planes, cell_T: Tensor, new: Planes) -> None:
    """cache[:, cell_T] = new, [L, T, G, E]; only the trash cell may be named twice."""
    cache.k_LXGE.index_copy_(1, cell_T, new.k_LXGE)
    cache.v_LXGE.index_copy_(1, cell_T, new.v_LXGE)


def _record(
    state: RoundState, slot_B: Tensor, count_B: Tensor, is_kept_BK: Tensor, place_K: Tensor
) -> None:
    """Outputs, anchors and histories. What is not kept goes to nobody's slot, which none reads."""
    num_out_B = state.num_out_S[slot_B]
    home_BK = torch.where(is_kept_BK, slot_B[:, None], state.nobody)
    place_BK = torch.where(is_kept_BK, num_out_B[:, None] + place_K, 0)
    state.output_SO[home_BK, place_BK] = state.emitted_BK
    if state.logprobs_SO is not None and state.logprobs_BN is not None:
        row_B1 = torch.arange(len(slot_B), device=slot_B.device)[:, None]
        for history_SO, told_BN in zip(state.logprobs_SO, state.logprobs_BN, strict=True):
            # The draw at a path's node is the token emitted at its place.
            history_SO[home_BK, place_BK] = told_BN[row_B1, state.path_BK]
    may_end_BK = state.sampling.may_end_string(slot_B[:, None], state.emitted_BK) & is_kept_BK
    flag_end_B = torch.where(may_end_BK, place_BK + 1, 0).amax(dim=1)
    state.flag_end_S[slot_B] = torch.maximum(state.flag_end_S[slot_B], flag_end_B)
    last_B1 = (count_B - 1).clamp(min=0)[:, None]
    state.anchor_S[slot_B] = state.emitted_BK.gather(1, last_B1).squeeze(1)
    state.num_out_S[slot_B] = num_out_B + count_B
    round_B = torch.where(state.active_B, state.num_rounds_S[slot_B], 0)
    state.accepted_SO[slot_B, round_B] = state.num_accepted_B
    state.depth_SO[slot_B, round_B] = state.tree.depth_BN.amax(dim=1)
    state.num_rounds_S[slot_B] = round_B + 1
