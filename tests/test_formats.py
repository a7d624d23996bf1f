"""One input file: rows by position in every format, what is refused, and types of columns."""

from __future__ import annotations

import base64
import datetime
import decimal
import gzip
import json
import threading
import tracemalloc
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_files import FORMATS, write

from ddbatch.data.batching.columns import BadRow, ColumnType, Fault, Row
from ddbatch.data.source import jsonl as formats_jsonl
from ddbatch.data.source.formats import (
    READ_ERRORS,
    FileScan,
    ScanCancelledError,
    Select,
    read_rows,
    scan_file,
)

UNREADABLE = (ValueError, *READ_ERRORS)


def look(file: Path, select: Select = "all") -> FileScan:
    return scan_file(file, select, threading.Event())


def read(
    file: Path, start: int = 0, stop: int | None = None, select: Select = "all"
) -> list[Row | BadRow]:
    scan = look(file, select)
    end = scan.rows if stop is None else stop
    return list(read_rows(file, select, start, end, scan.offsets))


def brief(rows: Sequence[Row | BadRow]) -> list[object]:
    return [dict(row.values) if isinstance(row, Row) else row.fault.code for row in rows]


@pytest.mark.parametrize("name", FORMATS)
def test_any_range_of_rows_can_be_read(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"question {n} \u2028 \u00e4", "n": n} for n in range(600)]
    file = write(tmp_path / name, rows, group=77)
    scan = look(file)
    assert (scan.rows, scan.stamp.size) == (600, file.stat().st_size)
    assert [column.name for column in scan.columns] == ["prompt", "n"]
    ranges = ((0, 600), (0, 1), (599, 600), (76, 78), (255, 513), (256, 512), (77, 154), (300, 300))
    for start, stop in ranges:
        found = list(read_rows(file, "all", start, stop, scan.offsets))
        assert brief(found) == rows[start:stop]
        assert [json.loads(row.raw_json) for row in found] == rows[start:stop]
    # A file that has become shorter ends early; inputs.py finds it out.
    assert len(list(read_rows(file, "all", 590, 700, scan.offsets))) == 10


def test_one_bad_line_is_one_bad_row_and_lines_end_at_newlines_only(tmp_path: Path) -> None:
    lines = [
        b"\xef\xbb\xbf" + b'{"a": "one"}\r',
        b"",
        b'{"a": "tw',
        b" \t\r",
        b'{"a": "\xff"}',
        '{"a": "\u2028\u0085\x0c"}'.encode(),
        b"[1]",
        b'{"a": "last"}',
    ]
    expected = [{"a": "one"}, "bad_json", "bad_text", "bad_json", "wrong_type", {"a": "last"}]
    file = tmp_path / "x.jsonl"
    for end in (b"", b"\n", b"\n\n \n"):
        file.write_bytes(b"\n".join(lines) + end)
        rows = read(file)
        assert brief(rows) == expected
        assert rows[1].raw_json == '{"a": "tw'
        assert rows[2].raw_json == '{"a": "\ufffd"}'
        assert brief(read(file, 2, 5)) == expected[2:5]
    file.write_bytes(b"\xef\xbb\xbf")
    assert look(file).rows == 0


@settings(max_examples=60)
@given(st.lists(st.sampled_from([b"{}", b"", b" ", b"\xff", b"\r", b"1", b"\xef\xbb\xbf"])))
def test_rows_are_the_lines_that_are_not_blank(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    file = tmp_path_factory.mktemp("lines") / "x.jsonl"
    file.write_bytes(b"\n".join(lines))
    bodies = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = sum(bool(body.strip()) for body in bodies)
    assert look(file).rows == len(read(file)) == expected


@pytest.mark.parametrize("name", FORMATS[1:])  # a shorter JSONL file is one too
def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, [{"prompt": f"{n * 7919 % 10007}"} for n in range(400)], group=90)
    whole = file.read_bytes()
    for keep in (0, 1, 7, 100, *range(200, len(whole), 301), len(whole) - 8, len(whole) - 1):
        file.write_bytes(whole[:keep])
        if name == "x.jsonl.gz" and keep == 0:
            continue  # nothing, packed, is nothing
        with pytest.raises(UNREADABLE):
            look(file)


def test_an_arrow_stream_that_ends_between_two_batches_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "x.arrow", [{"n": n} for n in range(9)], group=3)
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        assert reader.read_all().num_rows == 9  # Arrow itself sees nothing
    with pytest.raises(ValueError, match="cut short, or never closed"):
        look(file)
    file.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="cut short, or never closed"):
        look(file)
    file.write_bytes(b"PAR1" + whole)
    with pytest.raises(ValueError, match="neither Arrow's stream nor its file format"):
        look(file)


