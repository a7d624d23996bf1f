"""The draft tree of each row."""

from torch import Tensor

from ddbatch_kernels.build_tree.reference import (
    MAX_DEPTH,
    TreeNodes,
    build_tree_ref,
    tree_capacity,
)

__all__ = ["MAX_DEPTH", "TreeNodes", "build_tree", "build_tree_ref", "tree_capacity"]


def build_tree(
    edge_BDRM: Tensor,
    candidate_BDM: Tensor,
    anchor_S: Tensor,
    slot_B: Tensor | None = None,
    length_S: Tensor | None = None,
    pos_BN: Tensor | None = None,
    *,
    out: TreeNodes,
) -> None:
    """Write into `out` the anchor and the N - 1 most probable prefixes under the drafter's scores.

    edge[b, d, r, m]: float32 log-prob of candidate m at depth d + 1 below a parent that is
    candidate r of its depth (r = 0 where R = 1), descending in m. candidate_BDM: int64 tokens. D is
    at most 31; a tree of this depth and branching must have N - 1 nodes (tree_capacity). N = 1
    reads neither edges nor candidates.

    anchor_S, length_S: int64, of the rows' slots. slot_B: int64; None: row b has slot b. pos_BN,
    where it is given, becomes length_S of the slot plus the node's depth.
    """
    arguments = (edge_BDRM, candidate_BDM, anchor_S, slot_B, length_S, pos_BN)
    if edge_BDRM.is_cuda:
        from ddbatch_kernels.build_tree.kernel import build_tree_triton  # only a GPU needs Triton

        build_tree_triton(*arguments, out=out)
    else:
        build_tree_ref(*arguments, out=out)
