"""The oracle's DDTree: one sequence's trees and accepted lengths, slow and obviously right.

Trees come from a heap. The drafter here reads weights and nothing more: own formulas, no cache,
every context key made anew each round. Which tokens the target emits is given (oracle.py says
them), so a round only drafts, builds and walks.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.engine.oracle import Oracle, attention, gated_mlp, norm, project, rotate
from ddbatch.models.decoder import DecoderLayer, Target
from ddbatch.models.dflash import DFlash


class OracleRound(NamedTuple):
    """One round's tree without its root, in the order of the heap, and how far it was followed.

    parents: 0 is the root, i + 1 the i-th node here. accepted_nodes: in that count, root first.
    """

    token_ids: list[int]
    depths: list[int]
    parents: list[int]
    accepted_nodes: list[int]


def best_first(edge_DRM: Tensor, budget: int) -> list[tuple[int, ...]]:
    """Rank tuples of the `budget` most probable prefixes, best first, by a heap.

    Order: larger sum, then smaller tuple, a prefix before its extension. Sums are exact integers in
    units of 2^-40 of the float32 log-probs.
    """
    edges = (edge_DRM.double() * 2.0**40).round().clamp(min=-(2.0**58)).long().tolist()
    depth, has_parent = len(edges), len(edges[0]) > 1

    def step(ranks: tuple[int, ...]) -> int:
        parent = ranks[-2] if has_parent and len(ranks) > 1 else 0
        value: int = edges[len(ranks) - 1][parent][ranks[-1]]
        return value

    found: list[tuple[int, ...]] = []
    heap: list[tuple[int, tuple[int, ...]]] = [(-step((0,)), (0,))]
    while heap and len(found) < budget:
        cost, ranks = heapq.heappop(heap)
        found.append(ranks)
        if ranks[-1] + 1 < len(edges[0][0]):
            sibling = (*ranks[:-1], ranks[-1] + 1)
            heapq.heappush(heap, (cost + step(ranks) - step(sibling), sibling))
        if len(ranks) < depth:
            child = (*ranks, 0)
            heapq.heappush(heap, (cost - step(child), child))
    return found


def draft_scores(
    target: Target, drafter: DFlash, features: Tensor, anchor: int, block: int
) -> Tensor:
    """float32 scores [block, V] after a context of `features` [n, C], positions 0..n-1.

    Row i scores the token at position n + i; row 0, the anchor's, means nothing.
    """
    dims = drafter.dims.decoder
    device, eps = features.device, dims.norm_eps
    context = norm(features.float() @ drafter.fuse.weight.float().T, drafter.fuse_norm.weight, eps)
    pos = torch.arange(len(context) + block, device=device)
    own = pos[len(context) :]
    distance = own[:, None] - pos
    token_ids = [anchor] + [drafter.dims.mask_token_id] * (block - 1)
    x = target.embed[torch.tensor(token_ids, device=device)].float()
    for layer, window in zip(drafter.layers, dims.windows, strict=True):
        assert isinstance(layer, DecoderLayer)
        y = norm(x, layer.input_norm.weight, eps)
        # Of the context only keys and values count, and its features pass through no input norm.
        q, k, v = project(torch.cat((context, y)), layer)
        q, k = rotate(q[len(context) :], own, dims.rope), rotate(k, pos, dims.rope)
        is_visible = torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            is_visible = (distance >= 0) & (distance < window)
        x = x + attention(q, k, v, is_visible) @ layer.out.weight.float().T
        x = x + gated_mlp(norm(x, layer.mlp_norm.weight, eps), layer.mlp)
    return norm(x, drafter.norm.weight, eps) @ target.head.float().T


@torch.inference_mode()
def context_cache(drafter: DFlash, features: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each layer of the drafter, keys (rotated) and values [T, G, E] of a context of `features`
    [T, C] at positions 0..T-1, in the features' dtype."""
    dims, dtype = drafter.dims.decoder, features.dtype
    fused = features @ drafter.fuse.weight.to(dtype).T
    context = norm(fused, drafter.fuse_norm.weight, dims.norm_eps)
    pos = torch.arange(len(context), device=features.device)
    pairs = []
    for layer in drafter.layers:
        assert isinstance(layer, DecoderLayer)
        _, k, v = project(context, layer)
        pairs.append((rotate(k, pos, dims.rope), v))
    return pairs