def test_a_damaged_gzip_file_is_refused_and_several_members_are_one_file(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl.gz"
    first, second = gzip.compress(b'{"n": 0}\n{"n"'), gzip.compress(b": 1}\n")
    file.write_bytes(first + second)
    assert brief(read(file)) == [{"n": 0}, {"n": 1}]
    for broken in (b"not gzip", first + b"x", first[:-5] + b"\0" + first[-4:]):
        file.write_bytes(broken)
        with pytest.raises(UNREADABLE):
            look(file)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(pa.Table.from_batches([batch]), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="two columns are called 'a'"):
        look(tmp_path / "x.parquet")


def broken_text() -> pa.Array:
    """Three strings, of which the second is no UTF-8."""
    return pa.Array.from_buffers(pa.string(), 3, pa.array([b"ok", b"\xffx", b"fine"]).buffers())


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_value_that_python_cannot_hold_is_a_fault_in_its_place(tmp_path: Path, name: str) -> None:
    nested = pa.ListArray.from_arrays([0, 1, 2, 3], broken_text())
    late = pa.array([0, 0, 2**62], pa.timestamp("us"))
    table = pa.table({"prompt": broken_text(), "n": nested, "late": late})
    if name == "x.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    good, text, date = read(tmp_path / name)
    assert isinstance(good, Row)
    assert isinstance(text, Row)
    assert isinstance(date, Row)
    assert good.values["prompt"] == "ok"
    faults = (text.values["prompt"], text.values["n"], date.values["late"])
    assert [fault.code for fault in faults if isinstance(fault, Fault)] == [
        "bad_text",
        "bad_text",
        "wrong_type",
    ]
    assert (text.values["late"], date.values["prompt"]) == (datetime.datetime(1970, 1, 1), "fine")
    assert json.loads(text.raw_json) == {
        "prompt": "\ufffdx",
        "n": None,
        "late": "1970-01-01T00:00:00",
    }
    assert json.loads(date.raw_json) == {"prompt": "fine", "n": ["fine"], "late": None}


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_values_come_out_as_python_has_them(tmp_path: Path, name: str) -> None:
    code = uuid.UUID(int=7)
    arrays = {
        "day": pa.array([datetime.date(2024, 2, 29)]),
        "cost": pa.array([decimal.Decimal("1.50")]),
        "raw": pa.array([b"\xff"]),
        "pairs": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
        "word": pa.array(["w"]).dictionary_encode(),
        "long": pa.array(["l"], pa.large_string()),
        "nested": pa.array([{"a": [None, 1.5], "b": True}]),
        "code": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([code.bytes], pa.binary(16))),
    }
    table = pa.table(arrays)
    if name == "x.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    (row,) = read(tmp_path / name)
    assert isinstance(row, Row)
    assert row.values == {
        "day": datetime.date(2024, 2, 29),
        "cost": decimal.Decimal("1.50"),
        "raw": b"\xff",
        "pairs": [("k", 1)],
        "word": "w",
        "long": "l",
        "nested": {"a": [None, 1.5], "b": True},
        "code": code,
    }
    assert json.loads(row.raw_json) == {
        "day": "2024-02-29",
        "cost": "1.50",
        "raw": base64.b64encode(b"\xff").decode(),
        "pairs": [["k", 1]],
        "word": "w",
        "long": "l",
        "nested": {"a": [None, 1.5], "b": True},
        "code": str(code),
    }
    kinds = {column.name: column.type for column in look(tmp_path / name).columns}
    assert {column for column, kind in kinds.items() if kind.is_json} == {"pairs", "code"}
    assert kinds["word"] == kinds["long"] == ColumnType(pa.string(), False)


def test_many_short_lines_stream_in_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"prompt": "short"}\n' * 200_000)
    scan = look(file)
    assert scan.offsets is not None
    assert len(scan.offsets) == -(-200_000 // 256)
    tracemalloc.start()
    count = sum(1 for _ in read_rows(file, "all", 0, 200_000, scan.offsets))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 200_000
    assert peak < 3 << 20, peak


def test_a_large_row_group_or_batch_is_not_held_whole(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (40_000, 400), np.uint8)
    table = pa.table({"raw": [row.tobytes() for row in noise]})  # 16 MB that do not compress
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=len(table))
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table.combine_chunks())
    del table, noise
    for name in ("x.parquet", "x.arrow"):
        before, peak = pa.total_allocated_bytes(), 0
        for number, _ in enumerate(read_rows(tmp_path / name, "all", 30_000, 40_000, None)):
            if number % 100 == 0:
                peak = max(peak, pa.total_allocated_bytes() - before)
        assert peak < 6 << 20, (name, peak)


def test_a_file_that_is_being_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "x.jsonl", [{"n": 1}])
    real = formats_jsonl.scan_lines

    def scan_and_write(lines: Iterable[bytes]) -> formats_jsonl.LineScan:
        scan = real(lines)
        with file.open("ab") as more:
            more.write(b"{}\n")
        return scan

    monkeypatch.setattr(formats_jsonl, "scan_lines", scan_and_write)
    with pytest.raises(ValueError, match="changed while it was read"):
        look(file)


@pytest.mark.parametrize("name", FORMATS)
def test_a_look_ends_when_nobody_needs_it_any_more(tmp_path: Path, name: str) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(ScanCancelledError):
        scan_file(write(tmp_path / name, [{"n": 1}]), "all", cancel)
