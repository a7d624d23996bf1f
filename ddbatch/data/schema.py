"""The tables of a run: their columns, and how a finished row fills them.

Knows types. Knows nothing about folders, parts or files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa

from ddbatch.core import Completion, Prompt, Rejected
from ddbatch.data.batching.columns import KeptColumn, dump_json, escape_surrogates
from ddbatch.data.logprobs import output_logprobs, top_tokens
from ddbatch.data.parquet import TableRow

SCHEMA_VERSION = 1
# What is summed over the finished rows of a part.
SUMS = (
    "completions",
    "prompt_tokens",
    "output_tokens",
    "rounds",
    "accepted_tokens",
    "truncated",
)
STORED = ("prompt_ids", "acceptance")

KEY_FIELDS = (("row_id", pa.int64()), ("turn", pa.int16()), ("sample", pa.int16()))
# What a message may have beside role and content; tool_calls as JSON, since arguments have no
# common type.
MESSAGE_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content")
_DRAFTED = pa.struct([("rounds", pa.int32()), ("drafted", pa.int32())])
# How the schema marks the kept input columns.
_KEPT, _KEPT_AS_JSON = {"ddbatch": "kept"}, {"ddbatch": "kept, JSON"}


@dataclass(frozen=True)
class FinishedRow:
    """All that one output row is made from.

    conversation_json: the messages that the model saw, a JSON list; None for token ids.
    num_dropped: prompt tokens cut off by data.on_long=truncate_left. text: the completion as text.
    stop_reason: the matched stop string or id as text, or "context". max_new_tokens: the cap in
    force for the row. seed: the seed in force. reasoning_end: output tokens up to and with the one
    that closes the reasoning.
    """

    prompt: Prompt
    conversation_json: str | None
    prompt_token_ids: tuple[int, ...]
    num_dropped: int
    completion: Completion
    text: str
    stop_reason: str | None
    max_new_tokens: int
    seed: int
    reasoning_end: int | None = None


def completions_schema(
    *, keep: Sequence[KeptColumn], store: Collection[str], message_fields: Collection[str] = ()
) -> pa.Schema:
    """Content columns, then observed ones, then the kept input columns.

    Kept columns have their own type, or are JSON strings where the field's metadata says so.
    message_fields: those of MESSAGE_FIELDS that messages have.
    """
    for name in store:
        if name not in STORED:
            raise ValueError(f"output.store={list(store)}: allowed members: {', '.join(STORED)}")
    more = (name for name in MESSAGE_FIELDS if name in message_fields)
    message = ("role", "content", *more)
    fields: list[tuple[str, pa.DataType]] = [
        *KEY_FIELDS,
        ("id", pa.string()),
        ("messages", pa.list_(pa.struct([(name, pa.string()) for name in message]))),
        ("completion", pa.string()),
        *([("prompt_token_ids", pa.list_(pa.int32()))] if "prompt_ids" in store else []),
        ("output_token_ids", pa.list_(pa.int32())),
        ("prompt_tokens", pa.int32()),
        ("dropped_prompt_tokens", pa.int32()),
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
    kept: list[pa.Field] = []
    for column in keep:
        if column.name in [*own, *(field.name for field in kept)]:
            raise ValueError(
                f"data.keep_columns={[item.name for item in keep]}: {column.name!r} is a column of "
                f"the output already; allowed: any name once, except {', '.join(own)}"
            )
        mark = _KEPT_AS_JSON if column.is_json else _KEPT
        kept.append(pa.field(column.name, column.type, metadata=mark))
    return _schema("completions", [*(pa.field(*item) for item in fields), *kept])


def kept_columns(schema: pa.Schema) -> tuple[KeptColumn, ...]:
    """The kept input columns of a completions schema."""
    marks = [(field, (field.metadata or {}).get(b"ddbatch", b"").decode()) for field in schema]
    return tuple(
        KeptColumn(field.name, field.type, mark == _KEPT_AS_JSON["ddbatch"])
        for field, mark in marks
        if mark
    )


def acceptance_schema() -> pa.Schema:
    """Per round: drafted tokens accepted (bonus excluded), and the deepest node offered."""
    fields = [
        *KEY_FIELDS,
        ("accepted", pa.list_(pa.uint8())),
        ("drafted", pa.list_(_DRAFTED)),
        ("depth", pa.list_(pa.uint8())),
        ("histogram", pa.list_(pa.int32())),
    ]
    return _schema("acceptance", fields)


def logprobs_schema(top: int) -> pa.Schema:
    """Per output token: the `top` most probable tokens and their log-probabilities, best first.

    Half precision may make close log-probabilities equal; the order still tells them apart.
    """
    assert top > 0, top
    fields = [
        *KEY_FIELDS,
        ("top_token_ids", pa.list_(pa.list_(pa.int32(), top))),
        ("top_logprobs", pa.list_(pa.list_(pa.float16(), top))),
    ]
    return _schema("logprobs", fields)


def rejected_schema() -> pa.Schema:
    """The rows that could not run, with the row as it was read."""
    names = ("id", "raw_json", "code", "reason")
    return _schema("rejected", [*KEY_FIELDS, *((name, pa.string()) for name in names)])


def _schema(
    table: str, fields: Sequence[pa.Field] | Sequence[tuple[str, pa.DataType]]
) -> pa.Schema:
    about = json.dumps({"schema_version": SCHEMA_VERSION, "table": table})
    return pa.schema(fields, metadata={"ddbatch": about})


def completions_row(row: FinishedRow, schema: pa.Schema) -> TableRow:
    """One row of the completions table; the schema says which optional columns it has.

    Ids are arrays: as Python integers a part of long rows would take ten times its size on disk.
    """
    done = row.completion
    _check(row)
    output_tokens, rounds = len(done.token_ids), len(done.accepted)
    kept_names = schema.names[len(schema.names) - len(row.prompt.kept) :]
    values: dict[str, object] = {
        **done.key._asdict(),
        "id": row.prompt.user_id,
        "messages": _messages(row, schema.field("messages").type.value_type),
        "completion": row.text,
        "prompt_token_ids": np.array(row.prompt_token_ids, np.int32),
        "output_token_ids": np.array(done.token_ids, np.int32),
        "prompt_tokens": len(row.prompt_token_ids),
        "dropped_prompt_tokens": row.num_dropped,
        "output_tokens": output_tokens,
        "finish_reason": done.finish_reason,
        "stop_reason": row.stop_reason,
        "reasoning_end": row.reasoning_end,
        "max_new_tokens": row.max_new_tokens,
        "seed": row.seed,
        "output_logprobs": output_logprobs(done),
        "num_steps": rounds,
        "draft_tokens": sum(done.drafted),
        "accepted_tokens": sum(done.accepted),
        # Prefill gives the first token, so the rounds emitted all but one.
        "mean_acceptance_length": (output_tokens - 1) / rounds if rounds else None,
        "seconds": done.seconds,
        "slot": done.slot,
        **dict(zip(kept_names, row.prompt.kept, strict=True)),
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
        "accepted": np.array(done.accepted, np.uint8),
        "drafted": [
            {"rounds": len(list(run)), "drafted": nodes} for nodes, run in groupby(done.drafted)
        ],
        "depth": np.array(done.depth, np.uint8),
        "histogram": histogram,
    }


def logprobs_row(row: FinishedRow, schema: pa.Schema) -> TableRow:
    """One row of the logprobs table: arrays [output tokens, top], int32 and float16."""
    top = top_tokens(row.completion, schema.field("top_token_ids").type.value_type.list_size)
    key = row.completion.key._asdict()
    return {**key, "top_token_ids": top.ids, "top_logprobs": top.scores}


def rejected_row(row: Rejected) -> TableRow:
    """One row of the rejected table; reasons may quote text that UTF-8 cannot hold."""
    return {
        **row.key._asdict(),
        "id": None if row.user_id is None else escape_surrogates(row.user_id),
        "raw_json": escape_surrogates(row.raw_json),
        "code": row.code,
        "reason": escape_surrogates(row.reason),
    }


def row_counts(row: FinishedRow) -> dict[str, int]:
    """What a finished row adds to a part's sums, by the names of SUMS."""
    done = row.completion
    return {
        "completions": 1,
        "prompt_tokens": len(row.prompt_token_ids),
        "output_tokens": len(done.token_ids),
        "rounds": len(done.accepted),
        "accepted_tokens": sum(done.accepted),
        "truncated": int(done.finish_reason == "length"),
    }


