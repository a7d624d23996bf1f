"""Move the keys and values of kept nodes from scratch to their cells, and gather their features.

L layers, X cells, G heads of width E; T = B x K places of paths, C values of a feature.
"""

from torch import Tensor


def move_cells_ref(
    k_LXGE: Tensor,
    v_LXGE: Tensor,
    feature_XC: Tensor,
    node_T: Tensor,
    cell_T: Tensor,
    *,
    scratch_cell: int,
    trash_cell: int,
) -> Tensor:
    """cache[:, cell_T] = cache[:, scratch_cell + node_T]; returns feature_XC[node_T]. Only the
    trash cell may be named twice, and what it holds afterwards is anything."""
    del trash_cell
    for plane_LXGE in (k_LXGE, v_LXGE):
        moved_LTGE = plane_LXGE.index_select(1, scratch_cell + node_T)
        plane_LXGE.index_copy_(1, cell_T, moved_LTGE)
    return feature_XC[node_T]
