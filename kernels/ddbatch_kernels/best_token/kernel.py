"""The token of the largest score: one read of the scores, split so that few nodes fill a GPU.

A score and its token are packed into one int64 that sorts as the scores do and, of equal scores,
puts the lower token first. So a maximum of integers, in whatever order, is the answer. The keyed
draw packs its perturbed scores in the same way. Knows nothing about noise and filters.

T = B * N nodes, V vocabulary, C chunks of the vocabulary, L lanes of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.keyed_draw.reference import Draw, empty_draw

# Found by tests/measure_scores.py on an H200. Programs that keep its memory busy, and how much each
# reads at once.
READERS = 1056
LEAST_CHUNK = CHUNK_TILE = 512
# From here on one program a node reads fast enough, with more in flight, and no second launch has
# to join chunks.
WHOLE_NODES, WHOLE_TILE = 264, 4096


class Chunks(NamedTuple):
    """The vocabulary in `num` chunks of `size` tokens; the last one may be shorter."""

    num: int
    size: int


def split_vocab(nodes: int, vocab: int, programs: int) -> Chunks:
    """Equal chunks, none empty, so that all nodes make about so many programs."""
    wanted = triton.cdiv(programs, nodes)
    size = triton.cdiv(triton.cdiv(vocab, wanted), LEAST_CHUNK) * LEAST_CHUNK
    return Chunks(triton.cdiv(vocab, size), size)


def best_token_triton(logits_BNV: Tensor, *, out: Draw | None = None) -> Draw:
    """As the reference; one launch for many nodes, two for few."""
    B, N, V = logits_BNV.shape
    out = place_of(logits_BNV, out)
    if B * N < WHOLE_NODES:
        best_TC = best_of_chunks(logits_BNV, split_vocab(B * N, V, READERS))
        return join_chunks(best_TC, best_TC, out)
    _launch(logits_BNV, Chunks(1, V), out.token_BN, out)
    return out


def best_of_chunks(logits_BNV: Tensor, chunks: Chunks) -> Tensor:
    """int64 [T, C]: the packed best score of each chunk."""
    nodes = logits_BNV.shape[0] * logits_BNV.shape[1]
    best_TC = logits_BNV.new_empty(nodes, chunks.num, dtype=torch.int64)
    _launch(logits_BNV, chunks, best_TC, None)
    return best_TC


def join_chunks(drawn_TC: Tensor, best_TC: Tensor, out: Draw) -> Draw:
    """Write the token of the best of drawn_TC; best_TC tells whether the scores are numbers."""
    nodes, num_drawn = drawn_TC.shape
    num_best = best_TC.shape[1]
    _join_chunks_kernel[(nodes,)](
        drawn_TC,
        best_TC,
        out.token_BN,
        out.is_finite_BN,
        num_drawn,
        num_best,
        BLOCK=triton.next_power_of_2(max(num_drawn, num_best)),
        num_warps=1,
    )
    return out


def place_of(logits_BNV: Tensor, out: Draw | None) -> Draw:
    """Where the draws from these scores go: `out`, or a new place."""
    out = out or empty_draw(logits_BNV)
    assert all(part.shape == logits_BNV.shape[:2] for part in out), out.token_BN.shape
    assert all(part.is_contiguous() for part in out)
    return out


def node_stride(logits_BNV: Tensor) -> int:
    """From a node's scores to the next one's; the nodes of all rows lie evenly."""
    N = logits_BNV.shape[1]
    assert logits_BNV.dtype == torch.float32, logits_BNV.dtype
    row, node, token = logits_BNV.stride()
    assert token == 1, logits_BNV.stride()
    assert row == N * node or logits_BNV.shape[0] == 1, logits_BNV.stride()
    return node if N > 1 else row


def _launch(logits_BNV: Tensor, chunks: Chunks, packed: Tensor, out: Draw | None) -> None:
    """Chunks into `packed`, or whole nodes into `out`."""
    B, N, V = logits_BNV.shape
    most, warps = (CHUNK_TILE, 4) if out is None else (WHOLE_TILE, 16)
    tile = min(most, triton.next_power_of_2(chunks.size))
    _best_token_kernel[(B * N, chunks.num)](
        logits_BNV,
        packed,
        packed if out is None else out.token_BN,
        packed if out is None else out.is_finite_BN,
        V,
        node_stride(logits_BNV),
        chunks.size,
        IS_WHOLE=out is not None,
        TILE=tile,
        num_warps=warps if tile == most else 4,
    )


@triton.jit
def pack(value, token):
    """float32 and the token that has it, as int64: sorts by value, NaN above all and -0.0 as 0.0;
    of equal values the lower token is larger."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(value == value, key, 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def packed_value(packed):
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed_token(packed):
    return 0xFFFFFFFF - (packed & 0xFFFFFFFF)


@triton.jit
def is_number(value):
    return tl.abs(value) < float("inf")


@triton.jit
def _best_token_kernel(
    logits_ptr,
    packed_ptr,
    token_ptr,
    is_finite_ptr,
    V,
    node_stride,
    chunk_size,
    IS_WHOLE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One chunk of one node. Grid (T, C)."""
    node, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = chunk * chunk_size
    stop = tl.minimum(first + chunk_size, V)
    logits_ptr += node * node_stride
    # Each lane keeps the best score that it has seen, by its first token. The ids of lanes beyond
    # the end lose ties with all others, and a chunk is never empty.
    token_L = first + tl.arange(0, TILE)
    best_L = tl.full([TILE], float("-inf"), tl.float32)
    best_token_L = token_L
    for start in range(first, stop, TILE):
        token_L = start + tl.arange(0, TILE)
        score_L = tl.load(logits_ptr + token_L, mask=token_L < stop, other=float("-inf"))
        # Larger or NaN; the first NaN stays.
        is_better_L = ~(score_L <= best_L) & (best_L == best_L)
        best_L = tl.where(is_better_L, score_L, best_L)
        best_token_L = tl.where(is_better_L, token_L, best_token_L)
    packed = tl.max(pack(best_L, best_token_L), axis=0)
    if IS_WHOLE:
        tl.store(token_ptr + node, packed_token(packed))
        tl.store(is_finite_ptr + node, is_number(packed_value(packed)))
    else:
        tl.store(packed_ptr + node * tl.num_programs(1) + chunk, packed)


@triton.jit
def best_of(packed_ptr, node, num_chunks, BLOCK: tl.constexpr):
    """The largest packed score of a node's chunks."""
    chunk_C = tl.arange(0, BLOCK)
    packed_C = tl.load(
        packed_ptr + node * num_chunks + chunk_C, mask=chunk_C < num_chunks, other=-(2**63)
    )
    return tl.max(packed_C, axis=0)


@triton.jit
def _join_chunks_kernel(
    drawn_ptr,
    best_ptr,
    token_ptr,
    is_finite_ptr,
    num_drawn,
    num_best,
    BLOCK: tl.constexpr,
):
    """One node. Grid (T,)."""
    node = tl.program_id(0).to(tl.int64)
    drawn = best_of(drawn_ptr, node, num_drawn, BLOCK)
    best = best_of(best_ptr, node, num_best, BLOCK)
    tl.store(token_ptr + node, packed_token(drawn))
    tl.store(is_finite_ptr + node, is_number(packed_value(best)))
