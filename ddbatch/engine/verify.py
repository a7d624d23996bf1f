"""Verify stage: one target forward over every node of every tree.

In: tree, lengths, target cache. Out: choice_BN, is_finite_BN, feature_TC, scratch. Knows nothing
about the drafter.
"""

import torch

from ddbatch.engine.state import RoundState, prefix_keys, visible_keys
from ddbatch.models.llama import Llama
from ddbatch_kernels.ancestors import unpack_ancestors


def verify(target: Llama, state: RoundState, tap_layers: tuple[int, ...]) -> None:
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
    keys = visible_keys(addr_BS, is_visible_BNZ, state.scratch.k_LXGE.dtype)
    out = target(
        state.tree.token_BN.flatten(),
        pos_BN.flatten(),
        state.target_cache,
        state.scratch,
        keys,
        tap_layers,
    )
    state.feature_TC.copy_(out.feature_TC)
    # Greedy: the first of equal scores, that is the lower token id. NaN wins a max, so it is seen.
    best = target.logits(out.hidden_TD).max(dim=-1)
    state.choice_BN.copy_(best.indices.unflatten(0, (B, N)))
    state.is_finite_BN.copy_(best.values.isfinite().unflatten(0, (B, N)))
