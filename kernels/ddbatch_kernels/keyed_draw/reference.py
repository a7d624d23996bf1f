"""Draw one token per node: filters, then keyed Gumbel noise, then the largest score.

The noise of a token depends on (seed, hash of the row, output index, token) alone, by a counter-
based generator, so a draw does not depend on what else is in the batch, and the nodes that a tree
offers for one output index see the same noise. The largest of score / T + Gumbel noise is a draw of
softmax(score / T) (Gumbel-max).

B rows, N nodes, V vocabulary, D depths (output indices that a row's nodes stand for).
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
# Noise words made at a time: what a round needs beside its scores stays small. Any value gives the
# same draws.
CHUNK_WORDS = 1 << 22
# Probabilities as integers, so that their sums do not depend on the order of summation. 2^40 times
# the largest vocabulary is far below 2^63.
WEIGHT_ONE = 2.0**40
DIGIT_BITS = 8


class DrawParams(NamedTuple):
    """How each row draws. temperature_B: float32, 0 = the largest score. top_k_B: int64, 0 = all.
    top_p_B: float64, 1 = all. min_p_B: float32, 0 = all. seed_B2, hash_B2: int64, the low and the
    high word (0..2^32 - 1) of the row's seed and of the hash of its key. Slots may stand for rows.
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B2: Tensor
    hash_B2: Tensor

    def of(self, slot_B: Tensor) -> "DrawParams":
        """Those of rows that have these slots."""
        return DrawParams(*(part[slot_B] for part in self))


class Draw(NamedTuple):
    """token_BN: int64. is_finite_BN: bool, whether the largest raw score is a finite number."""

    token_BN: Tensor
    is_finite_BN: Tensor


def empty_draw(logits_BNV: Tensor) -> Draw:
    """Where draws from these scores can be written."""
    shape = logits_BNV.shape[:2]
    return Draw(
        logits_BNV.new_empty(shape, dtype=torch.int64),
        logits_BNV.new_empty(shape, dtype=torch.bool),
    )


