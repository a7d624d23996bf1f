"""A condition on columns as users write it, and which rows of a table meet it.

Knows which parts of Python's grammar are a condition, and what they may be applied to. No part of
the text is ever run as Python: evaluating.py turns it into Arrow's kernels. Knows nothing of runs.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pyarrow as pa

from ddbatch.checks import did_you_mean
from ddbatch.data.export.evaluating import ARITHMETIC, Kind, condition, constant, kind_of_type

_ALLOWED = (
    "column names, numbers, 'strings', True, False, == != < <= > >=, in and not in [lists], and, "
    "or, not, + - * /, parentheses, is_null(column), len(text or list), lower(text)"
)
_FUNCTIONS = ("is_null", "len", "lower")


class _NotAllowedError(Exception):
    """A part of the text that is not allowed, and why."""


@dataclass(frozen=True)
class Filter:
    """A checked condition. columns: those that it reads, sorted."""

    text: str
    columns: tuple[str, ...]
    tree: ast.expr

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        """True for each row that meets the condition; never null.

        A comparison with null is false, `!=` and `not in` too; `not` of it is true.
        """
        try:
            return condition(self.tree, table)
        except pa.ArrowInvalid as error:
            raise ValueError(f"merge.filter={self.text}: {error}") from error


def parse_filter(text: str, schema: pa.Schema) -> Filter:
    """The condition, checked against the columns of the tables that it will see."""
    try:
        tree = _parse(text)
        if _kind(tree, schema) != "bool":
            raise _NotAllowedError(f"`{ast.unparse(tree)}` is no condition")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        columns = tuple(sorted(names & set(schema.names)))
        if not columns:
            raise _NotAllowedError("it names no column")
    except RecursionError as error:
        raise ValueError(f"merge.filter={text}: it is nested too deeply") from error
    except _NotAllowedError as refusal:
        raise ValueError(f"merge.filter={text}: {refusal}; allowed: {_ALLOWED}") from refusal
    return Filter(text, columns, tree)


def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        hint = ""
        if error.text and "=" in error.text and "==" not in error.text:
            hint = " (equality is written ==)"
        raise _NotAllowedError(f"{error.msg} at character {error.offset}{hint}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise _NotAllowedError(f"it cannot be read ({type(error).__name__})") from error


def _kind(node: ast.expr, schema: pa.Schema) -> Kind:
    """What the node's value is; _NotAllowedError where a part is not allowed or does not fit."""
    match node:
        case ast.Constant():
            return _kind_of_constant(node)
        case ast.Name(id=name):
            return _kind_of_column(name, schema)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _require(operand, "bool", schema, "not")
            return "bool"
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            _require(operand, "number", schema, "a sign")
            return "number"
        case ast.BoolOp(values=values):
            for value in values:
                _require(value, "bool", schema, "and, or")
            return "bool"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            for side in (left, right):
                _require(side, "number", schema, "arithmetic")
            return "number"
        case ast.Compare():
            sides = [node.left, *node.comparators]
            for left, compare, right in zip(sides, node.ops, sides[1:], strict=False):
                _check_pair(left, compare, right, schema)
            return "bool"
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _kind_of_call(name, argument, schema)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            raise _NotAllowedError(f"`{ast.unparse(node)}`: {name} takes one argument")
        case ast.Call(func=ast.Name(id=name)):
            guess = did_you_mean(name, _FUNCTIONS)
            raise _NotAllowedError(f"`{ast.unparse(node)}`: no such function{guess}")
    raise _NotAllowedError(f"`{ast.unparse(node)}` is not allowed")


def _require(node: ast.expr, wanted: Kind, schema: pa.Schema, user: str) -> None:
    found = _kind(node, schema)
    if found != wanted:
        what = {"bool": "a condition", "number": "a number"}[wanted]
        raise _NotAllowedError(
            f"`{ast.unparse(node)}`: {user} needs {what}, this is {_named(found)}"
        )


def _kind_of_constant(node: ast.Constant) -> Kind:
    match node.value:
        case bool():
            return "bool"
        case int() | float():
            if isinstance(node.value, int) and node.value >= 2**63:
                raise _NotAllowedError(f"`{node.value}` does not fit in 64 bits")
            return "number"
        case str():
            return "string"
        case None:
            raise _NotAllowedError("`None`: write is_null(column)")
    raise _NotAllowedError(f"`{ast.unparse(node)}` is not allowed")


def _kind_of_column(name: str, schema: pa.Schema) -> Kind:
    if name not in schema.names:
        guess = did_you_mean(name, schema.names)
        raise _NotAllowedError(
            f"`{name}` is no column{guess}; a text is written '{name}'; columns: "
            f"{', '.join(schema.names)}"
        )
    return kind_of_type(schema.field(name).type)


def _kind_of_call(name: str, argument: ast.expr, schema: pa.Schema) -> Kind:
    shown = f"`{name}({ast.unparse(argument)})`"
    found = _kind(argument, schema)
    if name == "is_null":
        if not isinstance(argument, ast.Name):
            raise _NotAllowedError(f"{shown}: is_null takes a column")
        return "bool"
    if name == "len":
        if found not in ("string", "list"):
            raise _NotAllowedError(f"{shown}: len takes a text or a list, this is {_named(found)}")
        return "number"
    if found != "string":
        raise _NotAllowedError(f"{shown}: lower takes a text, this is {_named(found)}")
    return "string"


def _check_pair(left: ast.expr, op: ast.cmpop, right: ast.expr, schema: pa.Schema) -> None:
    """Both sides of a comparison must be of one kind that can be compared."""
    kind = _kind(left, schema)
    sides = f"`{ast.unparse(left)}` with `{ast.unparse(right)}`"
    if isinstance(op, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple) or not right.elts:
            raise _NotAllowedError(f"`{ast.unparse(right)}`: in takes a list such as ['a', 'b']")
        for item in right.elts:
            if constant(item) is None:
                shown = ast.unparse(item)
                raise _NotAllowedError(f"`{shown}`: a list holds numbers or strings as they are")
        kinds = [_kind(item, schema) for item in right.elts]
    elif isinstance(op, ast.Is | ast.IsNot):
        raise _NotAllowedError(f"{sides}: write == or is_null(column), not is")
    else:
        kinds = [_kind(right, schema)]
    for other in (kind, *kinds):
        if other in ("list", "other"):
            raise _NotAllowedError(f"{sides}: {_named(other)} cannot be compared")
        if other != kind:
            raise _NotAllowedError(f"{sides}: compares {_named(kind)} with {_named(other)}")
    if kind == "bool" and isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        raise _NotAllowedError(f"{sides}: conditions have no order")


def _named(kind: Kind) -> str:
    return {
        "number": "a number",
        "string": "a text",
        "bool": "a condition",
        "list": "a list",
        "other": "a column of another type, which only is_null takes",
    }[kind]
