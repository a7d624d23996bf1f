"""Formats: what a row looks like in each, and where its reasoning goes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddbatch.data.batching.columns import KeptColumn
from ddbatch.data.export.exports import FORMATS, Export, Tally, export_rows, plan_export
from ddbatch.data.export.json_lines import json_features, json_lines
from ddbatch.data.export.reasoning import Answer, split_reasoning
from ddbatch.data.schema import completions_schema

KEPT = (KeptColumn("prompt", pa.string(), False), KeptColumn("topic", pa.int64(), False))
SCHEMA = completions_schema(keep=KEPT, store=("prompt_ids",))
TOOLS = completions_schema(keep=(), store=(), message_fields=("name", "tool_calls", "tool_call_id"))


def completion(
    row_id: int,
    text: str,
    *,
    asked: Sequence[tuple[str, str | None]] | None = (("user", "why?"),),
    said: str | None = None,
    finish_reason: str = "stop",
    sample: int = 0,
    user_id: str | None = None,
    schema: pa.Schema = SCHEMA,
) -> dict[str, object]:
    """A row of the completions; said: the last message, if it is more than the completion."""
    row: dict[str, object] = dict.fromkeys(schema.names)
    messages = None
    if asked is not None:
        turns = [*asked, ("assistant", text if said is None else said)]
        messages = [{"role": role, "content": content} for role, content in turns]
    row |= {
        "row_id": row_id,
        "turn": 0,
        "sample": sample,
        "id": user_id,
        "messages": messages,
        "completion": text,
        "prompt_tokens": 3,
        "output_tokens": 4,
        "finish_reason": finish_reason,
    }
    return row | ({"prompt": "raw", "topic": row_id * 10} if schema is SCHEMA else {})


def exported(
    rows: Sequence[Mapping[str, object]],
    format: str,
    reasoning: str = "keep",
    schema: pa.Schema = SCHEMA,
) -> list[dict[str, object]]:
    """The rows of a format; only the columns that it asked for are there to be read."""
    export = plan_export(schema, format=format, reasoning=reasoning, model="toy")
    result = export_rows(given_table(rows, export), export).table
    assert result.schema.equals(export.schema, check_metadata=True)
    result.validate(full=True)
    return result.to_pylist()


def given_table(rows: Sequence[Mapping[str, object]], export: Export) -> pa.Table:
    fields = [export.source.field(name) for name in export.columns]
    if export.format == "openai_batch":
        fields += [pa.field("code", pa.string()), pa.field("reason", pa.string())]
    narrow = [{field.name: row.get(field.name) for field in fields} for row in rows]
    return pa.Table.from_pylist(narrow, schema=pa.schema(fields))


THOUGHT = "<think>\nhm\n</think>\n\nYes."


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (THOUGHT, Answer("hm", "Yes.", True, True)),
        ("hm\n</think>\n\nYes.", Answer("hm", "Yes.", False, True)),
        ("\n <think>hm</think>Yes.", Answer("hm", "Yes.", True, True)),
        ("<think></think>", Answer("", "", True, True)),
        ("<think>\n\n</think>\n\nYes.", Answer("", "Yes.", True, True)),
        ("<think>hm, the cap", Answer("hm, the cap", "", True, False)),
        ("a</think>b</think>c", Answer("a", "b</think>c", False, True)),
        ("hm</think>\r\n  indented\n", Answer("hm", "  indented\n", False, True)),
        ("Yes. <think>", Answer(None, "Yes. <think>", False, False)),
        ("\nYes.\n", Answer(None, "\nYes.\n", False, False)),
        ("", Answer(None, "", False, False)),
    ],
)
def test_reasoning_ends_at_the_first_closing_tag(text: str, answer: Answer) -> None:
    assert split_reasoning(text) == answer


@settings(max_examples=100)
@given(st.text("a\n<think>/ ", max_size=30))
def test_no_text_is_lost_when_it_is_split(text: str) -> None:
    answer = split_reasoning(text)
    whole = (answer.reasoning or "") + answer.text
    tags = ("<think>", "</think>", "\n", " ")
    for tag in tags:
        whole, text = whole.replace(tag, ""), text.replace(tag, "")
    assert whole == text


def test_full_has_all_columns_as_they_are() -> None:
    rows = [completion(0, THOUGHT), completion(1, "No.", asked=None)]
    assert exported(rows, "full") == rows


def test_full_splits_the_completion_and_the_last_message() -> None:
    asked = [("user", "<think>x</think>why?"), ("assistant", THOUGHT), ("user", "and?")]
    rows = [
        completion(0, "hm</think>\nYes.", asked=asked),
        completion(1, "hm", asked=None),
        completion(2, "ly</think>", said="Certain" + "ly</think>"),
    ]
    split = exported(rows, "full", "split")
    assert [row["completion"] for row in split] == ["Yes.", "hm", ""]
    assert [row["reasoning"] for row in split] == ["hm", None, "ly"]
    assert split[0]["messages"] == [
        *({"role": role, "content": text, "reasoning_content": None} for role, text in asked),
        {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"},
    ]
    assert split[1]["messages"] is None
    assert split[2]["messages"][-1]["reasoning_content"] == "Certainly"  # type: ignore[index]
    names = list(split[0])
    assert names[names.index("completion") + 1] == "reasoning"
    dropped = exported(rows, "full", "drop")
    assert [row["completion"] for row in dropped] == ["Yes.", "hm", ""]
    assert list(dropped[0]) == SCHEMA.names
    assert dropped[0]["messages"][-1] == {"role": "assistant", "content": "Yes."}  # type: ignore[index]
    assert dropped[0]["messages"][1]["content"] == THOUGHT  # type: ignore[index]


def test_messages_come_with_id_key_and_kept_columns() -> None:
    rows = [completion(7, THOUGHT, sample=2, user_id="u")]
    assert exported(rows, "messages") == [
        {
            "messages": [
                {"role": "user", "content": "why?"},
                {"role": "assistant", "content": THOUGHT},
            ],
            "id": "u",
            "row_id": 7,
            "turn": 0,
            "sample": 2,
            "prompt": "raw",
            "topic": 70,
        }
    ]
    (split,) = exported(rows, "messages", "split")
    assert split["messages"] == [
        {"role": "user", "content": "why?", "reasoning_content": None},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"},
    ]


def test_messages_keep_what_tool_use_adds() -> None:
    row = completion(0, "Rain.", asked=[("user", "?"), ("assistant", None)], schema=TOOLS)
    messages = row["messages"]
    assert isinstance(messages, list)
    for message in messages:
        message |= dict.fromkeys(("name", "tool_calls", "tool_call_id"))
    messages[1]["tool_calls"] = '[{"function": {"name": "weather"}}]'
    assert exported([row], "messages", schema=TOOLS)[0]["messages"] == messages
    (split,) = exported([row], "messages", "split", schema=TOOLS)
    assert split["messages"][1] == {**messages[1], "reasoning_content": None}  # type: ignore[index]
    rows = [completion(4, "x", schema=TOOLS), {**row, "row_id": 5}]
    with pytest.raises(ValueError, match=r"merge\.format=conversations: row_id 5 .*tool_calls"):
        exported(rows, "conversations", schema=TOOLS)


def test_conversations_speak_as_sharegpt_does() -> None:
    asked = [("system", "s"), ("user", "u"), ("assistant", "a"), ("tool", "t"), ("critic", "c")]
    (row,) = exported([completion(0, THOUGHT, asked=asked)], "conversations")
    assert row["conversations"] == [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "u"},
        {"from": "gpt", "value": "a"},
        {"from": "tool", "value": "t"},
        {"from": "critic", "value": "c"},
        {"from": "gpt", "value": THOUGHT},
    ]
    assert "reasoning" not in row
    (row,) = exported([completion(0, THOUGHT)], "conversations", "split")
    assert row["conversations"][-1] == {"from": "gpt", "value": "Yes."}  # type: ignore[index]
    assert row["reasoning"] == "hm"
    (row,) = exported([completion(0, THOUGHT)], "conversations", "drop")
    assert row["conversations"][-1] == {"from": "gpt", "value": "Yes."}  # type: ignore[index]
    assert "reasoning" not in row


def test_text_is_one_question_and_its_answer() -> None:
    rows = [
        completion(0, THOUGHT),
        completion(1, "No.", asked=[("system", "Be brief."), ("user", "why?")]),
        completion(2, "ly.", said="Certainly."),
    ]
    texts = exported(rows, "text")
    assert [row["prompt"] for row in texts] == ["why?", "Be brief.\n\nwhy?", "why?"]
    assert [row["completion"] for row in texts] == [THOUGHT, "No.", "Certainly."]
    assert list(texts[0]) == [
        *("prompt", "completion", "id", "row_id", "turn", "sample"),
        *("input_prompt", "topic"),
    ]
    assert texts[0]["input_prompt"] == "raw"
    split = exported(rows, "text", "split")
    assert [row["completion"] for row in split] == ["Yes.", "No.", "Certainly."]
    assert [row["reasoning"] for row in split] == ["hm", None, None]


def test_a_row_that_a_format_cannot_hold_is_refused_by_name() -> None:
    asked = [("user", "a"), ("assistant", "b"), ("user", "c")]
    rows = [completion(3, "x"), completion(4, "x", asked=asked)]
    match = r"merge\.format=text: row_id 4 has messages of user, assistant, user .*len\(messages\)"
    with pytest.raises(ValueError, match=match):
        exported(rows, "text")
    rows = [completion(3, "x"), completion(4, "x", asked=None)]
    for format in ("messages", "conversations", "text"):
        match = rf"merge\.format={format}: row_id 4 has no messages.*not is_null\(messages\)"
        with pytest.raises(ValueError, match=match):
            exported(rows, format)


def test_a_batch_answers_with_responses_and_errors() -> None:
    rows = [
        completion(0, THOUGHT, user_id="u"),
        completion(0, "x", user_id="u", sample=1, finish_reason="length"),
        {**dict.fromkeys(("turn", "sample"), 0), "row_id": 1, "code": "bad_json", "reason": "why"},
    ]
    done, second, failed = exported(rows, "openai_batch", "split")
    assert done == {
        "id": "batch_req_0-0-0",
        "custom_id": "u",
        "response": {
            "status_code": 200,
            "request_id": "req_0-0-0",
            "body": {
                "id": "chatcmpl-0-0-0",
                "object": "chat.completion",
                "created": 0,
                "model": "toy",
                "choices": [
                    {
                        "index": 0,
                        "message": {
                            "role": "assistant",
                            "content": "Yes.",
                            "reasoning_content": "hm",
                        },
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
            },
        },
        "error": None,
    }
    assert second["custom_id"] == "u-0-1"
    assert second["response"]["body"]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    assert failed == {
        "id": "batch_req_1-0-0",
        "custom_id": "1",
        "response": None,
        "error": {"code": "bad_json", "message": "why"},
    }
    (kept,) = exported(rows[:1], "openai_batch")
    message = kept["response"]["body"]["choices"][0]["message"]  # type: ignore[index]
    assert message == {"role": "assistant", "content": THOUGHT}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("reasoning", ["keep", "split", "drop"])
def test_answers_are_counted_whatever_is_done_with_reasoning(format: str, reasoning: str) -> None:
    rows = [
        completion(0, "<think>never", finish_reason="length"),
        completion(1, "<think>hm</think>\n \n"),
        completion(2, " "),
        completion(3, "hm</think>Yes."),
        completion(4, "all thought", finish_reason="length"),
        completion(5, "Yes."),
    ]
    export = plan_export(SCHEMA, format=format, reasoning=reasoning, model="")
    found = export_rows(given_table(rows, export), export).tally
    assert found == Tally(empty=2, unclosed=1, closed_only=1, cut=1)
    assert found.plus(found) == Tally(4, 2, 2, 2)


def test_a_kept_column_makes_way_for_a_columns_name() -> None:
    kept = [KeptColumn(name, pa.string(), False) for name in ("reasoning", "conversations")]
    schema = completions_schema(keep=kept, store=())
    row = completion(0, THOUGHT, schema=schema) | {"reasoning": "mine", "conversations": "too"}
    (full,) = exported([row], "full", schema=schema)
    assert full["reasoning"] == "mine"
    (split,) = exported([row], "full", "split", schema=schema)
    assert (split["reasoning"], split["input_reasoning"]) == ("hm", "mine")
    assert split["conversations"] == "too"
    (chat,) = exported([row], "conversations", schema=schema)
    assert chat["input_conversations"] == "too"
    kept = [KeptColumn(name, pa.string(), False) for name in ("reasoning", "input_reasoning")]
    schema = completions_schema(keep=kept, store=())
    with pytest.raises(ValueError, match=r"whose name is taken becomes 'input_reasoning'"):
        exported([completion(0, THOUGHT, schema=schema)], "full", "split", schema=schema)


def test_slices_of_a_table_are_exported_alike() -> None:
    rows = [
        completion(at, f"{at}</think>x", asked=[("user", "u")] * (1 + at % 3)) for at in range(7)
    ]
    for format in ("full", "messages", "conversations"):
        export = plan_export(SCHEMA, format=format, reasoning="split", model="")
        table = given_table(rows, export)
        whole = export_rows(table, export).table.to_pylist()
        parts = [export_rows(table.slice(at, 2), export).table for at in range(0, 7, 2)]
        assert pa.concat_tables(parts).to_pylist() == whole
        assert pa.concat_tables(parts).schema == export.schema


def test_json_lines_hold_what_json_has_no_type_for() -> None:
    table = pa.table(
        {
            "number": pa.array([1.5, float("nan")]),
            "scores": pa.array([[float("-inf"), 2.0], None], pa.list_(pa.float32())),
            "ids": pa.array([[1], []], pa.list_(pa.int32())),
            "day": pa.array([0, None], pa.date32()),
            "kind": pa.array([7, None], pa.int16()).dictionary_encode(),
            "raw": pa.array([b"\xff", None]),
            "text": pa.array(["\u4f60\n", None]),
            "turn": pa.array([{"role": "a", "x": None}, None], pa.struct([("role", pa.string())])),
        }
    )
    first, second = json_lines(table)
    assert first.count("\n") == 1
    assert "\u4f60\\n" in first
    assert json.loads(first) == {
        "number": 1.5,
        "scores": [None, 2.0],
        "ids": [1],
        "day": "1970-01-01",
        "kind": 7,
        "raw": "/w==",
        "text": "\u4f60\n",
        "turn": {"role": "a"},
    }
    assert json.loads(second) == dict.fromkeys(table.column_names) | {"ids": []}
    assert json.loads(json_features(table.schema)) == [
        {"name": "number", "dtype": "float64"},
        {"name": "scores", "list": "float32"},
        {"name": "ids", "list": "int32"},
        {"name": "day", "dtype": "string"},
        {"name": "kind", "dtype": "int16"},
        {"name": "raw", "dtype": "string"},
        {"name": "text", "dtype": "string"},
        {"name": "turn", "struct": [{"name": "role", "dtype": "string"}]},
    ]
