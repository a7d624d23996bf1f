"""From a product's rows to roped queries, and keys and values in their cells.

L layers at once, T tokens, H query heads, G key/value heads, E head width, X cells of a cache
plane, P positions. A row holds H query heads, then G key heads, then G value heads.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Heads(NamedTuple):
    """What becomes of a product's heads in L layers. Norm weights, where given, are of a head's
    RMSNorm. rope_P2E: float32 cos and sin of each position, halves equal. pos_T, cell_T: int64, of
    each token; only a cell that none reads may be named twice."""

    q_norm_LE: Tensor | None
    k_norm_LE: Tensor | None
    norm_eps: float
    rope_P2E: Tensor
    pos_T: Tensor
    k_cache_LXGE: Tensor
    v_cache_LXGE: Tensor
    cell_T: Tensor


def apply_rope(x_THE: Tensor, rope_T2E: Tensor) -> Tensor:
    """Rotate (first half, second half) pairs of each head by its token's angles, in float32."""
    cos_T1E, sin_T1E = rope_T2E[:, :1], rope_T2E[:, 1:]
    x = x_THE.float()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos_T1E + turned * sin_T1E).to(x_THE.dtype)


def rope_append_ref(qkv_LTX: Tensor, heads: Heads) -> Tensor:
    """Norm and rope queries and keys, write keys and values to cells; queries [L, T, H, E]."""
    layers, _, G, E = heads.k_cache_LXGE.shape
    H = qkv_LTX.shape[-1] // E - 2 * G
    rope_T2E = heads.rope_P2E[heads.pos_T]
    q_LTHE = qkv_LTX.new_empty((*qkv_LTX.shape[:2], H, E))
    for layer in range(layers):
        qkv = qkv_LTX[layer].unflatten(-1, (H + 2 * G, E))
        q_THE, k_TGE, v_TGE = qkv.split([H, G, G], dim=1)
        if heads.q_norm_LE is not None:
            q_THE = F.rms_norm(q_THE, (E,), heads.q_norm_LE[layer], heads.norm_eps)
        if heads.k_norm_LE is not None:
            k_TGE = F.rms_norm(k_TGE, (E,), heads.k_norm_LE[layer], heads.norm_eps)
        q_LTHE[layer] = apply_rope(q_THE, rope_T2E)
        heads.k_cache_LXGE[layer].index_copy_(0, heads.cell_T, apply_rope(k_TGE, rope_T2E))
        heads.v_cache_LXGE[layer].index_copy_(0, heads.cell_T, v_TGE)
    return q_LTHE
