"""Norm and rope of heads, and the write of keys and values to their cells."""

from torch import Tensor

from ddbatch_kernels.rope_append.reference import apply_rope, rope_append_ref

__all__ = ["apply_rope", "rope_append", "rope_append_ref"]


def rope_append(
    qkv_LTX: Tensor,
    q_norm_LE: Tensor | None,
    k_norm_LE: Tensor | None,
    norm_eps: float,
    rope_P2E: Tensor,
    pos_T: Tensor,
    k_cache_LXGE: Tensor,
    v_cache_LXGE: Tensor,
    cell_T: Tensor,
) -> Tensor:
    """Norm and rope queries and keys, write keys and values to cells; queries [L, T, H, E].

    qkv_LTX: rows of H query heads, G key heads and G value heads, any strides but the last; H may
    be 0. Norm weights, where given, are of a head's RMSNorm. rope_P2E: float32 cos and sin of each
    position, halves equal. pos_T, cell_T: int64; only a cell that none reads may be named twice.
    """
    if qkv_LTX.is_cuda:
        from ddbatch_kernels.rope_append.kernel import rope_append_triton

        append = rope_append_triton
    else:
        append = rope_append_ref
    return append(
        qkv_LTX,
        q_norm_LE,
        k_norm_LE,
        norm_eps,
        rope_P2E,
        pos_T,
        k_cache_LXGE,
        v_cache_LXGE,
        cell_T,
    )
