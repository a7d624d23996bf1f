"""rounds/: what one worker's engine did second by second. Best effort, outside of every promise.

Knows the table and its files. A failure to write is told once on stderr and costs nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq

from ddbatch.data.folder import RunFolder

SCHEMA = pa.schema(
    [
        ("seconds_since_start", pa.float32()),
        ("rows", pa.int32()),
        ("nodes", pa.int32()),
        ("rounds", pa.int32()),
        ("live_row_rounds", pa.int32()),
        ("emitted", pa.int32()),
        ("seconds", pa.float32()),
        ("watts", pa.float32()),
    ]
)
# Rounds of the same plan are summed over so long: a round takes milliseconds.
_LINE_SECONDS = 1.0
_FILE_LINES = 3600


class RoundsLog:
    """Sums of rounds, a line a second, a file an hour and at the end."""

    def __init__(
        self, folder: RunFolder, attempt: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._attempt, self._clock = folder, attempt, clock
        self._started = self._line_began = clock()
        self._num_rounds, self._plan = 0, (0, 0)
        self._seen = self._counted = (0, 0)
        self._lines: list[dict[str, object]] = []
        self._num_files, self._is_broken = 0, False

    def add(self, *, rows: int, nodes: int, num_live: int, num_emitted: int) -> None:
        """One round is over. rows, nodes: of its plan. num_live: row-rounds that emitted, and
        num_emitted: tokens, both counted from the start of the run."""
        now = self._clock()
        if self._num_rounds and (
            (rows, nodes) != self._plan or now - self._line_began >= _LINE_SECONDS
        ):
            self._end_line(now)
        self._plan, self._num_rounds = (rows, nodes), self._num_rounds + 1
        self._seen = (num_live, num_emitted)

    def close(self) -> None:
        """Write what is left."""
        if self._num_rounds:
            self._end_line(self._clock())
        self._write()

    def _end_line(self, now: float) -> None:
        live, emitted = (
            after - before for after, before in zip(self._seen, self._counted, strict=True)
        )
        self._lines.append(
            {
                "seconds_since_start": self._line_began - self._started,
                "rows": self._plan[0],
                "nodes": self._plan[1],
                "rounds": self._num_rounds,
                "live_row_rounds": live,
                "emitted": emitted,
                "seconds": now - self._line_began,
                "watts": None,
            }
        )
        self._counted, self._num_rounds, self._line_began = self._seen, 0, now
        if len(self._lines) >= _FILE_LINES:
            self._write()

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if not lines or self._is_broken:
            return
        name = f"worker-{self._attempt}-{self._num_files:04d}.parquet"
        tmp, final = self._folder.tmp(self._attempt) / name, self._folder.place / "rounds" / name
        try:
            tmp.parent.mkdir(parents=True, exist_ok=True)
            final.parent.mkdir(exist_ok=True)
            pq.write_table(pa.Table.from_pylist(lines, schema=SCHEMA), tmp, compression="zstd")
            os.replace(tmp, final)
        except OSError as error:
            self._is_broken = True
            print(f"note: rounds/ is not written any more: {error}", file=sys.stderr)
        self._num_files += 1
