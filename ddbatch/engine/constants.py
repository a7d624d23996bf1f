"""Tensors that are the same in every round of a plan, made once: a captured round goes on reading
them.

Knows nothing of what is in flight.
"""

from functools import cache

import torch
from torch import Tensor

from ddbatch_kernels.ancestors import pack_ancestors


@cache
def cell_range(first: int, cells: int, device: torch.device) -> Tensor:
    """int64 [X]: `first` and those behind it."""
    return torch.arange(first, first + cells, device=device)


@cache
def whole_block(tokens: int, device: torch.device) -> Tensor:
    """Bit words [1, K, W] of tokens that all see each other."""
    return pack_ancestors(torch.ones(1, tokens, tokens, dtype=torch.bool, device=device))
