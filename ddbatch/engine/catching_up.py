"""What a drafter is told of the sequences, and what it misses while plain decoding advances them.

Its context is made of what the target computes of each committed token, and plain rounds keep
nothing of that: later the tokens go through prefill calls once more, which write the target's keys
anew too. Knows nothing about when a drafter is needed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ddbatch.engine.histories import Histories
from ddbatch.engine.prefill import Piece
from ddbatch.engine.record import Ints
from ddbatch.engine.seats import Seat

_ALL = np.iinfo(np.int64).max


class Context:
    """Of each slot. Hundreds are asked for at once, so nothing here goes slot by slot."""

    def __init__(self, slots: int) -> None:
        self._prompt_len_S, self._launched_S = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._told_S = np.full(slots, _ALL)

    def open(self, slot: int, prompt_len: int, *, is_told: bool) -> None:
        """A sequence takes the slot; is_told: its drafter is told of all that is committed."""
        self._prompt_len_S[slot], self._launched_S[slot] = prompt_len, 0
        self._told_S[slot] = _ALL if is_told else 0

    def launch(self, slot: int, stop: int) -> None:
        """So many tokens of its prompt are in prefill calls."""
        self._launched_S[slot] = stop

    def close(self, slot: int) -> None:
        """The sequence has ended."""
        self._told_S[slot] = _ALL

    def sleep(self, histories: Histories) -> None:
        """From now on the drafter is told nothing. All records must have been read."""
        self._told_S = np.minimum(self._told_S, self._committed(histories))

    def num_untold(self, histories: Histories) -> int:
        """Tokens that it missed, as far as records were read."""
        return int(np.maximum(self._committed(histories) - self._told_S, 0).sum())

    def tell(self, seats: Iterable[Seat], histories: Histories, chunk: int) -> list[Piece]:
        """Pieces of all tokens that it missed, each from a multiple of `chunk` on; they count as
        told. All records must have been read."""
        pieces, committed_S = [], self._committed(histories)
        for placed in (seat.placed for seat in seats):
            told, stop = int(self._told_S[placed.slot]), int(committed_S[placed.slot])
            if told >= stop:
                continue
            ids = (*placed.prompt.token_ids, *histories.token_ids(placed.slot))[:stop]
            pieces += [
                Piece(
                    placed,
                    start,
                    ids[start : start + chunk],
                    is_first=False,
                    is_last=False,
                    is_prompt=False,
                )
                for start in range(told - told % chunk, stop, chunk)
            ]
        self._told_S.fill(_ALL)
        return pieces

    def _committed(self, histories: Histories) -> Ints:
        """Tokens whose keys are in the cache, or will be after the calls that were launched."""
        is_loaded_S = self._launched_S == self._prompt_len_S
        return np.where(is_loaded_S, histories.lengths(), self._launched_S)
