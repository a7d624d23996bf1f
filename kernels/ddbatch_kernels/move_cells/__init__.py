"""What a round keeps, from scratch to its cells."""

from torch import Tensor

from ddbatch_kernels.move_cells.reference import move_cells_ref


def move_cells(
    k_LXGE: Tensor,
    v_LXGE: Tensor,
    feature_XC: Tensor,
    node_T: Tensor,
    cell_T: Tensor,
    *,
    scratch_cell: int,
    trash_cell: int,
) -> Tensor:
    """cache[:, cell_T] = cache[:, scratch_cell + node_T], planes [L, X, G, E], int64 nodes and
    cells; returns feature_XC[node_T]. Only the trash cell may be named twice, and what it holds
    afterwards is anything."""
    if k_LXGE.is_cuda:
        from ddbatch_kernels.move_cells.kernel import move_cells_triton  # only a GPU needs Triton

        op = move_cells_triton
    else:
        op = move_cells_ref
    return op(
        k_LXGE,
        v_LXGE,
        feature_XC,
        node_T,
        cell_T,
        scratch_cell=scratch_cell,
        trash_cell=trash_cell,
    )


__all__ = ["move_cells", "move_cells_ref"]
