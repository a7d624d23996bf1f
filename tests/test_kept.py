"""Kept input columns: a value has the column's type unchanged, or rejects its own row."""

from __future__ import annotations

import datetime
import io
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from json_values import json_values

from ddbatch.data.batching.columns import Fault, KeptColumn
from ddbatch.data.batching.kept import kept_value


def kept(value: object, kind: pa.DataType, *, is_json: bool = False) -> object:
    return kept_value(value, KeptColumn("k", kind, is_json))


def test_kept_values_have_the_columns_type_or_reject_their_row() -> None:
    good: list[tuple[object, pa.DataType, object]] = [
        ("a", pa.string(), "a"),
        (-(2**63), pa.int64(), -(2**63)),
        (1.5, pa.float64(), 1.5),
        (3, pa.float64(), 3.0),
        (True, pa.bool_(), True),
        ([1, None], pa.list_(pa.int64()), [1, None]),
        ({"a": None}, pa.struct([("a", pa.int8()), ("b", pa.string())]), {"a": None}),
        ("a", pa.dictionary(pa.int32(), pa.string()), "a"),
        (b"\xff", pa.binary(), b"\xff"),
        (Decimal("1.25"), pa.decimal128(5, 2), Decimal("1.25")),
        (datetime.date(2024, 2, 29), pa.date32(), datetime.date(2024, 2, 29)),
    ]
    for value, kind, expected in good:
        result = kept(value, kind)
        assert result == expected
        assert type(result) is type(expected)
    bad: list[tuple[object, pa.DataType]] = [
        ("1", pa.int64()),
        (2**63, pa.int64()),
        (1.0, pa.int64()),
        (1.5, pa.int64()),
        (True, pa.int64()),
        (True, pa.float64()),
        (2**53 + 1, pa.float64()),
        (10**400, pa.float64()),
        (1, pa.bool_()),
        (1, pa.string()),
        ("ab", pa.list_(pa.string())),
        ([1.5], pa.list_(pa.int64())),
        ({"a": 1, "c": 2}, pa.struct([("a", pa.int8())])),
        (300, pa.int8()),
        (1, pa.date32()),
        ("x", pa.binary()),
        (Decimal("1.255"), pa.decimal128(5, 2)),
        ([1], pa.map_(pa.string(), pa.int8())),
    ]
    for value, kind in bad:
        result = kept(value, kind)
        assert isinstance(result, Fault), (value, kind)
        assert result.code == "wrong_type"
        assert "column 'k'" in result.reason
        assert str(kind) in result.reason
    for value, kind in (("\ud800", pa.string()), (["\ud800"], pa.list_(pa.string()))):
        result = kept(value, kind)
        assert isinstance(result, Fault)
        assert result.code == "bad_text"


def test_kept_json_holds_anything_and_null_stays_null() -> None:
    day = datetime.date(2024, 2, 29)
    cases: list[tuple[object, object]] = [
        (None, None),
        ("a", '"a"'),
        ({"\u00e9": [1, None, 2.5]}, '{"\u00e9": [1, null, 2.5]}'),
        (10**30, str(10**30)),
        ("\ud800", '"\\ud800"'),
        ([("k", 1)], '[["k", 1]]'),
        (b"\xff", '"/w=="'),
        (day, '"2024-02-29"'),
    ]
    for value, expected in cases:
        assert kept(value, pa.string(), is_json=True) == expected
    assert kept(None, pa.int64()) is None


scalars = [pa.string(), pa.large_string(), pa.bool_(), pa.int8(), pa.uint64(), pa.int64()]
scalars += [pa.float64(), pa.binary(), pa.timestamp("us"), pa.time64("ns"), pa.decimal128(9, 2)]
scalars += [pa.dictionary(pa.int32(), pa.string())]
kinds = st.recursive(
    st.sampled_from(scalars),
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(lambda kind: pa.list_(kind, 2))
        | inner.map(lambda kind: pa.struct([("a", kind), ("b", pa.int64())]))
    ),
    max_leaves=3,
)


@settings(max_examples=200)
@given(json_values, kinds, st.booleans())
def test_a_kept_value_can_be_written_in_its_type_and_comes_back_unchanged(
    value: object, kind: pa.DataType, is_json: bool
) -> None:
    kind = pa.string() if is_json else kind
    result = kept(value, kind, is_json=is_json)
    if isinstance(result, Fault):
        assert result.code in ("wrong_type", "bad_text")
        return
    schema = pa.schema([("k", kind)])
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"k": result}], schema=schema), file)
    back = pq.read_table(file)["k"].to_pylist()[0]
    if is_json and value is not None:
        back = json.loads(back)
    assert repr(_plain(back, value)) == repr(value)


def _plain(stored: object, value: object) -> object:
    """What was stored, in the form of the value: without filled fields, whole floats as ints."""
    if isinstance(value, dict) and isinstance(stored, dict):
        assert all(stored[name] is None for name in set(stored) - set(value))
        return {name: _plain(stored[name], item) for name, item in value.items()}
    if isinstance(value, list) and isinstance(stored, list):
        return [_plain(*pair) for pair in zip(stored, value, strict=True)]
    return int(stored) if type(value) is int and isinstance(stored, float) else stored
