"""Verify stage: one target forward over every node of every tree.

In: tree, lengths, target cache. Out: pos_BN, choice_BN, is_finite_BN, logprobs_BN, feature_TC, the
nodes' keys in the scratch cells. Knows nothing about the drafter.
"""

import torch

from ddbatch.engine.choose import choose, tell_logprobs
from ddbatch.engine.state import RoundShape, RoundState, scratch_cells
from ddbatch.engine.windows import row_keys
from ddbatch.models.decoder import Target


def verify(
    target: Target, state: RoundState, tap_layers: tuple[int, ...], shape: RoundShape
) -> None:
    """Choose the target's token at every node; keys and values of the nodes stay in scratch.

    A node sees its row's committed prefix, its ancestors and itself, at position length + depth.
    """
    B, N = state.plan.rows, state.plan.nodes
    length_B = state.length_S[state.slot_B]
    torch.add(length_B[:, None], state.tree.depth_BN, out=state.pos_BN)
    keys = row_keys(
        state, state.pos_BN, state.tree.ancestor_BNW, shape.num_keys, window=target.dims.window
    )
    out = target(
        state.tree.token_BN.flatten(),
        state.pos_BN.flatten(),
        state.target_cache,
        scratch_cells(state, B, N).flatten(),
        keys,
        tap_layers,
    )
    state.feature_TC.copy_(out.feature_TC)
    logits_BNV = target.logits(out.hidden_TD).unflatten(0, (B, N))
    drawn = choose(
        logits_BNV,
        state.tree.depth_BN,
        state.num_out_S[state.slot_B],
        state.slot_B,
        state.sampling,
        shape.draw,
        num_depths=state.plan.draft_depth + 1,
    )
    state.choice_BN.copy_(drawn.token_BN)
    state.is_finite_BN.copy_(drawn.is_finite_BN)
    if state.scores_BNV is not None:
        state.scores_BNV.copy_(logits_BNV)
    if state.logprobs_BN is not None:
        told = tell_logprobs(logits_BNV, drawn.token_BN, state.logprobs_BN.top.shape[-1])
        for place, value in zip(state.logprobs_BN, told, strict=True):
            place.copy_(value)
