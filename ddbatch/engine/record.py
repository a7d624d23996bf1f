"""What a program told the host: written on the device at its end, read on the host later.

Columns are Fact (ddbatch_kernels/facts.py). The host holds every record against what it knows: a
record of another round, of a slot's earlier sequence or of a sequence of another length is a broken
engine, and no output of it can be trusted. Knows nothing about what the host does with the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ddbatch.core import RunError
from ddbatch_kernels.facts import CHECK_PRIME, ERRORS, Fact, Finish

_INT32 = (1 << 31) - 1
assert [int(finish) for finish in Finish] == list(range(len(Finish)))
Ints = NDArray[np.int64]


def check_sum(token_ids: Sequence[int]) -> int:
    """Of a piece's tokens, by place: what the device saw is what the host sent."""
    token_Q = np.fromiter(token_ids, np.int64, len(token_ids))
    return int(token_Q @ np.arange(1, len(token_Q) + 1)) % CHECK_PRIME


class Facts(NamedTuple):
    """Of L live rows or pieces of prompts, as in Fact. Of the K places for tokens the first
    emitted_L count. logprobs_LK: of the same places, with any further dimension."""

    row_L: Ints
    slot_L: Ints
    generation_L: Ints
    check_L: Ints
    emitted_L: Ints
    accepted_L: Ints
    depth_L: Ints
    finish_L: Ints
    may_end_L: Ints
    token_LK: Ints
    logprobs_LK: Sequence[NDArray[np.generic]]

    def only(self, line_Y: Ints) -> Facts:
        """Those of some lines."""
        logprobs_YK = [told_LK[line_Y] for told_LK in self.logprobs_LK]
        return Facts._make([*(column_L[line_Y] for column_L in self[:-1]), logprobs_YK])


_COLUMNS = [fact for fact in Fact if fact is not Fact.ERROR]
assert [f"{fact.name.lower()}_L" for fact in _COLUMNS] == list(Facts._fields[1:-2])


def read_record(copies: Sequence[Tensor], number: int, nobody: int, what: str) -> Facts:
    """Facts of the live rows of a record. RunError where it is not the `number`-th one, or the
    device found something wrong."""
    table_BX = copies[0].numpy()
    seen = int(table_BX[-1, 0])
    if seen & _INT32 != number & _INT32:
        raise RunError(
            f"engine: the record of {what} {seen} came where {number} was expected; "
            "nothing of it can be trusted"
        )
    # Hundreds of rows are read while one round runs: never one by one.
    row_L = np.flatnonzero(table_BX[:-1, Fact.SLOT] != nobody)
    line_LX = table_BX[row_L].astype(np.int64)
    error_L, finish_L = line_LX[:, Fact.ERROR], line_LX[:, Fact.FINISH]
    for line in np.flatnonzero(error_L)[:1]:
        bad = [text for bit, text in ERRORS.items() if error_L[line] & bit]
        raise RunError(
            f"engine: {what} {number}, row {row_L[line]}, slot {line_LX[line, Fact.SLOT]}: "
            f"{', '.join(bad)}; nothing of this round can be trusted"
        )
    for line in np.flatnonzero((finish_L < 0) | (finish_L >= len(Finish)))[:1]:
        raise RunError(f"engine: {what} {number}, row {row_L[line]}: no such end: {finish_L[line]}")
    columns = [line_LX[:, fact] for fact in _COLUMNS]
    logprobs_LK = [copy.numpy()[row_L] for copy in copies[1:]]
    return Facts._make([row_L, *columns, line_LX[:, len(Fact) :], logprobs_LK])
