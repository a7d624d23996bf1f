"""Parquet and Arrow files: their columns, and their rows by position, in bounded memory.

Also the two tables of an earlier run that can be an input: its truncated and its rejected rows.
Knows nothing about hashes or which files are the input.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ddbatch.data.batching.columns import BadRow, Fault, Row, dump_json, parse_line
from ddbatch.data.source.column_types import Column, columns_of_schema

_BATCH_ROWS = 256
_BATCH_BYTES = 16 << 20
_BUFFER = 1 << 20
_FILE_MAGIC = b"ARROW1"
_STREAM_START = b"\xff\xff\xff\xff"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True)
class TableScan:
    """What a table file says about itself."""

    rows: int
    columns: tuple[Column, ...]


def scan_parquet(file: Path, needed: str | None = None) -> TableScan:
    """Rows and columns from the footer; ValueError without the column `needed`."""
    with pq.ParquetFile(file) as table:
        columns = columns_of_schema(table.schema_arrow)
        if needed is not None and needed not in table.schema_arrow.names:
            raise ValueError(f"no column {needed}: not a table of a ddbatch run")
        return TableScan(table.metadata.num_rows, columns)


def scan_arrow(file: Path) -> TableScan:
    """Rows and columns from a walk over the batches."""
    _check_arrow(file)
    with _arrow_reader(file) as reader:
        rows = sum(batch.num_rows for batch in _record_batches(reader))
        return TableScan(rows, columns_of_schema(reader.schema))


def _check_arrow(file: Path) -> None:
    """Which of the two formats; a stream that is cut between two batches looks whole to Arrow."""
    with file.open("rb") as raw:
        start = raw.read(len(_FILE_MAGIC))
        raw.seek(max(0, raw.seek(0, io.SEEK_END) - len(_STREAM_END)))
        end = raw.read()
    if start == _FILE_MAGIC:
        return
    if not start.startswith(_STREAM_START):
        raise ValueError("neither Arrow's stream nor its file format")
    if end != _STREAM_END:
        raise ValueError("an Arrow stream without its end: cut short, or never closed")


@contextmanager
def _arrow_reader(file: Path) -> Iterator[pa.RecordBatchReader | pa.ipc.RecordBatchFileReader]:
    with file.open("rb") as raw:
        is_file = raw.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    with pa.memory_map(str(file)) as source:
        opened = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        with opened as reader:
            yield reader


def _record_batches(
    reader: pa.RecordBatchReader | pa.ipc.RecordBatchFileReader,
) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


def read_parquet(file: Path, start: int, stop: int) -> Iterator[Row | BadRow]:
    """Rows start..stop-1; row groups before and after them are not touched."""
    for batch in _parquet_batches(file, start, stop):
        yield from _rows(batch)


def read_arrow(file: Path, start: int, stop: int) -> Iterator[Row | BadRow]:
    """Rows start..stop-1; batches before them are passed over in the memory map."""
    with _arrow_reader(file) as reader:
        for batch in _cut(_record_batches(reader), start, stop):
            yield from _rows(batch)


def count_truncated(file: Path) -> int:
    """Rows of a completions file that were cut off by the cap."""
    with pq.ParquetFile(file, buffer_size=_BUFFER) as table:
        batches = table.iter_batches(columns=["finish_reason"])
        return sum(_truncated(batch).num_rows for batch in batches)


def read_truncated(file: Path, start: int, stop: int) -> Iterator[Row | BadRow]:
    """Rows start..stop-1 of those rows."""
    chosen = (_truncated(batch) for batch in _parquet_batches(file, 0, None))
    for batch in _cut(chosen, start, stop):
        yield from _rows(batch)


def _truncated(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.equal(batch.column("finish_reason"), "length"))


def read_rejected(file: Path, start: int, stop: int) -> Iterator[Row | BadRow]:
    """Rows start..stop-1 of a rejected file, as they were read when they were rejected."""
    for batch in _parquet_batches(file, start, stop, ["raw_json"]):
        for raw_json in batch.column("raw_json").cast(pa.binary()).to_pylist():
            yield parse_line(raw_json or b"")


def _parquet_batches(
    file: Path, start: int, stop: int | None, columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    # Both settings are needed to stream within a row group: by default its columns are read whole.
    with pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as table:
        metadata = table.metadata
        last = metadata.num_rows if stop is None else stop
        first_row = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            begin, end = start - first_row, last - first_row
            first_row += group.num_rows
            if end <= 0 or begin >= group.num_rows:
                continue
            batches = table.iter_batches(
                batch_size=_batch_rows(group.num_rows, group.total_byte_size),
                row_groups=[number],
                columns=columns,
            )
            yield from _cut(batches, max(0, begin), end)


def _cut(batches: Iterator[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """Rows start..stop-1 of all batches together, in pieces that are small as Python values."""
    at = 0
    for batch in batches:
        begin, end = max(0, start - at), min(batch.num_rows, stop - at)
        step = _batch_rows(batch.num_rows, batch.nbytes)
        for first in range(begin, end, step):
            yield batch.slice(first, min(step, end - first))
        at += batch.num_rows
        if at >= stop:
            return


def _batch_rows(num_rows: int, num_bytes: int) -> int:
    """So many rows at once: few where rows are large."""
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * num_rows // max(1, num_bytes)))


def _rows(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of a batch; a value that Python cannot hold is a Fault in its column's place.

    Neither format checks that its strings are UTF-8, and both hold dates beyond the year 9999.
    """
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        if batch.num_rows == 1:
            yield _row_with_faults(batch)
            return
        for at in range(batch.num_rows):
            yield from _rows(batch.slice(at, 1))
        return
    for values in rows:
        yield Row(values, dump_json(values))


def _fault(error: ValueError | OverflowError) -> Fault:
    if isinstance(error, UnicodeDecodeError):
        return Fault("bad_text", f"not UTF-8: {error.reason} at byte {error.start}")
    return Fault("wrong_type", f"a value that cannot be read: {error}")


def _row_with_faults(batch: pa.RecordBatch) -> Row:
    """The one row of a batch; its text has replacement characters for what is no UTF-8, and null
    for what else cannot be read."""
    values: dict[str, object] = {}
    shown: dict[str, object] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = shown[name] = column[0].as_py()
        except (ValueError, OverflowError) as error:
            values[name] = _fault(error)
            is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
            shown[name] = (
                column[0].as_buffer().to_pybytes().decode("utf-8", "replace") if is_text else None
            )
    return Row(values, dump_json(shown))
