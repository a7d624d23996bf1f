"""Types of input columns: from Arrow, from JSON values, over several files, and in the log."""

from __future__ import annotations

import json

import datasets
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddbatch.data.batching.columns import ColumnType
from ddbatch.data.source.column_types import (
    JSON,
    Column,
    columns_of_schema,
    decode_type,
    encode_type,
    merge_columns,
)
from ddbatch.data.source.jsonl import scan_lines


def test_types_of_jsonl_columns_are_those_that_all_values_have() -> None:
    columns: dict[str, tuple[list[object], ColumnType]] = {
        "text": (["a", None], ColumnType(pa.string(), False)),
        "yes": ([True, False], ColumnType(pa.bool_(), False)),
        "count": ([1, -(2**63)], ColumnType(pa.int64(), False)),
        "score": ([1, 0.5], ColumnType(pa.float64(), False)),
        "loss": ([2**53 + 1, 0.5], JSON),
        "huge": ([1, 2**63], JSON),
        "mixed": ([1, "a"], JSON),
        "bit": ([1, True], JSON),
        "nested": ([[1], [2]], JSON),
        "nothing": ([None, None], JSON),
    }
    rows = [{name: values[at] for name, (values, _) in columns.items()} for at in range(2)]
    lines = [json.dumps(row).encode() for row in rows]
    late = [b'{"late": 1}', *[b'{"text": "a"}'] * 997, b'{"text": 1, "later": 1}']
    found = {column.name: column.type for column in scan_lines([*lines, *late]).columns}
    expected = {name: kind for name, (_, kind) in columns.items()}
    assert found == {**expected, "late": ColumnType(pa.int64(), False)}


LEAVES = (
    pa.bool_(),
    *(pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()),
    *(pa.string(), pa.binary(), pa.binary(3), pa.date32(), pa.date64(), pa.time32("ms")),
    *(
        pa.time64("ns"),
        pa.timestamp("s"),
        pa.timestamp("ns", tz="Europe/Berlin"),
        pa.duration("us"),
    ),
    *(pa.decimal128(5, -2), pa.decimal256(50, 2)),
)
KINDS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(lambda kind: pa.list_(kind, 2)),
        st.dictionaries(st.text(max_size=2), inner, min_size=1, max_size=2).map(
            lambda fields: pa.struct(list(fields.items()))
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=60)
@given(KINDS)
def test_a_plain_type_stays_itself_in_the_log_and_for_datasets(kind: pa.DataType) -> None:
    ((_, found),) = columns_of_schema(pa.schema([("x", kind)]))
    assert found == ColumnType(kind, False)
    assert decode_type(json.loads(json.dumps(encode_type(found)))) == found
    datasets.Features.from_arrow_schema(pa.schema([("x", kind)]))


def test_other_types_become_plain_or_json() -> None:
    plain = {
        pa.large_string(): pa.string(),
        pa.string_view(): pa.string(),
        pa.large_binary(): pa.binary(),
        pa.dictionary(pa.int8(), pa.large_string()): pa.string(),
        pa.run_end_encoded(pa.int32(), pa.int8()): pa.int8(),
        pa.large_list(pa.field("odd", pa.int8(), nullable=False)): pa.list_(pa.int8()),
        pa.list_view(pa.int8()): pa.list_(pa.int8()),
        pa.struct([pa.field("a", pa.large_string(), nullable=False)]): pa.struct(
            [("a", pa.string())]
        ),
    }
    for kind, expected in plain.items():
        ((_, found),) = columns_of_schema(pa.schema([("x", kind)]))
        assert found == ColumnType(expected, False), kind
    pairs = pa.map_(pa.string(), pa.int8())
    odd = (pairs, pa.null(), pa.uuid(), pa.month_day_nano_interval(), pa.struct([]))
    # An extension type that nobody has registered is its storage type with a note.
    unknown = pa.field("y", pa.int8(), metadata={"ARROW:extension:name": "z"})
    for kind in (*odd, pa.struct([unknown]), pa.struct([("a", pa.int8()), ("a", pa.int8())])):
        for outer in (kind, pa.list_(kind), pa.struct([("a", pa.list_(kind, 2))])):
            ((_, found),) = columns_of_schema(pa.schema([("x", outer)]))
            assert found == JSON, outer
    ((_, found),) = columns_of_schema(pa.schema([unknown]))
    assert found == JSON
    for text in ("x", "decimal128(99, 1)", ["list"], ["list", "x"], {"struct": 1}, None, 3):
        with pytest.raises(ValueError, match=r"type|precision"):
            decode_type(text)


def test_types_that_differ_between_files_become_json() -> None:
    number, text = ColumnType(pa.int64(), False), ColumnType(pa.string(), False)
    merged = merge_columns(
        [
            [Column("a", number), Column("b", number)],
            [Column("c", text), Column("b", text)],
            [Column("b", number), Column("a", number)],
        ]
    )
    assert list(merged.items()) == [("a", number), ("b", JSON), ("c", text)]
