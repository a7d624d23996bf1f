"""From the residual stream to roped queries, and keys and values in their cells.

T tokens, D width, X rows of the projection (H query heads, then G key and G value heads), E head
width. In a cache plane X stands for cells.
"""

import torch.nn.functional as F
from torch import Tensor

from ddbatch_kernels.normed import Normed
from ddbatch_kernels.rope_append.reference import rope_append_ref


def project_heads_ref(
    normed: Normed,
    qkv_weight_XD: Tensor,
    qkv_bias_X: Tensor | None,
    q_norm_E: Tensor | None,
    k_norm_E: Tensor | None,
    rope_P2E: Tensor,
    pos_T: Tensor,
    k_cache_XGE: Tensor,
    v_cache_XGE: Tensor,
    cell_T: Tensor,
) -> Tensor:
    """RMSNorm, projection and rope_append of one layer; queries [T, H, E]."""
    q_LTHE = rope_append_ref(
        F.linear(normed.made(), qkv_weight_XD, qkv_bias_X)[None],
        None if q_norm_E is None else q_norm_E[None],
        None if k_norm_E is None else k_norm_E[None],
        normed.eps,
        rope_P2E,
        pos_T,
        k_cache_XGE[None],
        v_cache_XGE[None],
        cell_T,
    )
    return q_LTHE[0]
