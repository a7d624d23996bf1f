"""What a program told the host: written on the device at its end, read on the host later.

Columns are Fact (ddbatch_kernels/facts.py). The host holds every record against what it knows: a
record of another round, of a slot's earlier sequence or of a sequence of another length is a broken
engine, and no output of it can be trusted. Knows nothing about what the host does with the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ddbatch.core import RunError, TokenLogprobs
from ddbatch_kernels.facts import CHECK_PRIME, ERRORS, Fact, Finish

_INT32 = (1 << 31) - 1


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
    table = copies[0].tolist()
    if table[-1][0] & _INT32 != number & _INT32:
        raise RunError(
            f"engine: the record of {what} {table[-1][0]} came where {number} was expected; "
            "nothing of it can be trusted"
        )
    found = []
    for row, line in enumerate(table[:-1]):
        if line[Fact.SLOT] == nobody:
            continue
        if line[Fact.ERROR]:
            bad = [text for bit, text in ERRORS.items() if line[Fact.ERROR] & bit]
            raise RunError(
                f"engine: {what} {number}, row {row}, slot {line[Fact.SLOT]}: {', '.join(bad)}; "
                "nothing of this round can be trusted"
            )
        if line[Fact.FINISH] not in iter(Finish):
            raise RunError(f"engine: {what} {number}, row {row}: no such end: {line[Fact.FINISH]}")
        count = line[Fact.EMITTED]
        found.append(
            RowFacts(
                row,
                line[Fact.SLOT],
                line[Fact.GENERATION],
                line[Fact.CHECK],
                line[Fact.ACCEPTED],
                line[Fact.DEPTH],
                Finish(line[Fact.FINISH]),
                line[Fact.MAY_END],
                line[len(Fact) : len(Fact) + count],
                _logprobs(copies[1:], row, count),
            )
        )
    return found


def _logprobs(copies: Sequence[Tensor], row: int, count: int) -> TokenLogprobs | None:
    if not copies:
        return None
    return TokenLogprobs(*(copy[row, :count].tolist() for copy in copies))
