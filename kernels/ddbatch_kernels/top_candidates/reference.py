"""The M best tokens of each draft position, in a total order, with their log-probabilities.

B rows, D draft positions, V vocabulary, M candidates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens per chunk of the two-stage selection; any value gives the same result


def top_candidates_ref(
    logits_BDV: Tensor,
    num_candidates: int,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    log_total_BD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs of the candidates, both [B, D, M], ordered by (logit desc, token id
    asc), written into `out` where that is given, and log-sum-exps into log_total_BD.

    logits: float32. token: int64. log-prob: float32(logit - logsumexp(logits)), not divided by a
    temperature and not above 0, as rounding could lift it. torch.topk leaves the order of equal
    values open, so values and ids are packed into one integer key. The M best tokens lie in the M
    chunks whose best token ranks first, since each better chunk holds at least one better token:
    only those chunks are searched. Where a row's scores are not all numbers its candidates are
    still distinct tokens.
    """
    B, D, V = logits_BDV.shape
    M = num_candidates
    assert 1 <= M <= V, (M, V)
    logits = logits_BDV
    if V % CHUNK:
        logits = F.pad(logits, (0, -V % CHUNK), value=-torch.inf)
    logits = logits.unflatten(-1, (-1, CHUNK))
    chunk = _ranked(logits.amax(dim=-1), min(M, logits.shape[2]))
    inside = logits.gather(2, chunk[..., None].expand(B, D, chunk.shape[2], CHUNK))
    token = chunk[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)
    # Chunks are ranked by value; the tie rule wants ascending ids, so ids decide, not the place.
    best = _ranked(inside.flatten(2), M, token.flatten(2))
    token = token.flatten(2).gather(2, best)
    logit = logits_BDV.gather(2, token)
    total_BD1 = logits_BDV.logsumexp(dim=-1, keepdim=True)
    logprob = (logit - total_BD1).clamp(max=0)
    if log_total_BD is not None:
        log_total_BD.copy_(total_BD1.squeeze(2))
    if out is None:
        return token, logprob
    for place, value in zip(out, (token, logprob), strict=True):
        place.copy_(value)
    return out


def _ranked(value: Tensor, count: int, name: Tensor | None = None) -> Tensor:
    """Places of the first `count` entries of the last dim by (value desc, name asc). NaN counts as
    -inf: among scores that are no numbers any order will do, but padding must come last."""
    value = torch.where(value.isnan(), -torch.inf, value)
    bits = (value + 0.0).view(torch.int32).long()  # + 0.0: -0.0 equals 0.0, so their keys must too
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that sort as the floats do
    if name is None:
        name = torch.arange(value.shape[-1], device=value.device)
    key = (ordered << 32) - name  # names are below 2^31, so keys are distinct
    return key.topk(count, dim=-1).indices
