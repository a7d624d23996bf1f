"""Verify stage: one target forward over every node of every tree.

In: tree, pos_BN, target cache. Out: choice_BN, is_finite_BN, logprobs_BN, feature_TC, the
nodes' keys in the scratch cells. Knows nothing about the drafter.
"""

from ddbatch.engine.choose import choose, tell_logprobs
from ddbatch.engine.constants import cell_range
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.engine.windows import row_keys
from ddbatch.models.decoder import Target
from ddbatch_kernels.ancestors import unpack_paths
from ddbatch_kernels.keyed_draw import Draw


def verify(
    target: Target, state: RoundState, tap_layers: tuple[int, ...], shape: RoundShape
) -> None:
    """Choose the target's token at every node; keys and values of the nodes stay in scratch.

    A node sees its row's committed prefix, its ancestors and itself, at position length + depth.
    """
    B, N = state.plan.rows, state.plan.nodes
    sees_BNW, path_BND = state.tree.ancestor_BNW, None
    if target.in_order:
        path_BND = unpack_paths(sees_BNW, state.plan.draft_depth + 1)
    keys = row_keys(
        state,
        state.pos_BN,
        sees_BNW,
        shape.num_keys,
        window=target.dims.window,
        path_BQD=path_BND,
    )
    out = target(
        state.tree.token_BN.flatten(),
        state.pos_BN.flatten(),
        state.target_cache,
        cell_range(state.scratch_cell, B * N, state.slot_B.device),
        keys,
        tap_layers,
        state.feature_TC,
    )
    logits_BNV = target.logits(out.hidden_TD).unflatten(0, (B, N))
    choose(
        logits_BNV,
        state.tree.depth_BN,
        state.num_out_S,
        state.slot_B,
        state.sampling,
        shape.draw,
        num_depths=state.plan.draft_depth + 1,
        out=Draw(state.choice_BN, state.is_finite_BN),
    )
    if state.scores_BNV is not None:
        state.scores_BNV.copy_(logits_BNV)
    if state.logprobs_BN is not None:
        tell_logprobs(logits_BNV, state.choice_BN, out=state.logprobs_BN)
