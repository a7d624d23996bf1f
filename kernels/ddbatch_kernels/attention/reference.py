"""Attention of a few new tokens a row over keys that lie in a cache plane, their own among them.

One op serves verify (tree mask), draft (block mask) and prefill (causal mask): what differs is only
which keys a query sees. B rows, Q queries a row, Z keys a row, H query heads, G key/value heads, E
head width, X cells of a cache plane.
"""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# On a GPU PyTorch would choose a backend by size, and a row's bits would depend on the batch. The
# first takes the keys in order, without a split by length; the second serves widths it cannot take.
CUDA_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_ref(
    q_BQHE: Tensor,
    k_cache_XGE: Tensor,
    v_cache_XGE: Tensor,
    addr_BZ: Tensor,
    bias_BQZ: Tensor,
    *,
    scale: float,
) -> Tensor:
    """softmax(q k^T * scale + bias) v with float32 softmax; out [B, Q, H, E] in q's dtype.

    addr_BZ: int64, cells of the cache planes that hold the row's keys. bias_BQZ: 0 or -inf, in q's
    dtype; each query must see at least one key. A masked key must be finite (its weight is exactly
    0, and 0 * NaN is NaN), so padding points at a cell of zeros.
    """
    B, Q, H, E = q_BQHE.shape
    Z, G = addr_BZ.shape[1], k_cache_XGE.shape[1]
    assert bias_BQZ.shape == (B, Q, Z), (bias_BQZ.shape, B, Q, Z)
    assert H % G == 0, (H, G)
    k_BGZE, v_BGZE = (
        plane.index_select(0, addr_BZ.flatten()).unflatten(0, (B, Z)).transpose(1, 2)
        for plane in (k_cache_XGE, v_cache_XGE)
    )
    # The H / G query heads of a key head become extra queries of it: no key is copied per head.
    group = H // G
    q = q_BQHE.unflatten(2, (G, group)).permute(0, 2, 3, 1, 4).reshape(B, G, group * Q, E)
    bias = bias_BQZ[:, None, None].expand(B, 1, group, Q, Z).reshape(B, 1, group * Q, Z)
    out = _sdpa(q, k_BGZE, v_BGZE, bias.expand(B, G, group * Q, Z), scale)
    out_BQHE: Tensor = out.unflatten(2, (group, Q)).permute(0, 3, 1, 2, 4).reshape(B, Q, H, E)
    return out_BQHE


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    with sdpa_kernel(CUDA_BACKENDS):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
