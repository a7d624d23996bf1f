"""Seating as one launch of one program, which goes over the rows a block at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from ddbatch_kernels.admit.reference import Ready
from ddbatch_kernels.rows import Rows

LARGEST_BLOCK = 1024  # rows looked at together


def admit_triton(rows: Rows, ready: Ready) -> None:
    """admit_ref on a GPU."""
    B, ring = len(rows.slot_B), len(ready.slot_Y) - 1
    assert ring > 0, ready.slot_Y.shape
    assert all(tensor.is_contiguous() for tensor in (*rows, *ready))
    _admit_kernel[(1,)](
        *rows,
        *ready,
        B,
        ring,
        BLOCK=min(triton.next_power_of_2(B), LARGEST_BLOCK),
        # One warp: all its lanes have read the ring's head before one of them moves it.
        num_warps=1,
    )


@triton.jit
def _admit_kernel(
    slot_ptr,
    is_active_ptr,
    ready_ptr,
    head_ptr,
    tail_ptr,
    B,
    ring,
    BLOCK: tl.constexpr,
):
    head = tl.load(head_ptr)
    num_waiting = tl.load(tail_ptr) - head
    num_wanting = tl.zeros_like(head)  # rows that were inert in the blocks before
    for start in range(0, B, BLOCK):
        row = start + tl.arange(0, BLOCK)
        is_row = row < B
        wants = is_row & (tl.load(is_active_ptr + row, mask=is_row, other=1) == 0)
        order = num_wanting + tl.cumsum(wants.to(tl.int64), 0) - 1
        takes = wants & (order < num_waiting)
        place = (head + order) % ring
        place = tl.where(place < 0, place + ring, place)  # only where the ring is broken
        slot = tl.load(ready_ptr + place, mask=takes, other=0)
        tl.store(slot_ptr + row, slot, mask=takes)
        tl.store(is_active_ptr + row, takes, mask=takes)
        num_wanting += tl.sum(wants.to(tl.int64), 0)
    num_taken = tl.maximum(tl.minimum(num_wanting, num_waiting), 0)
    tl.store(head_ptr, head + num_taken)
