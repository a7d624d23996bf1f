"""Build stage: the draft tree of each row.

In: candidate_BDM, edge_BDM, anchors. Out: tree. Knows nothing about models or caches.
"""

from ddbatch.engine.state import RoundState
from ddbatch_kernels.build_tree import build_tree


def build(state: RoundState) -> None:
    """Write the tree: the anchor, then the most probable prefixes under the drafter's scores."""
    tree, plan = state.tree, state.plan
    tree.token_BN[:, 0] = state.anchor_S[state.slot_B]
    if plan.nodes == 1:
        return
    # Marginals do not depend on the parent: one parent rank.
    nodes = build_tree(state.edge_BDM[:, :, None], plan.nodes - 1)
    place = (nodes.depth_BN - 1) * plan.topk + nodes.rank_BN
    tree.token_BN[:, 1:] = state.candidate_BDM.flatten(1).gather(1, place[:, 1:])
    tree.parent_BN.copy_(nodes.parent_BN)
    tree.depth_BN.copy_(nodes.depth_BN)
    tree.ancestor_BNW.copy_(nodes.ancestor_BNW)
