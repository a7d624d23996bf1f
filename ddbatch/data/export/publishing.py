"""A data set in a folder of its own: files of about one size, a card, and no name before its end.

Knows how rows become files that `load_dataset` reads. Knows nothing about where rows come from.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

import pyarrow as pa

from ddbatch.core import RunError
from ddbatch.data import parquet
from ddbatch.data.export.json_lines import json_features, json_lines
from ddbatch.data.folder import sync
from ddbatch.data.parquet import open_writer, row_groups

FileType = Literal["parquet", "jsonl"]

# So many bytes of columns are Python values at a time, which take ten times as much.
_LINES_BYTES = 1 << 20

_CARD = """---
configs:
- config_name: default
  description: merge {word}
  data_files:
  - split: train
    path: data/train-*.{file_type}
{types}---

# Completions

Generated offline and merged by ddbatch. `load_dataset(<this folder>)` reads it.

|  |  |
|--|--|
{facts}
"""


def check_place(output_dir: str) -> Path:
    """The folder that a data set may be written to; ValueError where something is already."""
    place = Path(output_dir).resolve()
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        what = "is not empty" if place.is_dir() else "is no folder"
        raise ValueError(f"merge.output_dir={output_dir} {what}; choose another, or move it away")
    return place


def leftovers(place: Path) -> list[Path]:
    """Folders beside `place` that merges into it have left, or are writing right now."""
    if not place.parent.is_dir():
        return []
    return sorted(
        folder for folder in place.parent.iterdir() if folder.name.startswith(_tmp_name(place, ""))
    )


def _tmp_name(place: Path, mark: str) -> str:
    return f".{place.name}.tmp-{mark}"


class DataSet:
    """A data set that is being written. Entered with `with`; without publish() nothing stays."""

    def __init__(
        self, place: Path, schema: pa.Schema, file_type: FileType, file_bytes: int
    ) -> None:
        self._place, self._schema = place, schema
        self._file_type, self._file_bytes = file_type, file_bytes
        self._tmp = place.parent / _tmp_name(place, uuid.uuid4().hex[:12])
        self._pending: list[pa.Table] = []
        self._file: _ParquetFile | _JsonlFile | None = None
        self.num_files = self.num_rows = self.num_bytes = 0

    def __enter__(self) -> DataSet:
        try:
            (self._tmp / "data").mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"merge.output_dir={self._place} cannot be made: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk was told of already, and the file goes
                self._file.close()
        if self._tmp.exists():
            shutil.rmtree(self._tmp, ignore_errors=True)  # what is left of it takes space only

    def write(self, table: pa.Table) -> None:
        """Add rows."""
        self._pending.append(table)
        num_bytes = sum(part.nbytes for part in self._pending)
        num_rows = sum(part.num_rows for part in self._pending)
        if num_bytes >= self._group_bytes or num_rows >= parquet.GROUP_ROWS:
            self._flush()

    def finish(self) -> None:
        """Write what is left; num_files, num_rows and num_bytes are final then."""
        self._flush()
        self._close_file()

    def publish(self, facts: Mapping[str, str]) -> None:
        """Write a card with these facts, and give the folder its name once the disk has it all."""
        assert self._file is None, "not finished"
        assert self.num_files, "a data set without rows cannot be loaded with datasets"
        with self._disk():
            card = self._tmp / "README.md"
            card.write_text(make_card(self._schema, self._file_type, facts), encoding="utf-8")
            for path in (card, self._tmp / "data", self._tmp):
                sync(path)
            # An empty folder is replaced, any other is not.
            os.rename(self._tmp, self._place)
            sync(self._place.parent)

    @property
    def _group_bytes(self) -> int:
        return min(parquet.GROUP_BYTES, self._file_bytes)

    def _flush(self) -> None:
        if not self._pending:
            return
        table, self._pending = pa.concat_tables(self._pending), []
        for group in row_groups(table, self._group_bytes):
            with self._disk():
                if self._file is None:
                    self._file = self._new_file()
                self._file.write(group)
            self.num_rows += group.num_rows
            if self._file.num_bytes() >= self._file_bytes:
                self._close_file()

    def _new_file(self) -> _ParquetFile | _JsonlFile:
        name = f"train-{self.num_files:05d}.{self._file_type}"
        self.num_files += 1
        make = _ParquetFile if self._file_type == "parquet" else _JsonlFile
        return make(self._tmp / "data" / name, self._schema)

    def _close_file(self) -> None:
        if self._file is not None:
            with self._disk():
                self._file.close()
                sync(self._file.path)
                self.num_bytes += self._file.num_bytes()
            self._file = None

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"merge.output_dir={self._place} cannot be written: {error}") from error


class _ParquetFile:
    """One Parquet file, a row group at a time."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self._writer = open_writer(path, schema)

    def write(self, group: pa.Table) -> None:
        self._writer.write_table(group, row_group_size=group.num_rows)

    def num_bytes(self) -> int:
        return self.path.stat().st_size

    def close(self) -> None:
        self._writer.close()


class _JsonlFile:
    """One file of JSON lines."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self._num_bytes = 0

    def write(self, group: pa.Table) -> None:
        for piece in row_groups(group, _LINES_BYTES):
            for line in json_lines(piece):
                self._num_bytes += self._file.write(line.encode())

    def num_bytes(self) -> int:
        return self._num_bytes

    def close(self) -> None:
        self._file.close()


def make_card(schema: pa.Schema, file_type: FileType, facts: Mapping[str, str]) -> str:
    """README.md: how the files load, and a table of facts."""
    types = ""
    if file_type == "jsonl":
        types = f"dataset_info:\n  config_name: default\n  features: {json_features(schema)}\n"
    lines = (f"| {name} | {_cell(value)} |" for name, value in facts.items())
    # datasets keeps what it loads under a digest of the configs and the folder's last name: without
    # a word of its own another merge of this name would be taken for this one.
    word = uuid.uuid4().hex[:12]
    return _CARD.format(file_type=file_type, types=types, facts="\n".join(lines), word=word)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
