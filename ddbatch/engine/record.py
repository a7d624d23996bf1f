"""What a program told the host: written on the device at its end, read on the host later.

Columns are Fact (ddbatch_kernels/facts.py). The host holds every record against what it knows: a
record of another round, of a slot's earlier sequence or of a sequence of another length is a broken
engine, and no output of it can be trusted. Knows nothing about what the host does with the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ddbatch.core import RunError, TokenLogprobs
from ddbatch_kernels.facts import CHECK_PRIME, ERRORS, Fact, Finish

_INT32 = (1 << 31) - 1
_FINISHES = tuple(Finish)
assert [int(finish) for finish in _FINISHES] == list(range(len(_FINISHES)))


def check_sum(token_ids: Sequence[int]) -> int:
    """Of a piece's tokens, by place: what the device saw is what the host sent."""
    return sum(place * token for place, token in enumerate(token_ids, start=1)) % CHECK_PRIME


class RowFacts(NamedTuple):
    """Of one live row, or of one piece of a prompt."""

    row: int
    slot: int
    generation: int
    check: int
    accepted: int
    depth: int
    finish: Finish
    may_end: int
    token_ids: list[int]
    logprobs: TokenLogprobs | None


def read_record(copies: Sequence[Tensor], number: int, nobody: int, what: str) -> list[RowFacts]:
    """Facts of the live rows of a record. RunError where it is not the `number`-th one, or the
    device found something wrong."""
    table_BX = copies[0].numpy()
    seen = int(table_BX[-1, 0])
    if seen & _INT32 != number & _INT32:
        raise RunError(
            f"engine: the record of {what} {seen} came where {number} was expected; "
            "nothing of it can be trusted"
        )
    # Hundreds of rows are read while one round runs: what is rare is looked for in all at once.
    live = np.flatnonzero(table_BX[:-1, Fact.SLOT] != nobody)
    lines = table_BX[live]
    for place in np.flatnonzero(lines[:, Fact.ERROR])[:1]:
        bad = [text for bit, text in ERRORS.items() if lines[place, Fact.ERROR] & bit]
        raise RunError(
            f"engine: {what} {number}, row {live[place]}, slot {lines[place, Fact.SLOT]}: "
            f"{', '.join(bad)}; nothing of this round can be trusted"
        )
    finish_L = lines[:, Fact.FINISH]
    for place in np.flatnonzero((finish_L < 0) | (finish_L >= len(_FINISHES)))[:1]:
        raise RunError(
            f"engine: {what} {number}, row {live[place]}: no such end: {finish_L[place]}"
        )
    has_logprobs = len(copies) > 1
    return [
        RowFacts(
            row,
            slot,
            generation,
            check,
            accepted,
            depth,
            _FINISHES[finish],
            may_end,
            tokens[:count],
            _logprobs(copies[1:], row, count) if has_logprobs else None,
        )
        for row, (
            slot,
            generation,
            check,
            count,
            accepted,
            depth,
            finish,
            may_end,
            _,
            *tokens,
        ) in zip(live.tolist(), lines.tolist(), strict=True)
    ]


def _logprobs(copies: Sequence[Tensor], row: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(*(copy[row, :count].tolist() for copy in copies))