def keyed_draw_ref(
    logits_BNV: Tensor,
    depth_BN: Tensor,
    index_S: Tensor,
    params: DrawParams,
    *,
    num_depths: int,
    has_top_k: bool = True,
    has_top_p: bool = True,
    slot_B: Tensor | None = None,
    out: Draw | None = None,
) -> Draw:
    """The token that each node's float32 scores draw, written into `out` where that is given.

    depth_BN: int64 in 0..num_depths - 1; a node at depth d draws output index index_S + d (from 0)
    of its row's slot. slot_B: the slots of the rows; None: row b has slot b. Of equal perturbed
    scores the lower token id is drawn. A kept token whose noise is -inf (the largest words) still
    beats every token that the filters dropped. has_top_k, has_top_p: False where no row uses the
    filter, which is then not computed.
    """
    B, N, V = logits_BNV.shape
    assert depth_BN.shape == (B, N), (depth_BN.shape, B, N)
    best = logits_BNV.max(dim=-1)  # of equal scores the first; NaN wins, so it is seen
    out = out or empty_draw(logits_BNV)
    out.is_finite_BN.copy_(best.values.isfinite())
    if slot_B is None:
        slot_B = torch.arange(B, device=logits_BNV.device)
    rows_at_a_time = max(1, CHUNK_WORDS // (V * max(N, num_depths)))
    for first in range(0, B, rows_at_a_time):
        own = slice(first, first + rows_at_a_time)
        part, index_B = params.of(slot_B[own]), index_S[slot_B[own]]
        is_greedy_B1 = part.temperature_B[:, None] == 0
        divisor_B11 = torch.where(is_greedy_B1, 1.0, part.temperature_B[:, None])[..., None]
        scaled_BNV = logits_BNV[own] / divisor_B11
        noise_BDV = draw_noise(index_B, part.seed_B2, part.hash_B2, num_depths, V)
        noise_BNV = noise_BDV.gather(1, depth_BN[own, :, None].expand(-1, -1, V))
        kept = kept_tokens(scaled_BNV, part, has_top_k=has_top_k, has_top_p=has_top_p)
        lowest = torch.finfo(torch.float32).min
        perturbed_BNV = (scaled_BNV + noise_BNV).clamp_(min=lowest)
        perturbed_BNV.masked_fill_(~kept, -torch.inf)
        drawn_BN = perturbed_BNV.max(dim=-1).indices
        out.token_BN[own] = torch.where(is_greedy_B1, best.indices[own], drawn_BN)
    return out


def draw_noise(
    index_B: Tensor, seed_B2: Tensor, hash_B2: Tensor, depths: int, vocab: int
) -> Tensor:
    """Gumbel noise, float32 [B, D, V], of output indices index_B .. index_B + depths - 1.

    A token takes word `token mod 4` of the counter (token div 4, output index, hash).
    """
    device = index_B.device
    quad = torch.arange(-(-vocab // 4), device=device)[None, None]
    index = (index_B[:, None] + torch.arange(depths, device=device))[..., None]
    low, high = (word[:, None, None] for word in hash_B2.unbind(dim=1))
    seed = tuple(word[:, None, None] for word in seed_B2.unbind(dim=1))
    words = philox4x32((quad, index, low, high), (seed[0], seed[1]))
    return gumbel(words.flatten(2)[..., :vocab])


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> Tensor:
    """Philox4x32-10: int64 [..., 4] of words in 0..2^32 - 1, from int64 words of any shapes that
    broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The low 64 bits of these products are all of them; the sign bit is masked away below.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & WORD) ^ c1 ^ k0,
            p1 & WORD,
            ((p0 >> 32) & WORD) ^ c3 ^ k1,
            p0 & WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def gumbel(word: Tensor) -> Tensor:
    """Words in 0..2^32 - 1 as Gumbel noise in float32: -log(E), E = -log1p(-v),
    v = (float32(word) + 0.5) * 2^-32.

    v is never 0, and 1 only for the 128 largest words: noise is never +inf, and -inf once in 3e7.
    """
    v = (word.float() + 0.5) * 2.0**-32
    return -(-torch.log1p(-v)).log()


def kept_tokens(
    scaled_BNV: Tensor, params: DrawParams, *, has_top_k: bool = True, has_top_p: bool = True
) -> Tensor:
    """Bool [B, N, V]: what top_k, then top_p of the rest, then min_p leave of scores / T.

    A token that ties with a threshold is kept, and so is the most probable one.
    """
    V = scaled_BNV.shape[-1]
    best_BN1 = scaled_BNV.amax(dim=-1, keepdim=True)
    # log(0) = -inf keeps all.
    kept_BNV = scaled_BNV >= best_BN1 + params.min_p_B.log()[:, None, None]
    if not (has_top_k or has_top_p):
        return kept_BNV
    key_BNV = ordered_key(scaled_BNV)
    in_top_k_BNV = torch.ones_like(kept_BNV)
    if has_top_k:
        top_k_B1 = params.top_k_B[:, None]
        need_B1 = torch.where(top_k_B1 == 0, V, top_k_B1).clamp(max=V)
        need_BN = need_B1.expand(scaled_BNV.shape[:2])
        in_top_k_BNV = key_BNV >= mass_threshold(key_BNV, torch.ones_like(key_BNV), need_BN)
        kept_BNV &= in_top_k_BNV
    if has_top_p:
        weight_BNV = ((scaled_BNV - best_BN1).exp() * WEIGHT_ONE).long() * in_top_k_BNV
        total_BN = weight_BNV.sum(dim=-1)
        top_p_B1 = params.top_p_B[:, None]
        need_BN = (total_BN.double() * top_p_B1).ceil().long()
        need_BN = torch.minimum(need_BN.clamp(min=1), total_BN)
        in_top_p_BNV = key_BNV >= mass_threshold(key_BNV, weight_BNV, need_BN)
        kept_BNV &= in_top_p_BNV | (top_p_B1[..., None] >= 1)
    return kept_BNV


def ordered_key(value: Tensor) -> Tensor:
    """float32 as int64 in 0..2^32 - 1 that sort as the floats do; -0.0 equals 0.0."""
    bits = (value + 0.0).view(torch.int32).long()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + (1 << 31)


def mass_threshold(key_BNV: Tensor, weight_BNV: Tensor, need_BN: Tensor) -> Tensor:
    """The largest key t [B, N, 1] such that the tokens with key >= t weigh at least need_BN.

    Digit by digit from the top, with a histogram of weights each: integers, so the order of
    summation does not matter, and no sort.
    """
    above_BN1 = torch.zeros_like(need_BN)[..., None]  # weight of larger keys
    prefix_BN1 = torch.zeros_like(above_BN1)
    for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
        is_candidate = (key_BNV >> (shift + DIGIT_BITS)) == prefix_BN1
        digit_BNV = (key_BNV >> shift) & ((1 << DIGIT_BITS) - 1)
        empty = torch.zeros(
            *need_BN.shape, 1 << DIGIT_BITS, dtype=torch.long, device=key_BNV.device
        )
        weight_BNY = empty.scatter_add(2, digit_BNV, torch.where(is_candidate, weight_BNV, 0))
        mass_BNY = above_BN1 + weight_BNY.flip(2).cumsum(dim=2).flip(2)
        chosen_BN1 = (mass_BNY >= need_BN[..., None]).sum(dim=2, keepdim=True) - 1
        above_BN1 = mass_BNY.gather(2, chosen_BN1) - weight_BNY.gather(2, chosen_BN1)
        prefix_BN1 = (prefix_BN1 << DIGIT_BITS) + chosen_BN1
    return prefix_BN1
