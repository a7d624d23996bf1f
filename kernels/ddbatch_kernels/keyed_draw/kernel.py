"""The keyed draw: best scores, what the filters leave, then the best of score / T + noise.

The best score's own token is always kept, so what it draws is a bound that tokens must reach; noise
is made only for tiles where one still can. Launches: best scores of chunks, the filters' bar if a
row may use top_k or top_p, the draws of chunks, their join.

T = B * N nodes, V vocabulary, C chunks of the vocabulary, Q quads of tokens in a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.best_token.kernel import (
    READERS,
    best_of,
    best_of_chunks,
    is_number,
    join_chunks,
    node_stride,
    pack,
    packed_token,
    packed_value,
    place_of,
    split_vocab,
)
from ddbatch_kernels.keyed_draw.filter_bar import filter_bar
from ddbatch_kernels.keyed_draw.noise import (
    MOST_NOISE,
    gumbel,
    noise_ceiling,
    philox4x32,
    uniform,
    words_of_quads,
)
from ddbatch_kernels.keyed_draw.reference import Draw, DrawParams
from ddbatch_kernels.slots import slot_of

# Draws compute, so they need more programs than reads do to fill a GPU evenly.
DRAWERS = 1056
TILE = 2048

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_NOWHERE = tl.constexpr(float("-inf"))
# Below every packed score; of a chunk without a kept token.
_NONE = tl.constexpr(-(2**63) + 0xFFFFFFFF)


def keyed_draw_triton(
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
    """As the reference; num_depths is not needed here."""
    B, N, V = logits_BNV.shape
    assert depth_BN.shape == (B, N), (depth_BN.shape, B, N)
    depth_BN = depth_BN.contiguous()
    slot_B = None if slot_B is None else slot_B.contiguous()
    num_slots = len(index_S)
    assert slot_B is not None or num_slots == B, (num_slots, B)
    assert all(part.is_contiguous() for part in (index_S, *params))
    assert all(len(part) == num_slots for part in params), num_slots
    best_TC = best_of_chunks(logits_BNV, split_vocab(B * N, V, READERS))
    has_bar = has_top_k or has_top_p
    bar_T = best_TC
    if has_bar:
        filters = {"has_top_k": has_top_k, "has_top_p": has_top_p}
        bar_T = filter_bar(logits_BNV, best_TC, params, slot_B, **filters)
    chunks = split_vocab(B * N, V, DRAWERS)
    drawn_TC = torch.empty(B * N, chunks.num, dtype=torch.int64, device=logits_BNV.device)
    _keyed_draw_kernel[(B * N, chunks.num)](
        logits_BNV,
        depth_BN,
        slot_B,
        index_S,
        params.temperature_B,
        params.min_p_B,
        params.seed_B2,
        params.hash_B2,
        best_TC,
        bar_T,
        drawn_TC,
        num_slots,
        N,
        V,
        node_stride(logits_BNV),
        chunks.size,
        best_TC.shape[1],
        HAS_BAR=has_bar,
        BEST_BLOCK=triton.next_power_of_2(best_TC.shape[1]),
        TILE=min(TILE, triton.next_power_of_2(chunks.size)),
        num_warps=4,
    )
    return join_chunks(drawn_TC, best_TC, place_of(logits_BNV, out))


@triton.jit
def _word(ptr, place):
    return tl.load(ptr + place).to(tl.uint32)


@triton.jit
def _noise_of_token(token, index, hash_low, hash_high, seed_low, seed_high):
    """Of one token."""
    quad = (token // 4).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(quad, index, hash_low, hash_high, seed_low, seed_high)
    place = token % 4
    word = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
    return gumbel(uniform(word))


@triton.jit
def _reach(is_kept, value):
    """The largest value of the kept tokens. As low as noise may be, kept ones beat all others."""
    return tl.max(tl.where(is_kept, tl.maximum(value, _LOWEST), _NOWHERE))


@triton.jit
def _keyed_draw_kernel(
    logits_ptr,
    depth_ptr,
    slot_ptr,  # None: row b has slot b
    index_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    hash_ptr,
    best_ptr,
    bar_ptr,
    drawn_ptr,
    num_slots,
    N,
    V,
    node_stride,
    chunk_size,
    num_best,
    HAS_BAR: tl.constexpr,
    BEST_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One chunk of one node. Grid (T, C)."""
    node, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = slot_of(slot_ptr, node // N, num_slots)
    temperature = tl.load(temperature_ptr + slot)
    best = best_of(best_ptr, node, num_best, BEST_BLOCK)
    drawn = best
    if (temperature != 0) & is_number(packed_value(best)):
        top = tl.div_rn(packed_value(best), temperature)
        bar = top + tl.log(tl.load(min_p_ptr + slot))
        if HAS_BAR:
            bar = tl.maximum(bar, tl.load(bar_ptr + node))
        index = (tl.load(index_ptr + slot) + tl.load(depth_ptr + node)).to(tl.uint32)
        hash_low, hash_high = _word(hash_ptr, 2 * slot), _word(hash_ptr, 2 * slot + 1)
        seed_low, seed_high = _word(seed_ptr, 2 * slot), _word(seed_ptr, 2 * slot + 1)
        top_noise = _noise_of_token(
            packed_token(best), index, hash_low, hash_high, seed_low, seed_high
        )
        bound = tl.maximum(top + top_noise, _LOWEST)
        drawn = tl.full((), _NONE, tl.int64)
        first = chunk * chunk_size
        stop = tl.minimum(first + chunk_size, V)
        for start in range(first, stop, TILE):
            quad_Q = start // 4 + tl.arange(0, TILE // 4)
            token_Q4 = quad_Q[:, None] * 4 + tl.arange(0, 4)[None, :]
            is_here_Q4 = token_Q4 < stop
            score_Q4 = tl.load(
                logits_ptr + node * node_stride + token_Q4, mask=is_here_Q4, other=_NOWHERE
            )
            scaled_Q4 = tl.div_rn(score_Q4, temperature)
            is_kept_Q4 = is_here_Q4 & (scaled_Q4 >= bar)
            if _reach(is_kept_Q4, scaled_Q4 + MOST_NOISE) >= bound:
                word_Q4 = words_of_quads(
                    quad_Q.to(tl.uint32), index, hash_low, hash_high, seed_low, seed_high
                )
                v_Q4 = uniform(word_Q4)
                if _reach(is_kept_Q4, scaled_Q4 + noise_ceiling(v_Q4)) >= bound:
                    value_Q4 = tl.maximum(scaled_Q4 + gumbel(v_Q4), _LOWEST)
                    packed_Q4 = tl.where(is_kept_Q4, pack(value_Q4, token_Q4), _NONE)
                    drawn = tl.maximum(drawn, tl.max(packed_Q4))
                    bound = tl.maximum(bound, packed_value(drawn))
    tl.store(drawn_ptr + node * tl.num_programs(1) + chunk, drawn)
