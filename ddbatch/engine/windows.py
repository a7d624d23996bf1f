"""What the layers of a model see: the pages and own tokens of rows, for layers that see everything
and for those that see a sliding window.

Knows nothing about trees or blocks: it is told which own tokens are visible, and where they stand.
"""

from torch import Tensor

from ddbatch.engine.state import RoundState
from ddbatch.models.layers import LayerKeys
from ddbatch_kernels.ancestors import pack_ancestors, unpack_ancestors
from ddbatch_kernels.attention import RowKeys


def row_keys(
    state: RoundState, pos_BQ: Tensor, own_BQW: Tensor, num_keys: int, *, window: int | None
) -> LayerKeys:
    """Keys of the rows' next Q tokens: their slots' committed prefix, behind which the first of
    them stands, and each other where a bit of own_BQW is set (may be broadcast over rows)."""
    B, Q = pos_BQ.shape
    stop_BQ = pos_BQ[:, :1].expand(B, Q)
    own_BQW = own_BQW.expand(B, Q, -1)
    full = _keys(state, state.slot_B, None, stop_BQ, own_BQW, num_keys)
    if window is None:
        return LayerKeys(full, full)
    near_BQW = pack_ancestors(unpack_ancestors(own_BQW) & is_near(pos_BQ, pos_BQ, window))
    first_BQ = first_near(pos_BQ, window)
    return LayerKeys(full, _keys(state, state.slot_B, first_BQ, stop_BQ, near_BQW, num_keys))


def piece_keys(
    state: RoundState,
    slot_R: Tensor,
    pos_RQ: Tensor,
    stop_RQ: Tensor,
    num_keys: int,
    *,
    window: int | None,
) -> LayerKeys:
    """Keys of pieces of prompts, whose own keys go to their slots' pages: positions below stop."""
    full = _keys(state, slot_R, None, stop_RQ, None, num_keys)
    if window is None:
        return LayerKeys(full, full)
    first_RQ = first_near(pos_RQ, window)
    return LayerKeys(full, _keys(state, slot_R, first_RQ, stop_RQ, None, num_keys))


def first_near(pos_BQ: Tensor, window: int) -> Tensor:
    """The first position that a token under a window sees: it sees itself and the window - 1
    positions before it."""
    return (pos_BQ - (window - 1)).clamp(min=0)


def is_near(pos_BQ: Tensor, pos_BZ: Tensor, window: int) -> Tensor:
    """Bool [B, Q, Z]: does a token at pos_BQ see one at pos_BZ under a window; none behind."""
    distance_BQZ = pos_BQ[:, :, None] - pos_BZ[:, None]
    return (distance_BQZ >= 0) & (distance_BQZ < window)


def _keys(
    state: RoundState,
    slot_B: Tensor,
    first_BQ: Tensor | None,
    stop_BQ: Tensor,
    own_BQW: Tensor | None,
    num_keys: int,
) -> RowKeys:
    return RowKeys(
        state.page_table_SP,
        slot_B,
        state.cache_plan.page,
        num_keys,
        first_BQ,
        stop_BQ,
        own_BQW,
        state.scratch_cell,
        state.null_cell,
    )
