"""Choose the target's token at every node from its scores, and tell log-probabilities of it.

Used by verify for the nodes of the trees and by prefill for first tokens. Knows nothing about
caches, models or trees beyond a node's depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddbatch.engine.sampling import DrawKind, SlotSampling
from ddbatch.engine.state import Logprobs
from ddbatch_kernels.best_token import best_token
from ddbatch_kernels.keyed_draw import Draw, DrawParams, keyed_draw
from ddbatch_kernels.top_candidates import top_candidates


def choose(
    logits_BNV: Tensor,
    depth_BN: Tensor,
    index_S: Tensor,
    slot_B: Tensor,
    sampling: SlotSampling,
    kind: DrawKind,
    *,
    num_depths: int,
    out: Draw | None = None,
) -> Draw:
    """The token that each node draws; index_S: the output index that the root of a row on this slot
    draws."""
    if kind == DrawKind.GREEDY:
        return best_token(logits_BNV, out=out)
    return keyed_draw(
        logits_BNV,
        depth_BN,
        index_S,
        DrawParams(
            sampling.temperature_S,
            sampling.top_k_S,
            sampling.top_p_S,
            sampling.min_p_S,
            sampling.seed_S2,
            sampling.hash_S2,
        ),
        num_depths=num_depths,
        has_top_k=kind == DrawKind.FILTERED,
        has_top_p=kind == DrawKind.FILTERED,
        slot_B=slot_B,
        out=out,
    )


def tell_logprobs(logits_BNV: Tensor, token_BN: Tensor, *, out: Logprobs) -> None:
    """Write log-probs of the chosen tokens and of as many best ones as `out` has room for, under
    the raw softmax."""
    num_top, log_total_BN = out.top.shape[2], torch.empty_like(out.token)
    best = (out.top_id, out.top) if num_top else None
    top_candidates(logits_BNV, num_top or 1, out=best, log_total_BD=log_total_BN)
    score_BN = logits_BNV.gather(2, token_BN[..., None]).squeeze(2)
    # Rounding must not lift a probability above 1.
    torch.clamp(score_BN - log_total_BN, max=0, out=out.token)
