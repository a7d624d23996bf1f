"""Verify stage: one target forward over every node of every tree.

In: tree, lengths, target cache. Out: choice_BN, is_finite_BN, logprobs_BN, feature_TC, scratch.
Knows nothing about the drafter.
"""

import torch

from ddbatch.engine.choose import choose, tell_logprobs
from ddbatch.engine.state import RoundState, prefix_keys
from ddbatch.engine.windows import layer_keys
from ddbatch.models.decoder import Target
from ddbatch_kernels.ancestors import unpack_ancestors


def verify(target: Target, state: RoundState, tap_layers: tuple[int, ...]) -> None:
    """Choose the target's token at every node; keys and values of the nodes stay in scratch.

    A node sees its row's committed prefix, its ancestors and itself, at position length + depth.
    """
    B, N = state.plan.rows, state.plan.nodes
    length_B = state.length_S[state.slot_B]
    pos_BN = length_B[:, None] + state.tree.depth_BN
    addr_BS, exists_BS = prefix_keys(state, state.slot_B, length_B, state.num_keys)
    is_visible_BNZ = torch.cat(
        (exists_BS[:, None].expand(B, N, -1), unpack_ancestors(state.tree.ancestor_BNW)), dim=-1
    )
    keys = layer_keys(
        addr_BS,
        is_visible_BNZ,
        pos_BN,
        window=target.dims.window,
        dtype=state.scratch.k_LXGE.dtype,
    )
    out = target(
        state.tree.token_BN.flatten(),
        pos_BN.flatten(),
        state.target_cache,
        state.scratch,
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
