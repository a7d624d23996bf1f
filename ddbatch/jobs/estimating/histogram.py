"""Counts of lengths in bounded memory: mean, percentiles, and a histogram in text.

Knows nothing about what has the lengths.
"""

from __future__ import annotations

from collections import Counter

from ddbatch.jobs.show import aligned, share

_BAR = 40  # characters of the longest bar


class Lengths:
    """How many things have which length: one counter a length, not one entry a thing."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, length: int) -> None:
        """One more thing."""
        self._counts[length] += 1

    @property
    def num(self) -> int:
        """Things so far."""
        return self._counts.total()

    @property
    def total(self) -> int:
        """Sum of the lengths."""
        return sum(length * count for length, count in self._counts.items())

    @property
    def mean(self) -> float:
        """Mean length; there must be one."""
        return self.total / self.num

    @property
    def longest(self) -> int:
        """The largest length; there must be one."""
        return max(self._counts)

    def percentile(self, per_cent: float) -> int:
        """The smallest length that at least per_cent of the things do not exceed."""
        wanted, seen = per_cent / 100 * self.num, 0
        for length in sorted(self._counts):
            seen += self._counts[length]
            if seen >= wanted:
                return length
        raise AssertionError(f"{per_cent} per cent of {self.num}: {seen}")

    def bars(self) -> str:
        """A line per power of two, from the first that has something to the last."""
        buckets: Counter[int] = Counter()
        for length, count in self._counts.items():
            buckets[length.bit_length()] += count
        highest = max(buckets.values())
        lines = []
        for bits in range(min(buckets), max(buckets) + 1):
            low, high = (1 << bits) >> 1, (1 << bits) - 1
            count = buckets[bits]
            # A single one in a million is still seen.
            bar = "#" * max(count > 0, round(_BAR * count / highest))
            span = f"{low:,}" if low == high else f"{low:,}-{high:,}"
            lines.append((span, f"{count:,}", share(count, self.num), bar))
        return aligned(lines, right=(0, 1, 2))
