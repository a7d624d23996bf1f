"""The B most probable prefixes under the drafter's scores, as a tree (DDTree).

Source: DDTree, Prop. 1 and 2: under a factorised draft distribution the prefix-closed tree of B
nodes with the largest expected accepted length consists of the B most probable prefixes.

The order is total: larger sum of log-probs first, then the lexicographically smaller rank tuple, a
prefix before its extension. Log-probs are <= 0 and ranks are sorted, so a parent and every better
sibling precede a node, and the tree is the first `budget` nodes of this order.

B rows, D draft depth, R parent ranks (1: scores do not depend on the parent), M candidates, N =
budget + 1 nodes, W mask words.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch_kernels.ancestors import pack_ancestors

# Sums are integers in units of 2^-40: exact, so that equal scores tie and order never depends on
# the order of summation. The floor keeps a path's sum inside int64; only log-probs below -2^18 meet
# it, and those that are no numbers.
FIXED_POINT = 2.0**40
FLOOR = -(2.0**58)
MAX_DEPTH = 31


class TreeNodes(NamedTuple):
    """Static tensors of the trees of all rows. Node 0 is the root, the last emitted token; nodes
    1.. stand in the total order, so parent < child.

    token_BN: int64. parent_BN: int64, -1 for the root. depth_BN: int64, 0 for the root.
    ancestor_BNW: int32 words (ddbatch_kernels.ancestors).
    """

    token_BN: Tensor
    parent_BN: Tensor
    depth_BN: Tensor
    ancestor_BNW: Tensor


def tree_capacity(depth: int, num_candidates: int, limit: int) -> int:
    """Nodes a tree of this depth and branching can have besides the root, at most `limit`."""
    total, width = 0, 1
    for _ in range(depth):
        width = min(width * num_candidates, limit)
        total = min(total + width, limit)
    return total


class _Level(NamedTuple):
    """What a depth keeps, in the total order."""

    score_BY: Tensor  # int64 fixed point, sum of log-probs along the path
    words: tuple[Tensor, ...]  # int64 [B, Y] each: the rank tuple, digits rank + 1, absent ones 0
    rank_BY: Tensor  # own rank
    parent_BY: Tensor  # place of the parent among the entries of all depths, -1 for the root


def build_tree_ref(
    edge_BDRM: Tensor,
    candidate_BDM: Tensor,
    anchor_S: Tensor,
    slot_B: Tensor | None = None,
    length_S: Tensor | None = None,
    pos_BN: Tensor | None = None,
    *,
    out: TreeNodes,
) -> None:
    """Write the tree of each row, and where its nodes stand.

    A beam per depth keeps what can still be among the first `budget` nodes, then one selection over
    all depths takes them. Shapes depend on (D, R, M, N) alone.
    """
    D, M = candidate_BDM.shape[1:]
    budget = out.token_BN.shape[1] - 1
    assert D <= MAX_DEPTH, D
    assert budget <= tree_capacity(D, M, budget), (budget, D, M)
    out.token_BN[:, 0] = anchor_S if slot_B is None else anchor_S[slot_B]
    out.parent_BN[:, 0] = -1
    out.depth_BN[:, 0] = 0
    if budget:
        levels = _beam(edge_BDRM, budget)
        drafts = _select(levels, budget)
        place = (drafts.depth_BY - 1) * M + drafts.rank_BY
        out.token_BN[:, 1:] = candidate_BDM.flatten(1).gather(1, place)
        out.parent_BN[:, 1:] = drafts.parent_BY
        out.depth_BN[:, 1:] = drafts.depth_BY
    if pos_BN is not None:
        assert length_S is not None
        length_B = length_S if slot_B is None else length_S[slot_B]
        torch.add(length_B[:, None], out.depth_BN, out=pos_BN)
    out.ancestor_BNW.copy_(pack_ancestors(_ancestors(out.parent_BN, D)))


def _beam(edge_BDRM: Tensor, budget: int) -> list[_Level]:
    """Of every depth, from 1 on, the nodes that can be among the first `budget`."""
    B, D, R, M = edge_BDRM.shape
    device = edge_BDRM.device
    # NaN would overflow, and a node could stand under a parent that is not its own.
    edge = (edge_BDRM.double() * FIXED_POINT).round().nan_to_num(nan=FLOOR).clamp(FLOOR, 0.0).long()
    digit_bits = M.bit_length()
    digits_per_word = 62 // digit_bits
    zero = torch.zeros(B, 1, dtype=torch.long, device=device)
    level = _Level(zero, (zero,) * -(-D // digits_per_word), zero, zero - 1)
    levels: list[_Level] = []
    start, width = -1, 1  # the parents' places among all entries: the root has none
    for depth in range(1, D + 1):
        pairs = _pairs(width, M, budget, depth, is_product=R == 1, device=device)
        if not pairs.numel():
            break
        parent_Y, rank_Y = pairs
        place, digit = divmod(depth - 1, digits_per_word)
        words = [word[:, parent_Y] for word in level.words]
        words[place] = words[place] + ((rank_Y + 1) << digit_bits * (digits_per_word - 1 - digit))
        step = level.rank_BY[:, parent_Y] % R * M + rank_Y
        score_BY = level.score_BY[:, parent_Y] + edge[:, depth - 1].flatten(1).gather(1, step)
        # A node has depth - 1 ancestors before it.
        order = _total_order(score_BY, words[: place + 1])[:, : budget - depth + 1]
        level = _Level(
            score_BY.gather(1, order),
            tuple(word.gather(1, order) for word in words),
            rank_Y[order],
            parent_Y[order] + start,
        )
        levels.append(level)
        start, width = start + width, order.shape[1]
    return levels


class _Drafts(NamedTuple):
    """Nodes 1.. of the tree. rank_BY: which candidate of its depth a node is."""

    parent_BY: Tensor
    depth_BY: Tensor
    rank_BY: Tensor


def _select(levels: list[_Level], budget: int) -> _Drafts:
    """The first `budget` entries of all depths in the total order, numbered in that order."""
    score = torch.cat([level.score_BY for level in levels], dim=1)
    words = [
        torch.cat(parts, dim=1) for parts in zip(*(level.words for level in levels), strict=True)
    ]
    depth = torch.cat(
        [torch.full_like(level.rank_BY, number) for number, level in enumerate(levels, start=1)],
        dim=1,
    )
    chosen = _total_order(score, words)[:, :budget]
    node_of_entry = torch.zeros_like(score)
    nodes = torch.arange(1, budget + 1, device=score.device).expand_as(chosen)
    node_of_entry.scatter_(1, chosen, nodes)
    parent_entry = torch.cat([level.parent_BY for level in levels], dim=1).gather(1, chosen)
    parent = torch.where(parent_entry < 0, 0, node_of_entry.gather(1, parent_entry.clamp(min=0)))
    rank = torch.cat([level.rank_BY for level in levels], dim=1).gather(1, chosen)
    return _Drafts(parent, depth.gather(1, chosen), rank)


def _ancestors(parent_BN: Tensor, max_depth: int) -> Tensor:
    """Bool [B, N, N]: is node j (last dim) node i or an ancestor; the reach doubles each step."""
    N = parent_BN.shape[1]
    jump = parent_BN.clamp(min=0)
    reach = torch.eye(N, dtype=torch.bool, device=parent_BN.device).expand(len(parent_BN), N, N)
    steps = 1  # reach covers the nodes up to steps - 1 edges above
    while steps <= max_depth:
        reach = reach | reach.gather(1, jump[..., None].expand(-1, N, N))
        jump = jump.gather(1, jump)
        steps *= 2
    return reach


def _total_order(score_BY: Tensor, words: list[Tensor]) -> Tensor:
    """Places [B, Y] sorted by (score desc, words asc), stable sorts from the least key up."""
    order = words[-1].argsort(dim=1, stable=True)
    for word in reversed(words[:-1]):
        order = order.gather(1, word.gather(1, order).argsort(dim=1, stable=True))
    best = score_BY.gather(1, order).argsort(dim=1, descending=True, stable=True)
    return order.gather(1, best)


@cache  # a captured round goes on reading these
def _pairs(
    width: int, M: int, budget: int, depth: int, *, is_product: bool, device: torch.device
) -> Tensor:
    """[2, Y]: (parent place, rank) pairs that can be among the first `budget` nodes at this depth.

    Before child r of the p-th parent (both from 0) stand depth - 2 higher ancestors, p + 1 parents
    (at depth > 1) and r better siblings; where scores do not depend on the parent, also the
    children (p' <= p, r' <= r).
    """
    pairs = []
    for parent in range(width):
        for rank in range(M):
            above = 0 if depth == 1 else depth - 2 + parent + 1
            own = (parent + 1) * (rank + 1) if is_product else rank + 1
            if above + own <= budget:
                pairs.append((parent, rank))
    return torch.tensor(pairs, dtype=torch.long, device=device).reshape(-1, 2).t().contiguous()
