"""What a drafter is told of sequences that plain decoding advanced.

Its context is made of what the target computes of each committed token, and plain rounds keep
nothing of that: the tokens go through prefill calls once more, which write the target's keys anew
too. Knows nothing about when a drafter is needed.
"""

from __future__ import annotations

from collections.abc import Iterable

from ddbatch.engine.histories import Histories
from ddbatch.engine.prefill import Piece
from ddbatch.engine.seats import Seat


def num_committed(seat: Seat, histories: Histories) -> int:
    """Tokens of a sequence that are committed, as far as records were read, or in prefill calls."""
    is_loaded = seat.num_launched == len(seat.placed.prompt.token_ids)
    return histories.length(seat.placed.slot) if is_loaded else seat.num_launched


def untold_pieces(seats: Iterable[Seat], histories: Histories, chunk: int) -> list[Piece]:
    """Pieces of all tokens that the drafter was not told of, each from a multiple of `chunk` on; it
    counts as told afterwards. All records must have been read."""
    pieces = []
    for seat in seats:
        if seat.num_drafted is None:
            continue
        slot, prompt = seat.placed.slot, seat.placed.prompt
        ids = (*prompt.token_ids, *histories.token_ids(slot))[: num_committed(seat, histories)]
        first, seat.num_drafted = seat.num_drafted - seat.num_drafted % chunk, None
        pieces += [
            Piece(seat.placed, start, ids[start : start + chunk], is_first=False, is_last=False)
            for start in range(first, len(ids), chunk)
        ]
    return pieces
