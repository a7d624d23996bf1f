"""The books of a round as one launch, a warp a row.

A row reads and writes its own line and its own slot and nothing of others, so no order of the
programs matters; inert rows write nothing to nobody's slot. Nodes, slots, pages and tokens that are
none are not looked up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddbatch_kernels.commit_rows.reference import Kept, Record
from ddbatch_kernels.facts import Error, Fact, Finish, TokenFlag
from ddbatch_kernels.rows import Accepted, Nodes, Rows, Slots

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
_LIVE = tl.constexpr(int(Finish.LIVE))
_LENGTH = tl.constexpr(int(Finish.LENGTH))
_BAD_TOKEN = tl.constexpr(Error.TOKEN)
_BAD_PARENT = tl.constexpr(Error.PARENT)
_BAD_EMITTED = tl.constexpr(Error.EMITTED)
_BAD_LENGTH = tl.constexpr(Error.LENGTH)
_MAY_END_STRING = tl.constexpr(TokenFlag.MAY_END_STRING)


def commit_rows_triton(
    nodes: Nodes,
    accepted: Accepted,
    rows: Rows,
    slots: Slots,
    record: Record,
    *,
    page: int,
    max_len: int,
    trash_cell: int,
) -> Kept:
    """commit_rows_ref on a GPU."""
    B, N = nodes.token_BN.shape
    K = accepted.path_BK.shape[1]
    assert record.row_BX.shape == (B + 1, len(Fact) + K), (record.row_BX.shape, B, K)
    assert slots.page_table_SP.shape[1] * page >= max_len, (slots.page_table_SP.shape, page)
    tensors = (*nodes, *accepted, *rows, *slots, record.row_BX)
    assert all(tensor.is_contiguous() for tensor in (*tensors, *record.drawn_BN, *record.told_BK))
    kept = Kept(*(torch.empty_like(accepted.path_BK) for _ in Kept._fields))
    # Where no log-probs are kept the kernel touches none: any tensors do.
    has_logprobs = bool(record.told_BK)
    drawn, told = (record.drawn_BN, record.told_BK) if has_logprobs else ((record.number,) * 3,) * 2
    M = told[-1].shape[-1] if has_logprobs else 0
    _commit_rows_kernel[(B,)](
        nodes.token_BN,
        nodes.parent_BN,
        nodes.depth_BN,
        nodes.pos_BN,
        nodes.choice_BN,
        *accepted,
        *rows,
        slots.length_S,
        slots.anchor_S,
        slots.cap_S,
        slots.num_out_S,
        slots.generation_S,
        slots.page_table_SP,
        slots.token_flag_SV,
        record.row_BX,
        record.number,
        *drawn,
        *told,
        *kept,
        *slots.token_flag_SV.shape,
        slots.page_table_SP.shape[1],
        page,
        max_len,
        trash_cell,
        N=N,
        K=K,
        M=M,
        BLOCK_N=triton.next_power_of_2(N),
        BLOCK_K=triton.next_power_of_2(K),
        BLOCK_M=triton.next_power_of_2(max(M, 1)),
        HAS_LOGPROBS=has_logprobs,
        num_warps=1,
    )
    return kept


@triton.jit
def _commit_rows_kernel(
    token_ptr,
    parent_ptr,
    depth_ptr,
    pos_ptr,
    choice_ptr,
    path_ptr,
    num_accepted_ptr,
    emitted_ptr,
    num_emitted_ptr,
    finish_ptr,
    slot_ptr,
    is_active_ptr,
    length_ptr,
    anchor_ptr,
    cap_ptr,
    num_out_ptr,
    generation_ptr,
    page_table_ptr,
    flag_ptr,
    record_ptr,
    number_ptr,
    drawn_ptr,
    drawn_top_id_ptr,
    drawn_top_ptr,
    told_ptr,
    told_top_id_ptr,
    told_top_ptr,
    kept_node_ptr,
    kept_pos_ptr,
    kept_cell_ptr,
    num_slots,
    vocab,
    num_pages,
    page,
    max_len,
    trash_cell,
    N: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    is_active = tl.load(is_active_ptr + row) != 0
    named_slot = tl.load(slot_ptr + row)
    slot = tl.minimum(tl.maximum(named_slot, 0), num_slots - 1)
    length = tl.load(pos_ptr + row * N)
    count = tl.load(num_emitted_ptr + row)
    num_accepted = tl.load(num_accepted_ptr + row)
    finish = tl.load(finish_ptr + row)
    num_out = tl.load(num_out_ptr + slot) + count
    cap = tl.load(cap_ptr + slot)
    place = tl.arange(0, BLOCK_K)
    is_place = place < K
    path = tl.load(path_ptr + row * K + place, mask=is_place, other=0)
    path = tl.minimum(tl.maximum(path, 0), N - 1)
    emitted = tl.load(emitted_ptr + row * K + place, mask=is_place, other=0)

    # What is wrong.
    node = tl.arange(0, BLOCK_N)
    is_node = node < N
    here = row * N + node
    token = tl.load(token_ptr + here, mask=is_node, other=0)
    choice = tl.load(choice_ptr + here, mask=is_node, other=0)
    parent = tl.load(parent_ptr + here, mask=is_node, other=0)
    depth = tl.load(depth_ptr + here, mask=is_node, other=0)
    parent_node = tl.minimum(tl.maximum(parent, 0), N - 1)
    parent_depth = tl.load(depth_ptr + row * N + parent_node, mask=is_node & (node > 0), other=-1)
    is_bad_token = (token < 0) | (token >= vocab) | (choice < 0) | (choice >= vocab)
    is_bad_parent = (parent >= node) | ((parent < 0) != (node == 0)) | (depth != parent_depth + 1)
    # A row may end without a token: cancelled, or with scores that are no numbers.
    is_bad_count = (count < (finish <= _LENGTH).to(tl.int64)) | (count > K)
    # Pages are there for the prompt and cap_S tokens.
    is_bad_length = (length + count > max_len) | (num_out > cap)
    error = tl.max((is_bad_token & is_node).to(tl.int32), 0) * _BAD_TOKEN
    error += tl.max((is_bad_parent & is_node).to(tl.int32), 0) * _BAD_PARENT
    error += is_bad_count.to(tl.int32) * _BAD_EMITTED
    error += is_bad_length.to(tl.int32) * _BAD_LENGTH

    # Which of the kept tokens is the last that may end a stop string.
    is_emitted = is_place & (place < count)
    flag_token = tl.minimum(tl.maximum(emitted, 0), vocab - 1)
    flag = tl.load(flag_ptr + slot * vocab + flag_token, mask=is_emitted, other=0)
    may_end = tl.max(tl.where((flag & _MAY_END_STRING) != 0, place + 1, 0), 0)

    # The record.
    line_ptr = record_ptr + row * (_NUM_FACTS + K)
    told_slot = tl.where(is_active, named_slot, num_slots - 1)
    tl.store(line_ptr + _SLOT, told_slot.to(tl.int32))
    tl.store(line_ptr + _GENERATION, tl.load(generation_ptr + slot).to(tl.int32))
    # As the verified nodes saw it: another row on the slot cannot have changed it since.
    tl.store(line_ptr + _CHECK, length.to(tl.int32))
    tl.store(line_ptr + _EMITTED, count.to(tl.int32))
    tl.store(line_ptr + _ACCEPTED, num_accepted.to(tl.int32))
    tl.store(line_ptr + _DEPTH, tl.max(depth, 0).to(tl.int32))
    tl.store(line_ptr + _FINISH, finish.to(tl.int32))
    tl.store(line_ptr + _MAY_END, may_end)
    tl.store(line_ptr + _ERROR, tl.where(is_active, error, 0))
    tl.store(line_ptr + _NUM_FACTS + place, emitted.to(tl.int32), mask=is_place)
    if row == 0:
        number = tl.load(number_ptr)
        last_line = tl.num_programs(0).to(tl.int64)
        tl.store(record_ptr + last_line * (_NUM_FACTS + K), number.to(tl.int32))
        tl.store(number_ptr, number + 1)
    if HAS_LOGPROBS:
        # The draw at a path's node is the token emitted at its place.
        from_K = row * N + path
        to_K = row * K + place
        logprob = tl.load(drawn_ptr + from_K, mask=is_place)
        tl.store(told_ptr + to_K, logprob, mask=is_place)
        best = tl.arange(0, BLOCK_M)
        is_best = is_place[:, None] & (best < M)[None, :]
        from_KM = from_K[:, None] * M + best[None, :]
        to_KM = to_K[:, None] * M + best[None, :]
        top_id = tl.load(drawn_top_id_ptr + from_KM, mask=is_best)
        tl.store(told_top_id_ptr + to_KM, top_id, mask=is_best)
        top = tl.load(drawn_top_ptr + from_KM, mask=is_best)
        tl.store(told_top_ptr + to_KM, top, mask=is_best)

    # Where what is kept belongs.
    pos = length + place
    is_kept = is_emitted & (pos >= 0) & (pos < max_len)
    pos = tl.where(is_kept, pos, 0)
    page_id = tl.load(page_table_ptr + slot * num_pages + pos // page, mask=is_kept, other=0)
    cell = tl.where(is_kept, page_id * page + pos % page, trash_cell)
    tl.store(kept_node_ptr + row * K + place, row * N + path, mask=is_place)
    tl.store(kept_pos_ptr + row * K + place, pos, mask=is_place)
    tl.store(kept_cell_ptr + row * K + place, cell, mask=is_place)

    # The slot and the row afterwards.
    last = tl.minimum(tl.maximum(count - 1, 0), K - 1)  # a wrong count is told, and not a fault
    tl.store(length_ptr + slot, length + count, mask=is_active)
    tl.store(num_out_ptr + slot, num_out, mask=is_active)
    tl.store(anchor_ptr + slot, tl.load(emitted_ptr + row * K + last), mask=is_active)
    stays = is_active & (finish == _LIVE)
    tl.store(is_active_ptr + row, stays)
    tl.store(slot_ptr + row, tl.where(stays, slot, num_slots - 1).to(tl.int64))
