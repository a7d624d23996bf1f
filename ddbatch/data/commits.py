"""Commit records on the disk: one compare-and-swap a part, then roll forward.

A part is committed by the link of its record and by nothing else. Everything here may be cut off
anywhere, and done by several workers at once. Knows nothing about what is in a part's files.
An OSError that is not explained here is passed on.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ddbatch.core import RunError
from ddbatch.data.finished import mark_finished
from ddbatch.data.folder import (
    RunFolder,
    StateError,
    link_new,
    list_names,
    make_folder,
    sync,
)
from ddbatch.data.records import (
    KeyBlock,
    NewerRecordError,
    PartCounts,
    PartFile,
    Record,
    blocks_of,
    from_json,
    to_json,
)
from ddbatch.data.reload_mark import renew_mark

__all__ = [  # with what callers need to make and to read a record
    "KeyBlock",
    "PartCounts",
    "PartFile",
    "Record",
    "blocks_of",
    "clean_tmp",
    "commit",
    "discard",
    "mark_finished",
    "read_shard",
    "recover",
    "roll_forward",
    "shards_with_records",
]

REPAIR = "output.resume=repair moves it and the shard's later records aside and redoes their rows"

_SHARD_NAME = re.compile(r"shard-(\d{5,})")
_RECORD_NAME = re.compile(r"(\d{6,})\.json")


def shards_with_records(folder: RunFolder) -> list[int]:
    """The shards that have a folder of records, in order."""
    place = folder.state("commits")
    shards = []
    for name in list_names(place):
        found = _SHARD_NAME.fullmatch(name)
        if found is None or folder.records(int(found[1])).name != name:
            raise StateError(f"{place / name} is no shard's folder of records; move it away")
        shards.append(int(found[1]))
    return sorted(shards)


def read_shard(folder: RunFolder, shard: int) -> tuple[Record, ...]:
    """A shard's records 0..k-1.

    StateError if one cannot be parsed, is not what its name says or is missing, or if something
    else lies there.
    """
    numbers, strays = list_records(folder, shard)
    if strays:
        raise StateError(f"{strays[0]} is no record; output.resume=repair moves it aside")
    records: list[Record] = []
    while (record := read_record(folder, shard, len(records))) is not None:
        records.append(record)
    # The numbers were listed first: a record that was linked since is read, and makes no gap.
    if numbers and numbers[-1] >= len(records):
        missing = folder.record(shard, len(records))
        raise StateError(f"{missing} is missing, but {numbers[-1]:06d}.json is there; {REPAIR}")
    return tuple(records)


def list_records(folder: RunFolder, shard: int) -> tuple[list[int], list[Path]]:
    """The record numbers that a shard has, sorted, and what lies there and is no record."""
    numbers, strays = [], []
    for name in list_names(folder.records(shard)):
        found = _RECORD_NAME.fullmatch(name)
        if found is not None and folder.record(shard, int(found[1])).name == name:
            numbers.append(int(found[1]))
        else:
            strays.append(folder.records(shard) / name)
    return sorted(numbers), sorted(strays)


def read_record(folder: RunFolder, shard: int, number: int) -> Record | None:
    """One record, None if it is not there; StateError if it cannot be trusted."""
    file = folder.record(shard, number)
    try:
        record = from_json(file.read_bytes())
        _check_places(folder, record, shard, number)
    except FileNotFoundError:
        return None
    except NewerRecordError as error:
        raise RunError(f"{file} cannot be read: {error}; go on with that version") from error
    except ValueError as error:
        raise StateError(f"{file} is no whole record: {error}; {REPAIR}") from error
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    return record


def _check_places(folder: RunFolder, record: Record, shard: int, number: int) -> None:
    """ValueError unless the record and its files have the names that this shard and number have."""
    if (record.shard, record.number) != (shard, number):
        raise ValueError(f"it is the record of part {record.number} of shard {record.shard}")
    own = PurePosixPath(folder.relative(folder.tmp(record.attempt)))
    for file in record.files:
        expected = folder.relative(folder.part(file.table, shard, number))
        if file.final != expected:
            raise ValueError(f"final is {file.final!r}, expected {expected!r}")
        if PurePosixPath(file.tmp).parent != own or file.tmp.endswith("/.."):
            raise ValueError(f"tmp is {file.tmp!r}, which is not below {str(own)!r}")


def commit(folder: RunFolder, record: Record) -> bool:
    """Commit a part: its files lie whole under their tmp names, and all records before it are read.

    False if somebody else has the number: the view of the shard was stale; discard the part and
    give up the shard. After an exception it is open whether the part is committed: discard nothing;
    a second call would tell.
    """
    final = folder.record(record.shard, record.number)
    text = _readable(folder, record)
    if record.number and not folder.record(record.shard, record.number - 1).exists():
        raise StateError(f"{final}: the record before it was there and is gone; {REPAIR}")
    visible = [file.final for file in record.files if (folder.place / file.final).exists()]
    if visible and not final.exists():
        raise StateError(f"{visible[0]} has no record; output.resume=repair moves it aside")
    tmp = folder.tmp(record.attempt) / f"record-{record.shard}.json"
    try:
        for file in record.files:
            size = (folder.place / file.tmp).stat().st_size
            assert size == file.size, f"{file} has {size} bytes"
        # In the folder of the files, which is not made again: with it, they are gone.
        tmp.unlink(missing_ok=True)
        tmp.write_text(text, encoding="utf-8")
        return link_new(tmp, final) or _is_committed(folder, record)
    except FileNotFoundError:
        # Our files were deleted by somebody. Where the number is taken, we have lost it, no more.
        if not final.exists():
            raise
        return _is_committed(folder, record)


def _readable(folder: RunFolder, record: Record) -> str:
    """The record's text, once it is sure that all will read it."""
    text = to_json(record)
    try:
        assert from_json(text.encode()) == record, f"not read as it was written: {text}"
        _check_places(folder, record, record.shard, record.number)
    except ValueError as error:
        raise AssertionError(f"nobody would read this record: {error}: {text}") from error
    return text


