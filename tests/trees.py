"""Static tensors that trees are written into; no test."""

from __future__ import annotations

import torch
from torch import Tensor

from ddbatch_kernels.build_tree import TreeNodes, build_tree


def poisoned_tree(rows: int, num_nodes: int, device: torch.device | str = "cpu") -> TreeNodes:
    """Where trees are written, full of numbers that no tree holds."""
    columns = torch.full((3, rows, num_nodes), 1 << 40, device=device)
    words = torch.full((rows, num_nodes, -(-num_nodes // 32)), 0x5A5A5A5A, device=device)
    return TreeNodes(*columns, words.int())


def tree_of_ranks(edge_BDRM: Tensor, budget: int) -> TreeNodes:
    """The trees under these scores; a node's token is its rank, a root's the row's number."""
    B, D, _, M = edge_BDRM.shape
    nodes = poisoned_tree(B, budget + 1)
    rank_BDM = torch.arange(M).expand(B, D, M).contiguous()
    build_tree(edge_BDRM, rank_BDM, torch.arange(B), out=nodes)
    return nodes
