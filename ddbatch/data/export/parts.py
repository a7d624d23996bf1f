"""Committed files as a merge reads them: what a footer says, keys alone, and rows by position.

Knows Parquet, and that memory is for a few rows of each part only. Knows nothing about order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ddbatch.data.folder import StateError
from ddbatch.data.schema import KEY_FIELDS

Ints = NDArray[np.int64]

KEY = tuple(name for name, _ in KEY_FIELDS)

# So many bytes of a column are read at a time, not a whole row group of it.
_BUFFER_BYTES = 256 << 10
# A column of an open file holds a buffer and a page, which Parquet makes about 1 MiB large.
_OPEN_BYTES = (1 << 20) + _BUFFER_BYTES
# About so many bytes of a part are decoded at a time.
_BATCH_BYTES = 2 << 20
_BATCH_ROWS = 4096
# Above so many bytes, or parts, those that were not used longest are closed.
_HELD_BYTES = 512 << 20
_HELD_PARTS = 256


@dataclass(frozen=True)
class Part:
    """One committed file of a run.

    run: the run's place in the list of runs. groups: the rows of each row group. size: bytes of its
    columns before compression. first_row: its least row_id.
    """

    run: int
    table: str  # completions or rejected
    file: Path
    groups: tuple[int, ...]
    size: int
    first_row: int

    @property
    def rows(self) -> int:
        return sum(self.groups)

    @property
    def is_completions(self) -> bool:
        return self.table == "completions"


class PartKeys(NamedTuple):
    """The keys of a part, ascending."""

    row_id: Ints
    turn: Ints
    sample: Ints


def describe_part(run: int, table: str, file: Path, rows: int, schema: pa.Schema) -> Part:
    """A part by its footer; StateError unless it has the rows and columns that the run says."""
    with _reading(file) as part:
        about, found = part.metadata, part.schema_arrow
        groups = [about.row_group(at) for at in range(about.num_row_groups)]
        first = part.read_row_group(0, columns=[KEY[0]]).column(0)[0].as_py() if groups else 0
    if about.num_rows != rows:
        raise StateError(f"{file}: {about.num_rows} rows, its record says {rows}")
    if not found.equals(schema, check_metadata=False):
        raise StateError(f"{file}: its columns are not those that manifest.json says")
    return Part(
        run=run,
        table=table,
        file=file,
        groups=tuple(group.num_rows for group in groups),
        size=sum(group.total_byte_size for group in groups),
        first_row=first,
    )


def read_keys(part: Part) -> PartKeys:
    """The keys of a part; StateError unless they ascend."""
    with _reading(part.file) as content:
        table = content.read(columns=list(KEY))
    row_id, turn, sample = (table.column(name).to_numpy().astype(np.int64) for name in KEY)
    row_step, turn_step, sample_step = np.diff(row_id), np.diff(turn), np.diff(sample)
    ascends = (row_step > 0) | (row_step == 0) & (
        (turn_step > 0) | (turn_step == 0) & (sample_step > 0)
    )
    if not ascends.all():
        at = int(ascends.argmin()) + 1
        raise StateError(f"{part.file}: row {at} (row_id {row_id[at]}) is not sorted by key")
    return PartKeys(row_id, turn, sample)


def read_column(part: Part, name: str) -> pa.Table:
    """One column of a part; all null where its table has no such column."""
    with _reading(part.file) as content:
        if name not in content.schema_arrow.names:
            return pa.table({name: pa.nulls(part.rows)})
        return content.read(columns=[name]).select([name])


@contextmanager
def _reading(file: Path) -> Iterator[pq.ParquetFile]:
    """An open part; what goes wrong with it is the state's fault."""
    try:
        with pq.ParquetFile(file) as part:
            yield part
    except (OSError, pa.ArrowException) as error:
        raise StateError(f"{file} cannot be read: {error}") from error


