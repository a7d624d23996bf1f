"""Seat ready slots on inert rows, in the order of the ring and of the rows.

B rows; a ring of Y places, and one spare place behind it for what is not pushed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch_kernels.rows import Rows


class Ready(NamedTuple):
    """Slots that are prefilled and wait for a row. slot_Y: int64 [Y + 1]. head, tail: int64 [1],
    how many were ever taken and pushed."""

    slot_Y: Tensor
    head: Tensor
    tail: Tensor


def admit_ref(rows: Rows, ready: Ready) -> None:
    """Take as many slots as there are inert rows and waiting slots; all is written in place."""
    ring = len(ready.slot_Y) - 1
    wants_B = ~rows.is_active_B
    order_B = wants_B.cumsum(dim=0) - 1
    takes_B = wants_B & (order_B < ready.tail - ready.head)
    slot_B = ready.slot_Y[(ready.head + order_B) % ring]
    rows.slot_B.copy_(torch.where(takes_B, slot_B, rows.slot_B))
    rows.is_active_B.logical_or_(takes_B)
    ready.head.add_(takes_B.sum())