@torch.inference_mode()
def trace(
    target: Target,
    drafter: DFlash,
    prompt_ids: tuple[int, ...],
    output_ids: tuple[int, ...],
    *,
    budget: int,
    topk: int,
    block: int | None = None,
) -> list[OracleRound]:
    """Every round that leads from the first output token to the last, the last cut at its end.
    block: of the drafts, None for the drafter's own block size."""
    oracle = Oracle(target, drafter.dims.tap_layers)
    oracle.scores([*prompt_ids, *output_ids])
    rounds: list[OracleRound] = []
    num_out = 1
    while num_out < len(output_ids):
        features = oracle.features[0][: len(prompt_ids) + num_out - 1]
        anchor = output_ids[num_out - 1]
        scores = draft_scores(target, drafter, features, anchor, block or drafter.dims.block)
        rounds.append(oracle_round(scores[1:], output_ids[num_out:], budget=budget, topk=topk))
        num_out += len(rounds[-1].accepted_nodes)
    return rounds


def oracle_round(
    scores_DV: Tensor, next_ids: tuple[int, ...], *, budget: int, topk: int
) -> OracleRound:
    """The tree of the drafter's scores, followed along the tokens that the target emits next."""
    logprob_DV = scores_DV - scores_DV.logsumexp(dim=-1, keepdim=True)
    # A stable sort keeps the lower token id first among equal scores.
    candidate_DM = scores_DV.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    candidates = candidate_DM.tolist()
    nodes = best_first(logprob_DV.gather(1, candidate_DM)[:, None], budget)
    number = {ranks: place for place, ranks in enumerate(nodes, start=1)}
    token_ids = [candidates[len(ranks) - 1][ranks[-1]] for ranks in nodes]
    accepted: list[int] = [0]
    here: tuple[int, ...] = ()
    for token_id in next_ids:
        matches = [
            ranks
            for ranks in nodes
            if ranks[:-1] == here and token_ids[number[ranks] - 1] == token_id
        ]
        if not matches:
            break
        here = matches[0]
        accepted.append(number[here])
    return OracleRound(
        token_ids,
        [len(ranks) for ranks in nodes],
        [number.get(ranks[:-1], 0) for ranks in nodes],
        accepted,
    )


def could_accept(
    scores_DV: Tensor,
    next_ids: tuple[int, ...],
    num_accepted: int,
    *,
    budget: int,
    topk: int,
    error: float,
) -> bool:
    """Whether the tree of scores of which two may be off by `error` against each other could be
    followed so far and no farther along these tokens.

    A node can be in such a tree if neither its sum of log-probs trails the last that is taken by
    more than the error, nor any of its tokens the last candidate; it can be out if it does not lead
    by more what comes next after these.
    """
    logprob_DV = scores_DV.log_softmax(dim=-1)
    best_DM = logprob_DV.topk(min(topk + 1, logprob_DV.shape[1]), dim=-1).values
    # What is not there is no rival.
    best_DM = torch.nn.functional.pad(best_DM, (0, topk + 1 - best_DM.shape[1]), value=-torch.inf)
    nodes = best_first(best_DM[:, None, :topk], budget + 1)
    sums = [sum(float(best_DM[depth, rank]) for depth, rank in enumerate(node)) for node in nodes]
    last, rival = sums[budget - 1], sums[budget] if len(sums) > budget else -torch.inf
    depth = min(len(next_ids), len(scores_DV))
    own = [float(logprob_DV[place, next_ids[place]]) for place in range(depth)]
    slack = 2 * error * len(scores_DV)  # sums of so many log-probs are compared
    may_be_in = all(
        value >= float(best_DM[place, topk - 1]) - error
        for place, value in enumerate(own[:num_accepted])
    ) and (not num_accepted or sum(own[:num_accepted]) >= last - slack)
    may_be_out = num_accepted == depth or (
        own[num_accepted] <= float(best_DM[num_accepted, topk]) + error
        or sum(own[: num_accepted + 1]) <= rival + slack
    )
    return may_be_in and may_be_out