class Rows:
    """Rows of parts by position. Cheap for positions that ascend in each part, right for any.

    schemas: the columns that are read of each table; what a row's table has not is null in it.
    """

    def __init__(self, parts: Sequence[Part], schemas: Mapping[str, pa.Schema]) -> None:
        self._readers = [_PartReader(part, schemas[part.table].names) for part in parts]
        self._nothing = pa.unify_schemas(list(schemas.values())).empty_table()
        self._held: dict[int, int] = {}  # part -> bytes held, the one used last at the end

    def take(self, part: Ints, position: Ints) -> pa.Table:
        """These rows in this order."""
        order = np.lexsort((position, part))
        numbers, starts = np.unique(part[order], return_index=True)
        tables = [self._nothing]
        for number, rows in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            reader = self._readers[number]
            tables.append(reader.take(position[rows]))
            self._held.pop(number, None)
            if reader.held_bytes:
                self._held[number] = reader.held_bytes
            self._close_unused()
        table = pa.concat_tables(tables, promote_options="default").combine_chunks()
        return table.take(pa.array(np.argsort(order)))

    def _close_unused(self) -> None:
        while len(self._held) > 1 and (
            len(self._held) > _HELD_PARTS or sum(self._held.values()) > _HELD_BYTES
        ):
            oldest = next(iter(self._held))
            self._readers[oldest].close()
            del self._held[oldest]


class _PartReader:
    """One part, read forward in batches; to go back is to read from the row group's start."""

    def __init__(self, part: Part, columns: Sequence[str]) -> None:
        self._part, self._columns = part, list(columns)
        self._group_stops = np.cumsum(part.groups)
        row_bytes = part.size // part.rows + 1
        self._batch_rows = min(max(_BATCH_BYTES // row_bytes, 1), _BATCH_ROWS)
        self._file: pq.ParquetFile | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._held: pa.Table | None = None
        self._start = self._stop = 0  # the rows that are held
        self._group_stop = 0  # where their row group ends

    @property
    def held_bytes(self) -> int:
        """About what this part takes in memory now."""
        is_open = self._file is not None
        of_file = min(self._part.size, _OPEN_BYTES * len(self._columns)) if is_open else 0
        return of_file + (0 if self._held is None else self._held.nbytes)

    def take(self, positions: Ints) -> pa.Table:
        """The rows at these ascending positions."""
        pieces, rest = [], positions
        try:
            while len(rest):
                held = self._hold(int(rest[0]))
                count = int(np.searchsorted(rest, self._stop))
                pieces.append(held.take(pa.array(rest[:count] - self._start)))
                rest = rest[count:]
        except (OSError, pa.ArrowException) as error:
            raise StateError(f"{self._part.file} cannot be read: {error}") from error
        if positions[-1] == self._part.rows - 1:
            self.close()
        return pa.concat_tables(pieces)

    def close(self) -> None:
        """Let go of the file and of what is held; the next take opens it again."""
        self._close_file()
        self._held = None
        self._start = self._stop = self._group_stop = 0

    def _hold(self, position: int) -> pa.Table:
        """The batch with this row."""
        if not self._start <= position < self._group_stop:
            self._open_group(int(np.searchsorted(self._group_stops, position, side="right")))
        while position >= self._stop:
            batch = next(self._batches)
            self._held = pa.Table.from_batches([batch]).select(self._columns)
            self._start, self._stop = self._stop, self._stop + batch.num_rows
        if self._stop == self._group_stop:
            self._close_file()
        assert self._held is not None, f"{self._part.file}: row {position} is not held"
        return self._held

    def _open_group(self, group: int) -> None:
        self.close()
        self._file = pq.ParquetFile(self._part.file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        self._batches = self._file.iter_batches(
            self._batch_rows, row_groups=[group], columns=self._columns
        )
        self._group_stop = int(self._group_stops[group])
        self._start = self._stop = self._group_stop - self._part.groups[group]

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._batches = None, iter(())
