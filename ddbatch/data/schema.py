"""The three tables of a run: their columns, how a finished row fills them, how a file is written.

Knows types and Parquet settings. Knows nothing about folders, parts or when a file is written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ddbatch.core import Completion, Prompt, Rejected
from ddbatch.data.columns import dump_json, escape_surrogates

SCHEMA_VERSION = 1
STORED = ("prompt_ids", "acceptance")

_KEY = (("row_id", pa.int64()), ("turn", pa.int16()), ("sample", pa.int16()))
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_DRAFTED = pa.struct([("rounds", pa.int32()), ("drafted", pa.int32())])
# Column paths whose values repeat; text, ids and scores would only fill a dictionary to no use.
_REPEATING = (
    "turn",
    "sample",
    "messages.list.element.role",
    "finish_reason",
    "stop_reason",
    "max_new_tokens",
    "seed",
    "slot",
    "accepted.list.element",
    "depth.list.element",
    "drafted.list.element.drafted",
    "histogram.list.element",
    "code",
)
# A reader holds one row group at a time, and 2 GiB of text would overflow the offsets of `string`.
_GROUP_ROWS = 50_000
_GROUP_BYTES = 64 << 20

TableRow = Mapping[str, object]


class Turn(NamedTuple):
    """One message of the completions table."""

    role: str
    content: str | None


@dataclass(frozen=True)
class FinishedRow:
    """All that one output row is made from.

    conversation_json: the messages that the model saw, a JSON list; None for token ids. text: the
    completion as text. stop_reason: the matched stop string or id as text, or "context".
    max_new_tokens: the cap in force for the row. seed: the run's seed.
    """

    prompt: Prompt
    conversation_json: str | None
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    text: str
    stop_reason: str | None
    max_new_tokens: int
    seed: int


def completions_schema(*, keep_columns: Sequence[str], store: Collection[str]) -> pa.Schema:
    """Content columns, then observed ones, then the kept input columns as JSON strings."""
    for name in store:
        if name not in STORED:
            raise ValueError(f"output.store={list(store)}: allowed members: {', '.join(STORED)}")
    fields = [
        *_KEY,
        ("id", pa.string()),
        ("messages", pa.list_(_MESSAGE)),
        ("completion", pa.string()),
        *([("prompt_token_ids", pa.list_(pa.int32()))] if "prompt_ids" in store else []),
        ("output_token_ids", pa.list_(pa.int32())),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("reasoning_end", pa.int32()),
        ("max_new_tokens", pa.int32()),
        ("seed", pa.int64()),
        ("output_logprobs", pa.list_(pa.float32())),
        ("num_steps", pa.int32()),
        ("draft_tokens", pa.int32()),
        ("accepted_tokens", pa.int32()),
        ("mean_acceptance_length", pa.float32()),
        ("seconds", pa.float32()),
        ("slot", pa.int32()),
    ]
    own = [name for name, _ in fields]
    for position, name in enumerate(keep_columns):
        if name in own or name in keep_columns[:position]:
            raise ValueError(
                f"data.keep_columns={list(keep_columns)}: {name!r} is a column of the output "
                f"already; allowed: any name once, except {', '.join(own)}"
            )
    return _schema("completions", [*fields, *((name, pa.string()) for name in keep_columns)])


def acceptance_schema() -> pa.Schema:
    """Per round: drafted tokens accepted (bonus excluded), and the deepest node offered."""
    fields = [
        *_KEY,
        ("accepted", pa.list_(pa.uint8())),
        ("drafted", pa.list_(_DRAFTED)),
        ("depth", pa.list_(pa.uint8())),
        ("histogram", pa.list_(pa.int32())),
    ]
    return _schema("acceptance", fields)


def rejected_schema() -> pa.Schema:
    """The rows that could not run, with the row as it was read."""
    names = ("id", "raw_json", "code", "reason")
    return _schema("rejected", [*_KEY, *((name, pa.string()) for name in names)])


def _schema(table: str, fields: Sequence[tuple[str, pa.DataType]]) -> pa.Schema:
    about = json.dumps({"schema_version": SCHEMA_VERSION, "table": table})
    return pa.schema(fields, metadata={"ddbatch": about})


def completions_row(row: FinishedRow, schema: pa.Schema) -> TableRow:
    """One row of the completions table; the schema says which optional columns it has."""
    done = row.completion
    _check(row)
    output_tokens, rounds = len(done.token_ids), len(done.accepted)
    kept = {} if row.prompt.kept_json is None else json.loads(row.prompt.kept_json)
    values: dict[str, object] = {
        **done.key._asdict(),
        "id": row.prompt.user_id,
        "messages": _messages(row.conversation_json, row.text),
        "completion": row.text,
        "prompt_token_ids": list(row.prompt_token_ids),
        "output_token_ids": list(done.token_ids),
        "prompt_tokens": len(row.prompt_token_ids),
        "output_tokens": output_tokens,
        "finish_reason": done.finish_reason,
        "stop_reason": row.stop_reason,
        "reasoning_end": None,
        "max_new_tokens": row.max_new_tokens,
        "seed": row.seed,
        "output_logprobs": None,
        "num_steps": rounds,
        "draft_tokens": rounds * done.drafted,
        "accepted_tokens": sum(done.accepted),
        # Prefill gives the first token, so the rounds emitted all but one.
        "mean_acceptance_length": (output_tokens - 1) / rounds if rounds else None,
        "seconds": done.seconds,
        "slot": done.slot,
        **{name: None if value is None else dump_json(value) for name, value in kept.items()},
    }
    return {name: values[name] for name in schema.names}


def acceptance_row(row: FinishedRow) -> TableRow:
    """One row of the acceptance table."""
    done = row.completion
    _check(row)
    rounds = len(done.accepted)
    rounds_by_accepted = Counter(done.accepted)
    histogram = [rounds_by_accepted[count] for count in range(max(done.accepted, default=-1) + 1)]
    assert sum(histogram) == rounds, f"{done.key}: {histogram} for {rounds} rounds"
    return {
        **done.key._asdict(),
        "accepted": list(done.accepted),
        "drafted": [{"rounds": rounds, "drafted": done.drafted}] if rounds else [],
        "depth": list(done.depth),
        "histogram": histogram,
    }


def rejected_row(row: Rejected) -> TableRow:
    """One row of the rejected table; reasons may quote text that UTF-8 cannot hold."""
    return {
        **row.key._asdict(),
        "id": None if row.user_id is None else escape_surrogates(row.user_id),
        "raw_json": escape_surrogates(row.raw_json),
        "code": row.code,
        "reason": escape_surrogates(row.reason),
    }


def _check(row: FinishedRow) -> None:
    """What must hold between a completion's counts; a breach is the engine's mistake."""
    done = row.completion
    assert done.key == row.prompt.key, f"{done.key} answers {row.prompt.key}"
    rounds, accepted, emitted = len(done.accepted), sum(done.accepted), len(done.token_ids) - 1
    assert 0 <= emitted < row.max_new_tokens, f"{done.key}: {emitted + 1} of {row.max_new_tokens}"
    assert len(done.depth) == rounds, f"{done.key}: {len(done.depth)} depths, {rounds} rounds"
    offers = zip(done.accepted, done.depth, strict=True)
    assert all(0 <= kept <= offered for kept, offered in offers), f"{done.key}: kept > offered"
    most = min(done.drafted, 255)  # the table's uint8
    assert all(offered <= most for offered in done.depth), f"{done.key}: depth above {most}"
    # Each round emits what it accepted and a bonus; a stop or the cap may cut the last one's bonus.
    assert accepted + rounds - emitted in ((0, 1) if rounds else (0,)), (
        f"{done.key}: {rounds} rounds accepted {accepted} and emitted {emitted}"
    )


def _messages(conversation_json: str | None, text: str) -> list[dict[str, str | None]] | None:
    """The conversation with its new turn, by role and text; a prompt of token ids has none."""
    if conversation_json is None:
        return None
    turns = [
        Turn(message["role"], _text(message.get("content")))
        for message in json.loads(conversation_json)
    ]
    return [turn._asdict() for turn in (*turns, Turn("assistant", text))]


def _text(content: str | Sequence[Mapping[str, str]] | None) -> str | None:
    """A message's content as one string: text parts are joined, null stays (a tool call)."""
    if content is None or isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


def write_table(rows: Sequence[TableRow], schema: pa.Schema, file: Path) -> None:
    """Write one Parquet file; each row has exactly the schema's columns."""
    assert rows, f"{file.name}: a file without rows cannot be loaded with datasets"
    for row in rows:
        assert list(row) == schema.names, f"{file.name}: {list(row)} is not {schema.names}"
    table = pa.Table.from_pylist(rows, schema=schema)
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=list(_REPEATING),
        write_page_index=True,
    ) as writer:
        for group in _groups(table):
            writer.write_table(group, row_group_size=group.num_rows)


def _groups(table: pa.Table) -> Iterator[pa.Table]:
    """The table in row groups within both bounds, halved until they fit."""
    if table.num_rows == 1 or (table.num_rows <= _GROUP_ROWS and table.nbytes <= _GROUP_BYTES):
        yield table
        return
    half = table.num_rows // 2
    yield from _groups(table.slice(0, half))
    yield from _groups(table.slice(half))
