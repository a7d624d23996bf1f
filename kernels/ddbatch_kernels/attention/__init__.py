"""Attention over a paged prefix and new tokens."""

from torch import Tensor

from ddbatch_kernels.attention.reference import RowKeys, attention_ref


def attention(
    q_BQHE: Tensor, k_cache_XGE: Tensor, v_cache_XGE: Tensor, keys: RowKeys, *, scale: float
) -> Tensor:
    """softmax(q k^T * scale) v over the visible keys [B, Q, H, E]; zeros where none is visible."""
    if q_BQHE.is_cuda:
        from ddbatch_kernels.attention.kernel import attention_triton  # only a GPU needs Triton

        return attention_triton(q_BQHE, k_cache_XGE, v_cache_XGE, keys, scale=scale)
    return attention_ref(q_BQHE, k_cache_XGE, v_cache_XGE, keys, scale=scale)


__all__ = ["RowKeys", "attention", "attention_ref"]
