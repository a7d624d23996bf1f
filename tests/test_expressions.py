"""Filters: what a condition selects, and that everything else is refused in plain words."""

from __future__ import annotations

import datetime
import math
import random

import pyarrow as pa
import pytest

from ddbatch.data.export.expressions import parse_filter

TABLE = pa.table(
    {
        "finish_reason": pa.array(["stop", "length", None, "stop"]),
        "output_tokens": pa.array([5, 12, 40, None], pa.int32()),
        "turn": pa.array([0, 1, 2, 3], pa.int16()),
        "score": pa.array([0.5, None, math.nan, 2.0], pa.float32()),
        "stop_reason": pa.array([None, None, "2", "END"]),
        "completion": pa.array(["Yes", "", None, "\u4f60\u597d"]),
        "ids": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int32())),
        "seed": pa.array([2**63 - 1, 0, -1, 7], pa.int64()),
        "big": pa.array([2**64 - 1, 0, 1, None], pa.uint64()),
        "good": pa.array([True, False, None, True]),
        "day": pa.array([datetime.date(2026, 1, 1)] * 4),
        "kind": pa.array(["x", "y", None, "x"]).dictionary_encode(),
        "long": pa.array(["a", "b", "c", None], pa.large_string()),
    }
)


def chosen(text: str, table: pa.Table = TABLE) -> list[int]:
    """The positions of the rows that meet a condition."""
    mask = parse_filter(text, table.schema).mask(table)
    assert mask.type == pa.bool_()
    assert mask.null_count == 0
    return [at for at, is_met in enumerate(mask.to_pylist()) if is_met]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("finish_reason == 'stop'", [0, 3]),
        ("finish_reason != 'stop'", [1]),
        ("not (finish_reason == 'stop')", [1, 2]),
        ('finish_reason == "stop" and output_tokens > 4', [0]),
        ("output_tokens > 10 or finish_reason == 'stop' and turn == 3", [1, 2, 3]),
        ("5 <= output_tokens < 40", [0, 1]),
        ("0 < turn < output_tokens < 41", [1, 2]),
        ("turn in [0, 2, 9]", [0, 2]),
        ("turn not in (0, 2)", [1, 3]),
        ("output_tokens not in [5]", [1, 2]),
        ("not output_tokens in [5]", [1, 2, 3]),
        ("score in [0.5, -1]", [0]),
        ("turn in [0.5, 1]", [1]),
        ("is_null(stop_reason)", [0, 1]),
        ("not is_null(stop_reason)", [2, 3]),
        ("is_null(ids) or is_null(day)", [2]),
        ("len(completion) == 2", [3]),
        ("len(completion) < 1", [1]),
        ("len(ids) > 0", [0, 3]),
        ("lower(completion) == 'yes'", [0]),
        ("lower(finish_reason) in ['stop']", [0, 3]),
        ("output_tokens * 2 + 1 == 11", [0]),
        ("output_tokens / 8 > 1.4", [1, 2]),
        ("turn / 0 > 5", [1, 2, 3]),
        ("output_tokens - -turn >= 13", [1, 2]),
        ("-(turn + 1) <= -3", [2, 3]),
        ("+turn == 1", [1]),
        ("score > 0", [0, 3]),
        ("score < 1", [0]),
        ("good", [0, 3]),
        ("not good", [1, 2]),
        ("good == True", [0, 3]),
        ("seed > 0.5", [0, 3]),
        ("seed == 9223372036854775807", [0]),
        ("big > 1", [0]),
        ("kind != 'y' or len(kind) > 1", [0, 3]),
        ("long in ['a', 'c'] and long < 'b'", [0]),
        ("turn == 1 and 1 < 2", [1]),
        ("  turn == 1 ", [1]),
        ("completion == 'it is \"x\"' or completion == 'Yes'", [0]),
    ],
)
def test_a_condition_selects_rows(text: str, rows: list[int]) -> None:
    assert chosen(text) == rows


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("finish_reson == 'stop'", r"`finish_reson` is no column \(did you mean finish_reason\?\)"),
        ("finish_reason = 'stop'", r"equality is written =="),
        (
            "finish_reason == stop",
            r"`stop` is no column.*; a text is written 'stop'; columns: finish_reason, output",
        ),
        ("output_tokens > '4'", r"`output_tokens` with `'4'`: compares a number with a text"),
        ("finish_reason", r"`finish_reason` is no condition"),
        ("output_tokens + 1", r"is no condition"),
        ("turn and good", r"`turn`: and, or needs a condition, this is a number"),
        ("not turn", r"`turn`: not needs a condition"),
        ("completion + 'a' == 'b'", r"`completion`: arithmetic needs a number, this is a text"),
        ("turn ** 2 > 3", r"`turn \*\* 2` is not allowed"),
        ("turn % 2 == 0", r"is not allowed"),
        ("turn // 2 == 0", r"is not allowed"),
        ("completion.upper() == 'A'", r"`completion.upper\(\)` is not allowed"),
        ("__import__('os').system('true') == 0", r"is not allowed"),
        ("open('x') == 'a'", r"`open\('x'\)`: no such function"),
        ("length(completion) == 1", r"no such function"),
        ("len(completion, 1) == 1", r"len takes one argument"),
        ("len(turn) == 1", r"len takes a text or a list, this is a number"),
        ("lower(turn) == 'a'", r"lower takes a text"),
        ("is_null(turn + 1)", r"is_null takes a column"),
        ("is_null('turn')", r"is_null takes a column"),
        ("completion is None", r"write == or is_null"),
        ("completion == None", r"`None`: write is_null"),
        ("turn is 1", r"write == or is_null\(column\), not is"),
        ("'a' in completion", r"in takes a list such as"),
        ("turn in []", r"in takes a list"),
        ("turn in [turn]", r"a list holds numbers or strings"),
        ("turn in ['a']", r"compares a number with a text"),
        ("turn in [1, 'a']", r"compares a number with a text"),
        ("ids == ids", r"a list cannot be compared"),
        ("day == day", r"which only is_null takes cannot be compared"),
        ("good < True", r"conditions have no order"),
        ("turn == 9223372036854775808", r"does not fit in 64 bits"),
        ("turn == 1j", r"is not allowed"),
        ("completion == b'a'", r"is not allowed"),
        ("completion == f'{turn}'", r"is not allowed"),
        ("[turn == 1]", r"is not allowed"),
        ("(turn == 1 for turn in ids)", r"is not allowed"),
        ("turn == 1 if good else good", r"is not allowed"),
        ("(turn := 1) == 1", r"is not allowed"),
        ("lambda: good", r"is not allowed"),
        ("ids[0] == 1", r"is not allowed"),
        ("~good", r"is not allowed"),
        ("1 < 2", r"it names no column"),
        ("", r"invalid syntax|no column"),
        ("turn == ", r"invalid syntax"),
        ("turn == 1\nturn == 2", r"invalid syntax"),
        ("import os", r"invalid syntax"),
        ("turn == '\x00'", r"cannot be read|null bytes"),
        ("-" * 3000 + "1 == turn", r"nested too deeply|cannot be read"),
        ("(" * 5000 + "turn" + ")" * 5000 + " == 1", r"cannot be read|too many"),
    ],
)
def test_anything_else_is_refused_with_the_part_and_what_is_allowed(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_filter(text, TABLE.schema)
    assert type(caught.value) is ValueError
    assert str(caught.value).startswith(f"merge.filter={text}: ")
    assert "; allowed: column names, numbers, 'strings'" in str(caught.value)


def test_integers_that_overflow_are_the_users_to_know() -> None:
    with pytest.raises(ValueError, match=r"merge\.filter=seed \* 3 > 0: overflow") as caught:
        chosen("seed * 3 > 0")
    assert type(caught.value) is ValueError


def test_a_filter_names_the_columns_that_it_reads() -> None:
    text = "len(completion) > turn and is_null(stop_reason) and turn in [1]"
    condition = parse_filter(text, TABLE.schema)
    assert condition.columns == ("completion", "stop_reason", "turn")
    narrow = TABLE.select(list(condition.columns))
    assert condition.mask(narrow).to_pylist() == [False] * 4
    assert condition.mask(narrow.slice(0, 0)).to_pylist() == []


def test_a_filter_agrees_with_python_on_rows_without_nulls() -> None:
    chance = random.Random(3)
    rows = [{"a": chance.randrange(-3, 4), "b": chance.choice("xyz")} for _ in range(41)]
    table = pa.Table.from_pylist(rows)
    for _ in range(60):
        text = condition(chance, 3)
        expected = [at for at, row in enumerate(rows) if eval(text, {}, row)]
        assert chosen(f"({text}) and a == a", table) == expected, text


def condition(chance: random.Random, depth: int) -> str:
    """A random condition on a number a and a text b."""
    if depth == 0 or chance.random() < 0.2:
        left, right = (chance.choice(("a", "a + 1", "-a * 2", "1", "a / 2")) for _ in range(2))
        compare = chance.choice(("==", "!=", "<", "<=", ">", ">="))
        return chance.choice(
            (
                f"{left} {compare} {right}",
                f"b {compare} 'y'",
                f"b {chance.choice(('in', 'not in'))} ['x', 'z']",
                f"-2 < {left} <= 2 != {right}",
                f"len(b) * a {compare} 1",
            )
        )
    kind = chance.choice(("and", "or", "not"))
    first = condition(chance, depth - 1)
    return f"not ({first})" if kind == "not" else f"({first}) {kind} {condition(chance, depth - 1)}"
