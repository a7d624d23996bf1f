"""One file of the input: what a full look at it shows, and its rows by position.

Knows which reader a file's name and data.select ask for, and hashes content. Knows nothing about
which files are the input, or about the run.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa

from ddbatch.data.batching.columns import BadRow, Row
from ddbatch.data.source import jsonl as formats_jsonl
from ddbatch.data.source import tables as formats_table
from ddbatch.data.source.column_types import Column
from ddbatch.data.source.jsonl import BUFFER, Offsets
from ddbatch.data.source.tables import TableScan

Select = Literal["all", "truncated", "rejected"]

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")
PACKED = ".jsonl.gz"

# What the readers raise about a file that is gone, cut short or no such file at all.
READ_ERRORS = (OSError, EOFError, zlib.error, pa.ArrowException)


class Stamp(NamedTuple):
    """What the file system says of a file; while it stays the same, so does the content."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


@dataclass(frozen=True)
class FileScan:
    """What a full look at a file shows. offsets: the index of a plain JSONL file."""

    stamp: Stamp
    sha256: str
    rows: int
    columns: tuple[Column, ...]
    offsets: Offsets | None


class FileHash(NamedTuple):
    """A file's content, and what the file system said of it then."""

    stamp: Stamp
    sha256: str


class ScanCancelledError(Exception):
    """Somebody else's look has failed, so that this one is not needed."""


class _HashedFile(io.RawIOBase):
    """A file that hashes what is read; a buffer needs its class to wrap it."""

    def __init__(self, file: Path, cancel: threading.Event) -> None:
        self._raw = file.open("rb", buffering=0)
        self._cancel = cancel
        self.sha256 = hashlib.sha256()
        self.stamp = stamp(os.fstat(self._raw.fileno()))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._cancel.is_set():
            raise ScanCancelledError
        count = self._raw.readinto(buffer)
        self.sha256.update(buffer[:count])
        return count

    def finish(self) -> str:
        """The hash of the whole file; ValueError if the file is being written to."""
        block = memoryview(bytearray(BUFFER))
        while self.readinto(block):
            pass
        now = stamp(os.fstat(self._raw.fileno()))
        if (now.size, now.mtime_ns) != (self.stamp.size, self.stamp.mtime_ns):
            raise ValueError("it changed while it was read")
        return self.sha256.hexdigest()

    def close(self) -> None:
        self._raw.close()
        super().close()


def is_plain_jsonl(file: Path) -> bool:
    """Whether the file has an offset index."""
    return file.name.endswith(".jsonl")


def stamp(stat: os.stat_result) -> Stamp:
    """The parts of a stat result that change with the content."""
    return Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


def scan_file(
    file: Path, select: Select, cancel: threading.Event, *, is_hashed: bool = True
) -> FileScan:
    """Hash, count, type and index a file; READ_ERRORS or ValueError if it is not whole.

    Without a hash a table is known from its metadata, and sha256 is "".
    """
    with _HashedFile(file, cancel) as hashed:
        if not file.name.endswith((".jsonl", PACKED)):
            sha256 = hashed.finish() if is_hashed else ""
            table = _scan_table(file, select)
            return FileScan(hashed.stamp, sha256, table.rows, table.columns, None)
        lines = io.BufferedReader(hashed, BUFFER)
        is_packed = file.name.endswith(PACKED)
        scan = formats_jsonl.scan_lines(formats_jsonl.unpack(lines) if is_packed else lines)
        sha256 = hashed.finish() if is_hashed else ""
        offsets = None if is_packed else scan.offsets
        return FileScan(hashed.stamp, sha256, scan.rows, scan.columns, offsets)


def _scan_table(file: Path, select: Select) -> TableScan:
    if select == "truncated":
        scan = formats_table.scan_parquet(file, needed="finish_reason")
        return TableScan(formats_table.count_truncated(file), scan.columns)
    if select == "rejected":
        scan = formats_table.scan_parquet(file, needed="raw_json")
        first_rows = formats_table.read_rejected(file, 0, formats_jsonl.TYPED_ROWS)
        return TableScan(scan.rows, formats_jsonl.columns_of_rows(first_rows))
    is_arrow = file.name.endswith(".arrow")
    return formats_table.scan_arrow(file) if is_arrow else formats_table.scan_parquet(file)


def hash_file(file: Path, cancel: threading.Event) -> FileHash:
    """Hash a file; READ_ERRORS or ValueError if it cannot be read as a whole."""
    with _HashedFile(file, cancel) as hashed:
        sha256 = hashed.finish()
        return FileHash(hashed.stamp, sha256)


def read_rows(
    file: Path, select: Select, start: int, stop: int, offsets: Offsets | None
) -> Iterator[Row | BadRow]:
    """Rows start..stop-1 of a file, fewer if it ends before; offsets: of a plain JSONL file."""
    if file.name.endswith(PACKED):
        return formats_jsonl.read_packed(file, start, stop)
    if offsets is not None:
        return formats_jsonl.read_lines(file, start, stop, offsets)
    if file.name.endswith(".arrow"):
        return formats_table.read_arrow(file, start, stop)
    readers = {
        "all": formats_table.read_parquet,
        "truncated": formats_table.read_truncated,
        "rejected": formats_table.read_rejected,
    }
    return readers[select](file, start, stop)
