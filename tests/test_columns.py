"""An input row: which columns are read, and every value that is taken, kept or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_values import json_values

from ddbatch.core import Key, Prompt, Rejected
from ddbatch.data.batching.columns import (
    MAX_DEPTH,
    BadRow,
    Columns,
    ColumnType,
    KeptColumn,
    Row,
    choose_columns,
    dump_json,
    parse_line,
)
from ddbatch.data.batching.prompts import to_prompt

KEY = Key(4, 0, 0)
TEXT = Columns("prompt", "text")


def choose(
    tables: Mapping[str, Sequence[str]],
    types: Mapping[str, ColumnType] | None = None,
    keep_columns: Sequence[str] = (),
    **named: str,
) -> Columns:
    options = ("prompt", "messages", "token_ids", "id", "tools", "sampling")
    return choose_columns(
        tables,
        types or {},
        keep_columns=keep_columns,
        **{f"{option}_column": named.get(option) for option in options},
    )


def read(values: Mapping[str, object], columns: Columns) -> Prompt | Rejected:
    return to_prompt(Row(values, dump_json(values)), KEY, columns, turns="last")


def prompt_of(values: Mapping[str, object], columns: Columns) -> Prompt:
    prompt = read(values, columns)
    assert isinstance(prompt, Prompt), prompt
    return prompt


def rejected(values: Mapping[str, object], columns: Columns) -> tuple[str, str]:
    result = read(values, columns)
    assert isinstance(result, Rejected), result
    assert result.key == KEY
    return result.code, result.reason


def test_named_columns_win_and_known_names_decide_only_when_alone() -> None:
    tables = {"x.jsonl": ["prompt", "messages", "q", "i"]}
    with pytest.raises(ValueError, match=r"prompt, messages are all present.*q, i"):
        choose(tables)
    assert choose(tables, prompt="q") == Columns("q", "text")
    assert choose(tables, token_ids="q", id="i") == Columns("q", "token_ids", "i")
    assert choose(tables, messages="messages", tools="q", sampling="i") == Columns(
        "messages", "messages", None, "q", "i"
    )
    with pytest.raises(
        ValueError, match=r"data.prompt_column=q, data.messages_column=messages: on"
    ):
        choose(tables, prompt="q", messages="messages")
    for name, kind in (("prompt", "text"), ("messages", "messages"), ("token_ids", "token_ids")):
        assert choose({"x": ["a", name]}) == Columns(name, kind)
    with pytest.raises(ValueError, match=r"no column is called prompt.* in y; set .*allowed: q, r"):
        choose({"y": ["q", "r"]})
    with pytest.raises(ValueError, match=r"data.tools_column=q: a prompt of token ids.*allowed: n"):
        choose(tables, token_ids="i", tools="q")


def test_a_named_column_must_be_in_every_file() -> None:
    tables = {"a.parquet": ["prompt", "k"], "b.parquet": ["prompt", "l"]}
    for name in ("prompt", "messages", "token_ids", "id", "tools", "sampling"):
        words = rf"data\.{name}_column=k: no such column in b\.parquet; allowed: prompt, l"
        with pytest.raises(ValueError, match=words):
            choose(tables, **{name: "k"})
    with pytest.raises(ValueError, match=r"data\.keep_columns=k: no such column in b\.parquet"):
        choose(tables, keep_columns=["prompt", "k"])
    assert choose(tables) == Columns("prompt", "text")


def test_two_known_names_in_two_files_are_not_overlooked() -> None:
    tables = {"a.parquet": ["prompt"], "b.parquet": ["token_ids"]}
    with pytest.raises(ValueError, match="prompt, token_ids are all present"):
        choose(tables)
    with pytest.raises(ValueError, match=r"data.prompt_column=prompt: no such column in b"):
        choose(tables, prompt="prompt")
    with pytest.raises(ValueError, match=r"no column is called prompt.* in b\.parquet.*allowed: q"):
        choose({"a.parquet": ["prompt"], "b.parquet": ["q"]})


def test_a_file_whose_rows_cannot_be_read_has_no_say() -> None:
    assert choose({"a": [], "b": ["q"]}, prompt="q") == Columns("q", "text")
    assert choose({"a": []}) == choose({}) == Columns("prompt", "text")
    kept = KeptColumn("k", pa.string(), True)
    named = choose({"a": []}, messages="m", keep_columns=["k"])
    assert named == Columns("m", "messages", keep=(kept,))


def test_kept_columns_are_stored_in_their_type_or_as_json() -> None:
    types = {
        "n": ColumnType(pa.int32(), False),
        "m": ColumnType(pa.map_(pa.string(), pa.int8()), True),
        "p": ColumnType(pa.string(), False),
    }
    columns = choose({"x": ["n", "m", "prompt", "p"]}, types, ["m", "n"])
    assert columns.keep == (KeptColumn("m", pa.string(), True), KeptColumn("n", pa.int32(), False))


def test_a_bad_line_is_a_bad_row_with_its_text() -> None:
    deep, deeper = ("[" * depth + "]" * depth for depth in (MAX_DEPTH - 1, MAX_DEPTH))
    cases = {
        b'{"prompt": "tw': "bad_json",
        b'{"prompt": "\xff"}': "bad_text",
        b"[1]": "wrong_type",
        b"[" * 100_000: "bad_json",
        f'{{"a": {deeper}}}'.encode(): "bad_json",
        b"1" * 5000: "bad_json",
    }
    for line, code in cases.items():
        row = parse_line(line)
        assert isinstance(row, BadRow)
        assert row.fault.code == code, line[:20]
        assert row.raw_json == line.decode("utf-8", "replace")
        result = to_prompt(row, KEY, TEXT, turns="last")
        assert result == Rejected(KEY, row.fault.code, row.fault.reason, None, row.raw_json)
    for text in (f'{{"a": {deep}}}', json.dumps({"a": [[]] * 500})):
        row = parse_line(text.encode())
        assert row == Row(json.loads(text), text)
    assert parse_line(b' {"a": 1}\r\n') == Row({"a": 1}, '{"a": 1}')


def test_a_row_needs_its_prompt_and_its_id_and_keeps_what_it_can() -> None:
    columns = Columns("prompt", "text", id_column="id")
    cases: list[tuple[dict[str, object], str, str | None]] = [
        ({"id": "only"}, "missing_field", "only"),
        ({"prompt": "x"}, "missing_field", None),
        ({"prompt": None, "id": None}, "missing_field", None),
        ({"prompt": 3, "id": "a"}, "wrong_type", "a"),
        ({"prompt": " \n\t", "id": "a"}, "empty_prompt", "a"),
        ({"prompt": "a\ud800", "id": "a"}, "bad_text", "a"),
        ({"prompt": "a", "id": "\ud800"}, "bad_text", "\\ud800"),
    ]
    for values, code, user_id in cases:
        result = read(values, columns)
        assert isinstance(result, Rejected), values
        assert (result.code, result.user_id) == (code, user_id)
        result.raw_json.encode()
    for value, user_id in ((7, "7"), (None, None), ("x", "x"), ({"a": 1}, '{"a": 1}')):
        assert prompt_of({"prompt": "p", "id": value}, columns).user_id == user_id


def test_token_ids_must_be_a_list_of_ints() -> None:
    columns = Columns("ids", "token_ids")
    assert prompt_of({"ids": [1, 2]}, columns).token_ids == (1, 2)
    cases: list[tuple[object, str]] = [
        ([], "empty_prompt"),
        ([1, None], "wrong_type"),
        ([True], "wrong_type"),
        ([1.0], "wrong_type"),
        ("1", "wrong_type"),
        (None, "missing_field"),
    ]
    for value, code in cases:
        assert rejected({"ids": value}, columns)[0] == code


def test_a_row_keeps_its_columns_in_order_and_lacks_none() -> None:
    keep = (KeptColumn("n", pa.int64(), False), KeptColumn("j", pa.string(), True))
    columns = Columns("prompt", "text", keep=keep)
    assert prompt_of({"prompt": "a", "j": [1], "n": 2}, columns).kept == (2, "[1]")
    assert prompt_of({"prompt": "a"}, columns).kept == (None, None)
    code, reason = rejected({"prompt": "a", "n": "2"}, columns)
    assert (code, reason) == ("wrong_type", "column 'n' is a string, which does not fit int64")


chats = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "from", "value", "name"]),
        st.sampled_from(["user", "assistant", "", "\ud800", None, [], [{"type": "text"}]])
        | json_values,
    ),
    max_size=3,
)
cells = json_values | chats | st.text('[]{}"a:,1', max_size=6) | chats.map(dump_json)


@settings(max_examples=150)
@given(
    st.dictionaries(st.sampled_from(["p", "i", "t", "s", "k", "j"]), cells),
    st.sampled_from(["text", "messages", "token_ids"]),
    st.sampled_from(["last", "all", "continue"]),
)
def test_any_row_is_a_prompt_or_rejected_and_can_be_stored(
    values: dict[str, object], kind: str, turns: str
) -> None:
    keep = (KeptColumn("k", pa.int64(), False), KeptColumn("j", pa.string(), True))
    columns = Columns("p", kind, "i", "t", "s", keep)
    result = to_prompt(Row(values, dump_json(values)), KEY, columns, turns=turns)
    if isinstance(result, Rejected):
        (result.user_id or "").encode()
        return
    texts = (result.user_id, result.messages_json, result.text, result.tools_json)
    pa.array(texts, type=pa.string())
    for column, value in zip(keep, result.kept, strict=True):
        pa.array([value], type=column.type)
    content = (result.messages_json, result.text, result.token_ids)
    assert sum(value is not None for value in content) == 1
    assert result.is_continued <= (turns == "continue")
