"""Draft stage: one drafter forward per round proposes M candidates for each of D positions.

In: anchors, lengths, the drafter's context planes. Out: candidate_BDM, edge_BDM. Knows nothing
about trees.
"""

import torch

from ddbatch.engine.state import RoundState
from ddbatch.engine.windows import row_keys
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.top_candidates import top_candidates


def draft(target: Target, drafter: DFlash, state: RoundState, num_keys: int) -> None:
    """Write candidate_BDM and edge_BDM (log-probs) of the positions after each row's anchor."""
    plan, dims = state.plan, drafter.dims
    B, K, D = plan.rows, plan.block, plan.draft_depth
    assert state.drafter_cache is not None
    length_B = state.length_S[state.slot_B]
    token_BK = torch.full_like(length_B[:, None].expand(B, K), dims.mask_token_id)
    token_BK[:, 0] = state.anchor_S[state.slot_B]
    pos_BK = length_B[:, None] + torch.arange(K, device=token_BK.device)
    is_visible_KK = torch.ones(K, K, dtype=torch.bool, device=token_BK.device)
    keys, cell_BK = row_keys(state, pos_BK, is_visible_KK, num_keys, window=dims.decoder.window)
    x_TD = target.embed[token_BK.flatten()]
    hidden_TD = drafter(x_TD, pos_BK.flatten(), state.drafter_cache, cell_BK.flatten(), keys)
    # No tree is deeper than D, so later positions need no scores.
    hidden_BDD = hidden_TD.unflatten(0, (B, K))[:, 1 : D + 1]
    logits_BDV = target.logits(hidden_BDD.flatten(0, 1)).unflatten(0, (B, D))
    token_BDM, logprob_BDM = top_candidates(logits_BDV, plan.topk)
    state.candidate_BDM.copy_(token_BDM)
    state.edge_BDM.copy_(logprob_BDM)
