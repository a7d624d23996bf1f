"""Walk each row's tree along the target's choices.

One token is drawn from the target at every node; from the root on, a node is accepted while it is
the drawn token of its accepted parent. This keeps the target's distribution at any temperature
(SpecInfer, naive sampling). B rows, N nodes, K = depth + 1 nodes of the longest path.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch_kernels.ancestors import unpack_ancestors


class AcceptedPath(NamedTuple):
    """path_BK: int64 node at each depth, root first, 0 beyond the path. num_accepted_B: int64,
    nodes of the path besides the root. emitted_BK: int64 tokens of the accepted nodes in order,
    then the bonus token (the draw at the last accepted node), 0 beyond.
    """

    path_BK: Tensor
    num_accepted_B: Tensor
    emitted_BK: Tensor


def accept_tree_ref(
    token_BN: Tensor,
    parent_BN: Tensor,
    depth_BN: Tensor,
    ancestor_BNW: Tensor,
    choice_BN: Tensor,
    *,
    max_depth: int,
) -> AcceptedPath:
    """The accepted path of each row, from the target's choice at every node.

    Siblings hold distinct tokens, so at most one child of a node matches its draw and the accepted
    nodes form one path: a node is on it when it and all its ancestors match.
    """
    drawn_BN = choice_BN.gather(1, parent_BN.clamp(min=0))
    is_match_BN = (token_BN == drawn_BN) | (parent_BN < 0)
    is_accepted_BN = (is_match_BN[:, None, :] | ~unpack_ancestors(ancestor_BNW)).all(dim=-1)
    # Accepted nodes go to the column of their depth, all others to one spare column.
    column_BN = torch.where(is_accepted_BN, depth_BN, max_depth + 1)
    node_N = torch.arange(token_BN.shape[1], device=token_BN.device)
    path = torch.zeros(len(token_BN), max_depth + 2, dtype=torch.long, device=token_BN.device)
    path_BK = path.scatter(1, column_BN, node_N.expand_as(column_BN))[:, :-1]
    num_accepted_B = is_accepted_BN.sum(dim=1) - 1
    choice_BK = choice_BN.gather(1, path_BK)
    place_K = torch.arange(max_depth + 1, device=token_BN.device)
    # The draw at an accepted node is the next accepted node's token, or the bonus token at the
    # last.
    emitted_BK = torch.where(place_K <= num_accepted_B[:, None], choice_BK, 0)
    return AcceptedPath(path_BK, num_accepted_B, emitted_BK)
