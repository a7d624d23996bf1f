"""The residual stream on its way to a product that begins with an RMSNorm.

T tokens, D width, Y tiles of D. On a GPU who makes the stream also does the norm's work, for few
tokens: sum(x g W) / rms(x) is sum(x / rms(x) g W), so that the product may take x g and divide its
finished sums, and its loop knows of no norm. x g is rounded to the dtype once, where the norm's
result would be: relative errors are the same. Knows nothing about kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Normed(NamedTuple):
    """x_TD that is to be normed with weight_D, and what its maker did of that: scaled_TD: x weight,
    rounded to the dtype. square_TY: float32 sums of squares of x, one for each tile of the maker.
    """

    x_TD: Tensor
    weight_D: Tensor
    eps: float
    scaled_TD: Tensor | None = None
    square_TY: Tensor | None = None

    def made(self) -> Tensor:
        """RMSNorm(x) -> [T, D]."""
        return F.rms_norm(self.x_TD, self.weight_D.shape, self.weight_D, self.eps)

    def operand(self) -> Operand:
        """For a product that can divide by the rms, where that is left to it."""
        if self.scaled_TD is None:
            return Operand(self.made(), None)
        return Operand(self.scaled_TD, self.square_TY)


class Operand(NamedTuple):
    """What a product takes. square_TY: None if x is normed; else what is missing is the division by
    the rms."""

    x_TD: Tensor
    square_TY: Tensor | None

    @property
    def num_squares(self) -> int:
        """Y."""
        return 1 if self.square_TY is None else self.square_TY.shape[1]


def can_scale(dtype: torch.dtype) -> bool:
    """Whether x g is safe: in float16 it could overflow or lose its small digits."""
    return dtype != torch.float16
