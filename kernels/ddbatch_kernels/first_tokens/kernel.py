"""Seating and telling of a prefill call as one launch of one program: pieces are few."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.admit.reference import Ready
from ddbatch_kernels.facts import CHECK_PRIME, ChunkFact, Error, Fact, Finish, TokenFlag
from ddbatch_kernels.rows import Slots

BLOCK_TOKENS = 1024  # of all pieces, looked at together

_SLOT = tl.constexpr(int(Fact.SLOT))
_GENERATION = tl.constexpr(int(Fact.GENERATION))
_CHECK = tl.constexpr(int(Fact.CHECK))
_EMITTED = tl.constexpr(int(Fact.EMITTED))
_ACCEPTED = tl.constexpr(int(Fact.ACCEPTED))
_DEPTH = tl.constexpr(int(Fact.DEPTH))
_FINISH = tl.constexpr(int(Fact.FINISH))
_MAY_END = tl.constexpr(int(Fact.MAY_END))
_ERROR = tl.constexpr(int(Fact.ERROR))
_NUM_FACTS = tl.constexpr(len(Fact))
_PIECE_SLOT = tl.constexpr(int(ChunkFact.SLOT))
_PIECE_START = tl.constexpr(int(ChunkFact.START))
_PIECE_SIZE = tl.constexpr(int(ChunkFact.SIZE))
_PIECE_IS_LAST = tl.constexpr(int(ChunkFact.IS_LAST))
_NUM_PIECE_FACTS = tl.constexpr(len(ChunkFact))
_LIVE = tl.constexpr(int(Finish.LIVE))
_STOP = tl.constexpr(int(Finish.STOP))
_LENGTH = tl.constexpr(int(Finish.LENGTH))
_NAN_LOGITS = tl.constexpr(int(Finish.NAN_LOGITS))
_STOP_ID = tl.constexpr(TokenFlag.STOP_ID)
_MAY_END_STRING = tl.constexpr(TokenFlag.MAY_END_STRING)
_BAD_TOKEN = tl.constexpr(Error.TOKEN)
_PRIME = tl.constexpr(CHECK_PRIME)


def first_tokens_triton(
    chunk_RX: Tensor,
    token_R: Tensor,
    is_finite_R: Tensor,
    slots: Slots,
    ready: Ready,
    record_BX: Tensor,
    number: Tensor,
) -> None:
    """first_tokens_ref on a GPU. The ring's spare place is left as it is."""
    R, Q = chunk_RX.shape[0], chunk_RX.shape[1] - len(ChunkFact)
    lines = len(record_BX) - 1
    assert lines >= R, (R, record_BX.shape)
    assert record_BX.shape[1] == len(Fact) + 1, record_BX.shape
    assert len(token_R) == len(is_finite_R) == R, (R, token_R.shape, is_finite_R.shape)
    tensors = (chunk_RX, record_BX, slots.token_flag_SV)
    assert all(tensor.is_contiguous() for tensor in tensors)
    BLOCK_R = triton.next_power_of_2(lines)
    _first_tokens_kernel[(1,)](
        chunk_RX,
        token_R,
        is_finite_R,
        slots.length_S,
        slots.anchor_S,
        slots.cap_S,
        slots.num_out_S,
        slots.generation_S,
        slots.token_flag_SV,
        *ready,
        record_BX,
        number,
        R,
        lines,
        Q,
        token_R.stride(0),
        is_finite_R.stride(0),
        *slots.token_flag_SV.shape,
        len(ready.slot_Y) - 1,
        BLOCK_R=BLOCK_R,
        BLOCK_Q=min(triton.next_power_of_2(Q), max(1, BLOCK_TOKENS // BLOCK_R)),
        # One warp: all its lanes have read the ring's tail before one of them moves it.
        num_warps=1,
    )


@triton.jit
def _first_tokens_kernel(
    chunk_ptr,
    token_ptr,
    is_finite_ptr,
    length_ptr,
    anchor_ptr,
    cap_ptr,
    num_out_ptr,
    generation_ptr,
    flag_ptr,
    ready_ptr,
    head_ptr,
    tail_ptr,
    record_ptr,
    number_ptr,
    num_pieces,
    num_lines,
    num_tokens,
    token_stride,
    is_finite_stride,
    num_slots,
    vocab,
    ring,
    BLOCK_R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    piece = tl.arange(0, BLOCK_R)
    is_piece = piece < num_pieces
    piece_ptr = chunk_ptr + piece.to(tl.int64) * (_NUM_PIECE_FACTS + num_tokens)
    named_slot = tl.load(piece_ptr + _PIECE_SLOT, mask=is_piece, other=0)
    start = tl.load(piece_ptr + _PIECE_START, mask=is_piece, other=0)
    size = tl.load(piece_ptr + _PIECE_SIZE, mask=is_piece, other=0)
    is_last = tl.load(piece_ptr + _PIECE_IS_LAST, mask=is_piece, other=0) != 0
    token = tl.load(token_ptr + piece * token_stride, mask=is_piece, other=0)
    is_finite = tl.load(is_finite_ptr + piece * is_finite_stride, mask=is_piece, other=0) != 0
    slot = tl.minimum(tl.maximum(named_slot, 0), num_slots - 1)
    cap = tl.load(cap_ptr + slot, mask=is_piece, other=0)
    generation = tl.load(generation_ptr + slot, mask=is_piece, other=0)
    flag_token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    flag = tl.load(flag_ptr + slot * vocab + flag_token, mask=is_piece, other=0)

    # What becomes of the sequences. A draw from scores that are no numbers is no token.
    finish = tl.where(cap == 1, _LENGTH, _LIVE)
    finish = tl.where((flag & _STOP_ID) != 0, _STOP, finish)
    finish = tl.where(is_finite, finish, _NAN_LOGITS)
    finish = tl.where(is_last, finish, _LIVE)
    num_emitted = (is_finite & is_last).to(tl.int32)
    tl.store(length_ptr + slot, start + size, mask=is_last)
    tl.store(anchor_ptr + slot, token, mask=is_last)
    tl.store(num_out_ptr + slot, num_emitted.to(tl.int64), mask=is_last)
    goes_on = is_last & (finish == _LIVE)
    tail = tl.load(tail_ptr)
    place = (tail + tl.cumsum(goes_on.to(tl.int64), 0) - 1) % ring
    place = tl.where(place < 0, place + ring, place)  # only where the ring is broken
    tl.store(ready_ptr + place, named_slot, mask=goes_on)
    tl.store(tail_ptr, tail + tl.sum(goes_on.to(tl.int64), 0))

    # What the host is told.
    check = tl.zeros([BLOCK_R], tl.int64)
    for first in range(0, num_tokens, BLOCK_Q):
        at = first + tl.arange(0, BLOCK_Q)
        is_token = is_piece[:, None] & (at < num_tokens)[None, :] & (at[None, :] < size[:, None])
        seen = tl.load(piece_ptr[:, None] + _NUM_PIECE_FACTS + at[None, :], mask=is_token, other=0)
        check += tl.sum(seen * (at[None, :] + 1), 1)
    check = check % _PRIME
    check = tl.where(check < 0, check + _PRIME, check)
    may_end = ((flag & _MAY_END_STRING) != 0).to(tl.int32) * num_emitted
    is_bad_token = (token < 0) | (token >= vocab)
    line_ptr = record_ptr + piece * (_NUM_FACTS + 1)
    # A call may be smaller than the plan's.
    told_slot = tl.where(is_piece, named_slot, num_slots - 1).to(tl.int32)
    tl.store(line_ptr + _SLOT, told_slot, mask=piece < num_lines)
    tl.store(line_ptr + _GENERATION, generation.to(tl.int32), mask=is_piece)
    tl.store(line_ptr + _CHECK, check.to(tl.int32), mask=is_piece)
    tl.store(line_ptr + _EMITTED, num_emitted, mask=is_piece)
    tl.store(line_ptr + _ACCEPTED, 0, mask=is_piece)
    tl.store(line_ptr + _DEPTH, 0, mask=is_piece)
    tl.store(line_ptr + _FINISH, finish.to(tl.int32), mask=is_piece)
    tl.store(line_ptr + _MAY_END, may_end, mask=is_piece)
    tl.store(line_ptr + _ERROR, is_bad_token.to(tl.int32) * _BAD_TOKEN, mask=is_piece)
    tl.store(line_ptr + _NUM_FACTS, token.to(tl.int32), mask=is_piece)
    number = tl.load(number_ptr)
    tl.store(record_ptr + num_lines * (_NUM_FACTS + 1), number.to(tl.int32))
    tl.store(number_ptr, number + 1)
