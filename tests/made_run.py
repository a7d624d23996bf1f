"""Runs made by hand: committed parts of random completions, and tools to spoil them.

No engine: rows are drawn, and go through the real sink. A spoilt file gets a record that fits it
(sizes, hash), so that a fault is found where it is and not by its hash.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from made_logprobs import made_logprobs

from ddbatch.core import Completion, Key, Prompt, Rejected, Shard
from ddbatch.data.batching.columns import Columns
from ddbatch.data.commits import read_shard
from ddbatch.data.folder import RunFolder
from ddbatch.data.manifest import Manifest, create_manifest
from ddbatch.data.records import Record, to_json
from ddbatch.data.schema import (
    FinishedRow,
    acceptance_schema,
    completions_schema,
    logprobs_schema,
    rejected_schema,
)
from ddbatch.data.sink import Sink
from ddbatch.data.source.log import Entry, InputFile, append_entry

CAP = 12
DRAFTED = 4
VOCAB = 97
SHARD_ROWS = 10
ATTEMPT = "0123456789ab"


def make_run(
    place: Path,
    *,
    rows: int = 23,
    samples: int = 2,
    skipped: tuple[int, ...] = (),
    part_rows: int = 7,
    store: tuple[str, ...] = ("prompt_ids", "acceptance"),
    turns: int = 1,
    seed: int = 0,
    top_logprobs: int | None = None,
) -> RunFolder:
    """A run of one input file; rows of `skipped` are left to do. Every seventh row is rejected.

    top_logprobs: how many of the best tokens are told beside the emitted one, None = no log-probs.
    """
    folder, attempt, chance = RunFolder(place), ATTEMPT, random.Random(seed)
    shards = tuple(
        Shard(index, first, min(SHARD_ROWS, rows - first))
        for index, first in enumerate(range(0, rows, SHARD_ROWS))
    )
    schemas = {"completions": completions_schema(keep=(), store=store)}
    if "acceptance" in store:
        schemas["acceptance"] = acceptance_schema()
    if top_logprobs:
        schemas["logprobs"] = logprobs_schema(top_logprobs)
    schemas["rejected"] = rejected_schema()
    create_manifest(
        folder,
        attempt,
        Manifest(
            identity={"sampling.logprobs": top_logprobs is not None},
            columns=Columns("prompt", "text"),
            schemas=schemas,
            template_date="2026-01-01T00:00:00",
            card={},
            config={},
            ddbatch="0",
        ),
    )
    listed = InputFile("prompts.jsonl", 1, rows, "0" * 64, ())
    append_entry(folder, attempt, 0, Entry((listed,), rows, samples, shards, "all", None))
    sink = Sink(folder, attempt, schemas, part_rows=part_rows, part_seconds=1e9)
    for shard in shards:
        sink.open_shard(shard.index, 0)
        units = [
            (row, sample)
            for row in range(shard.first_row, shard.stop_row)
            for sample in range(samples)
            if row not in skipped
        ]
        chance.shuffle(units)  # as rows finish
        for row, sample in units:
            keys = [Key(row, turn, sample) for turn in range(turns)]
            sink.add(shard.index, [_result(key, chance, top_logprobs) for key in keys])
            for full in sink.due():
                sink.commit_part(full)
        if sink.has_rows(shard.index):
            sink.commit_part(shard.index)
    return folder


def _result(
    key: Key, chance: random.Random, top_logprobs: int | None = None
) -> FinishedRow | Rejected:
    if key.row_id % 7 == 3:
        return Rejected(key, chance.choice(("bad_json", "prompt_too_long")), "why", "a", "{}")
    row = finished_row(key, chance)
    if top_logprobs is None:
        return row
    told = made_logprobs(row.completion.token_ids, top_logprobs, VOCAB)
    return replace(row, completion=replace(row.completion, logprobs=told))


def finished_row(key: Key, chance: random.Random) -> FinishedRow:
    """A completion of 1 to CAP tokens in rounds that accept 0 to 3 drafted tokens."""
    length = min(chance.randrange(1, CAP + 5), CAP)
    accepted: list[int] = []
    left = length - 1
    while left:
        kept = min(chance.randrange(DRAFTED), left)
        accepted.append(kept)
        left -= min(kept + 1, left)
    is_cut = length == CAP
    return FinishedRow(
        prompt=Prompt(key, text="why", raw_json="{}"),
        conversation_json='[{"role": "user", "content": "why"}]',
        prompt_token_ids=tuple(chance.randrange(VOCAB) for _ in range(chance.randrange(1, 6))),
        num_dropped=0,
        completion=Completion(
            key=key,
            token_ids=tuple(chance.randrange(VOCAB) for _ in range(length)),
            finish_reason="length" if is_cut else "stop",
            stop_token_id=None if is_cut else 1,
            accepted=tuple(accepted),
            depth=tuple(max(kept, chance.randrange(DRAFTED)) for kept in accepted),
            drafted=(DRAFTED,) * len(accepted),
            seconds=0.5,
            slot=0,
        ),
        text="because",
        stop_reason=None if is_cut else "1",
        max_new_tokens=CAP,
        seed=0,
    )


def change_record(
    folder: RunFolder, change: Callable[[Record], Record], shard: int = 0, number: int = 0
) -> None:
    """Put another record in the place of one."""
    record = read_shard(folder, shard)[number]
    folder.record(shard, number).write_text(to_json(change(record)))


def change_counts(folder: RunFolder, **counts: Any) -> None:
    """Another count in the first record."""
    change_record(folder, lambda record: replace(record, counts=replace(record.counts, **counts)))


def change_table(
    folder: RunFolder,
    table: str,
    change: Callable[[pa.Table], pa.Table],
    shard: int = 0,
    number: int = 0,
) -> None:
    """Put another table into a committed file, and into its record."""
    file = folder.part(table, shard, number)
    changed = change(pq.read_table(file))
    pq.write_table(changed, file)
    content = file.read_bytes()

    def fits(record: Record) -> Record:
        files = tuple(
            replace(
                part,
                size=len(content),
                sha256=hashlib.sha256(content).hexdigest(),
                rows=max(1, changed.num_rows),
            )
            if part.table == table
            else part
            for part in record.files
        )
        return replace(record, files=files)

    change_record(folder, fits, shard, number)


def change_cell(
    folder: RunFolder, table: str, column: str, change: Callable[[Any], Any], row: int = 1
) -> None:
    """Change one value of the first part."""

    def changed(content: pa.Table) -> pa.Table:
        values = content.column(column).to_pylist()
        values[row] = change(values[row])
        at = content.schema.get_field_index(column)
        field = content.schema.field(at)
        return content.set_column(at, field, pa.array(values, field.type))

    change_table(folder, table, changed)
