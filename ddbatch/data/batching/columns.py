"""An input row as read, and which of its columns mean what.

Knows how a line of JSONL becomes a row and how the columns are chosen from the names that the files
have. Knows nothing about files, and not what a good value looks like: that is prompts.py.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pyarrow as pa

from ddbatch.checks import did_you_mean
from ddbatch.core import RejectCode

PromptKind = Literal["text", "messages", "token_ids"]

# Names looked for when the config names no prompt column.
AUTO_COLUMNS: dict[str, PromptKind] = {
    "prompt": "text",
    "messages": "messages",
    "token_ids": "token_ids",
}
# Far below the depth at which Python's JSON, a template or our own walks run out of stack.
MAX_DEPTH = 100


class Fault(NamedTuple):
    """Why a row cannot run, before it is bound to a key."""

    code: RejectCode
    reason: str


@dataclass(frozen=True)
class Row:
    """One input row as read: its values by column, and the whole row as JSON.

    A value that cannot be read is a Fault, which counts where its column is used.
    """

    values: Mapping[str, object]
    raw_json: str


@dataclass(frozen=True)
class BadRow:
    """One input row that could not be read; raw_json is its text with replacement characters."""

    fault: Fault
    raw_json: str


@dataclass(frozen=True)
class ColumnType:
    """The type of an input column over all files.

    is_json: its values are stored as JSON strings, because the type holds a map, a null or an
    extension type at any depth, or because a JSONL column has no single scalar type.
    """

    type: pa.DataType
    is_json: bool


@dataclass(frozen=True)
class KeptColumn:
    """An input column that goes to the output. type: as it is stored, string where is_json."""

    name: str
    type: pa.DataType
    is_json: bool


@dataclass(frozen=True)
class Columns:
    """Which column holds the prompt, of which kind, and the other columns that are read."""

    prompt: str
    kind: PromptKind
    id_column: str | None = None
    tools_column: str | None = None
    sampling_column: str | None = None
    keep: tuple[KeptColumn, ...] = ()

    @property
    def used(self) -> tuple[str, ...]:
        """The names of all columns that are read."""
        others = (self.id_column, self.tools_column, self.sampling_column)
        kept = (column.name for column in self.keep)
        return (self.prompt, *(name for name in others if name is not None), *kept)


def _plain(value: object) -> str:
    """JSON text's stand-in for the Parquet types that JSON lacks."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    # Dates and times of datetime and pandas; Decimal, UUID and the rest have a plain str.
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_plain)  # json.dumps makes one a call


def escape_surrogates(text: str) -> str:
    r"""Text that UTF-8 can hold: a lone surrogate becomes its JSON escape (\ud800)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def has_surrogates(text: str) -> bool:
    """Whether the text holds a lone surrogate: not a character, so neither a token nor storable."""
    return escape_surrogates(text) != text


def dump_json(value: object) -> str:
    """One value as JSON that UTF-8 can hold; non-ASCII characters stay as they are."""
    return escape_surrogates(_dump(value))


def holds_surrogates(value: object) -> bool:
    """Whether any text inside a value holds a lone surrogate."""
    return has_surrogates(_dump(value))


def _dump(value: object) -> str:
    return _ENCODER.encode(value)


def kind_of(value: object) -> str:
    """A value's type in JSON's words, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a bool", type(None): "null"}
    return names.get(type(value), f"of type {type(value).__name__}")


