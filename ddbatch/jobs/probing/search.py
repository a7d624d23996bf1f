"""Which numbers of tokens are tried, one after the other, to find the most that work.

Knows nothing about what is tried.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Search:
    """Twice as many each time up to the first failure or `most`, then halves of what is between,
    in multiples of `step`. Whoever fails beyond a number fails everywhere beyond it, this takes for
    granted.

    works: the most that worked, 0 before any did. fails: the fewest that did not.
    """

    step: int
    most: int
    works: int = 0
    fails: int | None = None

    def next(self) -> int | None:
        """What to try; None where the answer is there."""
        if self.fails is None:
            candidate = min(max(self.step, 2 * self.works), self.most)
            return candidate if candidate > self.works else None
        between = self.fails - self.works
        if between <= self.step or not self.works:
            return None
        return self.works + max(self.step, between // 2 // self.step * self.step)

    def tell(self, tokens: int, *, is_sound: bool) -> None:
        """What became of it."""
        if is_sound:
            self.works = tokens
        else:
            self.fails = tokens
