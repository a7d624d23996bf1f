"""The kernel of open_blocks writes exactly what the reference writes."""

from __future__ import annotations

import pytest
import torch
from made_rounds import assert_same, copied

from ddbatch_kernels.open_blocks import open_blocks_ref
from ddbatch_kernels.open_blocks.kernel import open_blocks_triton


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 16), (3, 5), (8, 16), (9, 15), (130, 7)])
def test_kernel_opens_the_blocks_that_the_reference_opens(
    rows: int, size: int, kernel_device: str
) -> None:
    generator = torch.Generator().manual_seed(rows)
    slot_B = torch.randint(rows + 2, (rows,), generator=generator)
    anchor_S, length_S = torch.randint(1 << 33, (2, rows + 2), generator=generator)
    slots = (slot_B, anchor_S, length_S)
    found = open_blocks_triton(*copied(slots, kernel_device), size, 77)
    assert_same(found, open_blocks_ref(*slots, size, 77))


def test_a_block_is_the_anchor_and_masks_behind_the_committed_tokens() -> None:
    slots = (torch.tensor([2, 0]), torch.tensor([5, 6, 7]), torch.tensor([10, 20, 30]))
    blocks = open_blocks_ref(*slots, 3, 99)
    assert blocks.token_BK.tolist() == [[7, 99, 99], [5, 99, 99]]
    assert blocks.pos_BK.tolist() == [[30, 31, 32], [10, 11, 12]]


def test_slots_that_are_none_are_not_looked_up(kernel_device: str) -> None:
    wild = (torch.tensor([-(1 << 40), 1, 1 << 40]), torch.arange(3), torch.arange(3))
    blocks = open_blocks_triton(*copied(wild, kernel_device), 4, 77)
    assert blocks.token_BK[1].tolist() == [1, 77, 77, 77]
    assert blocks.pos_BK[1].tolist() == [1, 2, 3, 4]
