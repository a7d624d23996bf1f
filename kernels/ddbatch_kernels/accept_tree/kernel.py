"""The walk and where it ends as one launch: a warp a row goes down the tree, a level a step.

The walk goes by parents: of a sound tree it finds what the reference finds by ancestors. Whatever
the data is, it ends after K steps, and nodes, slots and tokens that are none are not looked up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddbatch_kernels.facts import Finish, TokenFlag
from ddbatch_kernels.rows import Accepted, Nodes, Rows, Slots

_LIVE = tl.constexpr(int(Finish.LIVE))
_STOP = tl.constexpr(int(Finish.STOP))
_LENGTH = tl.constexpr(int(Finish.LENGTH))
_NAN_LOGITS = tl.constexpr(int(Finish.NAN_LOGITS))
_CANCELLED = tl.constexpr(int(Finish.CANCELLED))
_STOP_ID = tl.constexpr(TokenFlag.STOP_ID)


def accept_tree_triton(nodes: Nodes, rows: Rows, slots: Slots, out: Accepted) -> None:
    """accept_tree_ref on a GPU."""
    B, N = nodes.token_BN.shape
    K = out.path_BK.shape[1]
    assert out.path_BK.shape == out.emitted_BK.shape == (B, K), (out.path_BK.shape, B)
    assert nodes.choice_BN.shape == nodes.is_finite_BN.shape == (B, N), (B, N)
    tensors = (*nodes, *rows, *out, slots.token_flag_SV)
    assert all(tensor.is_contiguous() for tensor in tensors)
    _accept_tree_kernel[(B,)](
        nodes.token_BN,
        nodes.parent_BN,
        nodes.choice_BN,
        nodes.is_finite_BN,
        *rows,
        slots.cap_S,
        slots.num_out_S,
        slots.is_cancelled_S,
        slots.token_flag_SV,
        *out,
        *slots.token_flag_SV.shape,
        N=N,
        K=K,
        BLOCK_N=triton.next_power_of_2(N),
        BLOCK_K=triton.next_power_of_2(K),
        num_warps=1,
    )


@triton.jit
def _accept_tree_kernel(
    token_ptr,
    parent_ptr,
    choice_ptr,
    is_finite_ptr,
    slot_ptr,
    is_active_ptr,
    cap_ptr,
    num_out_ptr,
    is_cancelled_ptr,
    flag_ptr,
    path_ptr,
    num_accepted_ptr,
    emitted_ptr,
    num_emitted_ptr,
    finish_ptr,
    num_slots,
    vocab,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    is_active = tl.load(is_active_ptr + row) != 0
    slot = tl.load(slot_ptr + row)
    slot = tl.minimum(tl.maximum(slot, 0), num_slots - 1)
    room = tl.load(cap_ptr + slot) - tl.load(num_out_ptr + slot)
    is_cancelled = tl.load(is_cancelled_ptr + slot) != 0

    node = tl.arange(0, BLOCK_N)
    is_node = node < N
    token_N = tl.load(token_ptr + row * N + node, mask=is_node, other=0)
    parent_N = tl.load(parent_ptr + row * N + node, mask=is_node, other=-1)
    is_child = is_node & (node > 0)
    place = tl.arange(0, BLOCK_K)
    path = tl.zeros([BLOCK_K], tl.int32)
    emitted = tl.zeros([BLOCK_K], tl.int64)
    here = tl.min(node, 0)  # the root
    num_steps = here
    while (here < N) & (num_steps < K):
        choice = tl.load(choice_ptr + row * N + here)
        path = tl.where(place == num_steps, here, path)
        emitted = tl.where(place == num_steps, choice, emitted)
        is_next = is_child & (parent_N == here) & (token_N == choice)
        here = tl.min(tl.where(is_next, node, N), 0)  # siblings hold distinct tokens
        num_steps += 1

    # In token order: what comes first of a score that is no number, a stop token and the cap.
    most = tl.minimum(num_steps.to(tl.int64), room)
    is_bad = tl.load(is_finite_ptr + row * N + path) == 0
    first_bad = tl.min(tl.where(is_bad, place, BLOCK_K), 0)
    num_good = tl.minimum(first_bad.to(tl.int64), most)
    flag_token = tl.minimum(tl.maximum(emitted, 0), vocab - 1)
    is_stop = (tl.load(flag_ptr + slot * vocab + flag_token) & _STOP_ID) != 0
    first_stop = tl.min(tl.where(is_stop & (place < num_good), place, BLOCK_K), 0)
    has_stop = first_stop < BLOCK_K
    num_kept = tl.where(has_stop, first_stop + 1, num_good)
    finish = tl.where(num_kept >= room, _LENGTH, _LIVE)
    finish = tl.where(num_good < most, _NAN_LOGITS, finish)
    finish = tl.where(has_stop, _STOP, finish)
    finish = tl.where(is_cancelled, _CANCELLED, finish)

    num_emitted = tl.where(is_active & (is_cancelled == 0), num_kept, 0)
    # A drafted token beyond the cut was not kept.
    num_accepted = tl.minimum((num_steps - 1).to(tl.int64), num_emitted)
    is_place = place < K
    tl.store(path_ptr + row * K + place, path.to(tl.int64), mask=is_place)
    tl.store(emitted_ptr + row * K + place, emitted, mask=is_place)
    tl.store(num_emitted_ptr + row, num_emitted)
    tl.store(num_accepted_ptr + row, num_accepted)
    tl.store(finish_ptr + row, tl.where(is_active, finish, _LIVE).to(tl.int64))
