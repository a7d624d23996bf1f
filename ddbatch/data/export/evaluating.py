"""The value of a checked condition on a table: Python's syntax tree through pyarrow's kernels.

expressions.py says which trees come here. Values are scalars, or arrays as long as the table.
"""

from __future__ import annotations

import ast
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

Kind = Literal["number", "string", "bool", "list", "other"]

_COMPARE = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
ARITHMETIC = {
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
    ast.Div: pc.divide,
}


def kind_of_type(kind: pa.DataType) -> Kind:
    """What the values of a column can be used as."""
    if pa.types.is_dictionary(kind):
        return kind_of_type(kind.value_type)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    if pa.types.is_boolean(kind):
        return "bool"
    if is_list(kind):
        return "list"
    return "other"


def is_list(kind: pa.DataType) -> bool:
    """Whether values have a length that is not a text's."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def constant(node: ast.expr) -> bool | int | float | str | None:
    """The value of an item of a list, a literal with a sign or without; None for anything else."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    return None


def condition(node: ast.expr, table: pa.Table) -> pa.ChunkedArray | pa.Scalar:
    """A boolean without nulls: a comparison with null is false."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return pc.invert(condition(operand, table))
        case ast.BoolOp(op=op, values=[first, *others]):
            combine = pc.and_ if isinstance(op, ast.And) else pc.or_
            result = condition(first, table)
            for other in others:
                result = combine(result, condition(other, table))
            return result
        case ast.Compare():
            result, sides = pa.scalar(True), [node.left, *node.comparators]
            for left, compare, right in zip(sides, node.ops, sides[1:], strict=False):
                result = pc.and_(result, _comparison(left, compare, right, table))
            return result
        case ast.Call(func=ast.Name(id="is_null"), args=[ast.Name(id=name)]):
            return pc.is_null(table.column(name))
    return pc.fill_null(_value(node, table), False)


def _comparison(
    left: ast.expr, op: ast.cmpop, right: ast.expr, table: pa.Table
) -> pa.ChunkedArray | pa.Scalar:
    value = _value(left, table)
    if isinstance(right, ast.List | ast.Tuple):
        items = pa.array([constant(item) for item in right.elts])
        value, items = _aligned(value, items)
        found = pc.is_in(value, value_set=items)
        return found if isinstance(op, ast.In) else pc.and_not(pc.is_valid(value), found)
    return pc.fill_null(_COMPARE[type(op)](*_aligned(value, _value(right, table))), False)


def _value(node: ast.expr, table: pa.Table) -> pa.ChunkedArray | pa.Scalar:
    """A number (int64 or double), a string or a boolean, null where the row has none."""
    match node:
        case ast.Constant(value=value):
            return pa.scalar(value)
        case ast.Name(id=name):
            return _widened(table.column(name))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return pc.negate_checked(_value(operand, table))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, table)
        case ast.BinOp(left=left, op=op, right=right):
            sides = _aligned(_value(left, table), _value(right, table))
            if isinstance(op, ast.Div):
                sides = tuple(pc.cast(side, pa.float64(), safe=False) for side in sides)
            return ARITHMETIC[type(op)](*sides)
        case ast.Call(func=ast.Name(id="lower"), args=[argument]):
            return pc.utf8_lower(_value(argument, table))
        case ast.Call(func=ast.Name(id="len"), args=[argument]):
            value = _value(argument, table)
            length = pc.list_value_length if is_list(value.type) else pc.utf8_length
            return pc.cast(length(value), pa.int64())
    return condition(node, table)


def _widened(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers as int64, or as double where that would not hold them."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if kind_of_type(column.type) == "string":
        return column.cast(pa.string())
    if kind_of_type(column.type) != "number":
        return column
    is_whole = pa.types.is_integer(column.type) and column.type != pa.uint64()
    return column.cast(pa.int64() if is_whole else pa.float64(), safe=False)


def _aligned(
    left: pa.ChunkedArray | pa.Scalar, right: pa.ChunkedArray | pa.Array | pa.Scalar
) -> tuple[pa.ChunkedArray | pa.Scalar, ...]:
    """Both sides in one type: beside a double an integer becomes one, which is always possible."""
    if left.type == right.type or not (
        pa.types.is_floating(left.type) or pa.types.is_floating(right.type)
    ):
        return left, right
    return tuple(pc.cast(side, pa.float64(), safe=False) for side in (left, right))
