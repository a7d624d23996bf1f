"""The first step of a decoder layer: norm, projection, rope, keys and values to their cells."""

from torch import Tensor

from ddbatch_kernels.normed import Normed
from ddbatch_kernels.project_heads.reference import project_heads_ref
from ddbatch_kernels.rope_append.reference import Heads

__all__ = ["Heads", "project_heads", "project_heads_ref"]


def project_heads(
    normed: Normed,
    qkv_weight_XD: Tensor,
    qkv_bias_X: Tensor | None,
    heads: Heads,
    *,
    in_order: bool = False,
) -> Tensor:
    """RMSNorm, projection and rope_append of one layer; queries [T, H, E].

    The projection's rows are H query heads, then G key heads, then G value heads. heads: of the one
    layer. in_order: whether a GPU must sum up in an order that does not depend on T.
    """
    if normed.x_TD.is_cuda:
        from ddbatch_kernels.project_heads.kernel import project_heads_triton

        return project_heads_triton(normed, qkv_weight_XD, qkv_bias_X, heads, in_order=in_order)
    return project_heads_ref(normed, qkv_weight_XD, qkv_bias_X, heads)
