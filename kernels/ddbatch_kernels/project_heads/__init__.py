"""The first step of a decoder layer: norm, projection, rope, keys and values to their cells."""

from torch import Tensor

from ddbatch_kernels.normed import Normed
from ddbatch_kernels.project_heads.reference import project_heads_ref

__all__ = ["project_heads", "project_heads_ref"]


def project_heads(
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
    *,
    in_order: bool = False,
) -> Tensor:
    """RMSNorm, projection and rope_append of one layer; queries [T, H, E].

    The projection's rows are H query heads, then G key heads, then G value heads; normed.eps is of
    all norms. rope_P2E: float32. pos_T, cell_T: int64; only a cell that none reads may be named
    twice. in_order: whether a GPU must sum up in an order that does not depend on T.
    """
    args = (
        normed,
        qkv_weight_XD,
        qkv_bias_X,
        q_norm_E,
        k_norm_E,
        rope_P2E,
        pos_T,
        k_cache_XGE,
        v_cache_XGE,
        cell_T,
    )
    if normed.x_TD.is_cuda:
        from ddbatch_kernels.project_heads.kernel import project_heads_triton

        return project_heads_triton(*args, in_order=in_order)
    return project_heads_ref(*args)
