"""Mend a shard whose state cannot be trusted: what is broken goes aside, its rows are redone.

Final folders never show a row without a record, wherever this is cut off: files go first, the
highest number first, then their record; what is left is broken still, and the next repair goes on.
No worker may have the shard meanwhile: it would commit with a view of what is gone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddbatch.core import Shard
from ddbatch.data.commits import list_records, read_record, roll_forward
from ddbatch.data.finished import mark_record
from ddbatch.data.folder import RunFolder, StateError, hash_file, list_names, make_folder, sync


def repair(folder: RunFolder, shard: Shard, samples: int, attempt: str) -> list[str]:
    """Move a shard's first broken record and its later ones, with their files, to
    .ddbatch/aside/<attempt>; the names moved, none if nothing is broken.

    Broken is what read_shard, roll_forward or mark_finished refuses, a file of another sha256, and
    a file under a final name without a record. Good records are rolled forward.
    """
    numbers, strays = list_records(folder, shard.index)
    aside = _Aside(folder, folder.state("aside") / attempt)
    moved = aside.move(strays)
    first = _first_broken(folder, shard, samples)
    last = max(numbers, default=-1)
    if last < first:
        last = first - 1
        while any(file.exists() for file in _finals(folder, shard.index, last + 1)):
            last += 1
    doomed = range(last, first - 1, -1)
    seen = {number: _content(folder.record(shard.index, number)) for number in numbers}
    for number in doomed:
        record = folder.record(shard.index, number)
        for file in (*_files_of(folder, shard.index, number), record):
            if _content(record) not in (seen.get(number), None):
                return moved  # somebody else has repaired the shard and gone on with it
            moved += aside.move([file])
    return moved


def _first_broken(folder: RunFolder, shard: Shard, samples: int) -> int:
    """The first number whose record is missing or cannot be trusted."""
    finished = np.zeros((shard.num_rows, samples), np.bool_)
    number = 0
    try:
        while (record := read_record(folder, shard.index, number)) is not None:
            mark_record(finished, record, shard)
            roll_forward(folder, record)
            for file in record.files:
                if hash_file(folder.place / file.final) != file.sha256:
                    raise StateError(f"{file.final} has another sha256 than its record says")
            number += 1
    except StateError:
        return number
    return number


def _files_of(folder: RunFolder, shard: int, number: int) -> list[Path]:
    """Where the files of a part may be. Tmp names first: from them others may make final ones.

    A record that cannot be read does not tell its tmp names; nobody else knows them either.
    """
    try:
        record = read_record(folder, shard, number)
    except StateError:
        record = None
    tmp = [folder.place / file.tmp for file in record.files] if record else []
    return tmp + _finals(folder, shard, number)


def _finals(folder: RunFolder, shard: int, number: int) -> list[Path]:
    """The final names of a part, in all folders that may be a table's."""
    tables = [name for name in list_names(folder.place) if (folder.place / name).is_dir()]
    return [folder.part(table, shard, number) for table in sorted(tables)]


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class _Aside:
    folder: RunFolder
    place: Path

    def move(self, files: list[Path]) -> list[str]:
        """Move the files that are there, and have the disk keep that; their names."""
        moved = []
        for file in files:
            target = self.place / self.folder.relative(file)
            make_folder(target.parent)
            while target.exists():
                target = target.with_name(f"{target.name}~")
            try:
                os.rename(file, target)
            except FileNotFoundError:
                continue
            sync(target.parent)
            with suppress(FileNotFoundError):  # swept, where the run is complete meanwhile
                sync(file.parent)
            moved.append(self.folder.relative(file))
        return moved
