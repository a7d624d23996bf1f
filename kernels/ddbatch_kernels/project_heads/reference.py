"""From the residual stream to roped queries, and keys and values in their cells.

T tokens, D width, X rows of the projection (H query heads, then G key and G value heads), E head
width. In a cache plane X stands for cells.
"""

import torch.nn.functional as F
from torch import Tensor

from ddbatch_kernels.normed import Normed
from ddbatch_kernels.rope_append.reference import Heads, rope_append_ref


def project_heads_ref(
    normed: Normed, qkv_weight_XD: Tensor, qkv_bias_X: Tensor | None, heads: Heads
) -> Tensor:
    """RMSNorm, projection and rope_append of one layer; queries [T, H, E]."""
    return rope_append_ref(F.linear(normed.made(), qkv_weight_XD, qkv_bias_X)[None], heads)[0]
