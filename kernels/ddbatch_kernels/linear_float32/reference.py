"""Scores of T tokens over a vocabulary of V. D width."""

import torch.nn.functional as F
from torch import Tensor


def linear_float32_ref(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """x W^T in float32 [T, V]."""
    return F.linear(x_TD.float(), weight_VD.float())
