"""Scores by cuBLAS, which is as fast as the weight can be read, or in our own product where sums
must have an order of their own."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ddbatch_kernels.product_table import Op, Way, tile_of, way_of
from ddbatch_kernels.project_heads.normed_linear import product


def linear_float32_triton(x_TD: Tensor, weight_VD: Tensor, *, in_order: bool = False) -> Tensor:
    """What linear_float32_ref computes, from operands of two bytes without a copy of the weight."""
    (T, D), V, dtype = x_TD.shape, weight_VD.shape[0], x_TD.dtype
    if way_of(Op.SCORES, T, V, D, dtype, in_order=in_order) is Way.ONE_LAUNCH:
        tile = tile_of(Op.SCORES, T, V, D, dtype, in_order=in_order)
        return product(x_TD, weight_VD, tile, torch.float32)
    if dtype == torch.float32:
        return F.linear(x_TD, weight_VD)
    return torch.mm(x_TD, weight_VD.t(), out_dtype=torch.float32)
