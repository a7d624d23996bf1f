"""Walk each row's tree along the target's choices; decide in token order where rows end.

One token is drawn from the target at every node; from the root on, a node is accepted while it is
the drawn token of its accepted parent. This keeps the target's distribution at any temperature
(SpecInfer, naive sampling). B rows, N nodes, K = depth + 1 nodes of the longest path.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch_kernels.ancestors import unpack_ancestors
from ddbatch_kernels.facts import Finish, TokenFlag
from ddbatch_kernels.rows import Accepted, Nodes, Rows, Slots, has_flag


class AcceptedPath(NamedTuple):
    """path_BK: int64 node at each depth, root first, 0 beyond the path. num_accepted_B: int64,
    nodes of the path besides the root. emitted_BK: int64 tokens of the accepted nodes in order,
    then the bonus token (the draw at the last accepted node), 0 beyond.
    """

    path_BK: Tensor
    num_accepted_B: Tensor
    emitted_BK: Tensor


def accept_tree_ref(nodes: Nodes, rows: Rows, slots: Slots, out: Accepted) -> None:
    """Emit the accepted tokens and the bonus, cut after the first stop token, at the cap and before
    the first draw from scores that are no numbers. A cancelled row emits nothing and ends.
    """
    K = out.path_BK.shape[1]
    found = accepted_path(*nodes[:4], nodes.choice_BN, max_depth=K - 1)
    is_cancelled_B = slots.is_cancelled_S[rows.slot_B]
    room_B = slots.cap_S[rows.slot_B] - slots.num_out_S[rows.slot_B]
    most_B = torch.minimum(found.num_accepted_B + 1, room_B)
    place_K = torch.arange(K, device=room_B.device)
    # In token order: what comes first of a score that is no number, a stop token and the cap.
    is_bad_BK = ~nodes.is_finite_BN.gather(1, found.path_BK)
    num_good_B = _first_place(is_bad_BK & (place_K < most_B[:, None]), most_B)
    stops_BK = has_flag(
        slots.token_flag_SV, rows.slot_B[:, None], found.emitted_BK, TokenFlag.STOP_ID
    )
    stops_BK &= place_K < num_good_B[:, None]
    num_kept_B = _first_place(stops_BK, num_good_B - 1) + 1
    finish_B = torch.where(num_kept_B >= room_B, int(Finish.LENGTH), int(Finish.LIVE))
    finish_B = torch.where(num_good_B < most_B, int(Finish.NAN_LOGITS), finish_B)
    finish_B = torch.where(stops_BK.any(dim=1), int(Finish.STOP), finish_B)
    finish_B = torch.where(is_cancelled_B, int(Finish.CANCELLED), finish_B)
    out.path_BK.copy_(found.path_BK)
    out.emitted_BK.copy_(found.emitted_BK)
    out.num_emitted_B.copy_(torch.where(rows.is_active_B & ~is_cancelled_B, num_kept_B, 0))
    # A drafted token beyond the cut was not kept.
    out.num_accepted_B.copy_(torch.minimum(found.num_accepted_B, out.num_emitted_B))
    out.finish_B.copy_(torch.where(rows.is_active_B, finish_B, int(Finish.LIVE)))


def accepted_path(
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
    N = token_BN.shape[1]
    drawn_BN = choice_BN.gather(1, parent_BN.clamp(0, N - 1))
    is_match_BN = (token_BN == drawn_BN) | (parent_BN < 0)
    is_accepted_BN = (is_match_BN[:, None, :] | ~unpack_ancestors(ancestor_BNW)).all(dim=-1)
    # Accepted nodes go to the column of their depth, all others to one spare column, and so do
    # those of a depth that no tree has.
    has_column_BN = is_accepted_BN & (depth_BN >= 0) & (depth_BN <= max_depth)
    column_BN = torch.where(has_column_BN, depth_BN, max_depth + 1)
    node_N = torch.arange(N, device=token_BN.device)
    path = torch.zeros(len(token_BN), max_depth + 2, dtype=torch.long, device=token_BN.device)
    path_BK = path.scatter(1, column_BN, node_N.expand_as(column_BN))[:, :-1]
    num_accepted_B = is_accepted_BN.sum(dim=1) - 1
    choice_BK = choice_BN.gather(1, path_BK)
    place_K = torch.arange(max_depth + 1, device=token_BN.device)
    # The draw at an accepted node is the next accepted node's token, or the bonus token at the
    # last.
    emitted_BK = torch.where(place_K <= num_accepted_B[:, None], choice_BK, 0)
    return AcceptedPath(path_BK, num_accepted_B, emitted_BK)


def _first_place(is_there_BK: Tensor, otherwise_B: Tensor) -> Tensor:
    """int64 [B]: the first True of each row, or `otherwise`."""
    return torch.where(is_there_BK.any(dim=1), is_there_BK.int().argmax(dim=1), otherwise_B)
