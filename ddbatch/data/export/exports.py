"""What a merged row looks like in each format: its columns, and how they come from a run's columns.

Knows the formats and what merge.reasoning does to them. Knows nothing about files or the order of
rows. Tables are batches of a few thousand rows: what has no kernel is done row by row in Python.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddbatch.data.export import openai_batch
from ddbatch.data.export.conversations import Turns, turns_of
from ddbatch.data.export.reasoning import Answer, split_reasoning
from ddbatch.data.schema import KEY_FIELDS, SCHEMA_VERSION, kept_columns

FORMATS = ("full", "messages", "conversations", "text", "openai_batch")
REASONING = ("keep", "split", "drop")

KEY = tuple(name for name, _ in KEY_FIELDS)
# What is read of a rejected row; code and reason are no columns of the completions.
REJECTED = (*KEY, "id", "code", "reason")

_SPEAKERS = {"user": "human", "assistant": "gpt"}  # all other roles keep their names


class Tally(NamedTuple):
    """Answers that a user should know of, whatever merge.reasoning says.

    empty: nothing but white space after the reasoning. unclosed: all reasoning, its end is missing.
    closed_only: reasoning that begins in the prompt. cut: ended by its cap without any tag.
    """

    empty: int = 0
    unclosed: int = 0
    closed_only: int = 0
    cut: int = 0

    def plus(self, other: Tally) -> Tally:
        return Tally(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Exported(NamedTuple):
    """Rows as they are written, and what was seen in their answers."""

    table: pa.Table
    tally: Tally


@dataclass(frozen=True)
class Export:
    """One way to write rows.

    model: what openai_batch calls the model. source: the columns of the completions. columns: those
    of them that are read.
    """

    format: str
    reasoning: str
    model: str
    source: pa.Schema
    columns: tuple[str, ...]

    @property
    def schema(self) -> pa.Schema:
        """The columns that are written."""
        nothing = pa.nulls(0, pa.string())
        empty = self.source.empty_table()
        if self.format == "openai_batch":
            empty = empty.append_column("code", nothing).append_column("reason", nothing)
        return export_rows(empty, self).table.schema

    def keeps(self, name: str) -> bool:
        """Whether a column is a kept column of the input."""
        return any(column.name == name for column in kept_columns(self.source))


def plan_export(source: pa.Schema, *, format: str, reasoning: str, model: str) -> Export:
    """How completions with these columns are written.

    full: all columns as they are. messages, conversations (ShareGPT) and text: the conversation,
    the id, the key and the kept columns. openai_batch: a line a row.
    """
    assert format in FORMATS, format
    assert reasoning in REASONING, reasoning
    if format == "full":
        columns = tuple(source.names)
    elif format == "openai_batch":
        columns = (*KEY, *openai_batch.SOURCES)
    else:
        kept = (column.name for column in kept_columns(source))
        columns = (*KEY, "id", "messages", "finish_reason", *kept)
    return Export(format, reasoning, model, source, columns)


def export_rows(table: pa.Table, export: Export) -> Exported:
    """Rows as the format has them; ValueError where a row does not fit into it.

    The table has export.columns, or more. For openai_batch it has code and reason too, and a row
    with a code is a rejected one.
    """
    if export.format == "openai_batch":
        done = table.filter(pc.is_null(table.column("code")))
        answers = [split_reasoning(text) for text in done.column("completion").to_pylist()]
        lines = openai_batch.batch_lines(table, model=export.model, reasoning=export.reasoning)
        return Exported(lines, _tally(done, answers))
    if export.format == "full":
        answers = [split_reasoning(text) for text in table.column("completion").to_pylist()]
        columns = _full(table, answers, export)
    else:
        _require_messages(table, export)
        turns = turns_of(table.column("messages"))
        answers = [split_reasoning(text) for text in turns.answers()]
        if export.format == "messages":
            is_kept = export.reasoning == "keep"
            said = table.column("messages") if is_kept else _messages(turns, answers, export)
            columns = {"messages": said}
        elif export.format == "conversations":
            columns = _conversations(table, turns, answers, export)
        else:
            columns = _text(table, turns, answers, export)
        columns |= {name: table.column(name) for name in ("id", *KEY)}
    return Exported(_with_kept(table, columns, export), _tally(table, answers))


Columns = dict[str, pa.Array | pa.ChunkedArray]


def _full(table: pa.Table, answers: Sequence[Answer], export: Export) -> Columns:
    columns: Columns = {}
    for name in export.source.names:
        if export.keeps(name):
            continue
        columns[name] = table.column(name)
        if name == "messages" and export.reasoning != "keep":
            # Not always the completion: a continued turn begins with the text that it continues.
            turns = turns_of(columns[name])
            said = [split_reasoning(text) for text in turns.answers()]
            columns[name] = _messages(turns, said, export)
        elif name == "completion" and export.reasoning != "keep":
            columns[name] = pa.array([answer.text for answer in answers], pa.string())
            columns |= _reasoning_column(answers, export)
    return columns


def _messages(turns: Turns, answers: Sequence[Answer], export: Export) -> pa.ListArray:
    """The conversations; the last turn's reasoning is a field of its own, or gone."""
    kind = turns.values.type
    fields = {name: turns.field(name) for name in (field.name for field in kind)}
    fields["content"] = turns.with_last(fields["content"], [answer.text for answer in answers])
    if export.reasoning == "split":
        nothing = pa.nulls(len(turns.values), pa.string())
        thoughts = [answer.reasoning for answer in answers]
        fields["reasoning_content"] = turns.with_last(nothing, thoughts)
    return turns.rebuilt(fields)


