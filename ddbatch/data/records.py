"""What a commit record says: a part's files, the keys that it finishes, and its counts, as JSON.

Knows the record's types and its strict text form. Knows nothing about the disk: commits.py writes
and reads records, finished.py tells what they leave to do. Standard library only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import NamedTuple

from ddbatch.core import Key, RunError

VERSION = 1

_SHA256 = re.compile("[0-9a-f]{64}")
_PLAIN_NAME = re.compile("[0-9A-Za-z][0-9A-Za-z_-]*")  # of an attempt or a table: never a path


class NewerRecordError(RunError):
    """A record of a later version of ddbatch: not broken, and not for this one to read."""


class KeyBlock(NamedTuple):
    """Finished keys: all of these rows, each with all of these samples and turns 0..num_turns-1."""

    first_row: int
    num_rows: int
    first_sample: int
    num_samples: int
    num_turns: int

    def keys(self) -> Iterator[Key]:
        """Every key, sorted."""
        rows = range(self.first_row, self.first_row + self.num_rows)
        samples = range(self.first_sample, self.first_sample + self.num_samples)
        return (Key(*key) for key in product(rows, range(self.num_turns), samples))


@dataclass(frozen=True)
class PartFile:
    """One table of a part; tmp and final are names below output_dir, with slashes."""

    table: str
    tmp: str
    final: str
    sha256: str
    size: int
    rows: int


@dataclass(frozen=True)
class PartCounts:
    """What a part adds to the run's totals; rejected rows by code, truncated = ended by length."""

    completions: int
    rejected: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    rounds: int
    accepted_tokens: int
    truncated: int


@dataclass(frozen=True)
class Record:
    """The commit of one part: part `number` of a shard, written by one attempt.

    keys: what is finished now, each key in one block only. closed_at: unix seconds, for people only
    (clocks jump and differ). seconds: how long the part was open, by a clock that does not jump.
    """

    shard: int
    number: int
    attempt: str
    files: tuple[PartFile, ...]
    keys: tuple[KeyBlock, ...]
    counts: PartCounts
    closed_at: float
    seconds: float

    @property
    def num_units(self) -> int:
        """Samples of input rows that it finishes."""
        return sum(block.num_rows * block.num_samples for block in self.keys)


def blocks_of(keys: Collection[Key]) -> tuple[KeyBlock, ...]:
    """The keys as few blocks; those of a (row, sample) are its turns from 0 on, without a gap."""
    turns_of: dict[tuple[int, int], set[int]] = {}
    for row_id, turn, sample in keys:
        turns_of.setdefault((row_id, sample), set()).add(turn)
    assert sum(map(len, turns_of.values())) == len(keys), "a key came twice"
    rows: dict[int, list[tuple[int, int]]] = {}
    for (row_id, sample), turns in sorted(turns_of.items()):
        assert turns == set(range(len(turns))), f"row {row_id}, sample {sample}: turns {turns}"
        rows.setdefault(row_id, []).append((sample, len(turns)))
    blocks: list[KeyBlock] = []
    grows: dict[tuple[int, int, int], int] = {}  # columns of the row before -> their block
    previous_row = -1
    for row_id, samples in rows.items():
        before = grows if row_id == previous_row + 1 else {}
        grows, previous_row = {}, row_id
        for columns in _runs(samples):
            place = before.get(columns, len(blocks))
            if place == len(blocks):
                blocks.append(KeyBlock(row_id, 0, *columns))
            blocks[place] = blocks[place]._replace(num_rows=blocks[place].num_rows + 1)
            grows[columns] = place
    return tuple(blocks)


def _runs(samples: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first sample, samples, turns) of a row's sorted (sample, turns)."""
    runs: list[tuple[int, int, int]] = []
    for sample, turns in samples:
        if runs and (sum(runs[-1][:2]), runs[-1][2]) == (sample, turns):
            first, num_samples, _ = runs.pop()
            runs.append((first, num_samples + 1, turns))
        else:
            runs.append((sample, 1, turns))
    return runs


