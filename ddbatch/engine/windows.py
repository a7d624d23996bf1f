"""What the layers of a model see: the pages and own tokens of rows, for layers that see everything
and for those that see a sliding window.

Knows nothing about trees or blocks: it is told which own tokens are visible, and where they stand.
"""

from dataclasses import replace

from torch import Tensor

from ddbatch.engine.state import RoundState
from ddbatch.models.layers import LayerKeys
from ddbatch_kernels.ancestors import pack_ancestors, unpack_ancestors
from ddbatch_kernels.attention import RowKeys


def row_keys(
    state: RoundState,
    pos_BQ: Tensor,
    own_BQW: Tensor,
    num_keys: int,
    *,
    window: int | None,
    path_BQD: Tensor | None = None,
) -> LayerKeys:
    """Keys of the rows' next Q tokens: their slots' committed prefix, behind which the first of
    them stands, and each other where a bit of own_BQW is set (may be broadcast over rows).
    path_BQD: asks for sums in order (RowKeys)."""
    B, Q = pos_BQ.shape
    stop_BQ = pos_BQ[:, :1].expand(B, Q)
    own_BQW = own_BQW.expand(B, Q, -1)
    keys = _keys(state, state.slot_B, stop_BQ, num_keys, in_order=path_BQD is not None)
    full = replace(keys, own_BQW=own_BQW, path_BQD=path_BQD)
    if window is None:
        return LayerKeys(full, full)
    near_BQW = pack_ancestors(unpack_ancestors(own_BQW) & is_near(pos_BQ, pos_BQ, window))
    first_BQ = first_near(pos_BQ, window)
    return LayerKeys(full, replace(full, first_BQ=first_BQ, own_BQW=near_BQW))


def piece_keys(
    state: RoundState,
    slot_R: Tensor,
    pos_RQ: Tensor,
    stop_RQ: Tensor,
    num_keys: int,
    *,
    window: int | None,
    in_order: bool,
) -> LayerKeys:
    """Keys of pieces of prompts, whose own keys go to their slots' pages: positions below stop.
    in_order: see RowKeys."""
    full = _keys(state, slot_R, stop_RQ, num_keys, in_order=in_order)
    if window is None:
        return LayerKeys(full, full)
    return LayerKeys(full, replace(full, first_BQ=first_near(pos_RQ, window)))


def first_near(pos_BQ: Tensor, window: int) -> Tensor:
    """The first position that a token under a window sees: it sees itself and the window - 1
    positions before it."""
    return (pos_BQ - (window - 1)).clamp(min=0)


def is_near(pos_BQ: Tensor, pos_BZ: Tensor, window: int) -> Tensor:
    """Bool [B, Q, Z]: does a token at pos_BQ see one at pos_BZ under a window; none behind."""
    distance_BQZ = pos_BQ[:, :, None] - pos_BZ[:, None]
    return (distance_BQZ >= 0) & (distance_BQZ < window)


def _keys(
    state: RoundState, slot_B: Tensor, stop_BQ: Tensor, num_keys: int, *, in_order: bool
) -> RowKeys:
    return RowKeys(
        state.page_table_SP,
        slot_B,
        state.cache_plan.page,
        num_keys,
        first_BQ=None,
        stop_BQ=stop_BQ,
        own_BQW=None,
        own_cell=state.scratch_cell,
        null_cell=state.null_cell,
        in_order=in_order,
    )
