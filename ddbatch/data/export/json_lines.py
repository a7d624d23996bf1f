"""Rows as lines of JSON, and what a data set's card must say so that they load with these types.

Without types `load_dataset` guesses them from the first rows, and fails at the first string in a
column that began with nulls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

import pyarrow as pa

from ddbatch.data.batching.columns import dump_json


def json_lines(table: pa.Table) -> Iterator[str]:
    """A line a row. What JSON has no type for is a string, and a number that is none is null."""
    has_floats = any(_holds_floats(field.type) for field in table.schema)
    for row in table.to_pylist():
        yield dump_json(_finite(row) if has_floats else row) + "\n"


def _holds_floats(kind: pa.DataType) -> bool:
    if pa.types.is_floating(kind):
        return True
    return any(_holds_floats(kind.field(at).type) for at in range(kind.num_fields))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value] if _has_floats(value) else value
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return value


def _has_floats(values: Sequence[object]) -> bool:
    """Whether a list can hold floats: token ids, of which there are many, cannot."""
    first = next((value for value in values if value is not None), None)
    return not isinstance(first, int | str)


def json_features(schema: pa.Schema) -> str:
    """The `features` of a card's dataset_info, as JSON, which is YAML."""
    return json.dumps([_feature(field.name, field.type) for field in schema])


def _feature(name: str, kind: pa.DataType) -> dict[str, object]:
    return {"name": name, **_kind(kind)}


def _kind(kind: pa.DataType) -> dict[str, object]:
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        return {"struct": [_feature(field.name, field.type) for field in fields]}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = _kind(kind.value_type)
        # The card's short forms: a list of a type by its name, a list of structs by their fields.
        return {"list": item.get("dtype", item.get("struct", item))}
    if pa.types.is_boolean(kind):
        return {"dtype": "bool"}
    if pa.types.is_integer(kind):
        return {"dtype": str(kind)}
    if pa.types.is_floating(kind):
        return {"dtype": f"float{kind.bit_width}"}
    return {"dtype": "string"}
