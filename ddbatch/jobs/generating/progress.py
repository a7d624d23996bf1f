"""Progress of a run: a bar on a terminal, one line every half minute in a log.

Knows the tally of the run and how many tokens the engine has made; tells speed over the last minute
and the time that is left as a range.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable

from tqdm import tqdm

from ddbatch.jobs.generating.tally import Tally
from ddbatch.jobs.show import duration, ranged, say, share
from ddbatch.jobs.ticker import LINE_SECONDS

WINDOW_SECONDS = 60.0
_SAMPLE_SECONDS = 1.0
# The range is not given before so many rows say how long a row is.
_MIN_ROWS = 8


class Progress:
    """Shows a tally: rows of all (finished ones in a bar, committed ones in a log), tokens/s over
    60 s, and what went wrong."""

    def __init__(
        self,
        tally: Tally,
        *,
        is_terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        is_terminal = sys.stderr.isatty() if is_terminal is None else is_terminal
        self._clock = clock
        self._started = self._last_line = self._last_sample = clock()
        self._bar = tqdm(
            total=tally.num_units,
            initial=tally.committed.units,
            unit="row",
            disable=not is_terminal,
            leave=False,
            bar_format="{percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt}{postfix}",
        )
        # (time, output tokens, finished units) over the last minute.
        self._samples: deque[tuple[float, int, int]] = deque([(self._started, 0, 0)])

    def show(self, tally: Tally, output_tokens: int) -> None:
        """Called every round; output_tokens: made by this worker since its start."""
        now = self._clock()
        if now - self._last_sample < _SAMPLE_SECONDS:
            return
        self._last_sample = now
        self._samples.append((now, output_tokens, tally.num_finished))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_SECONDS:
            self._samples.popleft()
        if not self._bar.disable:
            # Not the committed ones, as in a log: of a small run they are none until its end.
            self._bar.n = tally.committed.units + tally.num_open
            self._bar.set_postfix_str(self._text(tally), refresh=False)
            try:
                self._bar.refresh()
            except OSError:  # the terminal is gone, and the run goes on
                self._bar.disable = True
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            head = f"committed {tally.committed.units:,}/{tally.num_units:,} rows"
            say(f"{head}, {self._text(tally)}")

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.close()

    def _text(self, tally: Tally) -> str:
        (then, tokens_then, _), (now, tokens_now, _) = self._samples[0], self._samples[-1]
        rate = (tokens_now - tokens_then) / max(now - then, 1e-9)
        parts = [f"{rate:,.0f} tokens/s", f"ETA {self._eta(tally)}"]
        known = tally.known()
        if known.rounds:
            # The first token of a row comes from its prompt's forward, not from a round.
            length = (known.output_tokens - known.completions) / known.rounds
            parts.append(f"acceptance length {length:.2f}")
        if known.rejected:
            parts.append(f"{known.rejected.total():,} rejected")
        if known.completions:
            parts.append(f"{share(known.truncated, known.completions)} truncated")
        return ", ".join(parts)

    def _eta(self, tally: Tally) -> str:
        """Time left, from the rate of the last minute and from that since the start."""
        now, _, finished_now = self._samples[-1]
        left = tally.num_units - tally.committed.units - tally.num_open
        rates = []
        for then, _, finished_then in (self._samples[0], (self._started, 0, 0)):
            if finished_now - finished_then >= _MIN_ROWS and now > then:
                rates.append((finished_now - finished_then) / (now - then))
        if not rates:
            return "unknown"
        low, high = left / max(rates), left / min(rates)
        return ranged(duration(low), duration(high))
