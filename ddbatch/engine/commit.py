"""Commit stage: move what was accepted from scratch to its slot.

In: path_BK, emitted_BK, num_emitted_B, finish_B, scratch cells, feature_TC. Out: both caches,
lengths, anchors, counts; finished rows become inert. Knows nothing about how tokens were chosen.

As many keys are committed as tokens were emitted: the anchor's and those of all emitted tokens but
the last, which becomes the next anchor. The drafter's context grows here too, in the same step and
from the same path, so its length can never part from the target's.
"""

import torch
from torch import Tensor

from ddbatch.engine.state import RoundState, cell_of, scratch_cells
from ddbatch.models.dflash import DFlash
from ddbatch.models.layers import Planes


def commit(drafter: DFlash | None, state: RoundState) -> None:
    """Write caches, lengths, anchors and counts of the live rows."""
    slot_B, count_B = state.slot_B, state.num_emitted_B
    B, N, K = state.plan.rows, state.plan.nodes, state.path_BK.shape[1]
    length_B, num_out_B = state.length_S[slot_B], state.num_out_S[slot_B]
    place_K = torch.arange(K, device=slot_B.device)
    is_kept_BK = place_K < count_B[:, None]
    safe_pos_BK = torch.where(is_kept_BK, length_B[:, None] + place_K, 0)
    cell_BK = torch.where(
        is_kept_BK, cell_of(state, slot_B[:, None], safe_pos_BK), state.trash_cell
    )
    from_BK = scratch_cells(state, B, N).gather(1, state.path_BK)
    write_cells(
        state.target_cache,
        cell_BK.flatten(),
        Planes(*(plane.index_select(1, from_BK.flatten()) for plane in state.target_cache)),
    )
    if drafter is not None:
        row_B = torch.arange(B, device=slot_B.device)
        node_T = (row_B[:, None] * N + state.path_BK).flatten()
        append_context(
            drafter, state, state.feature_TC[node_T], safe_pos_BK.flatten(), cell_BK.flatten()
        )
    # Inert rows share nobody's slot and leave zeros there.
    state.length_S[slot_B] = length_B + count_B
    state.num_out_S[slot_B] = num_out_B + count_B
    last_B1 = (count_B - 1).clamp(0, K - 1)[:, None]  # a wrong count is told, and not a fault
    anchor_B = state.emitted_BK.gather(1, last_B1).squeeze(1)
    state.anchor_S[slot_B] = torch.where(state.active_B, anchor_B, 0)
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
