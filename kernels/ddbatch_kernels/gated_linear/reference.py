"""The first half of a gated MLP, its norm included. T tokens, D width, F width of the MLP."""

import torch.nn.functional as F
from torch import Tensor

from ddbatch_kernels.normed import Normed
from ddbatch_kernels.silu_mul.reference import silu_mul_ref


def gated_linear_ref(normed: Normed, weight_2FD: Tensor) -> Tensor:
    """silu(h Wg^T) * (h Wu^T) -> [T, F] of h = RMSNorm(x); the weight holds Wg's rows first."""
    return silu_mul_ref(F.linear(normed.made(), weight_2FD))
