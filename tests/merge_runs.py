"""Runs for job=merge, made by hand: rows are given, and committed in parts without final names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ddbatch.core import Key, Shard
from ddbatch.data.batching.columns import Columns
from ddbatch.data.commits import PartCounts, PartFile, Record, blocks_of, commit
from ddbatch.data.folder import RunFolder
from ddbatch.data.manifest import Manifest, create_manifest
from ddbatch.data.schema import completions_schema, rejected_schema
from ddbatch.data.source.log import Entry, InputFile, append_entry

ATTEMPT = "0123456789ab"
SCHEMA = completions_schema(keep=(), store=("prompt_ids",))
REJECTED = rejected_schema()

Row = dict[str, Any]


def completion(key: Key, **values: object) -> Row:
    row: Row = dict.fromkeys(SCHEMA.names)
    text = f"said {key.row_id}"
    row |= key._asdict() | {
        "id": f"id-{key.row_id}",
        "completion": text,
        "output_token_ids": [key.row_id, key.sample],
        "prompt_tokens": 3,
        "output_tokens": 2,
        "finish_reason": "stop",
    }
    row |= values
    asked = {"role": "user", "content": f"asked {key.row_id}"}
    row["messages"] = [asked, {"role": "assistant", "content": row["completion"]}]
    return row


def rejected(key: Key, **values: object) -> Row:
    row = key._asdict() | {"id": f"id-{key.row_id}", "raw_json": "{}", "code": "bad_json"}
    return row | {"reason": "why"} | values


class MadeRun:
    """A run folder made by hand: rows go into committed parts; none has its final name yet."""

    def __init__(
        self,
        place: Path,
        *,
        rows: int = 20,
        shard_rows: int = 10,
        samples: int = 1,
        schema: pa.Schema = SCHEMA,
        select: Any = "all",
        content: str = "0",
    ) -> None:
        self.folder, self.shard_rows, self.schema = RunFolder(place), shard_rows, schema
        self.numbers: dict[int, int] = {}
        schemas = {"completions": schema, "rejected": REJECTED}
        manifest = Manifest(
            identity={},
            columns=Columns("prompt", "text"),
            schemas=schemas,
            template_date="2026-01-01T00:00:00",
            card={},
            config={"model": {"path": "toy"}},
            ddbatch="0",
        )
        create_manifest(self.folder, ATTEMPT, manifest)
        shards = tuple(
            Shard(at, first, min(shard_rows, rows - first))
            for at, first in enumerate(range(0, rows, shard_rows))
        )
        listed = InputFile("prompts.jsonl", 1, rows, content * 64, ())
        entry = Entry((listed,), rows, samples, shards, select, None)
        assert append_entry(self.folder, ATTEMPT, 0, entry)

    def add(self, done: Iterable[Row], failed: Iterable[Row] = (), group_rows: int = 3) -> None:
        """Commit one part; its rows are of one shard."""
        done, failed = (sorted(rows, key=key_of) for rows in (done, failed))
        tables = {"completions": (done, self.schema), "rejected": (failed, REJECTED)}
        self.add_tables(
            {
                name: pa.Table.from_pylist(rows, schema=schema)
                for name, (rows, schema) in tables.items()
                if rows
            },
            group_rows,
        )

    def add_tables(self, tables: Mapping[str, pa.Table], group_rows: int = 3) -> None:
        keys = [
            Key(*(row[name] for name in Key._fields))
            for table in tables.values()
            for row in table.select(Key._fields).to_pylist()
        ]
        (shard,) = {key.row_id // self.shard_rows for key in keys}
        number = self.numbers.get(shard, 0)
        self.numbers[shard] = number + 1
        files = []
        for name, table in tables.items():
            final = self.folder.part(name, shard, number)
            tmp = self.folder.tmp(ATTEMPT) / f"{name}-{final.name}"
            tmp.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, tmp, row_group_size=group_rows)
            content = tmp.read_bytes()
            places = (self.folder.relative(tmp), self.folder.relative(final))
            sha256 = hashlib.sha256(content).hexdigest()
            files.append(PartFile(name, *places, sha256, len(content), table.num_rows))
        counts = PartCounts(len(keys), {}, 1, 1, 1, 1, 0)
        record = Record(shard, number, ATTEMPT, tuple(files), blocks_of(keys), counts, 1.5, 2.5)
        assert commit(self.folder, record)


def key_of(row: Row) -> Key:
    return Key(row["row_id"], row["turn"], row["sample"])


def make_run(
    place: Path, row_ids: Sequence[int], *, is_split: bool = True, said: str = "said", **more: Any
) -> RunFolder:
    """A run of twenty rows with these completed, each shard in two parts that interleave."""
    made = MadeRun(place, **more)
    for shard in range(2):
        here = [row_id for row_id in row_ids if row_id // made.shard_rows == shard]
        for part in (here[::2], here[1::2]) if is_split else (here,):
            if part:
                keys = [Key(row_id, 0, 0) for row_id in part]
                made.add(completion(key, completion=f"{said} {key.row_id}") for key in keys)
    return made.folder