def _check(row: FinishedRow) -> None:
    """What must hold between a completion's counts; a breach is the engine's mistake."""
    done = row.completion
    assert done.key == row.prompt.key, f"{done.key} answers {row.prompt.key}"
    rounds, accepted, emitted = len(done.accepted), sum(done.accepted), len(done.token_ids) - 1
    assert 0 <= emitted < row.max_new_tokens, f"{done.key}: {emitted + 1} of {row.max_new_tokens}"
    assert len(done.depth) == rounds, f"{done.key}: {len(done.depth)} depths, {rounds} rounds"
    assert len(done.drafted) == rounds, f"{done.key}: {len(done.drafted)} drafts, {rounds} rounds"
    for kept, deepest, nodes in zip(done.accepted, done.depth, done.drafted, strict=True):
        assert 0 <= kept <= deepest, f"{done.key}: {kept} kept of a path of {deepest}"
        most = min(nodes, 255)  # the table's uint8
        assert deepest <= most, f"{done.key}: depth above {most}"
    # Each round emits what it accepted and a bonus; a stop or the cap may cut the last one's bonus.
    assert accepted + rounds - emitted in ((0, 1) if rounds else (0,)), (
        f"{done.key}: {rounds} rounds accepted {accepted} and emitted {emitted}"
    )


def _messages(row: FinishedRow, message: pa.StructType) -> list[dict[str, str | None]] | None:
    """The conversation with its new turn; a prompt of token ids has none."""
    if row.conversation_json is None:
        return None
    names = [message.field(at).name for at in range(message.num_fields)]
    turns = json.loads(row.conversation_json)
    said = row.text
    if row.prompt.is_continued:
        said = (_text(turns.pop().get("content")) or "") + said
    turns.append({"role": "assistant", "content": said})
    return [{name: _message_field(turn.get(name)) for name in names} for turn in turns]


def _message_field(value: object) -> str | None:
    """A field of a message as one string; what is no text (tool calls) as JSON."""
    if isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value):
        return _text(value)
    return value if value is None or isinstance(value, str) else dump_json(value)


def _text(content: str | Sequence[Mapping[str, str]] | None) -> str | None:
    """A message's content as one string: text parts are joined, null stays (a tool call)."""
    if content is None or isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)
