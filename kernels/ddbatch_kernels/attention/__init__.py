"""Attention over a paged prefix and new tokens."""

from ddbatch_kernels.attention.reference import attention_ref

attention = attention_ref

__all__ = ["attention", "attention_ref"]
