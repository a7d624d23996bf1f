"""How far a run is: what its records say, and what this worker has finished since.

Knows counts only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from ddbatch.core import Rejected
from ddbatch.data.commits import Record
from ddbatch.data.schema import SUMS, FinishedRow, row_counts


@dataclass
class Counts:
    """Sums over output rows. units: samples of input rows; the rest counts output rows (one a
    turn). rounds and accepted count those of the speculative decoding."""

    units: int = 0
    completions: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    accepted_tokens: int = 0
    dropped_prompts: int = 0

    @property
    def num_rows(self) -> int:
        """Output rows, rejected ones included."""
        return self.completions + self.rejected.total()

    def add(self, other: Counts) -> None:
        """Count what another has counted."""
        self.rejected.update(other.rejected)
        names = (item.name for item in fields(Counts) if item.name != "rejected")
        self._sum({name: getattr(other, name) for name in names})

    def add_record(self, record: Record) -> None:
        """Count a committed part."""
        self.units += record.num_units
        self.rejected.update(record.counts.rejected)
        self._sum({name: getattr(record.counts, name) for name in SUMS})

    def add_unit(self, results: Sequence[FinishedRow | Rejected]) -> None:
        """Count a unit's turns."""
        self.units += 1
        for row in results:
            if isinstance(row, Rejected):
                self.rejected[row.code] += 1
                continue
            self._sum(row_counts(row))
            self.dropped_prompts += row.num_dropped > 0

    def _sum(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)


class Tally:
    """Counts of the run as far as this worker knows it."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units  # rows x samples of the input
        self.committed = Counts()  # by anybody
        self.own = Counts()  # committed by this worker
        self._open: dict[int, Counts] = {}
        self._seen: set[tuple[int, int]] = set()

    @property
    def num_left(self) -> int:
        """Units that no record has; another start may have asked for more than we know of."""
        return max(0, self.num_units - self.committed.units)

    @property
    def num_open(self) -> int:
        """Units of this worker's open parts."""
        return sum(counts.units for counts in self._open.values())

    @property
    def num_finished(self) -> int:
        """Units that this worker has finished, committed or not."""
        return self.own.units + self.num_open

    def known(self) -> Counts:
        """Sums over what is committed and what is in an open part."""
        total = Counts()
        for counts in (self.committed, *self._open.values()):
            total.add(counts)
        return total

    @property
    def num_known(self) -> int:
        """Output rows that are committed or in an open part."""
        return self.committed.num_rows + sum(counts.num_rows for counts in self._open.values())

    @property
    def num_rejected(self) -> int:
        """Rejected rows among them."""
        return self.committed.rejected.total() + sum(
            counts.rejected.total() for counts in self._open.values()
        )

    def see(self, records: Iterable[Record]) -> None:
        """Count records, each once."""
        for record in records:
            if (record.shard, record.number) not in self._seen:
                self._seen.add((record.shard, record.number))
                self.committed.add_record(record)

    def add(self, shard: int, results: Sequence[FinishedRow | Rejected]) -> None:
        """Count a unit that went into its shard's open part."""
        self._open.setdefault(shard, Counts()).add_unit(results)

    def commit(self, record: Record) -> None:
        """The open part of a shard is committed."""
        dropped = self._open.pop(record.shard).dropped_prompts
        self.see([record])
        self.own.add_record(record)
        self.own.dropped_prompts += dropped

    def forget(self, shard: int) -> None:
        """The open part of a shard is lost to another worker."""
        self._open.pop(shard, None)
