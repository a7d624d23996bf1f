"""The first half of a gated MLP, its norm included."""

from torch import Tensor

from ddbatch_kernels.gated_linear.reference import gated_linear_ref
from ddbatch_kernels.normed import Normed

__all__ = ["gated_linear", "gated_linear_ref"]


def gated_linear(normed: Normed, weight_2FD: Tensor) -> Tensor:
    """silu(h Wg^T) * (h Wu^T) -> [T, F] of h = RMSNorm(x); the weight holds Wg's rows first."""
    if normed.x_TD.is_cuda:
        from ddbatch_kernels.gated_linear.kernel import gated_linear_triton

        return gated_linear_triton(normed, weight_2FD)
    return gated_linear_ref(normed, weight_2FD)
