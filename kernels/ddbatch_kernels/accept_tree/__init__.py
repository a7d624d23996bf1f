"""What each row keeps of its tree, and whether it ends."""

from ddbatch_kernels.accept_tree.reference import AcceptedPath, accept_tree_ref, accepted_path
from ddbatch_kernels.rows import Accepted, Nodes, Rows, Slots


def accept_tree(nodes: Nodes, rows: Rows, slots: Slots, out: Accepted) -> None:
    """Walk the trees along the target's choices and write what is kept into `out`, up to a stop
    token, the cap or a score that is no number; an inert row keeps nothing."""
    if nodes.token_BN.is_cuda:
        from ddbatch_kernels.accept_tree.kernel import accept_tree_triton  # only a GPU needs Triton

        accept_tree_triton(nodes, rows, slots, out)
    else:
        accept_tree_ref(nodes, rows, slots, out)


__all__ = ["AcceptedPath", "accept_tree", "accept_tree_ref", "accepted_path"]
