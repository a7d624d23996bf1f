"""Attention of a few new tokens a row over its cached prefix and over each other.

One op serves verify (tree mask), draft (block mask) and prefill (causal mask): what differs is only
which keys a query sees. B rows, Q queries a row, S cached keys a row, Z = S + Q keys in all, H
query heads, G key/value heads, E head width, X cells of a cache plane.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_ref(
    q_BQHE: Tensor,
    k_BQGE: Tensor,
    v_BQGE: Tensor,
    k_cache_XGE: Tensor,
    v_cache_XGE: Tensor,
    addr_BS: Tensor,
    bias_BQZ: Tensor,
    *,
    scale: float,
) -> Tensor:
    """softmax(q k^T * scale + bias) v with float32 softmax; out [B, Q, H, E] in q's dtype.

    addr_BS: int64, cells of the cache planes that hold the row's prefix. bias_BQZ: 0 or -inf, in
    q's dtype, over [cached keys, new keys]; each query must see at least one key. A masked key must
    be finite (its weight is exactly 0, and 0 * NaN is NaN), so padding points at a cell of zeros.
    """
    B, Q, H, E = q_BQHE.shape
    S, G = addr_BS.shape[1], k_BQGE.shape[2]
    assert bias_BQZ.shape == (B, Q, S + Q), (bias_BQZ.shape, B, Q, S)
    assert H % G == 0, (H, G)
    k_BZGE = torch.cat((k_cache_XGE[addr_BS], k_BQGE), dim=1)
    v_BZGE = torch.cat((v_cache_XGE[addr_BS], v_BQGE), dim=1)
    # The H / G query heads of a key head become extra queries of it: no key is copied per head.
    group = H // G
    q = q_BQHE.unflatten(2, (G, group)).permute(0, 2, 3, 1, 4).reshape(B, G, group * Q, E)
    bias = bias_BQZ[:, None, None].expand(B, 1, group, Q, S + Q).reshape(B, 1, group * Q, S + Q)
    out: Tensor = F.scaled_dot_product_attention(
        q, k_BZGE.transpose(1, 2), v_BZGE.transpose(1, 2), attn_mask=bias, scale=scale
    )
    out_BQHE: Tensor = out.unflatten(2, (group, Q)).permute(0, 3, 1, 2, 4).reshape(B, Q, H, E)
    return out_BQHE
