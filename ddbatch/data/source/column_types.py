"""What type an input column has: from an Arrow field or from JSON values, and over several files.

Knows Arrow types, and which of them the output can hold as they are; all others are kept as JSON
strings. Knows nothing about files, or about what a column means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from ddbatch.data.batching.columns import ColumnType

Kinds = dict[str, set[str]]  # column -> what its JSON values were

_EXACT = 2**53  # a float64 holds no larger integer without loss
_DECIMAL = re.compile(r"decimal(128|256)\((\d+), (-?\d+)\)")
_FIXED_BINARY = re.compile(r"fixed_size_binary\[(\d+)\]")
_ZONED = re.compile(r"timestamp\[(s|ms|us|ns), tz=(.+)\]")


JSON = ColumnType(pa.string(), is_json=True)


class Column(NamedTuple):
    """A column of one input file."""

    name: str
    type: ColumnType


def _plainly(kind: pa.DataType) -> ColumnType:
    return ColumnType(kind, is_json=False)


def columns_of_schema(schema: pa.Schema) -> tuple[Column, ...]:
    """The columns of a Parquet or Arrow file; ValueError if two have one name."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise ValueError(f"two columns are called {name!r}")
    return tuple(Column(field.name, _of_field(field)) for field in schema)


def _of_field(field: pa.Field) -> ColumnType:
    plain = _plain(field)
    return JSON if plain is None else _plainly(plain)


def _plain(field: pa.Field) -> pa.DataType | None:
    """The type without encodings and large offsets; None where the output cannot hold it.

    An extension type that nobody has registered shows as its storage type, with its name in the
    metadata: what is imported must not change the answer.
    """
    kind, types = field.type, pa.types
    if isinstance(kind, pa.BaseExtensionType) or b"ARROW:extension:name" in (field.metadata or {}):
        return None
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _plain(pa.field("", kind.value_type))
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_fixed_size_list(kind):
        inner = _plain(kind.value_field)
        return None if inner is None else pa.list_(inner, kind.list_size)
    lists = (types.is_list, types.is_large_list, types.is_list_view, types.is_large_list_view)
    if any(is_kind(kind) for is_kind in lists):
        inner = _plain(kind.value_field)
        return None if inner is None else pa.list_(inner)
    if types.is_struct(kind):
        fields = {child.name: _plain(child) for child in kind}
        is_sound = 0 < len(fields) == kind.num_fields and None not in fields.values()
        return pa.struct(list(fields.items())) if is_sound else None
    return kind if _is_storable_leaf(kind) else None


def _is_storable_leaf(kind: pa.DataType) -> bool:
    """Leaves that Parquet and `datasets` both hold; they know neither null, union nor interval."""
    types = pa.types
    checks = (
        types.is_boolean,
        types.is_integer,
        types.is_floating,
        types.is_date,
        types.is_time,
        types.is_timestamp,
        types.is_duration,
        types.is_decimal128,
        types.is_decimal256,
        types.is_fixed_size_binary,
    )
    return any(is_kind(kind) for is_kind in checks)


def note_kinds(kinds: Kinds, values: Mapping[str, object]) -> None:
    """Take one JSON object into account; columns_of_kinds decides."""
    for name, value in values.items():
        seen = kinds.setdefault(name, set())
        if value is not None:
            seen.add(_kind(value))


def columns_of_kinds(kinds: Kinds) -> tuple[Column, ...]:
    """The columns of a JSONL file, from what was noted of its first rows."""
    return tuple(Column(name, _of_kinds(seen)) for name, seen in kinds.items())


def _kind(value: object) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return "float"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return "int" if abs(value) <= _EXACT else "long"
    return "other"


def _of_kinds(seen: set[str]) -> ColumnType:
    if not seen or "other" in seen:
        return JSON
    if seen <= {"int", "long"}:
        return _plainly(pa.int64())
    if seen <= {"int", "float"}:
        return _plainly(pa.float64())
    leaves = {"string": pa.string(), "bool": pa.bool_()}
    return _plainly(leaves[seen.pop()]) if len(seen) == 1 else JSON


def merge_columns(files: Iterable[Sequence[Column]]) -> dict[str, ColumnType]:
    """All files' columns in the order of first sight, of a type that holds all of the files'."""
    merged: dict[str, ColumnType] = {}
    for columns in files:
        for name, kind in columns:
            merged[name] = _common(merged.setdefault(name, kind), kind)
    return merged


def _common(one: ColumnType, other: ColumnType) -> ColumnType:
    """The type that holds both: the wider of two integers or two floats, otherwise JSON."""
    if one == other:
        return one
    kinds = (one.type, other.type)
    for is_kind in (pa.types.is_integer, pa.types.is_floating):
        if all(map(is_kind, kinds)):
            schemas = [pa.schema([("", kind)]) for kind in kinds]
            with suppress(pa.ArrowException):  # uint64 with a signed integer
                wider = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
                return _plainly(wider) if is_kind(wider) else JSON
    return JSON


def encode_type(column: ColumnType) -> object:
    """The type as a JSON value that people can read too."""
    return "json" if column.is_json else _encode(column.type)


def _encode(kind: pa.DataType) -> object:
    if pa.types.is_fixed_size_list(kind):
        return ["fixed_size_list", kind.list_size, _encode(kind.value_type)]
    if pa.types.is_list(kind):
        return ["list", _encode(kind.value_type)]
    if pa.types.is_struct(kind):
        return ["struct", {child.name: _encode(child.type) for child in kind}]
    return str(kind)


def decode_type(value: object) -> ColumnType:
    """What encode_type has written; ValueError for anything else."""
    return JSON if value == "json" else _plainly(_decode(value))


def _decode(value: object) -> pa.DataType:
    match value:
        case ["list", inner]:
            return pa.list_(_decode(inner))
        case ["fixed_size_list", int(size), inner]:
            return pa.list_(_decode(inner), size)
        case ["struct", dict(children)]:
            return pa.struct([(name, _decode(child)) for name, child in children.items()])
        case str(text):
            return _decode_leaf(text)
    raise ValueError(f"{value!r} is no column type")


def _decode_leaf(text: str) -> pa.DataType:
    """A leaf from its Arrow name; pyarrow itself reads only the names without arguments."""
    if found := _DECIMAL.fullmatch(text):
        width, precision, scale = map(int, found.groups())
        return (pa.decimal128 if width == 128 else pa.decimal256)(precision, scale)
    if found := _FIXED_BINARY.fullmatch(text):
        return pa.binary(int(found.group(1)))
    if found := _ZONED.fullmatch(text):
        return pa.timestamp(found.group(1), tz=found.group(2))
    return pa.type_for_alias(text)
