"""Commit stage: tell what the round did, and move what was accepted from scratch to its slot.

In: the verified nodes, what was accepted of them, scratch cells, feature_TC. Out: the round's
record, both caches, lengths, anchors, counts; finished rows become inert. Knows nothing about how
tokens were chosen.

The drafter's context grows here too, in the same step and from the same path, so its length can
never part from the target's.
"""

from torch import Tensor

from ddbatch.engine.state import RoundState
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.commit_rows import commit_rows
from ddbatch_kernels.move_cells import move_cells


def commit(drafter: DFlash | None, state: RoundState) -> None:
    """Write the record, then lengths, anchors and counts of the live rows, and the caches."""
    kept = commit_rows(
        state.nodes,
        state.accepted,
        state.rows,
        state.slots,
        state.record,
        page=state.cache_plan.page,
        max_len=state.cache_plan.max_len,
        trash_cell=state.trash_cell,
    )
    cell_T = kept.cell_BK.flatten()
    feature_TC = move_cells(
        *state.target_cache,
        state.feature_TC,
        kept.node_BK.flatten(),
        cell_T,
        scratch_cell=state.scratch_cell,
        trash_cell=state.trash_cell,
    )
    if drafter is not None:
        append_context(drafter, state, feature_TC, kept.pos_BK.flatten(), cell_T)


def append_context(
    drafter: DFlash, state: RoundState, feature_TC: Tensor, pos_T: Tensor, cell_T: Tensor
) -> None:
    """Write the drafter's context keys and values of committed tokens into its planes."""
    assert state.drafter_cache is not None
    drafter.append_context(feature_TC, pos_T, state.drafter_cache, cell_T)
