"""What the sequences in flight have said so far: one table of all slots, filled a record at a time.

Hundreds of rows tell of themselves while one round runs, so nothing here is done row by row. Every
record is held against the tables first. Knows nothing about pages, text or programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddbatch.core import CachePlan, RunError, ShapePlan, TokenLogprobs
from ddbatch.engine.prefill import Placed
from ddbatch.engine.record import Facts, Ints
from ddbatch_kernels.facts import Finish

_NO_SEQUENCE = -(1 << 40)  # what no record, which is int32, can tell


class Said(NamedTuple):
    """By one sequence. accepted, depth, drafted: of each round."""

    token_ids: list[int]
    accepted: list[int]
    depth: list[int]
    drafted: list[int]
    logprobs: TokenLogprobs | None


class Histories:
    """S slots and nobody's. plan: that drafts deepest. logprobs: what tells them, by row and
    place; empty where none are."""

    def __init__(self, plan: ShapePlan, cache_plan: CachePlan, logprobs: Sequence[Tensor]) -> None:
        slots, path = cache_plan.slots, plan.draft_depth + 1
        self._nobody = slots
        self._generation_S = np.full(slots + 1, _NO_SEQUENCE)
        self._prompt_len_S, self._num_out_S, self._num_rounds_S, self._may_end_S, self._most_S = (
            np.zeros(slots + 1, np.int64) for _ in range(5)
        )
        # All places of a path are written; those that hold nothing are written again, or not read.
        shape = (slots + 1, cache_plan.max_len + path)
        self._token_SO, self._accepted_SO, self._depth_SO, self._drafted_SO = (
            np.zeros(shape, np.int32) for _ in range(4)
        )
        self._logprobs_SO = [
            np.zeros((*shape, *told.shape[2:]), torch.empty(0, dtype=told.dtype).numpy().dtype)
            for told in logprobs
        ]
        self._place_K = np.arange(path)
        self._line_S = np.zeros(slots + 1, np.int64)  # of the record that is looked at

    def open(self, placed: Placed) -> None:
        """A sequence takes this slot."""
        slot = placed.slot
        self._generation_S[slot] = placed.generation
        self._prompt_len_S[slot] = len(placed.prompt.token_ids)
        for column_S in (self._num_out_S, self._num_rounds_S, self._may_end_S):
            column_S[slot] = 0

    @property
    def num_loaded(self) -> int:
        """Sequences whose prompts are all launched."""
        return int(np.count_nonzero(self._most_S))

    def load(self, placed: Placed) -> None:
        """All of the prompt is launched: from now on the sequence may be on a row."""
        prompt = placed.prompt
        self._most_S[placed.slot] = len(prompt.token_ids) + prompt.max_new_tokens

    def close(self, slot: int) -> Said:
        """The sequence has left this slot; all that it said."""
        self._generation_S[slot], self._most_S[slot] = _NO_SEQUENCE, 0
        num_out, num_rounds = self._num_out_S[slot], self._num_rounds_S[slot]
        told = [told_SO[slot, :num_out].tolist() for told_SO in self._logprobs_SO]
        return Said(
            self.token_ids(slot),
            self._accepted_SO[slot, :num_rounds].tolist(),
            self._depth_SO[slot, :num_rounds].tolist(),
            self._drafted_SO[slot, :num_rounds].tolist(),
            TokenLogprobs(*told) if told else None,
        )

    def token_ids(self, slot: int, start: int = 0) -> list[int]:
        """What was said from this place on."""
        return self._token_SO[slot, start : self._num_out_S[slot]].tolist()  # type: ignore[no-any-return]

    def may_end(self, slot: int) -> int:
        """Output tokens up to the last one that may end a stop string."""
        return int(self._may_end_S[slot])

    def lengths(self) -> Ints:
        """Committed tokens in each slot, where the first output token is known."""
        return self._lengths(slice(self._nobody))

    def mean_length(self) -> float:
        """Committed tokens of those that may be on a row, on average."""
        is_loaded_S = self._most_S > 0
        return float(self._lengths(slice(None))[is_loaded_S].mean()) if is_loaded_S.any() else 0.0

    def num_rounds(self, slot_L: Ints) -> Ints:
        """Rounds that these sequences had."""
        return self._num_rounds_S[slot_L]

    def longest(self, reach: int) -> int:
        """Committed tokens of the longest sequence that may be on a row, if each had as many more;
        none has more than its cap allows."""
        return int(np.minimum(self._lengths(slice(None)) + reach, self._most_S).max())

    def take(self, facts: Facts) -> None:
        """Append what a prefill call emitted. RunError where a slot has another sequence by now."""
        self._check_generations(facts)
        self._append(facts)

    def take_round(self, facts: Facts, drafted: int) -> None:
        """Append a round that offered each row so many nodes. RunError as above, where the device
        has a sequence at another place, and where two rows work on one."""
        self._check_generations(facts)
        self._check_lengths(facts)
        self._append(facts)
        slot_L, num_rounds_L = facts.slot_L, self._num_rounds_S[facts.slot_L]
        self._accepted_SO[slot_L, num_rounds_L] = facts.accepted_L
        self._depth_SO[slot_L, num_rounds_L] = facts.depth_L
        self._drafted_SO[slot_L, num_rounds_L] = drafted
        # A cancelled sequence does not take part in its last round.
        self._num_rounds_S[slot_L] = num_rounds_L + (facts.finish_L != Finish.CANCELLED)

    def _check_generations(self, facts: Facts) -> None:
        """RunError where a slot has another sequence by now, or none."""
        # A slot that does not exist is nobody's, where none is seated either.
        home_L = np.minimum(facts.slot_L.astype(np.uint64), self._nobody).astype(np.intp)
        seated_L = self._generation_S[home_L]
        for line in np.flatnonzero(seated_L != facts.generation_L)[:1]:
            seated = None if seated_L[line] == _NO_SEQUENCE else seated_L[line]
            raise RunError(
                f"engine: row {facts.row_L[line]} worked on sequence {facts.generation_L[line]} of "
                f"slot {facts.slot_L[line]} where {seated} is seated; a stale row cannot be trusted"
            )

    def _check_lengths(self, facts: Facts) -> None:
        """RunError where the device has a sequence at another place, or two rows work on it."""
        length_L, line_L = self._lengths(facts.slot_L), np.arange(len(facts.slot_L))
        self._line_S[facts.slot_L] = line_L
        last_L = self._line_S[facts.slot_L]
        for first in np.flatnonzero(last_L != line_L)[:1]:
            # Of two rows on a slot the second is where the host was before it read the first.
            length_L[last_L[first]] += facts.emitted_L[first]
            raise _at_another_place(facts, last_L[first], length_L)
        for line in np.flatnonzero(facts.check_L != length_L)[:1]:
            raise _at_another_place(facts, line, length_L)

    def _append(self, facts: Facts) -> None:
        slot_L, num_out_L = facts.slot_L, self._num_out_S[facts.slot_L]
        slot_L1 = slot_L[:, None]
        place_LK = num_out_L[:, None] + self._place_K[: facts.token_LK.shape[1]]
        self._token_SO[slot_L1, place_LK] = facts.token_LK
        for told_SO, told_LK in zip(self._logprobs_SO, facts.logprobs_LK, strict=True):
            told_SO[slot_L1, place_LK] = told_LK
        may_end_L = np.where(facts.may_end_L > 0, num_out_L + facts.may_end_L, 0)
        self._may_end_S[slot_L] = np.maximum(self._may_end_S[slot_L], may_end_L)
        self._num_out_S[slot_L] = num_out_L + facts.emitted_L

    def _lengths(self, slot_L: Ints | slice) -> Ints:
        """Committed tokens: all but the last emitted one."""
        return self._prompt_len_S[slot_L] + np.maximum(self._num_out_S[slot_L] - 1, 0)


def _at_another_place(facts: Facts, line: np.intp, length_L: Ints) -> RunError:
    return RunError(
        f"engine: slot {facts.slot_L[line]} had {facts.check_L[line]} tokens committed on the "
        f"device where the host has {length_L[line]}; nothing of this sequence can be trusted"
    )
