"""The first half of a gated MLP, its norm included."""

from torch import Tensor

from ddbatch_kernels.gated_linear.reference import gated_linear_ref
from ddbatch_kernels.normed import Normed

__all__ = ["gated_linear", "gated_linear_ref"]


def gated_linear(normed: Normed, weight_2FD: Tensor, *, in_order: bool = False) -> Tensor:
    """silu(h Wg^T) * (h Wu^T) -> [T, F] of h = RMSNorm(x); the weight holds Wg's rows first.

    in_order: whether a GPU must sum up in an order that does not depend on T.
    """
    if normed.x_TD.is_cuda:
        from ddbatch_kernels.gated_linear.kernel import gated_linear_triton

        return gated_linear_triton(normed, weight_2FD, in_order=in_order)
    return gated_linear_ref(normed, weight_2FD)
