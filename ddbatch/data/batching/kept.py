"""Values of kept input columns (data.keep_columns) in the types that the run's schema gives them.

One value that does not fit must reject its own row, and never fail the part it would be written in.
Knows types. Knows nothing about rows or files.
"""

from __future__ import annotations

import pyarrow as pa

from ddbatch.data.batching.columns import Fault, KeptColumn, dump_json, kind_of

# What Arrow raises for a value that it cannot convert.
_REFUSED = (pa.ArrowException, OverflowError, TypeError, ValueError)


def kept_value(value: object, column: KeptColumn) -> object | Fault:
    """The value as the column stores it. What is returned converts to the type, unchanged."""
    if value is None:
        return None
    if column.is_json:
        return dump_json(value)
    if pa.types.is_floating(column.type) and type(value) is int:
        value = _float(value)
    if not _is_of(value, column.type):
        return _misfit(value, column)
    try:
        pa.array([value], type=column.type)
    except UnicodeEncodeError:
        return Fault("bad_text", f"column {column.name!r} holds a lone surrogate")
    except _REFUSED:
        return _misfit(value, column)
    return value


def _misfit(value: object, column: KeptColumn) -> Fault:
    reason = f"column {column.name!r} is {kind_of(value)}, which does not fit {column.type}"
    return Fault("wrong_type", reason)


def _float(value: int) -> float | int:
    """The same number as a float; an integer that no float equals stays what it is."""
    try:
        return float(value) if float(value) == value else value
    except OverflowError:
        return value


def _is_of(value: object, kind: pa.DataType) -> bool:
    """Whether a value is of the type itself: Arrow alone would make 1 of 1.5, a list of a string
    and a date of a number, and drop an object's unknown fields."""
    types = pa.types
    if value is None:
        return True
    if types.is_dictionary(kind):
        return _is_of(value, kind.value_type)
    if types.is_boolean(kind):
        return isinstance(value, bool)
    if types.is_integer(kind):
        return type(value) is int
    if types.is_floating(kind):
        return isinstance(value, float)
    if types.is_string(kind) or types.is_large_string(kind):
        return isinstance(value, str)
    if types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return isinstance(value, dict) and all(
            name in fields and _is_of(item, fields[name]) for name, item in value.items()
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return isinstance(value, list) and all(_is_of(item, kind.value_type) for item in value)
    # Dates, times, decimals, bytes: JSON has no such values, and Parquet brings the right ones.
    return not isinstance(value, bool | int | float | str | list | dict)