def discard(folder: RunFolder, record: Record) -> None:
    """Delete the files of a part of our own that was not committed."""
    assert not _is_committed(folder, record), f"part is committed: {record}"
    for file in record.files:
        (folder.place / file.tmp).unlink(missing_ok=True)


def _is_committed(folder: RunFolder, record: Record) -> bool:
    try:
        there = folder.record(record.shard, record.number).read_bytes()
    except FileNotFoundError:
        return False
    return there == to_json(record).encode()


def roll_forward(folder: RunFolder, record: Record) -> None:
    """Give every file of a committed part its final name; anybody may do so, at any time.

    StateError if a file is nowhere or has not the size that the record says.
    """
    renamed = [file for file in record.files if _rename(folder, record, file)]
    for place in {(folder.place / file.final).parent for file in renamed}:
        sync(place)
    if renamed:
        renew_mark(folder)


def _rename(folder: RunFolder, record: Record, file: PartFile) -> bool:
    """Whether this call gave the file its final name; False if it has it."""
    tmp, final = folder.place / file.tmp, folder.place / file.final
    size = _size(final)
    if size is None and (size := _size(tmp)) == file.size:
        sync(folder.records(record.shard))  # no file shows before its record is on the disk
        make_folder(final.parent)
        with suppress(FileNotFoundError):  # another worker was faster
            os.rename(tmp, final)
            return True
        size = None
    if size is None and final.parent.is_dir():
        sync(final.parent)  # a network file system may remember that the name was missing
        size = _size(final)
    if size != file.size:
        found = "is nowhere" if size is None else f"has {size} bytes instead of {file.size}"
        where = folder.record(record.shard, record.number)
        raise StateError(f"{where}: its file {file.final} {found}; {REPAIR}")
    return False


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None


def recover(folder: RunFolder, shard: int) -> tuple[Record, ...]:
    """A shard's records, with all of their files under final names.

    RunError where the disk refuses (a folder of somebody else, with a part that was cut off).
    """
    records = read_shard(folder, shard)
    try:
        for record in records:
            roll_forward(folder, record)
    except OSError as error:
        raise RunError(
            f"{folder.place}: a committed part cannot be given its final name: {error}"
        ) from error
    return records


def clean_tmp(folder: RunFolder, over: Collection[str]) -> None:
    """Delete the tmp folders of attempts that surely work on the run no more.

    What a record points at gets its final name first. Of an attempt that may still run nothing is
    touched, complete as the run may look: its input may have grown since we looked.
    """
    places = [folder.tmp(name) for name in list_names(folder.state("tmp")) if name in over]
    tables: set[Path] = set()
    for shard in shards_with_records(folder):
        for record in recover(folder, shard):
            tables.update((folder.place / file.final).parent for file in record.files)
    for table in tables:
        sync(table)  # another worker may have renamed and not come so far
    for place in places:
        shutil.rmtree(place, ignore_errors=True)  # what is left of it takes space only
