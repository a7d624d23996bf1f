"""What one input row means: its columns, checked, as a Prompt or a Rejected.

Knows what a good value of each column looks like. Knows nothing about files, templates or
tokenizers. A bad row is a Rejected with a code, never an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from ddbatch.core import Key, Prompt, Rejected, RowSampling
from ddbatch.data.batching.columns import (
    BadRow,
    Columns,
    Fault,
    Row,
    dump_json,
    escape_surrogates,
    has_surrogates,
    kind_of,
)
from ddbatch.data.batching.kept import kept_value
from ddbatch.data.batching.messages import read_messages, read_tools
from ddbatch.data.batching.row_sampling import read_row_sampling
from ddbatch.data.batching.turns import Turns, is_continued, messages_to_answer

Field = TypeVar("Field")


def to_prompt(row: Row | BadRow, key: Key, columns: Columns, *, turns: Turns) -> Prompt | Rejected:
    """The prompt of one row, or the reason why it has none.

    With turns=all it holds the whole conversation, of which turns.py makes the prompt of each turn.
    """
    if isinstance(row, BadRow):
        return Rejected(key, row.fault.code, row.fault.reason, None, row.raw_json)
    for name in columns.used:
        value = row.values.get(name)
        if isinstance(value, Fault):
            where = f"column {name!r}: {value.reason}"
            return Rejected(key, value.code, where, None, row.raw_json)
    user_id = _user_id(row.values, columns.id_column)
    prompt = _prompt(row.values, key, columns, turns, user_id)
    if isinstance(prompt, Fault):
        safe_id = None if user_id is None else escape_surrogates(user_id)
        return Rejected(key, prompt.code, prompt.reason, safe_id, row.raw_json)
    return replace(prompt, raw_json=row.raw_json)


def _prompt(
    values: Mapping[str, object], key: Key, columns: Columns, turns: Turns, user_id: str | None
) -> Prompt | Fault:
    """The prompt that a row's values make, without the row itself."""
    fault = _fault_of_row(values, columns)
    if fault is not None:
        return fault
    prompt = _content(values[columns.prompt], key, columns, turns)
    if isinstance(prompt, Fault):
        return prompt
    if user_id is not None and has_surrogates(user_id):
        return Fault("bad_text", f"column {columns.id_column!r} holds a lone surrogate")
    tools_json = _optional(values, columns.tools_column, read_tools)
    if isinstance(tools_json, Fault):
        return tools_json
    sampling = _optional(values, columns.sampling_column, read_row_sampling)
    if isinstance(sampling, Fault):
        return sampling
    kept = []
    for column in columns.keep:
        value = kept_value(values.get(column.name), column)
        if isinstance(value, Fault):
            return value
        kept.append(value)
    return replace(
        prompt,
        user_id=user_id,
        tools_json=tools_json,
        sampling=sampling or RowSampling(),
        kept=tuple(kept),
    )


def _optional(
    values: Mapping[str, object], column: str | None, read: Callable[[object, str], Field | Fault]
) -> Field | Fault | None:
    """What is read from a column that a row may lack."""
    return None if column is None else read(values.get(column), f"column {column!r}")


def _user_id(values: Mapping[str, object], id_column: str | None) -> str | None:
    value = None if id_column is None else values.get(id_column)
    return value if value is None or isinstance(value, str) else dump_json(value)


def _fault_of_row(values: Mapping[str, object], columns: Columns) -> Fault | None:
    """A row must have its prompt and its id; only the prompt must not be null."""
    others = () if columns.id_column is None else (columns.id_column,)
    for name in (columns.prompt, *others):
        if name not in values:
            return Fault("missing_field", f"column {name!r} is absent")
    if values[columns.prompt] is None:
        return Fault("missing_field", f"column {columns.prompt!r} is null")
    return None


def _content(value: object, key: Key, columns: Columns, turns: Turns) -> Prompt | Fault:
    """What the model will read, as a Prompt without the row's other columns."""
    where = f"column {columns.prompt!r}"
    if columns.kind == "messages":
        return _conversation(value, key, where, turns)
    if columns.kind == "token_ids":
        return _token_ids(value, key, where)
    if not isinstance(value, str):
        return Fault("wrong_type", f"{where} is {kind_of(value)}, not a string")
    if not value.strip():
        return Fault("empty_prompt", f"{where} is empty or blank")
    if has_surrogates(value):
        return Fault("bad_text", f"{where} holds a lone surrogate")
    return Prompt(key, text=value)


def _conversation(value: object, key: Key, where: str, turns: Turns) -> Prompt | Fault:
    messages = read_messages(value, where)
    if isinstance(messages, Fault):
        return messages
    asked = messages_to_answer(messages, turns)
    if not asked:
        return Fault("empty_prompt", f"{where} has no messages to answer")
    return Prompt(key, messages_json=dump_json(asked), is_continued=is_continued(messages, turns))


def _token_ids(value: object, key: Key, where: str) -> Prompt | Fault:
    if not isinstance(value, list):
        return Fault("wrong_type", f"{where} is {kind_of(value)}, not a list")
    if not value:
        return Fault("empty_prompt", f"{where} has no token_ids to answer")
    for position, token_id in enumerate(value):
        if type(token_id) is not int:  # a bool is an int to isinstance
            return Fault("wrong_type", f"{where}[{position}] is {kind_of(token_id)}, not an int")
    return Prompt(key, token_ids=tuple(value))