def to_json(record: Record) -> str:
    """The record's text: a field a line, then a file or a block of keys a line."""
    values: dict[str, object] = {"version": VERSION}
    for field in fields(Record):
        if field.name == "keys":
            values["key_fields"] = KeyBlock._fields
        values[field.name] = getattr(record, field.name)
    values["files"] = [asdict(file) for file in record.files]
    values["counts"] = asdict(record.counts)
    lines = (f'"{name}": {_to_lines(value, name)}' for name, value in values.items())
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _to_lines(value: object, name: str) -> str:
    if name in ("files", "keys"):
        assert isinstance(value, list | tuple), f"{name} is {value!r}"
        return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
    return json.dumps(value)


def from_json(content: bytes) -> Record:
    """The record, checked field by field; ValueError that says what is wrong with it.

    NewerRecordError for one of a later version.
    """
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is cut off, or no JSON in UTF-8 ({error})") from error
    if isinstance(value, dict) and type(value.get("version")) is int and value["version"] > VERSION:
        raise NewerRecordError(f"it has version {value['version']}, this ddbatch reads {VERSION}")
    names = ("version", "key_fields", *(field.name for field in fields(Record)))
    found = _object(value, "the record", names)
    for name, expected in (("version", VERSION), ("key_fields", list(KeyBlock._fields))):
        if found[name] != expected or isinstance(found[name], bool):
            raise ValueError(f"{name} is {found[name]!r}, expected {expected!r}")
    record = Record(
        shard=_whole(found["shard"], "shard"),
        number=_whole(found["number"], "number"),
        attempt=_text(found["attempt"], "attempt", _PLAIN_NAME),
        files=tuple(_file(file) for file in _filled_list(found["files"], "files")),
        keys=tuple(_block(block) for block in _filled_list(found["keys"], "keys")),
        counts=_counts(found["counts"]),
        closed_at=_finite(found["closed_at"], "closed_at"),
        seconds=_finite(found["seconds"], "seconds"),
    )
    if record.seconds < 0:
        raise ValueError(f"seconds is {record.seconds!r}, expected 0 or more")
    tables = [file.table for file in record.files]
    if len(set(tables)) < len(tables):
        raise ValueError(f"a table comes twice in {tables}")
    return record


def _file(value: object) -> PartFile:
    found = _object(value, "a file", tuple(field.name for field in fields(PartFile)))
    return PartFile(
        table=_text(found["table"], "table", _PLAIN_NAME),
        tmp=_text(found["tmp"], "tmp"),
        final=_text(found["final"], "final"),
        sha256=_text(found["sha256"], "sha256", _SHA256),
        size=_whole(found["size"], "size", 1),
        rows=_whole(found["rows"], "rows", 1),
    )


def _block(value: object) -> KeyBlock:
    if not isinstance(value, list) or len(value) != len(KeyBlock._fields):
        raise ValueError(f"a block of keys is {value!r}, expected {len(KeyBlock._fields)} numbers")
    least = (0, 1, 0, 1, 1)
    return KeyBlock(*map(_whole, value, KeyBlock._fields, least))


def _counts(value: object) -> PartCounts:
    found = _object(value, "counts", tuple(field.name for field in fields(PartCounts)))
    codes = found.pop("rejected")
    if not isinstance(codes, dict):
        raise ValueError(f"rejected is {codes!r}, expected a number per code")
    rejected = {code: _whole(number, code, 1) for code, number in codes.items()}
    numbers = {name: _whole(number, name) for name, number in found.items()}
    return PartCounts(rejected=rejected, **numbers)


def _object(value: object, name: str, names: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, expected fields and values")
    odd = sorted(set(value) ^ set(names))
    if odd:
        kind = "no field" if odd[0] in names else "an unknown field"
        raise ValueError(f"{name} has {kind} {odd[0]!r}")
    return value


def _filled_list(value: object, name: str) -> list[object]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is {value!r}, expected a list that is not empty")
    return value


def _whole(value: object, name: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
        raise ValueError(f"{name} is {value!r}, expected a whole number from {least} on")
    return value


def _finite(value: object, name: str) -> float:
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _whole(value, name)


def _text(value: object, name: str, pattern: re.Pattern[str] | None = None) -> str:
    if not isinstance(value, str) or not value or (pattern and not pattern.fullmatch(value)):
        raise ValueError(f"{name} is {value!r}, which is no {name}")
    return value
