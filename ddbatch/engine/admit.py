"""Admit stage: an inert row takes the next ready slot.

In: active_B, the ring of ready slots. Out: slot_B, active_B. It opens the round, so that what was
prefilled since the last one is seated at once and a first seating needs no other path.
"""

import torch
from torch import Tensor

from ddbatch.engine.state import RoundState


def admit(state: RoundState) -> None:
    """Seat ready slots on inert rows, in the order of the ring and of the rows."""
    ring = state.cache_plan.slots
    wants_B = ~state.active_B
    order_B = wants_B.cumsum(dim=0) - 1
    takes_B = wants_B & (order_B < state.ready_tail - state.ready_head)
    slot_B = state.ready_S[(state.ready_head + order_B) % ring]
    state.slot_B.copy_(torch.where(takes_B, slot_B, state.slot_B))
    state.active_B |= takes_B
    state.ready_head += takes_B.sum()


def push_ready(state: RoundState, slot_R: Tensor, is_live_R: Tensor) -> None:
    """Queue prefilled slots that still have tokens to emit."""
    ring = state.cache_plan.slots
    place_R = (state.ready_tail + is_live_R.cumsum(dim=0) - 1) % ring
    state.ready_S[torch.where(is_live_R, place_R, ring)] = slot_R
    state.ready_tail += is_live_R.sum()
