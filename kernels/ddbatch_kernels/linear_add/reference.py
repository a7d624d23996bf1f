"""A product that is added to the residual stream. T tokens, D width of the stream, X of x."""

import torch.nn.functional as F
from torch import Tensor

from ddbatch_kernels.normed import Normed


def linear_add_ref(
    x_TX: Tensor,
    weight_DX: Tensor,
    residual_TD: Tensor,
    norm_weight_D: Tensor,
    norm_eps: float,
) -> Normed:
    """residual + x W^T -> [T, D], a new tensor, to be normed like this."""
    return Normed(residual_TD + F.linear(x_TX, weight_DX), norm_weight_D, norm_eps)