def _conversations(
    table: pa.Table, turns: Turns, answers: Sequence[Answer], export: Export
) -> Columns:
    """ShareGPT's turns; a role that it has no word for stays as it is. Reasoning is a column."""
    names = [field.name for field in turns.values.type]
    if "tool_calls" in names:
        has_calls = pc.is_valid(turns.field("tool_calls")).to_numpy(zero_copy_only=False)
        if has_calls.any():
            row = int(np.searchsorted(turns.stops, int(has_calls.argmax()), side="right"))
            raise ValueError(
                f"merge.format=conversations: row_id {table.column('row_id')[row]} has a message "
                "with tool_calls, which this format has no place for; choose messages"
            )
    content, role = turns.field("content"), turns.field("role")
    if export.reasoning != "keep":
        content = turns.with_last(content, [answer.text for answer in answers])
    known = pc.index_in(role, value_set=pa.array(list(_SPEAKERS)))
    speaker = pc.coalesce(pa.array(list(_SPEAKERS.values())).take(known), role)
    columns: Columns = {"conversations": turns.rebuilt({"from": speaker, "value": content})}
    return columns | _reasoning_column(answers, export)


def _text(table: pa.Table, turns: Turns, answers: Sequence[Answer], export: Export) -> Columns:
    """A prompt and its answer as two strings, for conversations of one question only.

    A system message stands before the question, a blank line between them, since the model saw it.
    An answer to later turns means little without the turns before it: such rows are refused.
    """
    prompts = []
    for at, messages in enumerate(table.column("messages").to_pylist()):
        roles = [message["role"] for message in messages[:-1]]
        if roles not in (["user"], ["system", "user"], ["developer", "user"]):
            raise ValueError(
                f"merge.format=text: row_id {table.column('row_id')[at]} has messages of "
                f"{', '.join(roles) or 'nobody'} before its answer; text has a place for one user "
                "message, and a system message before it; choose messages, or leave such rows out "
                "with a merge.filter such as len(messages) == 2"
            )
        prompts.append("\n\n".join(message["content"] or "" for message in messages[:-1]))
    is_kept = export.reasoning == "keep"
    texts = turns.answers() if is_kept else [answer.text for answer in answers]
    columns: Columns = {
        "prompt": pa.array(prompts, pa.string()),
        "completion": pa.array(texts, pa.string()),
    }
    return columns | _reasoning_column(answers, export)


def _reasoning_column(answers: Sequence[Answer], export: Export) -> Columns:
    if export.reasoning != "split":
        return {}
    return {"reasoning": pa.array([answer.reasoning for answer in answers], pa.string())}


def _with_kept(table: pa.Table, columns: Columns, export: Export) -> pa.Table:
    """The table of these columns and the kept ones; a kept one whose name is taken is renamed."""
    fields = [pa.field(name, column.type) for name, column in columns.items()]
    arrays = list(columns.values())
    taken = list(columns)
    for kept in kept_columns(export.source):
        name = f"input_{kept.name}" if kept.name in columns else kept.name
        if name in taken:
            raise ValueError(
                f"merge.format={export.format}: a kept column whose name is taken becomes "
                f"{name!r}, and there is a kept column of that name; choose another format"
            )
        taken.append(name)
        fields.append(export.source.field(kept.name).with_name(name))
        arrays.append(table.column(kept.name))
    about = {"schema_version": SCHEMA_VERSION, "table": "merged", "format": export.format}
    schema = pa.schema(fields, metadata={"ddbatch": json.dumps(about)})
    return pa.Table.from_arrays(arrays, schema=schema)


def _require_messages(table: pa.Table, export: Export) -> None:
    is_missing = pc.is_null(table.column("messages"))
    if pc.any(is_missing).as_py():
        row_id = table.column("row_id").filter(is_missing)[0]
        raise ValueError(
            f"merge.format={export.format}: row_id {row_id} has no messages, since its prompt was "
            "token ids; choose full or openai_batch, or leave such rows out with "
            "merge.filter='not is_null(messages)'"
        )


def _tally(table: pa.Table, answers: Sequence[Answer]) -> Tally:
    """Count in completions and what they answer."""
    is_untagged = np.array([answer.reasoning is None for answer in answers], np.bool_)
    is_cut = pc.equal(table.column("finish_reason"), "length").to_numpy(zero_copy_only=False)
    unclosed = [answer.is_opened and not answer.is_closed for answer in answers]
    blank = [not answer.text.strip() for answer in answers]
    return Tally(
        empty=sum(blank) - sum(unclosed),  # an unclosed one is blank, too
        unclosed=sum(unclosed),
        closed_only=sum(answer.is_closed and not answer.is_opened for answer in answers),
        cut=int((is_untagged & is_cut).sum()),
    )
