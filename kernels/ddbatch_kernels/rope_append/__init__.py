"""Norm and rope of heads, and the write of keys and values to their cells."""

from torch import Tensor

from ddbatch_kernels.rope_append.reference import Heads, apply_rope, rope_append_ref

__all__ = ["Heads", "apply_rope", "rope_append", "rope_append_ref"]


def rope_append(qkv_LTX: Tensor, heads: Heads) -> Tensor:
    """Norm and rope queries and keys, write keys and values to cells; queries [L, T, H, E].

    qkv_LTX: rows of H query heads, G key heads and G value heads, any strides but the last; H may
    be 0.
    """
    if qkv_LTX.is_cuda:
        from ddbatch_kernels.rope_append.kernel import rope_append_triton

        return rope_append_triton(qkv_LTX, heads)
    return rope_append_ref(qkv_LTX, heads)
