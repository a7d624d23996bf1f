"""Progress of a run: a bar on a terminal, one line every half minute in a log.

Knows nothing about the engine; it is told how many rows and tokens are done.
"""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

LINE_SECONDS = 30.0


class Progress:
    """Rows done of `total`, with tokens per second and acceptance length."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._tokens, self._rounds = total, 0, 0, 0
        self._started = self._last_line = time.monotonic()
        self._bar = tqdm(total=total, unit="row", disable=not sys.stderr.isatty(), leave=False)

    def update(self, num_tokens: int, num_rounds: int) -> None:
        """One more row is done, with its output tokens and the rounds that made them."""
        self._done += 1
        self._tokens += num_tokens
        self._rounds += num_rounds
        self._bar.set_postfix_str(self._speed(), refresh=False)
        self._bar.update()
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            print(f"rows {self._done}/{self._total}, {self._speed()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.close()

    def _speed(self) -> str:
        rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
        length = f", acceptance length {self._tokens / self._rounds:.2f}" if self._rounds else ""
        return f"{rate:.0f} tokens/s{length}"
