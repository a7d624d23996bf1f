"""What the layers of a model see: all visible keys, or those inside a sliding window.

Knows nothing about trees or blocks: it is told which keys are visible, and where tokens stand.
"""

import torch
from torch import Tensor

from ddbatch.engine.state import visible_keys
from ddbatch.models.layers import LayerKeys, Ragged


def layer_keys(
    addr_BS: Tensor,
    is_visible_BQZ: Tensor,
    pos_BQ: Tensor,
    *,
    window: int | None,
    dtype: torch.dtype,
    ragged: Ragged | None = None,
) -> LayerKeys:
    """Keys of full and of sliding layers, of Z = S cached keys and the Q of this forward.

    pos_BQ: positions of the queries, and of their keys; a cached key stands at its place. A token
    under a window sees itself and the window - 1 positions before it, none behind.
    """
    full = visible_keys(addr_BS, is_visible_BQZ, dtype)._replace(ragged=ragged)
    if window is None:
        return LayerKeys(full, full)
    pos_S = torch.arange(addr_BS.shape[1], device=addr_BS.device)
    pos_BZ = torch.cat((pos_S.expand(len(pos_BQ), -1), pos_BQ), dim=1)
    distance_BQZ = pos_BQ[:, :, None] - pos_BZ[:, None]
    is_near_BQZ = (distance_BQZ >= 0) & (distance_BQZ < window)
    sliding = visible_keys(addr_BS, is_visible_BQZ & is_near_BQZ, dtype)._replace(ragged=ragged)
    return LayerKeys(full, sliding)
