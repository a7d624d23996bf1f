"""Blocks of all rows as one launch, a lane a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.open_blocks.reference import Blocks
from ddbatch_kernels.overlap import OVERLAP, gdc_launch_dependents, gdc_wait
from ddbatch_kernels.slots import slot_of

BLOCK = 128  # tokens of a program


def open_blocks_triton(
    slot_B: Tensor, anchor_S: Tensor, length_S: Tensor, size: int, mask_token: int
) -> Blocks:
    """open_blocks_ref on a GPU."""
    B, K = len(slot_B), size
    assert anchor_S.shape == length_S.shape, (anchor_S.shape, length_S.shape)
    assert all(tensor.is_contiguous() for tensor in (slot_B, anchor_S, length_S))
    blocks = Blocks(slot_B.new_empty(B, K), slot_B.new_empty(B, K))
    _open_blocks_kernel[(triton.cdiv(B * K, BLOCK),)](
        slot_B,
        anchor_S,
        length_S,
        *blocks,
        len(anchor_S),
        mask_token,
        B * K,
        K,
        BLOCK,
        num_warps=1,
        **OVERLAP,
    )
    return blocks


@triton.jit
def _open_blocks_kernel(
    slot_ptr,
    anchor_ptr,
    length_ptr,
    token_ptr,
    pos_ptr,
    num_slots,
    mask_token,
    num_tokens,
    K,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    token_T = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_token_T = token_T < num_tokens
    place_T = token_T % K
    slot_T = slot_of(slot_ptr, tl.where(is_token_T, token_T // K, 0), num_slots)
    anchor_T = tl.load(anchor_ptr + slot_T, mask=is_token_T & (place_T == 0), other=mask_token)
    length_T = tl.load(length_ptr + slot_T, mask=is_token_T, other=0)
    tl.store(token_ptr + token_T, anchor_T, mask=is_token_T)
    tl.store(pos_ptr + token_T, length_T + place_T, mask=is_token_T)
