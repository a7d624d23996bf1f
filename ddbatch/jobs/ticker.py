"""How far a job that reads is: a bar on a terminal, a line every half minute in a log.

Knows nothing about what is counted.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from ddbatch.jobs.show import say

LINE_SECONDS = 30.0


class Ticker:
    """Things done of `total`, on stderr; a job of a few seconds says nothing in a log."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._last_line = time.monotonic()
        self._bar = tqdm(total=total, unit=f" {what}", disable=not sys.stderr.isatty(), leave=False)

    def __enter__(self) -> Ticker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def show(self, done: int) -> None:
        """So many are done by now."""
        self._bar.update(done - self._bar.n)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            say(f"{done:,} of {self._total:,} {self._what}")
