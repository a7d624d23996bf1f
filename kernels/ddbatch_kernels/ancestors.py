"""Ancestor sets of tree nodes as bit words: bit j % 32 of word j // 32 of node i is set when node j
is node i itself or one of its ancestors. N nodes, W = ceil(N / 32) words, int32.
"""

import torch
from torch import Tensor


def pack_ancestors(is_ancestor_BNN: Tensor) -> Tensor:
    """Bool [B, N, N] to int32 words [B, N, W]."""
    N = is_ancestor_BNN.shape[-1]
    bits = torch.nn.functional.pad(is_ancestor_BNN.long(), (0, -N % 32)).unflatten(-1, (-1, 32))
    place = torch.arange(32, device=bits.device)
    words = (bits << place).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def unpack_ancestors(ancestor_BNW: Tensor) -> Tensor:
    """int32 words [B, N, W] to bool [B, N, N]."""
    N = ancestor_BNW.shape[1]
    place = torch.arange(32, device=ancestor_BNW.device, dtype=torch.int32)
    bits = (ancestor_BNW[..., None] >> place) & 1
    return bits.flatten(-2)[..., :N].bool()
