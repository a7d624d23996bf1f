"""Draft stage: one drafter forward per round proposes M candidates for each of D positions.

In: anchors, lengths, the drafter's context planes. Out: candidate_BDM, edge_BDM. Knows nothing
about trees.
"""

from ddbatch.engine.constants import cell_range, whole_block
from ddbatch.engine.state import RoundState
from ddbatch.engine.windows import row_keys
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.open_blocks import open_blocks
from ddbatch_kernels.top_candidates import top_candidates


def draft(target: Target, drafter: DFlash, state: RoundState, num_keys: int) -> None:
    """Write candidate_BDM and edge_BDM (log-probs) of the positions after each row's anchor."""
    plan, dims = state.plan, drafter.dims
    B, K, D = plan.rows, plan.block, plan.draft_depth
    assert state.drafter_cache is not None
    slots = (state.slot_B, state.anchor_S, state.length_S)
    blocks = open_blocks(*slots, K, dims.mask_token_id)
    device = state.slot_B.device
    hidden_TD = drafter(
        blocks.token_BK.flatten(),
        target.embed,
        blocks.pos_BK.flatten(),
        state.drafter_cache,
        cell_range(state.scratch_cell, B * K, device),
        row_keys(
            state, blocks.pos_BK, whole_block(K, device), num_keys, window=dims.decoder.window
        ),
    )
    # No tree is deeper than D, so later positions need no scores.
    hidden_BDD = hidden_TD.unflatten(0, (B, K))[:, 1 : D + 1]
    logits_BDV = target.logits(hidden_BDD.flatten(0, 1)).unflatten(0, (B, D))
    top_candidates(logits_BDV, plan.topk, out=(state.candidate_BDM, state.edge_BDM))
