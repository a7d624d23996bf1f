"""Messages and tools of a row: what passes to the template unchanged, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pyarrow as pa

from ddbatch.core import Key, Prompt, Rejected
from ddbatch.data.batching.columns import MAX_DEPTH, Columns, Row, dump_json
from ddbatch.data.batching.prompts import to_prompt

CHAT = Columns("messages", "messages", tools_column="tools")
USER = {"role": "user", "content": "h\u00e9", "name": "N"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}


def read(values: Mapping[str, object], columns: Columns = CHAT) -> Prompt | Rejected:
    return to_prompt(Row(values, dump_json(values)), Key(4, 0, 0), columns, turns="last")


def prompt_of(values: Mapping[str, object], columns: Columns = CHAT) -> Prompt:
    prompt = read(values, columns)
    assert isinstance(prompt, Prompt), prompt
    return prompt


def test_messages_are_checked_and_pass_unchanged() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    image = {"role": "user", "content": [{"type": "image", "url": "x"}]}
    tool = {"role": "tool", "content": "ok", "tool_call_id": "c", "extra": {"a": [1]}}
    cases: list[tuple[object, object]] = [
        ([USER], [USER]),
        ([USER, CALL, tool], [USER, {"role": "assistant", **_without(CALL, "content")}, tool]),
        ([parts], [parts]),
        (json.dumps([USER, CALL, tool]), [USER, CALL, tool]),
        ([{"role": "odd one", "content": ""}], [{"role": "odd one", "content": ""}]),
        ([image], "unsupported_content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "unsupported_content"),
        ([], "empty_prompt"),
        ("[]", "empty_prompt"),
        ("text", "bad_json"),
        ('{"role": "user"}', "wrong_type"),
        (1, "wrong_type"),
        ({}, "wrong_type"),
        (["text"], "wrong_type"),
        ([{"content": "x"}], "missing_field"),
        ([{"role": 1, "content": "x"}], "wrong_type"),
        ([{"role": "user"}], "missing_field"),
        ([{"role": "user", "content": None, "tool_calls": []}], "missing_field"),
        ([{"role": "user", "content": 5}], "wrong_type"),
        ([{"role": "user", "content": "\ud83d"}], "bad_text"),
        ([{"role": "user", "content": "x", "\ud83d": 1}], "bad_text"),
        (None, "missing_field"),
    ]
    for value, expected in cases:
        result = read({"messages": value})
        if isinstance(result, Prompt):
            assert result.messages_json is not None
            assert json.loads(result.messages_json) == expected
            assert "\\u" not in result.messages_json
        else:
            assert result.code == expected, result


def _without(values: Mapping[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in values.items() if key != name}


def test_the_sharegpt_form_is_refused_with_the_form_that_is_expected() -> None:
    for role in ("human", "gpt", "system", "tool"):
        row = read({"messages": [{"from": role, "value": "x"}]})
        assert isinstance(row, Rejected)
        assert row.code == "missing_field"
        assert "'messages'[0] has no role but from and value (the ShareGPT form)" in row.reason
        assert row.reason.endswith('expected: {"role": "user", "content": "..."}')


def test_null_fields_of_parquet_objects_are_dropped_at_any_depth() -> None:
    tools = [
        {"name": "a", "args": {"x": {"type": "int", "enum": None}, "y": None}},
        {"name": "b", "args": {"x": None, "y": {"type": "str", "enum": ["q", None]}}},
    ]
    call = {"id": None, "function": {"name": "a", "arguments": {"x": 0, "y": None}}}
    text = {"type": "text", "text": "t", "image": None}
    messages = [
        {"role": "user", "content": [text], "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [text], "tool_calls": None},
    ]
    table = pa.table({"messages": [messages], "tools": [tools]})
    prompt = prompt_of(table.to_pylist()[0])
    assert prompt.tools_json == dump_json(
        [
            {"name": "a", "args": {"x": {"type": "int"}}},
            {"name": "b", "args": {"y": {"type": "str", "enum": ["q", None]}}},
        ]
    )
    assert prompt.messages_json == dump_json(
        [
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "a", "arguments": {"x": 0}}}],
            },
            {"role": "tool", "content": [{"type": "text", "text": "t"}]},
        ]
    )


def test_tools_are_a_list_of_objects_or_a_json_string_of_one() -> None:
    bare = {"type": "function", "function": {"name": "f", "parameters": {}}}
    cases: list[tuple[object, object]] = [
        (None, None),
        ([], []),
        ([TOOL, bare], [bare, bare]),
        # What a string holds was written on purpose, nulls too.
        (json.dumps([TOOL]), [TOOL]),
        ("", "bad_json"),
        ("[{]", "bad_json"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "bad_json"),
        ("{}", "wrong_type"),
        ({}, "wrong_type"),
        (3, "wrong_type"),
        (["f"], "wrong_type"),
        ([None], "wrong_type"),
        ('[{"a": "\\ud800"}]', "bad_text"),
    ]
    for value, expected in cases:
        result = read({"messages": [USER], "tools": value})
        if isinstance(result, Prompt):
            tools = result.tools_json
            assert (None if tools is None else json.loads(tools)) == expected
        else:
            assert result.code == expected, value
            assert result.reason.startswith("column 'tools'")
    assert prompt_of({"messages": [USER]}).tools_json is None
    text = Columns("prompt", "text", tools_column="tools")
    assert prompt_of({"prompt": "x", "tools": [bare]}, text).tools_json == dump_json([bare])
