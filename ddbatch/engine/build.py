"""Build stage: the draft tree of each row.

In: candidate_BDM, edge_BDM, anchors, lengths. Out: tree, pos_BN. Knows nothing about models or
caches.
"""

from ddbatch.engine.state import RoundState
from ddbatch_kernels.build_tree import build_tree


def build(state: RoundState) -> None:
    """Write the tree, the anchor and then the most probable prefixes under the drafter's scores,
    and where its nodes stand."""
    build_tree(
        state.edge_BDM[:, :, None],  # marginals do not depend on the parent: one parent rank
        state.candidate_BDM,
        state.anchor_S,
        state.slot_B,
        state.length_S,
        state.pos_BN,
        out=state.tree,
    )
