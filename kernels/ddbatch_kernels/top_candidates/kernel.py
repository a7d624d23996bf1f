"""Candidates as two launches: one reads the scores, the other looks into a few chunks of them.

The first reads every score once and keeps the best one of each chunk of tokens, and a tile's share
of the log-sum-exp. The second, a program a position, does twice what finds the M best of many: it
guesses a key that M of them reach and few others do, collects those that do, and guesses better
where they were too many. First of the chunks, by their best scores, then of the tokens in these. It
ranks what is left by counting.

A key is a score as an integer that sorts as the score does, above its token or chunk: keys are
distinct, and the larger one comes first. Of each position (row B, depth D), T in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.top_candidates.reference import CHUNK

TILE = 64  # chunks that a program of the first launch reads
MAX_GUESSES = 64  # candidates up to which groups of chunks give the first guess
MAX_BLOCK = 4096  # keys that are held at once

_NAME_BITS = tl.constexpr(32)
_MAX_NAME = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))
_MIN_KEY = tl.constexpr(-0x7F800001 * 2**32 - (2**31 - 1))  # -inf under the last name
_ABOVE_KEYS = tl.constexpr(2**63 - 1)


def top_candidates_triton(
    logits_BDV: Tensor,
    num_candidates: int,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    log_total_BD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """top_candidates_ref on a GPU."""
    B, D, V = logits_BDV.shape
    T, M = B * D, num_candidates
    assert 1 <= M <= V, (M, V)
    assert logits_BDV.dtype == torch.float32, logits_BDV.dtype
    assert logits_BDV.is_contiguous()
    num_chunks = triton.cdiv(V, CHUNK)
    num_tiles = triton.cdiv(num_chunks, TILE)
    peak_TC = logits_BDV.new_empty(T, num_chunks)
    stat_T2X = logits_BDV.new_empty(T, 2, num_tiles)
    if out is None:
        token_BDM = logits_BDV.new_empty(B, D, M, dtype=torch.int64)
        out = token_BDM, logits_BDV.new_empty(B, D, M)
    assert all(part.shape == (B, D, M) for part in out), (out[0].shape, B, D, M)
    assert all(part.is_contiguous() for part in out)
    if log_total_BD is not None:
        assert log_total_BD.shape == (B, D), (log_total_BD.shape, B, D)
        assert log_total_BD.is_contiguous(), log_total_BD.stride()
    if not T:
        return out
    _scan_kernel[(T * num_tiles,)](
        logits_BDV, peak_TC, stat_T2X, V, num_chunks, num_tiles, CHUNK, TILE, num_warps=4
    )
    block_m = triton.next_power_of_2(M)
    room = max(32, 2 * block_m)  # as many keys as may be left to rank
    block_c = min(max(64, triton.next_power_of_2(num_chunks)), MAX_BLOCK)
    block_v = min(max(512, 2 * CHUNK * block_m), MAX_BLOCK)
    scratch_T2Y = logits_BDV.new_empty(T, 2, room, dtype=torch.int64)
    _pick_kernel[(T,)](
        logits_BDV,
        peak_TC,
        stat_T2X,
        scratch_T2Y,
        *out,
        log_total_BD,
        V,
        num_chunks,
        num_tiles,
        M,
        CHUNK=CHUNK,
        ROOM=room,
        GROUPS=64 if block_m <= MAX_GUESSES else 0,
        BLOCK_C=block_c,
        BLOCK_V=block_v,
        BLOCK_X=triton.next_power_of_2(num_tiles),
        num_warps=8 if max(block_c, block_v) > 2048 else 4,
    )
    return out


@triton.jit
def _scan_kernel(
    logit_ptr,
    peak_ptr,
    stat_ptr,
    V,
    num_chunks,
    num_tiles,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Best score of each chunk; best score of a tile and sum of exp of its scores above that."""
    position = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    chunk_C = tile * TILE + tl.arange(0, TILE)
    token_CY = chunk_C[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    logit_CY = tl.load(logit_ptr + position * V + token_CY, mask=token_CY < V, other=float("-inf"))
    peak_C = tl.max(tl.where(logit_CY == logit_CY, logit_CY, float("-inf")), axis=1)
    tl.store(peak_ptr + position * num_chunks + chunk_C, peak_C, mask=chunk_C < num_chunks)
    top = tl.max(peak_C, axis=0)
    # NaN goes into the sum, and so do scores without bounds.
    total = tl.sum(tl.sum(tl.exp(logit_CY - _finite(top)), axis=1), axis=0)
    stat_ptr += position * 2 * num_tiles + tile
    tl.store(stat_ptr, top)
    tl.store(stat_ptr + num_tiles, total)


@triton.jit
def _pick_kernel(
    logit_ptr,
    peak_ptr,
    stat_ptr,
    scratch_ptr,
    token_ptr,
    logprob_ptr,
    total_ptr,  # None: not asked for
    V,
    num_chunks,
    num_tiles,
    M,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    logit_ptr += position * V
    peak_ptr += position * num_chunks
    chosen_ptr = scratch_ptr + position * 2 * ROOM  # keys of chunks
    best_ptr = chosen_ptr + ROOM  # keys of tokens

    # The M best tokens lie in the M chunks whose best token comes first. Among the best chunks of
    # many groups, the M-th is reached by M chunks.
    num_wanted = tl.minimum(M, num_chunks)
    low = tl.full([], _MIN_KEY, tl.int64)
    high = tl.full([], _ABOVE_KEYS, tl.int64)
    if GROUPS:
        best_G = tl.full([GROUPS], _NO_KEY, tl.int64)
        for start in range(0, num_chunks, BLOCK_C):
            key = _keys(peak_ptr, None, num_chunks, num_chunks, start, CHUNK, BLOCK_C)
            best_G = tl.maximum(best_G, tl.max(key.reshape(BLOCK_C // GROUPS, GROUPS), axis=0))
        rank_G = tl.sum((best_G[None, :] > best_G[:, None]).to(tl.int32), axis=1)
        guess = tl.max(tl.where(rank_G == num_wanted - 1, best_G, _NO_KEY), axis=0)
        low = tl.maximum(low, guess)
        high = tl.max(best_G, axis=0) + 1
    num_chosen, low = _collect_best(
        peak_ptr,
        None,
        num_chunks,
        num_chunks,
        low,
        high,
        num_wanted,
        chosen_ptr,
        CHUNK,
        ROOM,
        BLOCK_C,
    )

    # As many tokens as chunks reach the least score among these chunks' best.
    low = (_ordered_score(low) << _NAME_BITS) - _MAX_NAME
    low = tl.where(num_wanted == M, low, _MIN_KEY)
    high = tl.full([], _ABOVE_KEYS, tl.int64)
    num_best, low = _collect_best(
        logit_ptr, chosen_ptr, V, num_chosen * CHUNK, low, high, M, best_ptr, CHUNK, ROOM, BLOCK_V
    )

    log_total = _log_total(stat_ptr + position * 2 * num_tiles, num_tiles, BLOCK_X)
    if total_ptr is not None:
        tl.store(total_ptr + position, log_total)
    RANKED: tl.constexpr = min(ROOM, 128)
    for start in range(0, num_best, RANKED):
        place = start + tl.arange(0, RANKED)
        key = tl.load(best_ptr + place, mask=place < num_best, other=_NO_KEY)
        rank = tl.zeros([RANKED], tl.int32)
        for rival_start in range(0, num_best, 32):
            rival_place = rival_start + tl.arange(0, 32)
            rival = tl.load(best_ptr + rival_place, mask=rival_place < num_best, other=_NO_KEY)
            rank += tl.sum((rival[None, :] > key[:, None]).to(tl.int32), axis=1)
        is_kept = (place < num_best) & (rank < M)
        score = _ordered_score(key)
        bits = (score ^ ((score >> 31) & 0x7FFFFFFF)).to(tl.int32)
        logprob = bits.to(tl.float32, bitcast=True) - log_total
        logprob = tl.where(logprob > 0.0, 0.0, logprob)  # NaN stays
        tl.store(token_ptr + position * M + rank, _name(key), mask=is_kept)
        tl.store(logprob_ptr + position * M + rank, logprob, mask=is_kept)


@triton.jit
def _collect_best(
    score_ptr,
    chosen_ptr,
    num_scores,
    num_places,
    low,
    high,
    num_wanted,
    out_ptr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write at most ROOM keys, the num_wanted largest among them; how many, and what they reach.

    num_wanted keys reach `low`, fewer reach `high`. Keys are distinct, so the search between ends.
    """
    count = _collect(
        score_ptr, chosen_ptr, num_scores, num_places, low, out_ptr, CHUNK, ROOM, BLOCK
    )
    while count > ROOM:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        num_inside = _collect(
            score_ptr, chosen_ptr, num_scores, num_places, middle, out_ptr, CHUNK, ROOM, BLOCK
        )
        is_enough = num_inside >= num_wanted
        count = tl.where(is_enough, num_inside, count)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return count, low


@triton.jit
def _collect(
    score_ptr,
    chosen_ptr,
    num_scores,
    num_places,
    low,
    out_ptr,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the first ROOM keys that reach `low`, in order of their places; how many reach it."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, num_places, BLOCK):
        key = _keys(score_ptr, chosen_ptr, num_scores, num_places, start, CHUNK, BLOCK)
        is_inside = (key >= low).to(tl.int32)
        place = count + tl.cumsum(is_inside, 0) - 1
        tl.store(out_ptr + place, key, mask=(is_inside != 0) & (place < ROOM))
        count += tl.sum(is_inside, 0)
    tl.debug_barrier()  # what one thread wrote others read, or write again
    return count


@triton.jit
def _keys(
    score_ptr,
    chosen_ptr,
    num_scores,
    num_places,
    start,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys of the scores at places start.., which are all scores or those in the chosen chunks."""
    place = start + tl.arange(0, BLOCK)
    is_there = place < num_places
    name = place
    if chosen_ptr is not None:
        chunk = _name(tl.load(chosen_ptr + place // CHUNK, mask=is_there, other=0))
        name = chunk.to(tl.int32) * CHUNK + place % CHUNK
        is_there = is_there & (name < num_scores)
    score = tl.load(score_ptr + name, mask=is_there, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(ordered == -1, 0, ordered)  # -0.0 equals 0.0
    key = (ordered.to(tl.int64) << _NAME_BITS) - name
    return tl.where(is_there, key, _NO_KEY)


@triton.jit
def _ordered_score(key):
    """The integer that sorts as the score does, int64."""
    return (key + _MAX_NAME) >> _NAME_BITS


@triton.jit
def _name(key):
    """The token or chunk, int64."""
    return (_ordered_score(key) << _NAME_BITS) - key


@triton.jit
def _log_total(stat_ptr, num_tiles, BLOCK_X: tl.constexpr):
    """Log-sum-exp of a position's scores; in which order tiles are added depends on V alone."""
    tile_X = tl.arange(0, BLOCK_X)
    is_tile_X = tile_X < num_tiles
    top_X = tl.load(stat_ptr + tile_X, mask=is_tile_X, other=float("-inf"))
    total_X = tl.load(stat_ptr + num_tiles + tile_X, mask=is_tile_X, other=0.0)
    base = _finite(tl.max(top_X, axis=0))
    total = tl.sum(total_X * tl.exp(top_X - base), axis=0)
    return tl.log(total) + base


@triton.jit
def _finite(top):
    """What is subtracted before exp: nothing where scores are without bounds."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)
