"""Prompts in: files, numbering, column choice and every reason to refuse a row or an input."""

from __future__ import annotations

import datetime
import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddbatch.core import Prompt, Rejected
from ddbatch.data.source import list_files, read_prompts


def read(
    path: Path | str,
    *,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    token_ids_column: str | None = None,
    id_column: str | None = None,
    keep_columns: Sequence[str] = (),
    limit: int | None = None,
) -> list[Prompt | Rejected]:
    return list(
        read_prompts(
            path,
            prompt_column=prompt_column,
            messages_column=messages_column,
            token_ids_column=token_ids_column,
            id_column=id_column,
            keep_columns=keep_columns,
            limit=limit,
        )
    )


def write_lines(file: Path, rows: Sequence[object]) -> Path:
    """JSONL of values; bytes are written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    data = b"".join(line + b"\n" for line in lines)
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


def texts(rows: Sequence[Prompt | Rejected]) -> list[str | None]:
    return [row.text if isinstance(row, Prompt) else row.code for row in rows]


def test_every_form_of_input_gives_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n} \u2028 \u00e4", "n": n} for n in range(600)]
    folder = tmp_path / "rows"
    folder.mkdir()
    plain = write_lines(folder / "a.jsonl", rows)
    packed = write_lines(tmp_path / "a.jsonl.gz", rows)
    table = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table, row_group_size=7)
    (folder / "README.md").write_text("not data")
    (folder / ".hidden.jsonl").write_text("{}")
    expected = [(n, row["prompt"]) for n, row in enumerate(rows)]
    for path in (plain, packed, table, folder, str(folder / "*.jsonl"), f"{tmp_path}/**/*.jsonl"):
        prompts = read(path)
        assert [
            (row.key.row_id, row.text) for row in prompts if isinstance(row, Prompt)
        ] == expected
        assert all(row.key[1:] == (0, 0) for row in prompts)
        assert [json.loads(row.raw_json) for row in prompts] == rows


def test_files_of_a_folder_are_read_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_lines(tmp_path / f"part-{number}.jsonl", [{"prompt": str(number)}])
    pq.write_table(pa.table({"prompt": ["9"]}), tmp_path / "part-9.parquet")
    prompts = read(tmp_path)
    assert texts(prompts) == ["1", "2", "9", "10"]
    assert [row.key.row_id for row in prompts] == [0, 1, 2, 3]
    assert [file.name for file in list_files(f"{tmp_path}/part-?.*")] == [
        "part-1.jsonl",
        "part-2.jsonl",
        "part-9.parquet",
    ]


def test_a_bad_line_is_one_rejected_row_and_keeps_its_number(tmp_path: Path) -> None:
    lines: list[object] = [
        b"\xef\xbb\xbf" + b'{"prompt": "one", "id": 7}\r',
        b"",
        b'{"prompt": "tw',
        b"   ",
        b'{"prompt": "\xff"}',
        b"[1]",
        b"[" * 100_000,
        {"id": "only", "text": "x"},
        {"prompt": None, "id": None},
        {"prompt": 3, "id": "a"},
        {"prompt": " \n\t", "id": "a"},
        b'{"prompt": "a\\ud800", "id": "a"}',
        b'{"prompt": "a", "id": "\\ud800"}',
        {"prompt": "last", "id": {"a": 1}},
    ]
    prompts = read(write_lines(tmp_path / "x.jsonl", lines), id_column="id")
    assert texts(prompts) == [
        "one",
        "bad_json",
        "bad_text",
        "wrong_type",
        "bad_json",
        "missing_field",
        "missing_field",
        "wrong_type",
        "empty_prompt",
        "bad_text",
        "bad_text",
        "last",
    ]
    assert [row.key.row_id for row in prompts] == list(range(12))
    assert [row.user_id for row in prompts[-6:]] == [None, "a", "a", "a", "\\ud800", '{"a": 1}']
    assert prompts[0].user_id == "7"
    assert prompts[1].raw_json == '{"prompt": "tw'
    assert prompts[2].raw_json == '{"prompt": "\ufffd"}'
    for row in prompts:
        row.raw_json.encode()


def test_a_last_line_without_a_newline_is_a_row(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}')
    assert texts(read(file)) == ["a", "b"]
    assert texts(read(file, limit=1)) == ["a"]


def test_messages_are_checked_and_the_final_assistant_turn_is_dropped(tmp_path: Path) -> None:
    user = {"role": "user", "content": "h\u00e9", "name": "N"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    tool = {"role": "tool", "content": "ok"}
    answer = {"role": "assistant", "content": "old"}
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    image = {"role": "user", "content": [{"type": "image", "url": "x"}]}
    cases: list[tuple[object, object]] = [
        ([user], [user]),
        ([user, answer], [user]),
        ([user, call, tool], [user, call, tool]),
        ([user, call], [user]),
        ([parts], [parts]),
        ([image], "unsupported_content"),
        ([], "empty_prompt"),
        ([answer], "empty_prompt"),
        ("text", "wrong_type"),
        (["text"], "wrong_type"),
        ([{"content": "x"}], "missing_field"),
        ([{"role": 1, "content": "x"}], "wrong_type"),
        ([{"role": "user"}], "missing_field"),
        ([{"role": "user", "content": None, "tool_calls": []}], "missing_field"),
        ([{"role": "user", "content": 5}], "wrong_type"),
        ([{"role": "user", "content": "\ud83d"}], "bad_text"),
        (None, "missing_field"),
    ]
    file = write_lines(tmp_path / "x.jsonl", [{"messages": value} for value, _ in cases])
    for row, (_, expected) in zip(read(file), cases, strict=True):
        if isinstance(row, Prompt):
            assert row.messages_json is not None
            assert json.loads(row.messages_json) == expected
            assert "\\u" not in row.messages_json
        else:
            assert row.code == expected, row


def test_token_ids_must_be_a_list_of_ints(tmp_path: Path) -> None:
    values = [[1, 2], [], [1, None], [True], [1.0], "1", None]
    file = write_lines(tmp_path / "x.jsonl", [{"token_ids": value} for value in values])
    first, *others = read(file)
    assert isinstance(first, Prompt)
    assert first.token_ids == (1, 2)
    codes = ["empty_prompt", "wrong_type", "wrong_type", "wrong_type", "wrong_type"]
    assert texts(others) == [*codes, "missing_field"]


def test_named_columns_win_and_known_names_decide_only_when_alone(tmp_path: Path) -> None:
    both = [{"prompt": "p", "messages": [{"role": "user", "content": "m"}], "q": "q", "i": 1}]
    file = write_lines(tmp_path / "x.jsonl", both)
    with pytest.raises(ValueError, match=r"prompt, messages are all present.*q, i"):
        read(file)
    assert texts(read(file, prompt_column="q")) == ["q"]
    (row,) = read(file, messages_column="messages", id_column="i", keep_columns=["q", "i"])
    assert isinstance(row, Prompt)
    assert (row.user_id, row.kept_json, row.text) == ("1", '{"q": "q", "i": 1}', None)
    with pytest.raises(ValueError, match="only one of them"):
        read(file, prompt_column="q", messages_column="messages")
    other = write_lines(tmp_path / "y.jsonl", [b"{", {"q": "x", "r": 2}])
    with pytest.raises(ValueError, match=r"no column is called prompt.*allowed: q, r"):
        read(other)
    assert texts(read(other, prompt_column="q")) == ["bad_json", "x"]
    for name in ("prompt", "messages", "token_ids", "id"):
        with pytest.raises(ValueError, match=rf"data.{name}_column=z:.*allowed: q, r"):
            read(other, **{f"{name}_column": "z"})
    with pytest.raises(ValueError, match=r"data.keep_columns=z:.*allowed: q, r"):
        read(other, prompt_column="q", keep_columns=["r", "z"])


def test_two_known_names_in_two_files_are_not_overlooked(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"token_ids": [[1]]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="prompt, token_ids are all present"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"data.prompt_column=prompt: no such column"):
        read(tmp_path, prompt_column="prompt")


def test_a_kept_column_may_be_null_or_absent_and_an_id_null(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": None, "k": None}, {"prompt": "b", "id": "x"}]
    kept, short = read(write_lines(tmp_path / "x.jsonl", rows), id_column="id", keep_columns=["k"])
    assert isinstance(kept, Prompt)
    assert (kept.user_id, kept.kept_json) == (None, '{"k": null}')
    assert isinstance(short, Prompt)
    assert (short.user_id, short.kept_json) == ("x", '{"k": null}')


def test_parquet_values_without_a_json_type_are_kept_as_text(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    pairs = pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32()))
    table = pa.table({"prompt": ["a"], "raw": [b"\xff"], "day": [day], "map": pairs})
    pq.write_table(table, tmp_path / "a.parquet")
    (row,) = read(tmp_path / "a.parquet", keep_columns=["raw", "day"])
    assert isinstance(row, Prompt)
    assert row.kept_json == '{"raw": "/w==", "day": "2024-02-29"}'
    assert json.loads(row.raw_json)["map"] == [["k", 1]]


def test_a_parquet_string_that_is_no_utf8_rejects_its_row_only(tmp_path: Path) -> None:
    bytes_ = pa.array([b"ok", b"\xffx", b"fine"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 3, bytes_.buffers())
    nested = pa.ListArray.from_arrays([0, 1, 2, 3], broken)
    pq.write_table(pa.table({"prompt": broken, "n": nested}), tmp_path / "a.parquet")
    prompts = read(tmp_path / "a.parquet")
    assert texts(prompts) == ["ok", "bad_text", "fine"]
    assert json.loads(prompts[1].raw_json) == {"prompt": "\ufffdx", "n": None}


def test_an_input_that_cannot_be_read_is_refused_before_the_first_row(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    pq.write_table(pa.table({"prompt": ["x" * 50] * 50}), good)
    whole = good.read_bytes()
    cases = {
        "gone.jsonl": None,
        "cut.parquet": whole[: len(whole) // 2],
        "zero.parquet": b"",
        "empty.jsonl": b" \n\n",
        "data.arrow": b"x",
        "data.csv": b"prompt\nx",
        "data.json": b"[]",
        "no.jsonl.gz": b"not gzip",
        "cut.jsonl.gz": gzip.compress(b'{"prompt": "a"}\n' * 9)[:12],
    }
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"data\.path=.*" + name + r":.*(allowed|built)"):
            # Not consumed: the call itself must refuse.
            read_prompts(
                tmp_path / name,
                prompt_column=None,
                messages_column=None,
                token_ids_column=None,
                id_column=None,
                keep_columns=(),
                limit=None,
            )
    saved = tmp_path / "saved"
    saved.mkdir()
    for message in ("no input file", "Arrow and save_to_disk are not built yet"):
        with pytest.raises(ValueError, match=message):
            read(saved)
        (saved / "data-00000-of-00001.arrow").write_bytes(b"x")
    for path in ("org/name", f"{tmp_path}/none*.jsonl"):
        with pytest.raises(ValueError, match=r"data\.path="):
            read(path)
    with pytest.raises(ValueError, match=r"data.limit=0"):
        read(good, limit=0)


def test_a_broken_link_among_the_files_is_not_passed_over(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for path in (tmp_path, f"{tmp_path}/*.jsonl"):
        with pytest.raises(ValueError, match=r"b\.jsonl cannot be read"):
            read(path)


def test_a_parquet_file_without_rows_is_an_empty_data_set_alone_only(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no rows"):
        read(tmp_path)
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "b.parquet")
    assert texts(read(tmp_path)) == ["x"]


def test_a_gzip_file_that_ends_early_names_itself(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n * 7919 % 10007}"} for n in range(4000)]
    file = write_lines(tmp_path / "x.jsonl.gz", rows)
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"x.jsonl.gz cannot be read"):
        read(file)


def test_an_input_of_bad_lines_only_rejects_every_row(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", [b"{", b"1"])
    assert texts(read(file, messages_column="m")) == ["bad_json", "wrong_type"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.binary(max_size=40) | st.text(max_size=20).map(lambda t: json.dumps(t).encode()))
)
def test_any_bytes_give_one_numbered_result_per_non_blank_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    file = tmp_path_factory.mktemp("lines") / "x.jsonl"
    data = b'{"prompt": "first"}\n' + b"\n".join(lines)
    file.write_bytes(data)
    prompts = read(file)
    assert [row.key.row_id for row in prompts] == list(range(len(prompts)))
    assert len(prompts) == sum(bool(line.strip()) for line in data.split(b"\n"))
    for row in prompts:
        row.raw_json.encode()


def test_the_data_room_imports_neither_torch_nor_transformers() -> None:
    rooms = ("source", "batching", "schema", "sink")
    program = "; ".join(f"import ddbatch.data.{room}" for room in rooms)
    program += "; import sys; print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
