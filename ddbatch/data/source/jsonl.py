"""JSONL, plain and gzipped: rows by position, and the offset index that makes them quick to reach.

A row is a line that is not blank. Lines end at a newline byte only, because JSON strings may hold
U+2028; CRLF and a byte order mark at the start of the file are put up with. Knows nothing about
hashes, caches or what a row means.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from ddbatch.data.batching.columns import BadRow, Row, parse_line
from ddbatch.data.source.column_types import Column, Kinds, columns_of_kinds, note_kinds

INDEX_STEP = 256
TYPED_ROWS = 1000
BUFFER = 1 << 20

Offsets = npt.NDArray[
    np.int64
]  # from which byte on row 0, INDEX_STEP, 2 * INDEX_STEP, ... is found

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Line(NamedTuple):
    """A line that is a row, and the byte where it begins."""

    at: int
    body: bytes


@dataclass(frozen=True)
class LineScan:
    """What one pass over a JSONL file shows."""

    rows: int
    columns: tuple[Column, ...]
    offsets: Offsets


def unpack(packed: IO[bytes]) -> IO[bytes]:
    """The lines inside a gzip file; its checksum is proved by reading to the end."""
    # Iterating a buffer is several times faster than iterating GzipFile itself.
    return io.BufferedReader(gzip.GzipFile(fileobj=packed, mode="rb"), BUFFER)


def scan_lines(lines: Iterable[bytes]) -> LineScan:
    """Count the rows, note where every INDEX_STEP-th begins, and type the columns."""
    offsets = [0]
    kinds: Kinds = {}
    rows = 0
    for line in _row_lines(lines, 0):
        if rows and rows % INDEX_STEP == 0:
            offsets.append(line.at)
        if rows < TYPED_ROWS:
            row = parse_line(line.body)
            if isinstance(row, Row):
                note_kinds(kinds, row.values)
        rows += 1
    return LineScan(rows, columns_of_kinds(kinds), np.array(offsets, np.int64))


def columns_of_rows(rows: Iterable[Row | BadRow]) -> tuple[Column, ...]:
    """The columns of JSON rows that stand elsewhere, by the same rule as a file's."""
    kinds: Kinds = {}
    for row in islice(rows, TYPED_ROWS):
        if isinstance(row, Row):
            note_kinds(kinds, row.values)
    return columns_of_kinds(kinds)


def read_lines(file: Path, start: int, stop: int, offsets: Offsets) -> Iterator[Row | BadRow]:
    """Rows start..stop-1 of a plain file; fewer if the file ends before."""
    step = start // INDEX_STEP
    with file.open("rb", buffering=BUFFER) as lines:
        at = int(offsets[step])
        lines.seek(at)
        skipped = step * INDEX_STEP
        for line in islice(_row_lines(lines, at), start - skipped, stop - skipped):
            yield parse_line(line.body)


def read_packed(file: Path, start: int, stop: int) -> Iterator[Row | BadRow]:
    """Rows start..stop-1 of a gzip file, which can only be read from its beginning."""
    with file.open("rb", buffering=BUFFER) as packed, unpack(packed) as lines:
        for line in islice(_row_lines(lines, 0), start, stop):
            yield parse_line(line.body)


def _row_lines(lines: Iterable[bytes], at: int) -> Iterator[_Line]:
    """The lines that are rows, from a stream that stands at byte `at`."""
    for line in lines:
        body = line.removeprefix(_BYTE_ORDER_MARK) if at == 0 else line
        if body and not body.isspace():
            yield _Line(at, body)
        at += len(line)
