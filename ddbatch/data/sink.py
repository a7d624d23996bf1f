"""Open parts: finished and rejected rows in, committed Parquet parts out, never half a file.

Knows when a part is full and how its files are written and committed. Knows nothing about prompts
being made or decoded; columns are told by schema.py, the protocol by commits.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ddbatch.core import Key, Rejected, RunError
from ddbatch.data.commits import (
    PartCounts,
    PartFile,
    Record,
    blocks_of,
    commit,
    discard,
    roll_forward,
)
from ddbatch.data.folder import RunFolder, hash_file, sync
from ddbatch.data.parquet import TableRow, write_table
from ddbatch.data.schema import (
    SUMS,
    FinishedRow,
    acceptance_row,
    completions_row,
    logprobs_row,
    rejected_row,
    row_counts,
)

# A part is closed before its rows need much more memory than this.
PART_BYTES = 256 << 20


@dataclass
class _Part:
    """The open part of a shard. opened: clock time of its first row."""

    number: int
    rows: dict[str, dict[Key, TableRow]]
    opened: float = 0.0
    num_bytes: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)

    @property
    def num_rows(self) -> int:
        """Completions and rejected rows in it."""
        return len(self.rows["completions"]) + len(self.rows["rejected"])

    @property
    def keys(self) -> list[Key]:
        """Keys of the completions and the rejected rows in it."""
        return [*self.rows["completions"], *self.rows["rejected"]]


class Sink:
    """The open parts of one worker, by shard.

    A part is closed when it holds part_rows rows or PART_BYTES, is part_seconds old, or its shard
    ends. clock: seconds that only move forward.
    """

    def __init__(
        self,
        folder: RunFolder,
        attempt: str,
        schemas: Mapping[str, pa.Schema],
        *,
        part_rows: int,
        part_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._attempt, self._schemas = folder, attempt, schemas
        self._part_rows, self._part_seconds, self._clock = part_rows, part_seconds, clock
        self._parts: dict[int, _Part] = {}

    def open_shard(self, shard: int, next_number: int) -> None:
        """Take rows of a shard whose records 0..next_number - 1 have been read."""
        assert shard not in self._parts, shard
        self._parts[shard] = self._new_part(next_number)

    def add(self, shard: int, rows: Sequence[FinishedRow | Rejected]) -> None:
        """Take rows that belong together: they come into one part."""
        part = self._parts[shard]
        if not part.num_rows:
            part.opened = self._clock()
        for row in rows:
            if isinstance(row, Rejected):
                self._put(part, "rejected", row.key, rejected_row(row))
                part.rejected[row.code] += 1
                part.num_bytes += len(row.raw_json)
                continue
            key = row.completion.key
            self._put(part, "completions", key, completions_row(row, self._schemas["completions"]))
            if "acceptance" in self._schemas:
                self._put(part, "acceptance", key, acceptance_row(row))
            if "logprobs" in self._schemas:
                self._put(part, "logprobs", key, logprobs_row(row, self._schemas["logprobs"]))
            part.totals.update(row_counts(row))
            part.num_bytes += _text_bytes(row)

    def due(self) -> list[int]:
        """Shards whose open part is full or old."""
        return [shard for shard in self._parts if self.is_due(shard)]

    def is_due(self, shard: int) -> bool:
        """Whether a shard's open part is full or old."""
        part = self._parts[shard]
        return part.num_rows > 0 and (
            part.num_rows >= self._part_rows
            or part.num_bytes >= PART_BYTES
            or self._clock() - part.opened >= self._part_seconds
        )

    def open_shards(self) -> list[int]:
        """Shards that rows are taken for."""
        return list(self._parts)

    def has_rows(self, shard: int) -> bool:
        """Whether a shard's open part has rows."""
        return self._parts[shard].num_rows > 0

    def commit_part(self, shard: int) -> Record | None:
        """Commit a shard's open part, which has rows, and begin the next.

        None if another worker was first with this number: then the part is thrown away and the
        shard is given up (it is in open_shards() no more).
        """
        part = self._parts[shard]
        assert part.num_rows, shard
        try:
            record = self._write(shard, part)
            if commit(self._folder, record):
                roll_forward(self._folder, record)
                self._parts[shard] = self._new_part(part.number + 1)
                return record
            discard(self._folder, record)
        except OSError as error:
            raise RunError(
                f"output_dir={self._folder.place}: part {part.number} of shard {shard} cannot be "
                f"written: {error}; parts before it are whole, and the same command goes on from "
                "them once this is mended"
            ) from error
        del self._parts[shard]
        return None

    def drop(self, shard: int) -> None:
        """Take no more rows of a shard; its open part has none."""
        assert not self._parts[shard].num_rows, shard
        del self._parts[shard]

    def _new_part(self, number: int) -> _Part:
        # "rejected" last: the others are looked at first by people.
        return _Part(number, {table: {} for table in self._schemas})

    def _put(self, part: _Part, table: str, key: Key, row: TableRow) -> None:
        assert key not in part.rows[table], f"{key} came twice"
        part.rows[table][key] = row
        part.num_bytes += sum(v.nbytes for v in row.values() if isinstance(v, np.ndarray))

    def _write(self, shard: int, part: _Part) -> Record:
        """The part's files, whole and on the disk under tmp names."""
        tmp = self._folder.tmp(self._attempt)
        tmp.mkdir(parents=True, exist_ok=True)
        files: list[PartFile] = []
        try:
            for table, rows in part.rows.items():
                if rows:
                    final = self._folder.part(table, shard, part.number)
                    file = self._tmp_file(table, shard, part.number)
                    ordered = [rows[key] for key in sorted(rows)]
                    files.append(self._write_file(table, ordered, file, final))
            sync(tmp)
        except BaseException:
            # A full disk must not stay full of what will never be committed.
            for table in part.rows:
                self._tmp_file(table, shard, part.number).unlink(missing_ok=True)
            raise
        return Record(
            shard=shard,
            number=part.number,
            attempt=self._attempt,
            files=tuple(files),
            keys=blocks_of(part.keys),
            counts=PartCounts(
                rejected=dict(part.rejected), **{name: part.totals[name] for name in SUMS}
            ),
            closed_at=time.time(),
            seconds=self._clock() - part.opened,
        )

    def _tmp_file(self, table: str, shard: int, number: int) -> Path:
        name = self._folder.part(table, shard, number).name
        return self._folder.tmp(self._attempt) / f"{table}-{name}"

    def _write_file(
        self, table: str, rows: Sequence[TableRow], file: Path, final: Path
    ) -> PartFile:
        write_table(rows, self._schemas[table], file)
        sync(file)
        with pq.ParquetFile(file) as written:
            if written.metadata.num_rows != len(rows):
                raise OSError(f"{file.name}: {written.metadata.num_rows} of {len(rows)} rows")
        return PartFile(
            table=table,
            tmp=self._folder.relative(file),
            final=self._folder.relative(final),
            sha256=hash_file(file),
            size=file.stat().st_size,
            rows=len(rows),
        )


def _text_bytes(row: FinishedRow) -> int:
    """Bytes that a row's texts take, roughly."""
    texts = len(row.conversation_json or "") + 2 * len(row.text)
    kept = sum(len(value) for value in row.prompt.kept if isinstance(value, (str, bytes)))
    return texts + kept
