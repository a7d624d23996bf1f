"""The blocks that a drafter fills: B rows, K tokens each, of which it is told the first."""

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """int64. token_BK: the anchor, then masks. pos_BK: the anchor's place and those behind."""

    token_BK: Tensor
    pos_BK: Tensor


def open_blocks_ref(
    slot_B: Tensor, anchor_S: Tensor, length_S: Tensor, size: int, mask_token: int
) -> Blocks:
    """The anchor of each row's slot and size - 1 mask tokens behind it."""
    place_K = torch.arange(size, device=slot_B.device)
    anchor_B1, length_B1 = anchor_S[slot_B, None], length_S[slot_B, None]
    return Blocks(torch.where(place_K == 0, anchor_B1, mask_token), length_B1 + place_K)
