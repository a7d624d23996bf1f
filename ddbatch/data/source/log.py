"""The input log: which files, rows, samples and shards a run has, as immutable entries.

Knows how entries are stored and what a sound sequence of them is. Knows nothing about where the
files are, nor when the input grows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, get_args

import pyarrow as pa

from ddbatch.core import RunError, Shard
from ddbatch.data.folder import RunFolder, StateError, list_names, write_new
from ddbatch.data.source.column_types import Column, decode_type, encode_type
from ddbatch.data.source.formats import Select

VERSION = 1

_NAME = re.compile(r"[0-9]{6}\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("version", "select", "revision", "num_rows", "samples", "files", "shards")
_REPAIR = "entries are never changed: bring it back from a copy, or choose another output_dir"


@dataclass(frozen=True)
class InputFile:
    """An input file as it was when it was listed. name: relative to the listing's root."""

    name: str
    size: int
    rows: int
    sha256: str
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Entry:
    """One step of the input's growth. files, shards: the new ones. num_rows: rows taken from now
    on, data.limit applied. select: data.select. revision: the commit of a hub data set."""

    files: tuple[InputFile, ...]
    num_rows: int
    samples: int
    shards: tuple[Shard, ...]
    select: Select
    revision: str | None


@dataclass(frozen=True)
class InputLog:
    """All entries together. The row_id of a row is its place in the concatenation of `files`."""

    files: tuple[InputFile, ...]
    num_rows: int
    samples: int
    shards: tuple[Shard, ...]
    entries: int
    select: Select
    revision: str | None

    @property
    def rows_listed(self) -> int:
        """Rows of all files, whether taken or not."""
        return sum(file.rows for file in self.files)


EMPTY = InputLog((), 0, 0, (), 0, "all", None)


def read_log(folder: RunFolder) -> InputLog:
    """The run's input, EMPTY before its first start; StateError for an entry that is not sound."""
    place = folder.state("inputs")
    # Listed first: a run that another worker begins meanwhile has its input before its commits.
    has_commits = bool(list_names(folder.state("commits")))
    names = list_names(place)
    # An entry is made after those before it, so that what is listed last tells how many there are.
    last = max((int(name[:6]) for name in names if _NAME.fullmatch(name)), default=-1)
    if last < 0 and has_commits:
        raise StateError(f"{place} is empty, and the run has commits; {_REPAIR}")
    log = EMPTY
    for number in range(last + 1):
        file = place / f"{number:06d}.json"
        try:
            log = extend(log, _from_json(file.read_bytes()))
        except FileNotFoundError as error:
            raise StateError(
                f"{file} is missing, and later entries are there; {_REPAIR}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise StateError(f"{file} is no sound input log entry: {error}; {_REPAIR}") from error
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error}") from error
    return log


def append_entry(folder: RunFolder, attempt: str, number: int, entry: Entry) -> bool:
    """Make entry `number`; False if it was not made and the log has to be read again."""
    name = f"{number:06d}.json"
    final = folder.state("inputs") / name
    try:
        return write_new(_to_json(entry), folder.tmp(attempt) / f"inputs-{name}", final)
    except FileNotFoundError:
        return False  # who saw the run complete has swept our folder
    except OSError as error:
        raise RunError(f"{final} cannot be written: {error}") from error


