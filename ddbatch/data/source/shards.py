"""Cutting rows into shards. Knows row numbers, and which files are only read from their start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddbatch.core import Shard
from ddbatch.data.source.formats import PACKED
from ddbatch.data.source.log import InputFile


def cut_shards(
    files: Sequence[InputFile], start: int, stop: int, *, shard_rows: int, first_index: int
) -> tuple[Shard, ...]:
    """Rows start..stop-1 of all files together, in shards of at most `shard_rows` rows.

    A shard may span files; only the rows of a gzip file, however many, are one shard, because each
    shard of it would unpack the file from its beginning.
    """
    ranges = list(_ranges(files, start, stop, shard_rows))
    return tuple(
        Shard(first_index + at, first_row, end - first_row)
        for at, (first_row, end) in enumerate(ranges)
    )


def _ranges(
    files: Sequence[InputFile], start: int, stop: int, shard_rows: int
) -> Iterator[tuple[int, int]]:
    first_row, begin = 0, start  # begin: the first row that is in no range yet
    for file in files:
        last = min(first_row + file.rows, stop)
        if file.name.endswith(PACKED) and max(first_row, start) < last:
            yield from _equal(begin, max(first_row, start), shard_rows)
            yield max(first_row, start), last
            begin = last
        first_row += file.rows
    yield from _equal(begin, stop, shard_rows)


def _equal(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for first_row in range(start, stop, size):
        yield first_row, min(first_row + size, stop)
