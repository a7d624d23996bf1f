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
from ddbatch_kernels.keyed_draw import Draw, keyed_draw
from ddbatch_kernels.top_candidates import top_candidates


def choose(
    logits_BNV: Tensor,
    depth_BN: Tensor,
    index_B: Tensor,
    slot_B: Tensor,
    sampling: SlotSampling,
    kind: DrawKind,
    *,
    num_depths: int,
) -> Draw:
    """The token that each node draws; index_B: the output index that a row's root draws."""
    if kind == DrawKind.GREEDY:
        return best_token(logits_BNV)
    return keyed_draw(
        logits_BNV,
        depth_BN,
        index_B,
        sampling.rows(slot_B),
        num_depths=num_depths,
        has_top_k=kind == DrawKind.FILTERED,
        has_top_p=kind == DrawKind.FILTERED,
    )


def tell_logprobs(logits_BNV: Tensor, token_BN: Tensor, num_top: int) -> Logprobs:
    """Log-probs of the chosen tokens and the num_top best ones under the raw softmax."""
    total_BN1 = logits_BNV.logsumexp(dim=-1, keepdim=True)
    # Rounding must not lift a probability above 1.
    chosen_BN = (logits_BNV.gather(2, token_BN[..., None]) - total_BN1).clamp(max=0).squeeze(2)
    if not num_top:
        empty = token_BN.new_empty(*token_BN.shape, 0)
        return Logprobs(chosen_BN, empty.int(), empty.half())
    token_BNM, logprob_BNM = top_candidates(logits_BNV, num_top)
    return Logprobs(chosen_BN, token_BNM.int(), logprob_BNM.clamp(max=0).to(torch.float16))