def extend(log: InputLog, entry: Entry) -> InputLog:
    """The log with one more entry; ValueError if the entry does not follow from what was before."""
    longer = InputLog(
        files=log.files + entry.files,
        num_rows=entry.num_rows,
        samples=entry.samples,
        shards=log.shards + entry.shards,
        entries=log.entries + 1,
        select=entry.select,
        revision=entry.revision,
    )
    names = [file.name for file in longer.files]
    if len(set(names)) < len(names):
        raise ValueError("a file is listed twice")
    if not log.num_rows <= entry.num_rows <= longer.rows_listed:
        raise ValueError(f"num_rows is {entry.num_rows}, not {log.num_rows}..{longer.rows_listed}")
    if entry.samples < max(1, log.samples):
        raise ValueError(f"samples is {entry.samples}, which was {log.samples} before")
    if log.entries and entry.select != log.select:
        raise ValueError(f"select is {entry.select}, which was {log.select} before")
    first_row = log.num_rows
    for index, shard in enumerate(entry.shards, len(log.shards)):
        if shard.index != index or shard.first_row != first_row or shard.num_rows < 1:
            raise ValueError(f"{shard} is not shard {index} from row {first_row} on")
        first_row = shard.stop_row
    if first_row != entry.num_rows:
        raise ValueError(f"the shards end before row {first_row}, num_rows is {entry.num_rows}")
    return longer


def _to_json(entry: Entry) -> str:
    """A field a line, then a file or a shard a line."""
    values: dict[str, object] = {
        "version": VERSION,
        "select": entry.select,
        "revision": entry.revision,
        "num_rows": entry.num_rows,
        "samples": entry.samples,
        "files": [_file_to_json(file) for file in entry.files],
        "shards": [(shard.index, shard.first_row, shard.num_rows) for shard in entry.shards],
    }
    return (
        "{\n " + ",\n ".join(f'"{key}": {_lines(value)}' for key, value in values.items()) + "\n}\n"
    )


def _lines(value: object) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"


def _file_to_json(file: InputFile) -> dict[str, object]:
    return {
        "name": file.name,
        "size": file.size,
        "rows": file.rows,
        "sha256": file.sha256,
        "columns": [[column.name, encode_type(column.type)] for column in file.columns],
    }


def _from_json(content: bytes) -> Entry:
    """An entry, checked field by field; ValueError that says what is wrong with it."""
    value = json.loads(content.decode())
    if isinstance(value, dict) and type(value.get("version")) is int and value["version"] > VERSION:
        raise RunError(
            f"the input log has version {value['version']}, this ddbatch reads {VERSION}: "
            "go on with the newer ddbatch"
        )
    found = _object(value, _FIELDS)
    if _whole(found, "version", 1) != VERSION:
        raise ValueError(f"version is {found['version']}")
    if found["select"] not in get_args(Select):
        raise ValueError(f"select is {found['select']!r}")
    return Entry(
        files=tuple(_file(file) for file in _list(found, "files")),
        num_rows=_whole(found, "num_rows"),
        samples=_whole(found, "samples", 1),
        shards=tuple(_shard(shard) for shard in _list(found, "shards")),
        select=cast(Select, found["select"]),
        revision=None if found["revision"] is None else _text(found, "revision"),
    )


def _file(value: object) -> InputFile:
    found = _object(value, ("name", "size", "rows", "sha256", "columns"))
    sha256 = _text(found, "sha256")
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"sha256 is {sha256!r}")
    columns = tuple(_column(column) for column in _list(found, "columns"))
    return InputFile(
        _text(found, "name"), _whole(found, "size"), _whole(found, "rows"), sha256, columns
    )


def _column(value: object) -> Column:
    match value:
        case [str(name), kind]:
            try:
                return Column(name, decode_type(kind))
            except pa.ArrowException as error:
                raise ValueError(f"column {name!r} is of type {kind!r}") from error
    raise ValueError(f"a column is {value!r}")


def _shard(value: object) -> Shard:
    match value:
        case [int(index), int(first_row), int(num_rows)]:
            return Shard(index, first_row, num_rows)
    raise ValueError(f"a shard is {value!r}")


def _object(value: object, names: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"{str(value)[:80]} has not exactly the fields {', '.join(names)}")
    return value


def _list(found: Mapping[str, object], name: str) -> Sequence[object]:
    value = found[name]
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r}, not a list")
    return value


def _whole(found: Mapping[str, object], name: str, least: int = 0) -> int:
    value = found[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, not a whole number from {least} on")
    return value


def _text(found: Mapping[str, object], name: str) -> str:
    value = found[name]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}, not a text")
    return value
