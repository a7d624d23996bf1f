"""Admit stage: an inert row takes the next ready slot; and its way back, before a change of plan.

In: the ring of ready slots. Out: slot_B, active_B. It opens the round, so that what was prefilled
since the last one is seated at once and a first seating needs no other path.
"""

import torch

from ddbatch.engine.state import RoundState
from ddbatch_kernels.admit import admit as seat


def admit(state: RoundState) -> None:
    """Seat ready slots on inert rows, in the order of the ring and of the rows."""
    seat(state.rows, state.ready)


def leave(state: RoundState) -> None:
    """Take every sequence off its row, to the front of the ring: rows of another plan admit them.
    Between rounds, by the host."""
    ring, is_live_B = len(state.ready_S) - 1, state.active_B
    num_live = is_live_B.sum()
    place_B = (state.ready_head - num_live + is_live_B.cumsum(dim=0) - 1) % ring
    # The spare place takes what is not live.
    state.ready_S[torch.where(is_live_B, place_B, ring)] = state.slot_B
    state.ready_head.sub_(num_live)
    state.slot_B.fill_(state.nobody)
    state.active_B.zero_()
