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


def unpack_paths(ancestor_BNW: Tensor, length: int) -> Tensor:
    """int32 words [B, N, W] to int32 [B, N, length]: the nodes from the root to each node, which
    come in the order of their numbers, since a parent precedes its children; -1 beyond."""
    is_ancestor_BNN = unpack_ancestors(ancestor_BNW)
    B, N, _ = is_ancestor_BNN.shape
    # What is no ancestor goes to a column of its own, which is cut off.
    place_BNN = torch.where(is_ancestor_BNN, is_ancestor_BNN.cumsum(dim=2) - 1, length)
    path_BNX = torch.full((B, N, length + 1), -1, dtype=torch.int32, device=place_BNN.device)
    node_BNN = torch.arange(N, dtype=torch.int32, device=place_BNN.device).expand(B, N, N)
    path_BNX.scatter_(2, place_BNN.clamp(max=length), node_BNN)
    return path_BNX[..., :length].contiguous()
