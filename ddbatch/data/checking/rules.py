"""How a rule about the rows of a Parquet file is put and checked: rows, their keys, sums of lists.

Knows keys and Arrow columns. Knows nothing about which rules there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ddbatch.core import Key
from ddbatch.data.folder import StateError

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

# So many rows, or about so many bytes of them, are in memory at once.
_BATCH_ROWS = 4096
_BATCH_BYTES = 64 << 20
_LARGEST_KEY = Key(2**31 - 1, 2**15 - 1, 2**15 - 1)


class Rule(NamedTuple):
    """A rule as a sentence, in which rows it holds, and the values to name where it does not."""

    text: str
    holds: Bools
    values: Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Rows:
    """Rows of a file that are looked at together. first: the place of the first one in the file."""

    where: str
    first: int
    key: Ints

    def require(self, rules: Iterable[Rule]) -> None:
        """StateError for the first rule that does not hold in all rows, naming the first row."""
        for rule in rules:
            if not rule.holds.all():
                row = int(rule.holds.argmin())
                values = ", ".join(f"{name}={value[row]}" for name, value in rule.values.items())
                raise StateError(
                    f"{self.where}: row {self.first + row} ({key_words(int(self.key[row]))}): "
                    f"broken rule: {rule.text}{'; ' if values else ''}{values}"
                )


def pack_keys(row_id: Ints, turn: Ints, sample: Ints) -> Ints:
    """Keys as one number each, in the order of keys."""
    return (row_id << 32) | (turn << 16) | sample


def key_words(packed: int) -> str:
    """A key in words, from the number that pack_keys made of it."""
    return f"row_id {packed >> 32}, turn {packed >> 16 & 0xFFFF}, sample {packed & 0xFFFF}"


def read_batches(
    file: Path, where: str, columns: list[str]
) -> Iterator[tuple[pa.RecordBatch, Rows]]:
    """The rows of a file, some columns beside the key, with their keys checked and packed."""
    first = 0
    try:
        with pq.ParquetFile(file) as content:
            num_rows = _batch_rows(content.metadata)
            for batch in content.iter_batches(num_rows, columns=[*Key._fields, *columns]):
                yield batch, Rows(where, first, _keys_of(batch, where, first))
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise StateError(f"{where} cannot be read: {error}") from error


def _batch_rows(about: pq.FileMetaData) -> int:
    """How many rows to read at a time, by the size of all columns."""
    rows: int = about.num_rows
    size: int = sum(about.row_group(at).total_byte_size for at in range(about.num_row_groups))
    return min(_BATCH_ROWS, max(1, _BATCH_BYTES * rows // max(1, size)))


def _keys_of(batch: pa.RecordBatch, where: str, first: int) -> Ints:
    parts = [ints(batch.column(name).fill_null(-1)) for name in Key._fields]
    for name, part, largest in zip(Key._fields, parts, _LARGEST_KEY, strict=True):
        holds = (part >= 0) & (part <= largest)
        if not holds.all():
            row = int(holds.argmin())
            raise StateError(
                f"{where}: row {first + row}: broken rule: {name} is in 0..{largest}; {name}="
                f"{batch.column(name)[row].as_py()}"
            )
    return pack_keys(*parts)


def filled(batch: pa.RecordBatch, rows: Rows, name: str) -> pa.Array:
    """A column in which no row is null, nor an element of a row, however deep."""
    column = batch.column(name)
    rows.require([Rule(f"{name} is not null", bools(column.is_valid()), {})])
    inner = column
    while pa.types.is_list(inner.type) or pa.types.is_fixed_size_list(inner.type):
        inner = inner.flatten()
        if inner.null_count:
            raise StateError(f"{rows.where}: {name} has a null in a list, from row {rows.first} on")
    return column


def ints(column: pa.Array) -> Ints:
    """An Arrow column of integers without nulls."""
    return np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.int64)


def bools(column: pa.Array) -> Bools:
    """An Arrow column of booleans without nulls."""
    return np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.bool_)


def lengths(lists: pa.Array) -> Ints:
    """The length of each list."""
    return ints(pc.list_value_length(lists))


def is_among(name: str, column: pa.Array, allowed: tuple[str, ...]) -> Rule:
    """The rule that a column of strings holds only these."""
    holds = bools(pc.is_in(column, pa.array(allowed)))
    shown = np.asarray(column.to_numpy(zero_copy_only=False))
    return Rule(f"{name} is one of {', '.join(allowed)}", holds, {name: shown})


def check_order(key: Ints, where: str) -> None:
    """Rows are sorted by key, which also says that no key is there twice."""
    is_after = key[1:] > key[:-1]
    if not is_after.all():
        row = int(is_after.argmin()) + 1
        raise StateError(
            f"{where}: row {row} ({key_words(int(key[row]))}): broken rule: rows are sorted by "
            f"key, each key once; the row before is {key_words(int(key[row - 1]))}"
        )


def check_same_keys(done: Ints, key: Ints, where: str) -> None:
    """The rows of a file are those of the completions, in their order."""
    shared = min(len(done), len(key))
    agree = np.append(done[:shared] == key[:shared], len(done) == len(key))
    if not agree.all():
        row = int(agree.argmin())
        theirs, ours = (
            key_words(int(keys[row])) if row < len(keys) else "no row" for keys in (done, key)
        )
        raise StateError(
            f"{where}: row {row}: the keys are not those of the completions, in their order: "
            f"{ours} here, {theirs} there"
        )


def row_of(lists: pa.Array) -> Ints:
    """For each element of the lists, its row."""
    return np.repeat(np.arange(len(lists), dtype=np.int64), lengths(lists))


def sums(lists: pa.Array, values: npt.NDArray[np.generic]) -> Ints:
    """Sums of `values`, one per element of the lists, by row."""
    return np.bincount(row_of(lists), weights=values, minlength=len(lists)).astype(np.int64)
