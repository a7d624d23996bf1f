"""A product that is added to the residual stream, and the beginning of the norm that follows."""

from torch import Tensor

from ddbatch_kernels.linear_add.reference import linear_add_ref
from ddbatch_kernels.normed import Normed

__all__ = ["linear_add", "linear_add_ref"]


def linear_add(
    x_TX: Tensor,
    weight_DX: Tensor,
    residual_TD: Tensor,
    norm_weight_D: Tensor,
    norm_eps: float,
    *,
    in_order: bool = False,
    overwrites: bool = False,
) -> Normed:
    """residual + x W^T -> [T, D], on a GPU rounded once, to be normed like this.

    in_order: whether a GPU must sum up in an order that does not depend on T. overwrites: whether
    the residual may become the sum, where that saves a copy of it.
    """
    if x_TX.is_cuda:
        from ddbatch_kernels.linear_add.kernel import linear_add_triton

        return linear_add_triton(
            x_TX,
            weight_DX,
            residual_TD,
            norm_weight_D,
            norm_eps,
            in_order=in_order,
            overwrites=overwrites,
        )
    return linear_add_ref(x_TX, weight_DX, residual_TD, norm_weight_D, norm_eps)
