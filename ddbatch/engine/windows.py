"""What the layers of a model see: which cells hold a row's keys, and which of these keys a query
sees, all of them or those inside a sliding window.

Knows nothing about trees or blocks: it is told which keys are visible, and where tokens stand.
"""

import torch
from torch import Tensor

from ddbatch.engine.state import RoundState, cell_of, scratch_cells
from ddbatch.models.layers import LayerKeys, VisibleKeys

# Keys a row are padded to a multiple of this: attention kernels want aligned masks.
KEY_ALIGN = 8


def prefix_keys(
    state: RoundState, slot_B: Tensor, length_B: Tensor, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Cells of the first num_keys keys of each slot [B, S], and which of them exist (bool): those
    before length_B. What does not is the null cell: memory of another row is never read, not even
    masked.
    """
    pos_S = torch.arange(num_keys, device=slot_B.device)
    exists_BS = pos_S < length_B[:, None]
    addr_BS = cell_of(state, slot_B[:, None], pos_S[None])
    return torch.where(exists_BS, addr_BS, state.null_cell), exists_BS


def visible_keys(
    state: RoundState, addr_BZ: Tensor, is_visible_BQZ: Tensor, dtype: torch.dtype
) -> VisibleKeys:
    """Turn a bool mask over keys into the additive one that attention takes, padded."""
    padding = (0, -addr_BZ.shape[1] % KEY_ALIGN)
    addr_BZ = torch.nn.functional.pad(addr_BZ, padding, value=state.null_cell)
    is_visible_BQZ = torch.nn.functional.pad(is_visible_BQZ, padding)
    bias = torch.zeros(is_visible_BQZ.shape, dtype=dtype, device=addr_BZ.device)
    return VisibleKeys(addr_BZ, bias.masked_fill_(~is_visible_BQZ, -torch.inf))


def layer_keys(
    state: RoundState,
    addr_BZ: Tensor,
    is_visible_BQZ: Tensor,
    pos_BQ: Tensor,
    pos_BZ: Tensor,
    *,
    window: int | None,
) -> LayerKeys:
    """Keys of full and of sliding layers, from their cells and what a query sees of them (bool).

    pos: positions of queries and of keys. A token under a window sees itself and the window - 1
    positions before it, none behind.
    """
    dtype = state.target_cache.k_LXGE.dtype
    full = visible_keys(state, addr_BZ, is_visible_BQZ, dtype)
    if window is None:
        return LayerKeys(full, full)
    distance_BQZ = pos_BQ[:, :, None] - pos_BZ[:, None]
    is_near_BQZ = (distance_BQZ >= 0) & (distance_BQZ < window)
    sliding = visible_keys(state, addr_BZ, is_visible_BQZ & is_near_BQZ, dtype)
    return LayerKeys(full, sliding)


def row_keys(
    state: RoundState,
    pos_BQ: Tensor,
    is_visible_BQQ: Tensor,
    num_keys: int,
    *,
    window: int | None,
) -> tuple[LayerKeys, Tensor]:
    """Keys of the rows' next Q tokens: their slots' committed prefix and each other as told (bool,
    broadcast over rows); and the scratch cells [B, Q] where these tokens' own keys go."""
    B, Q = pos_BQ.shape
    length_B = state.length_S[state.slot_B]
    addr_BS, exists_BS = prefix_keys(state, state.slot_B, length_B, num_keys)
    cell_BQ = scratch_cells(state, B, Q)
    is_prefix_BQS = exists_BS[:, None].expand(B, Q, -1)
    pos_S = torch.arange(num_keys, device=pos_BQ.device)
    keys = layer_keys(
        state,
        torch.cat((addr_BS, cell_BQ), dim=1),
        torch.cat((is_prefix_BQS, is_visible_BQQ.expand(B, Q, Q)), dim=2),
        pos_BQ,
        torch.cat((pos_S.expand(B, -1), pos_BQ), dim=1),
        window=window,
    )
    return keys, cell_BQ
