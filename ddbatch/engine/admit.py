"""Admit stage: an inert row takes the next ready slot.

In: the ring of ready slots. Out: slot_B, active_B. It opens the round, so that what was prefilled
since the last one is seated at once and a first seating needs no other path.
"""

from ddbatch.engine.state import RoundState
from ddbatch_kernels.admit import admit as seat


def admit(state: RoundState) -> None:
    """Seat ready slots on inert rows, in the order of the ring and of the rows."""
    seat(state.rows, state.ready)
