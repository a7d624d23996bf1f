"""The input of a run: its rows by row_id, and how it begins and grows.

Knows the listed files and the input log. Knows nothing about what a row means, and prints nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from threading import Event

import numpy as np

from ddbatch.core import RunError
from ddbatch.data.batching.columns import BadRow, ColumnType, Row
from ddbatch.data.folder import RunFolder
from ddbatch.data.source.cache import load_index, load_verified, save_index, save_verified
from ddbatch.data.source.column_types import merge_columns
from ddbatch.data.source.files import Listing
from ddbatch.data.source.formats import READ_ERRORS, is_plain_jsonl, read_rows, scan_file, stamp
from ddbatch.data.source.growth import Grow, Wanted, describe_growth, next_entry
from ddbatch.data.source.jsonl import INDEX_STEP, Offsets
from ddbatch.data.source.log import EMPTY, InputFile, InputLog, append_entry, extend, read_log
from ddbatch.data.source.looks import Looks


class Inputs:
    """The rows of a run. log: files, shards, samples. growth: what a restart has added, in words.

    Made by scan or open_log.
    """

    def __init__(
        self,
        log: InputLog,
        looks: Looks,
        *,
        folder: RunFolder | None = None,
        attempt: str | None = None,
        growth: str | None = None,
    ) -> None:
        self.log, self.looks, self.growth = log, looks, growth
        self._folder, self._attempt = folder, attempt
        self._indexes: dict[str, Offsets] = {}
        self._first_rows = list(accumulate((file.rows for file in log.files), initial=0))

    @property
    def columns(self) -> dict[str, ColumnType]:
        """The columns of all files together; a file without rows has no say."""
        return merge_columns(file.columns for file in self.log.files if file.rows)

    @property
    def tables(self) -> dict[str, tuple[str, ...]]:
        """The column names of each file that has rows."""
        return {
            file.name: tuple(column.name for column in file.columns)
            for file in self.log.files
            if file.rows
        }

    def rows(self, first_row: int, stop_row: int) -> Iterator[tuple[int, Row | BadRow]]:
        """Rows first_row..stop_row-1 with their row_ids, in order, streaming.

        RunError for a file that cannot be read any more.
        """
        assert 0 <= first_row <= stop_row <= self.log.num_rows, (first_row, stop_row, self.log)
        row_id = first_row
        while row_id < stop_row:
            at = bisect_right(self._first_rows, row_id) - 1
            file, file_row = self.log.files[at], self._first_rows[at]
            stop = min(file.rows, stop_row - file_row)
            for row in self._file_rows(file, row_id - file_row, stop):
                yield row_id, row
                row_id += 1

    def _file_rows(self, file: InputFile, start: int, stop: int) -> Iterator[Row | BadRow]:
        path = self.looks.paths[file.name]
        changed = RunError(f"{path} has changed since this run began")
        count = 0
        try:
            if stamp(path.stat()) != self.looks.hashes[file.name].stamp:
                raise changed  # perhaps not in its content, but who writes to it may do it again
            offsets = self._offsets(file, path)
            for row in read_rows(path, self.log.select, start, stop, offsets):
                count += 1
                yield row
        except READ_ERRORS as error:
            raise RunError(f"{path} cannot be read any more: {error}") from error
        if count != stop - start:
            raise changed

    def _offsets(self, file: InputFile, path: Path) -> Offsets | None:
        """The index of a plain JSONL file: from this process, from the cache, or made anew."""
        if not is_plain_jsonl(path):
            return None
        if file.rows <= INDEX_STEP:
            return np.zeros(1, np.int64)
        if file.name not in self._indexes:
            self._indexes[file.name] = self._load_index(file, path)
        return self._indexes[file.name]

    def _load_index(self, file: InputFile, path: Path) -> Offsets:
        scan = self.looks.scans.get(file.name)
        if scan is not None and scan.offsets is not None:
            return scan.offsets
        assert self._folder is not None, "without a run's folder every file has been scanned"
        offsets = load_index(self._folder, file.sha256)
        if offsets is None:
            offsets = self._make_index(file, path)
            if self._attempt is not None:
                save_index(self._folder, self._attempt, file.sha256, offsets)
        return offsets

    def _make_index(self, file: InputFile, path: Path) -> Offsets:
        try:
            scan = scan_file(path, self.log.select, Event())
        except ValueError as error:
            raise RunError(f"{path} cannot be read any more: {error}") from error
        if scan.sha256 != file.sha256:
            raise RunError(f"{path} has changed since this run began")
        assert scan.offsets is not None, path
        return scan.offsets


def scan(
    listing: Listing,
    *,
    limit: int | None,
    samples: int,
    shard_rows: int,
    grow: Grow = "append",
    folder: RunFolder | None = None,
    is_hashed: bool = True,
) -> Inputs:
    """The input as open_log would make it, without writing anything.

    folder: the run that goes on, None for a first look. is_hashed=False reads no more of a table
    than its metadata; such a look begins no run.
    """
    assert is_hashed or folder is None, "a run's files are told by their content"
    looks = Looks(listing, is_hashed=is_hashed)
    log = EMPTY if folder is None else read_log(folder)
    entry = next_entry(log, looks, Wanted(limit, samples, shard_rows, grow), folder)
    longer = log if entry is None else extend(log, entry)
    return Inputs(longer, looks, folder=folder, growth=describe_growth(log, longer))


def open_log(
    folder: RunFolder,
    attempt: str,
    listing: Listing,
    *,
    limit: int | None,
    samples: int,
    shard_rows: int,
    grow: Grow,
    scanned: Inputs | None = None,
) -> Inputs:
    """The run's input, begun or continued: what is new is appended to the input log.

    scanned: a scan of the same listing, whose looks are not repeated. ValueError where the files or
    the options contradict the log.
    """
    looks = Looks(listing, is_hashed=True) if scanned is None else scanned.looks
    assert looks.is_hashed, "a run's files are told by their content"
    assert looks.listing == listing, f"{looks.listing} was scanned, not {listing}"
    wanted = Wanted(limit, samples, shard_rows, grow)
    while True:
        log = longer = read_log(folder)
        entry = next_entry(log, looks, wanted, folder)
        if entry is None:
            break
        longer = extend(log, entry)
        if append_entry(folder, attempt, log.entries, entry):
            break
    _remember(folder, attempt, looks)
    growth = describe_growth(log, longer)
    return Inputs(longer, looks, folder=folder, attempt=attempt, growth=growth)


def _remember(folder: RunFolder, attempt: str, looks: Looks) -> None:
    """Keep what was seen for later starts."""
    for scan in looks.scans.values():
        if scan.offsets is None or scan.rows <= INDEX_STEP:
            continue
        if load_index(folder, scan.sha256) is None:
            save_index(folder, attempt, scan.sha256, scan.offsets)
    if looks.hashes != load_verified(folder):
        save_verified(folder, attempt, looks.hashes)
