"""Scores: a product that is stored as it was summed up, in float32."""

from torch import Tensor

from ddbatch_kernels.linear_float32.reference import linear_float32_ref

__all__ = ["linear_float32", "linear_float32_ref"]


def linear_float32(x_TD: Tensor, weight_VD: Tensor, *, in_order: bool = False) -> Tensor:
    """x W^T accumulated and stored in float32 [T, V], so that no score is rounded before a draw.

    in_order: whether a GPU must sum up in an order that does not depend on T.
    """
    if x_TD.is_cuda:
        from ddbatch_kernels.linear_float32.kernel import linear_float32_triton

        return linear_float32_triton(x_TD, weight_VD, in_order=in_order)
    return linear_float32_ref(x_TD, weight_VD)
