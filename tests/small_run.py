"""A run without an engine: two shards of a few rows, workers that commit keys, and what must hold.

A part's files are JSON lists of keys. What must hold is read off the disk by other means than the
code under test: the state is plain JSON in known places.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddbatch.core import Key, Shard
from ddbatch.data.commits import (
    PartCounts,
    PartFile,
    Record,
    blocks_of,
    clean_tmp,
    commit,
    discard,
    mark_finished,
    recover,
    roll_forward,
)
from ddbatch.data.folder import RunFolder, sync

SHARDS = (Shard(0, 0, 5), Shard(1, 5, 3))
SAMPLES = 2
TABLES = ("completions", "acceptance", "rejected")

Unit = tuple[int, int]  # row_id, sample


def is_rejected(row_id: int) -> bool:
    return row_id % 4 == 2


def keys_of(unit: Unit) -> list[Key]:
    row_id, sample = unit
    num_turns = 1 if is_rejected(row_id) else 1 + row_id % 2
    return [Key(row_id, turn, sample) for turn in range(num_turns)]


def units_of(shard: Shard) -> list[Unit]:
    rows = range(shard.first_row, shard.stop_row)
    return [(row_id, sample) for row_id in rows for sample in range(SAMPLES)]


ALL_KEYS = sorted(key for shard in SHARDS for unit in units_of(shard) for key in keys_of(unit))


@dataclass
class Log:
    """What a worker was told."""

    won: list[Record] = field(default_factory=list)
    lost: list[Record] = field(default_factory=list)


def write_part(
    folder: RunFolder, shard: int, number: int, attempt: str, units: Iterable[Unit]
) -> Record:
    """The part's files under tmp names, and the record that would commit them."""
    keys = sorted(key for unit in units for key in keys_of(unit))
    done = [key for key in keys if not is_rejected(key.row_id)]
    rejected = [key for key in keys if is_rejected(key.row_id)]
    files = []
    tmp = folder.tmp(attempt)
    tmp.mkdir(parents=True, exist_ok=True)
    for table, rows in zip(TABLES, (done, done, rejected), strict=True):
        if rows:
            final = folder.part(table, shard, number)
            text = json.dumps({"attempt": attempt, "keys": rows})
            file = tmp / f"{table}-{final.name}"
            file.write_text(text)
            sync(file)
            sha256 = hashlib.sha256(text.encode()).hexdigest()
            names = folder.relative(file), folder.relative(final)
            files.append(PartFile(table, *names, sha256, len(text), len(rows)))
    sync(tmp)
    counts = PartCounts(len(done), {"bad_text": len(rejected)} if rejected else {}, 1, 2, 3, 4, 0)
    return Record(shard, number, attempt, tuple(files), blocks_of(keys), counts, 1.5, 2.5)


def generate(
    folder: RunFolder,
    attempt: str,
    seed: int = 0,
    part_units: int = 3,
    over: Callable[[], Collection[str]] = tuple,
) -> Log:
    """A worker: all shards, until nothing is left. It sweeps up first and last, after attempts that
    are over by then."""
    rng, log = random.Random(seed), Log()
    clean_tmp(folder, over())
    waiting = list(SHARDS)
    rng.shuffle(waiting)
    while waiting:
        shard = waiting.pop(0)
        if not _generate_shard(folder, shard, attempt, rng, part_units, log):
            waiting.append(shard)
    clean_tmp(folder, over())
    return log


def _generate_shard(
    folder: RunFolder, shard: Shard, attempt: str, rng: random.Random, part_units: int, log: Log
) -> bool:
    """Whether the shard is done; False if another worker was first."""
    records = recover(folder, shard.index)
    finished = mark_finished(records, shard, SAMPLES)
    missing = [unit for unit in units_of(shard) if not finished[unit[0] - shard.first_row, unit[1]]]
    rng.shuffle(missing)
    number = len(records)
    while missing:
        taken, missing = missing[:part_units], missing[part_units:]
        record = write_part(folder, shard.index, number, attempt, taken)
        if not commit(folder, record):
            log.lost.append(record)
            discard(folder, record)
            return False
        log.won.append(record)
        roll_forward(folder, record)
        number += 1
    return True


def records_on_disk(folder: RunFolder, shard: int) -> list[dict[str, object]]:
    """A shard's records as plain JSON; their numbers must have no gap."""
    files = sorted((folder.place / f".ddbatch/commits/shard-{shard:05d}").glob("*.json"))
    assert [file.name for file in files] == [f"{number:06d}.json" for number in range(len(files))]
    return [json.loads(file.read_text()) for file in files]


def keys_in(record: dict[str, object]) -> list[Key]:
    keys = []
    for first_row, num_rows, first_sample, num_samples, num_turns in record["keys"]:  # type: ignore[attr-defined]
        for row_id in range(first_row, first_row + num_rows):
            for sample in range(first_sample, first_sample + num_samples):
                keys += [Key(row_id, turn, sample) for turn in range(num_turns)]
    return keys


def committed_keys(folder: RunFolder) -> list[Key]:
    shards = (shard.index for shard in SHARDS)
    return [
        key
        for shard in shards
        for record in records_on_disk(folder, shard)
        for key in keys_in(record)
    ]


def visible_keys(
    folder: RunFolder, tables: Sequence[str] = ("completions", "rejected")
) -> list[Key]:
    """What a reader of the final folders sees."""
    files = [file for table in tables for file in (folder.place / table).glob("*")]
    return [Key(*key) for file in files for key in json.loads(file.read_text())["keys"]]


def check(folder: RunFolder) -> None:
    """What must hold whenever anybody stops anywhere."""
    committed = committed_keys(folder)
    assert max(Counter(committed).values(), default=1) == 1, "a key in two records"
    named: dict[Path, dict[str, object]] = {}
    for shard in SHARDS:
        for record in records_on_disk(folder, shard.index):
            for file in record["files"]:  # type: ignore[attr-defined]
                tmp, final = folder.place / file["tmp"], folder.place / file["final"]
                assert tmp.exists() != final.exists(), f"{file['final']} is nowhere or twice"
                where = final if final.exists() else tmp
                assert where.stat().st_size == file["size"], where
                named[final] = record
    for table in TABLES:
        for final in (folder.place / table).glob("*"):
            assert final in named, f"{final} without a record"
            content = json.loads(final.read_text())
            assert content["attempt"] == named[final]["attempt"], f"{final} is another attempt's"
            assert {Key(*key) for key in content["keys"]} <= set(keys_in(named[final])), final


def check_complete(folder: RunFolder) -> None:
    """What must hold when a worker has come to the end."""
    check(folder)
    assert sorted(visible_keys(folder)) == ALL_KEYS
    done = sorted(key for key in ALL_KEYS if not is_rejected(key.row_id))
    assert sorted(visible_keys(folder, ["completions"])) == done
    assert sorted(visible_keys(folder, ["acceptance"])) == done