def load_json(text: str) -> object | Fault:
    """The value of a JSON text of the input."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Fault("bad_json", f"not JSON: {error}")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        return Fault("bad_json", f"not JSON that can be used: nested deeper than {MAX_DEPTH}")
    return value


def _is_deep(value: object) -> bool:
    """Whether more than MAX_DEPTH lists and objects stand in each other."""
    level: list[dict[str, object] | list[object]] = []
    level += [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
    return bool(level)


def parse_line(line: bytes) -> Row | BadRow:
    """One non-blank line of JSONL as a row."""
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        fault = Fault("bad_text", f"not UTF-8: {error.reason} at byte {error.start}")
        return BadRow(fault, line.decode("utf-8", "replace").strip())
    values = load_json(text)
    if isinstance(values, Fault):
        return BadRow(values, text)
    if not isinstance(values, dict):
        return BadRow(Fault("wrong_type", f"the row is {kind_of(values)}, not an object"), text)
    return Row(values, text)


def choose_columns(
    tables: Mapping[str, Collection[str]],
    types: Mapping[str, ColumnType],
    *,
    prompt_column: str | None,
    messages_column: str | None,
    token_ids_column: str | None,
    id_column: str | None,
    tools_column: str | None,
    sampling_column: str | None,
    keep_columns: Sequence[str],
) -> Columns:
    """Decide once which columns are read; named columns win over known names.

    tables: the column names of each file by its name; a file without names (no row of it could be
    read) has no say. types: what is known of the columns' types.
    """
    tables = {file: names for file, names in tables.items() if names}
    options: dict[str, tuple[str | None, PromptKind]] = {
        "data.prompt_column": (prompt_column, "text"),
        "data.messages_column": (messages_column, "messages"),
        "data.token_ids_column": (token_ids_column, "token_ids"),
    }
    named = {option: name for option, (name, _) in options.items() if name is not None}
    others = {
        "data.id_column": id_column,
        "data.tools_column": tools_column,
        "data.sampling_column": sampling_column,
    }
    wanted = [(option, name) for option, name in {**named, **others}.items() if name is not None]
    for option, name in [*wanted, *(("data.keep_columns", name) for name in keep_columns)]:
        _require_column(option, name, tables)
    if len(named) > 1:
        given = ", ".join(f"{option}={name}" for option, name in named.items())
        raise ValueError(f"{given}: only one of them may be set")
    if named:
        option, prompt = next(iter(named.items()))
        kind = options[option][1]
    else:
        prompt, kind = _known_column(tables)
    if kind == "token_ids" and tools_column is not None:
        raise ValueError(
            f"data.tools_column={tools_column}: a prompt of token ids is taken as it is; "
            "allowed: null"
        )
    keep = tuple(_kept_column(name, types.get(name)) for name in keep_columns)
    return Columns(prompt, kind, id_column, tools_column, sampling_column, keep)


def _kept_column(name: str, known: ColumnType | None) -> KeptColumn:
    """A column whose type nobody could see is stored as JSON, which holds anything."""
    if known is None or known.is_json:
        return KeptColumn(name, pa.string(), True)
    return KeptColumn(name, known.type, False)


def _require_column(option: str, name: str, tables: Mapping[str, Collection[str]]) -> None:
    """Refuse a named column that a file does not have."""
    for file, names in tables.items():
        if name not in names:
            raise ValueError(
                f"{option}={name}: no such column in {file}; allowed: {', '.join(names)}"
                f"{did_you_mean(name, names)}"
            )


def _known_column(tables: Mapping[str, Collection[str]]) -> tuple[str, PromptKind]:
    """The one column of a known name; none or several is for the user to decide."""
    if not tables:
        # No row can be read: each will be rejected, whatever its columns.
        return "prompt", "text"
    # All files' columns at once, so that two known names in two files are not overlooked.
    present = tuple(dict.fromkeys(name for names in tables.values() for name in names))
    known = [name for name in AUTO_COLUMNS if name in present]
    options = "data.prompt_column, data.messages_column or data.token_ids_column"
    if len(known) > 1:
        raise ValueError(
            f"data.prompt_column is not set and the columns {', '.join(known)} are all present; "
            f"set one of {options}; columns: {', '.join(present)}"
        )
    for file, names in tables.items():
        if not set(known) & set(names):
            raise ValueError(
                f"data.prompt_column is not set and no column is called {', '.join(AUTO_COLUMNS)} "
                f"in {file}; set {options}; allowed: {', '.join(names)}"
            )
    return known[0], AUTO_COLUMNS[known[0]]
