"""What one input row means: its columns, checked, as a Prompt or a Rejected.

Knows which column holds the prompt and what a good value looks like. Knows nothing about files,
templates or tokenizers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddbatch.core import Key, Prompt, RejectCode, Rejected

PromptKind = Literal["text", "messages", "token_ids"]

# Names looked for when the config names no prompt column.
AUTO_COLUMNS: dict[str, PromptKind] = {
    "prompt": "text",
    "messages": "messages",
    "token_ids": "token_ids",
}


class Fault(NamedTuple):
    """Why a row cannot run, before it is bound to a key."""

    code: RejectCode
    reason: str


@dataclass(frozen=True)
class Row:
    """One input row as read: its values by column, and the whole row as JSON."""

    values: Mapping[str, object]
    raw_json: str


@dataclass(frozen=True)
class BadRow:
    """One input row that could not be read; raw_json is its text with replacement characters."""

    fault: Fault
    raw_json: str


@dataclass(frozen=True)
class Columns:
    """Which column holds the prompt, of which kind, and the other columns that are read."""

    prompt: str
    kind: PromptKind
    id_column: str | None
    keep_columns: tuple[str, ...]


def _plain(value: object) -> str:
    """JSON text's stand-in for the Parquet types that JSON lacks."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    # Dates and times of datetime and pandas; Decimal, UUID and the rest have a plain str.
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def escape_surrogates(text: str) -> str:
    r"""Text that UTF-8 can hold: a lone surrogate becomes its JSON escape (\ud800)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def has_surrogates(text: str) -> bool:
    """Whether the text holds a lone surrogate: not a character, so neither a token nor storable."""
    return escape_surrogates(text) != text


def dump_json(value: object) -> str:
    """One value as JSON that UTF-8 can hold; non-ASCII characters stay as they are."""
    return escape_surrogates(json.dumps(value, ensure_ascii=False, default=_plain))


def parse_line(line: bytes) -> Row | BadRow:
    """One non-blank line of JSONL as a row."""
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        fault = Fault("bad_text", f"not UTF-8: {error.reason} at byte {error.start}")
        return BadRow(fault, line.decode("utf-8", "replace").strip())
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow(Fault("bad_json", f"not JSON: {error}"), text)
    if not isinstance(values, dict):
        return BadRow(Fault("wrong_type", f"the row is {_kind(values)}, not an object"), text)
    return Row(values, text)


def choose_columns(
    present: Sequence[str],
    *,
    prompt_column: str | None,
    messages_column: str | None,
    token_ids_column: str | None,
    id_column: str | None,
    keep_columns: Sequence[str],
) -> Columns:
    """Decide once, from the columns present, which are read; named columns win over known names."""
    options: dict[str, tuple[str | None, PromptKind]] = {
        "data.prompt_column": (prompt_column, "text"),
        "data.messages_column": (messages_column, "messages"),
        "data.token_ids_column": (token_ids_column, "token_ids"),
    }
    named = {option: name for option, (name, _) in options.items() if name is not None}
    for option, name in named.items():
        require_column(option, name, present)
    if id_column is not None:
        require_column("data.id_column", id_column, present)
    for name in keep_columns:
        require_column("data.keep_columns", name, present)
    if len(named) > 1:
        given = ", ".join(f"{option}={name}" for option, name in named.items())
        raise ValueError(f"{given}: only one of them may be set")
    if named:
        option, prompt = next(iter(named.items()))
        kind = options[option][1]
    else:
        prompt, kind = _known_column(present)
    return Columns(prompt, kind, id_column, tuple(keep_columns))


def require_column(option: str, name: str, present: Sequence[str]) -> None:
    """Refuse a named column that the data do not have."""
    if name not in present:
        raise ValueError(f"{option}={name}: no such column; allowed: {', '.join(present)}")


def _known_column(present: Sequence[str]) -> tuple[str, PromptKind]:
    """The one column of a known name; none or several is for the user to decide."""
    known = [name for name in AUTO_COLUMNS if name in present]
    options = "data.prompt_column, data.messages_column or data.token_ids_column"
    if not known:
        raise ValueError(
            f"data.prompt_column is not set and no column is called {', '.join(AUTO_COLUMNS)}; "
            f"set {options}; allowed: {', '.join(present)}"
        )
    if len(known) > 1:
        raise ValueError(
            f"data.prompt_column is not set and the columns {', '.join(known)} are all present; "
            f"set one of {options}; columns: {', '.join(present)}"
        )
    return known[0], AUTO_COLUMNS[known[0]]


def to_prompt(row: Row | BadRow, key: Key, columns: Columns) -> Prompt | Rejected:
    """The prompt of one row, or the reason why it has none."""
    if isinstance(row, BadRow):
        return Rejected(key, row.fault.code, row.fault.reason, None, row.raw_json)
    user_id = _user_id(row.values, columns.id_column)
    value = row.values.get(columns.prompt)
    if columns.kind == "messages":
        value = _without_final_assistant(value)
    fault = _fault_of_row(row.values, columns) or _fault_of_prompt(value, columns)
    if fault is None and user_id is not None and has_surrogates(user_id):
        fault = Fault("bad_text", f"column {columns.id_column!r} holds a lone surrogate")
    if fault is not None:
        safe_id = None if user_id is None else escape_surrogates(user_id)
        return Rejected(key, fault.code, fault.reason, safe_id, row.raw_json)
    kept = {name: row.values.get(name) for name in columns.keep_columns}
    return Prompt(
        key=key,
        user_id=user_id,
        messages_json=dump_json(value) if columns.kind == "messages" else None,
        text=value if columns.kind == "text" and isinstance(value, str) else None,
        token_ids=tuple(value) if columns.kind == "token_ids" and isinstance(value, list) else None,
        kept_json=dump_json(kept) if kept else None,
        raw_json=row.raw_json,
    )


def _user_id(values: Mapping[str, object], id_column: str | None) -> str | None:
    value = None if id_column is None else values.get(id_column)
    return value if value is None or isinstance(value, str) else dump_json(value)


def _without_final_assistant(value: object) -> object:
    """The messages up to the turn that will be generated anew (data.turns=last)."""
    if isinstance(value, list) and value:
        final = value[-1]
        if isinstance(final, dict) and final.get("role") == "assistant":
            return value[:-1]
    return value


def _fault_of_row(values: Mapping[str, object], columns: Columns) -> Fault | None:
    """A row must have its prompt and its id; only the prompt must not be null."""
    others = () if columns.id_column is None else (columns.id_column,)
    for name in (columns.prompt, *others):
        if name not in values:
            return Fault("missing_field", f"column {name!r} is absent")
    if values[columns.prompt] is None:
        return Fault("missing_field", f"column {columns.prompt!r} is null")
    return None


def _fault_of_prompt(value: object, columns: Columns) -> Fault | None:
    where = f"column {columns.prompt!r}"
    if columns.kind == "text":
        if not isinstance(value, str):
            return Fault("wrong_type", f"{where} is {_kind(value)}, not a string")
        if not value.strip():
            return Fault("empty_prompt", f"{where} is empty or blank")
        return _fault_of_text(value, where)
    if not isinstance(value, list):
        return Fault("wrong_type", f"{where} is {_kind(value)}, not a list")
    if not value:
        return Fault("empty_prompt", f"{where} has no {columns.kind} to answer")
    if columns.kind == "token_ids":
        for position, token_id in enumerate(value):
            if type(token_id) is not int:  # a bool is an int to isinstance
                return Fault("wrong_type", f"{where}[{position}] is {_kind(token_id)}, not an int")
        return None
    for position, message in enumerate(value):
        fault = _fault_of_message(message, f"{where}[{position}]")
        if fault is not None:
            return fault
    return _fault_of_text(json.dumps(value, ensure_ascii=False, default=_plain), where)


def _fault_of_message(message: object, where: str) -> Fault | None:
    """A message has a string role and a string content; null content only beside tool calls."""
    if not isinstance(message, dict):
        return Fault("wrong_type", f"{where} is {_kind(message)}, not an object")
    role, content = message.get("role"), message.get("content")
    if role is None:
        return Fault("missing_field", f"{where}.role is absent or null")
    if not isinstance(role, str):
        return Fault("wrong_type", f"{where}.role is {_kind(role)}, not a string")
    if content is None:
        if message.get("tool_calls"):
            return None
        return Fault("missing_field", f"{where}.content is absent or null, without tool_calls")
    if isinstance(content, list):
        if all(_is_text_part(part) for part in content):
            return None
        return Fault("unsupported_content", f"{where}.content has a part that is not text")
    if not isinstance(content, str):
        return Fault("wrong_type", f"{where}.content is {_kind(content)}, not a string")
    return None


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _fault_of_text(text: str, where: str) -> Fault | None:
    return Fault("bad_text", f"{where} holds a lone surrogate") if has_surrogates(text) else None


def _kind(value: object) -> str:
    """A value's type in JSON's words, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a bool", type(None): "null"}
    return names.get(type(value), f"of type {type(value).__name__}")
