"""What the oracle says of a decoded sequence: which of its tokens it draws itself, how far its own
trees would have been followed, and what the sequence's cells should hold.

The tokens are given to it one after the other, so that one wrong token does not make all others
wrong. Knows nothing about how the engine came to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.core import Completion, ShapePlan, TokenPrompt
from ddbatch.engine.numerics import ORACLE_PIECE
from ddbatch.engine.oracle import Oracle
from ddbatch.engine.oracle_ddtree import context_cache, could_accept, draft_scores, oracle_round
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.layers import Planes

BLOCK_POSITIONS = 256  # whose keys' error is taken together
# What rounding may do to keys, as a share of their norm: to those of a block together, and to the
# worst of them. Other orders of summation make 3e-6 in float32, through all layers (SmolLM2-135M,
# tiny models; 1e-5 where errors grow). In a short dtype the engine was off by up to 1.5 times what
# plain PyTorch and one rounding make, at the worst position by up to 3.5 times (tiny models, worst
# layer of 83 runs), where a wrong mask bit made 1.7 and 5.6 times as much at least.
FLOORS = {torch.float32: 5e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MAX_TOGETHER, MAX_WORST = 2.5, 5.0
# Two formulas for the angle of a position make up to 0.2 * 2^-24 a position (thetas of 10,000 to
# 1,000,000, head widths 64 and 128).
ANGLE_FLOOR = 2.0**-24

LayerPairs = list[tuple[Tensor, Tensor]]


class Reread(NamedTuple):
    """scores_TV: those that drew the output, float32. feature_TC: of all committed tokens. caches:
    the target's keys and values [T, G, E] of each layer, and a drafter's."""

    scores_TV: Tensor
    feature_TC: Tensor | None
    caches: dict[str, LayerPairs]


def reread(
    target: Target,
    drafter: DFlash | None,
    prompt: TokenPrompt,
    token_ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Reread:
    """Read the prompt and all output tokens but the last, which was not committed."""
    oracle = Oracle(target, () if drafter is None else drafter.dims.tap_layers, dtype=dtype)
    *first, last = prompt.token_ids
    for start in range(0, len(first), ORACLE_PIECE):
        oracle.scores(first[start : start + ORACLE_PIECE])
    scores_TV = oracle.scores([last, *token_ids[:-1]])
    caches = {"target": oracle.cache}
    if drafter is None:
        return Reread(scores_TV, None, caches)
    feature_TC = torch.cat(oracle.features)
    caches["drafter"] = context_cache(drafter, feature_TC)
    return Reread(scores_TV, feature_TC, caches)


class Followed(NamedTuple):
    """A round: drafted tokens that the engine kept, that the oracle's tree keeps, and whether score
    errors explain a difference. -1: of what was emitted there can be no such round."""

    engine: int
    oracle: int
    is_explained: bool


def follow(
    target: Target,
    drafter: DFlash,
    feature_TC: Tensor,
    prompt: TokenPrompt,
    done: Completion,
    plan: ShapePlan,
    error: float,
) -> list[Followed]:
    """Every round of a sequence, begun where the engine began it. error: by how much two of the
    drafter's scores may be off against each other."""
    found = list[Followed]()
    output, num_out = done.token_ids, 1
    for accepted in done.accepted:
        if num_out >= len(output):
            return [*found, Followed(accepted, -1, False)]
        scores_KV = draft_scores(
            target,
            drafter,
            feature_TC[: len(prompt.token_ids) + num_out - 1],
            output[num_out - 1],
            plan.block,
        )
        scores_DV, rest = scores_KV[1:], output[num_out:]
        budget, topk = plan.nodes - 1, plan.topk
        walked = oracle_round(scores_DV, rest, budget=budget, topk=topk)
        expected = len(walked.accepted_nodes) - 1
        is_explained = accepted == expected or could_accept(
            scores_DV, rest, accepted, budget=budget, topk=topk, error=error
        )
        found.append(Followed(accepted, expected, is_explained))
        num_out += accepted + 1
    return found if num_out >= len(output) else [*found, Followed(-1, 0, False)]


class Distance(NamedTuple):
    """The worst block of a cache. share: its error as a share of what is allowed; infinite for
    NaN."""

    share: float
    where: str


def distance(
    cache: Planes, cell_T: Tensor, exact: LayerPairs, plain: LayerPairs | None
) -> Distance:
    """How far these cells are from the oracle's keys and values in float32. plain: the oracle's in
    the cache's dtype, None = it is float32."""
    worst = Distance(0.0, "")
    for layer, side in product(range(len(exact)), (0, 1)):
        held_T = _errors(cache[side][layer].index_select(0, cell_T), exact[layer][side])
        plain_T = torch.zeros_like(held_T)
        if plain is not None:
            plain_T = _errors(plain[layer][side], exact[layer][side])
        floor = FLOORS[cache.k_LXGE.dtype]
        for start in range(0, len(cell_T), BLOCK_POSITIONS):
            block = slice(start, min(start + BLOCK_POSITIONS, len(cell_T)))
            # Of a short block's positions a few may have been lucky.
            usual = max(_together(plain_T[block]), _together(plain_T))
            angle = ANGLE_FLOOR * block.stop
            off = (_together(held_T[block]), float(held_T[block].max()))
            allowed = (
                MAX_TOGETHER * (usual + floor) + angle,
                MAX_WORST * (float(plain_T.max()) + floor) + angle,
            )
            # A comparison with NaN is false.
            shares = [x / y if x >= 0 else math.inf for x, y in zip(off, allowed, strict=True)]
            if max(shares) > worst.share:
                worst = Distance(
                    max(shares),
                    f"{('keys', 'values')[side]} of layer {layer}, positions {start}.."
                    f"{block.stop - 1}: off by {off[0]:.2g} of their norm, the worst by "
                    f"{off[1]:.2g}; rounding explains {allowed[0]:.2g} and {allowed[1]:.2g}",
                )
    return worst


def _errors(held_TGE: Tensor, exact_TGE: Tensor) -> Tensor:
    """|held - exact| of each position, as a share of the usual |exact|; on the CPU."""
    off_T = (held_TGE.float() - exact_TGE.float()).flatten(1).norm(dim=1)
    usual = exact_TGE.float().flatten(1).norm(dim=1).square().mean().sqrt()
    errors_T: Tensor = off_T / usual.clamp(min=torch.finfo(torch.float32).tiny)
    return errors_T.cpu()


def _together(error_T: Tensor) -> float:
    return float(error_T.square().mean().sqrt())
