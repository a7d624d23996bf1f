"""Full looks at input files: new ones are scanned, listed ones must be what they were.

Knows how to look at many files at once, and what this process has seen, so that none is read twice.
Knows nothing about limits, shards or how the input log grows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ddbatch.data.source.files import ALLOWED, Listing
from ddbatch.data.source.formats import (
    READ_ERRORS,
    FileHash,
    FileScan,
    hash_file,
    is_plain_jsonl,
    scan_file,
    stamp,
)
from ddbatch.data.source.log import InputFile

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MAX_THREADS = 8
_KEEP = "put it back as it was, or choose another output_dir"


class Looks:
    """What this process has seen of a listing's files, by name.

    is_hashed: whether content counts; without it a table is only asked for its metadata.
    """

    def __init__(self, listing: Listing, *, is_hashed: bool) -> None:
        self.listing, self.is_hashed = listing, is_hashed
        self.paths = {listing.name_of(file): file for file in listing.files}
        self.scans: dict[str, FileScan] = {}
        self.hashes: dict[str, FileHash] = {}

    def scan(self, names: Sequence[str]) -> tuple[InputFile, ...]:
        """What new files are; ValueError naming the first that is not whole."""
        unseen = [name for name in names if name not in self.scans]
        for name, scan in zip(unseen, _at_once(self._scan, unseen), strict=True):
            self.scans[name] = scan
            self.hashes[name] = FileHash(scan.stamp, scan.sha256)
        found = ((name, self.scans[name]) for name in names)
        return tuple(
            InputFile(name, scan.stamp.size, scan.rows, scan.sha256, scan.columns)
            for name, scan in found
        )

    def verify(self, files: Sequence[InputFile], remembered: Mapping[str, FileHash]) -> None:
        """ValueError naming the first listed file that is gone, or not what it was.

        remembered: what earlier starts have seen; it saves reading what nobody has touched since.
        """
        for file in files:
            if file.name not in self.paths:
                raise ValueError(
                    f"data.path={self.listing.path}: {file.name} is gone, and this run began with "
                    f"it; {_KEEP}"
                )

        unseen = [file for file in files if not self._is_seen(file, remembered)]
        for file, found in zip(unseen, _at_once(self._hash, unseen), strict=True):
            self.hashes[file.name] = found
        for file in files:
            if self.hashes[file.name].sha256 != file.sha256:
                raise ValueError(
                    f"data.path={self.listing.path}: {file.name} has changed since this run began; "
                    f"{_KEEP}"
                )

    def _scan(self, name: str, cancel: threading.Event) -> FileScan:
        with self._named(name) as path:
            return scan_file(path, self.listing.select, cancel, is_hashed=self.is_hashed)

    def _is_seen(self, file: InputFile, remembered: Mapping[str, FileHash]) -> bool:
        """Whether this process, or one before, knows the content that the file has now."""
        known = remembered.get(file.name)
        if file.name in self.hashes or known is None or known.sha256 != file.sha256:
            return file.name in self.hashes
        with self._named(file.name) as path:
            is_untouched = known.stamp == stamp(path.stat())
        if is_untouched:
            self.hashes[file.name] = known
        return is_untouched

    def _hash(self, file: InputFile, cancel: threading.Event) -> FileHash:
        with self._named(file.name) as path:
            if not is_plain_jsonl(path):
                return hash_file(path, cancel)
            # The same pass makes the index.
            scan = scan_file(path, self.listing.select, cancel)
            self.scans[file.name] = scan
            return FileHash(scan.stamp, scan.sha256)

    @contextmanager
    def _named(self, name: str) -> Iterator[Path]:
        try:
            yield self.paths[name]
        except (ValueError, *READ_ERRORS) as error:
            raise ValueError(
                f"data.path={self.listing.path}: {name} cannot be read ({error}); "
                f"allowed: {ALLOWED}"
            ) from error


def _at_once(
    look: Callable[[_Item, threading.Event], _Result], items: Sequence[_Item]
) -> list[_Result]:
    """The results in order; at the first exception the others stop soon."""
    cancel = threading.Event()
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        try:
            return list(pool.map(look, items, [cancel] * len(items)))
        except BaseException:  # an interrupt as well: the pool waits for those that have begun
            cancel.set()
            raise
