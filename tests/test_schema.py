"""The tables of a run: what a finished row becomes, and how a file is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddbatch.core import Completion, Key, Prompt, Rejected
from ddbatch.data import parquet
from ddbatch.data.batching.columns import KeptColumn
from ddbatch.data.parquet import TableRow, write_table
from ddbatch.data.schema import (
    FinishedRow,
    acceptance_row,
    acceptance_schema,
    completions_row,
    completions_schema,
    kept_columns,
    rejected_row,
    rejected_schema,
)

STORE = ("prompt_ids", "acceptance")
FULL = completions_schema(keep=(), store=STORE)


def finished(
    row_id: int = 0,
    *,
    prompt: Prompt | None = None,
    accepted: tuple[int, ...] = (2, 0, 3),
    bonus_cut: bool = False,
    text: str = "said",
    seed: int = 11,
) -> FinishedRow:
    key = Key(row_id, 0, 0)
    num_tokens = 1 + sum(accepted) + len(accepted) - bonus_cut
    prompt = prompt or Prompt(key, text=f"asked {row_id}", user_id=f"user-{row_id}")
    completion = Completion(
        key=key,
        token_ids=tuple(range(num_tokens)),
        finish_reason="stop",
        stop_token_id=num_tokens - 1,
        accepted=accepted,
        depth=(5,) * len(accepted),
        drafted=7,
        seconds=0.5,
        slot=3,
    )
    return FinishedRow(
        prompt=prompt,
        conversation_json=None
        if prompt.token_ids is not None
        else prompt.messages_json or json.dumps([{"role": "user", "content": prompt.text}]),
        prompt_token_ids=(1, 2, 3),
        num_dropped=0,
        completion=completion,
        text=text,
        stop_reason=None,
        max_new_tokens=100,
        seed=seed,
    )


def plain(row: TableRow) -> dict[str, object]:
    """A row with lists in the place of arrays."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in row.items()
    }


def rejected(row_id: int) -> Rejected:
    raw_json = '{"prompt": "\ud800"}'
    return Rejected(Key(row_id, 0, 0), "bad_text", "a \ud800 in it", f"user-{row_id}", raw_json)


def read_back(rows: Sequence[TableRow], kind: pa.Schema, folder: Path) -> pa.Table:
    write_table(rows, kind, folder / "x.parquet")
    return pq.read_table(folder / "x.parquet")


def test_a_completion_comes_back_as_it_was_written(tmp_path: Path) -> None:
    row = finished(9, text="s\u00e4gt \u4f60")
    (read,) = read_back([completions_row(row, FULL)], FULL, tmp_path).to_pylist()
    assert read == {
        "row_id": 9,
        "turn": 0,
        "sample": 0,
        "id": "user-9",
        "messages": [
            {"role": "user", "content": "asked 9"},
            {"role": "assistant", "content": "s\u00e4gt \u4f60"},
        ],
        "completion": "s\u00e4gt \u4f60",
        "prompt_token_ids": [1, 2, 3],
        "output_token_ids": list(range(9)),
        "prompt_tokens": 3,
        "dropped_prompt_tokens": 0,
        "output_tokens": 9,
        "finish_reason": "stop",
        "stop_reason": None,
        "reasoning_end": None,
        "max_new_tokens": 100,
        "seed": 11,
        "output_logprobs": None,
        "num_steps": 3,
        "draft_tokens": 21,
        "accepted_tokens": 5,
        "mean_acceptance_length": pytest.approx(8 / 3),
        "seconds": 0.5,
        "slot": 3,
    }
    kind = acceptance_schema()
    (read,) = read_back([acceptance_row(row)], kind, tmp_path).to_pylist()
    assert read == {
        "row_id": 9,
        "turn": 0,
        "sample": 0,
        "accepted": [2, 0, 3],
        "drafted": [{"rounds": 3, "drafted": 7}],
        "depth": [5, 5, 5],
        "histogram": [1, 0, 1, 1],
    }


def test_a_rejected_row_comes_back_with_what_utf8_cannot_hold_escaped(tmp_path: Path) -> None:
    kind = rejected_schema()
    (read,) = read_back([rejected_row(rejected(21))], kind, tmp_path).to_pylist()
    assert (read["row_id"], read["id"], read["code"]) == (21, "user-21", "bad_text")
    assert (read["reason"], read["raw_json"]) == ("a \\ud800 in it", '{"prompt": "\\ud800"}')


def test_files_carry_the_schema_and_the_settings(tmp_path: Path) -> None:
    for table, kind, row in (
        ("completions", FULL, completions_row(finished(), FULL)),
        ("acceptance", acceptance_schema(), acceptance_row(finished())),
        ("rejected", rejected_schema(), rejected_row(rejected(1))),
    ):
        write_table([row], kind, tmp_path / "x.parquet")
        written = pq.ParquetFile(tmp_path / "x.parquet")
        assert written.schema_arrow.equals(kind, check_metadata=False)
        about = json.loads(written.schema_arrow.metadata[b"ddbatch"])
        assert about == {"schema_version": 1, "table": table}
        column = written.metadata.row_group(0).column(0)
        assert (column.compression, column.has_column_index) == ("ZSTD", True)
        for field in written.schema_arrow:
            assert not pa.types.is_large_string(field.type)
            assert not pa.types.is_null(field.type)
    bare = completions_schema(keep=(), store=())
    assert bare.names == [name for name in FULL.names if name != "prompt_token_ids"]


def test_without_tools_messages_keep_role_and_text_only() -> None:
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "ok", "name": "f"},
    ]
    prompt = Prompt(Key(0, 0, 0), messages_json=json.dumps(messages))
    assert completions_row(finished(prompt=prompt), FULL)["messages"] == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "said"},
    ]
    ids_only = Prompt(Key(0, 0, 0), token_ids=(1, 2, 3))
    assert completions_row(finished(prompt=ids_only), FULL)["messages"] is None


def test_with_tools_messages_keep_what_tool_use_adds() -> None:
    kind = completions_schema(
        keep=(), store=STORE, message_fields=("name", "tool_calls", "tool_call_id")
    )
    call = [{"id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "ok", "name": "f", "tool_call_id": "c1"},
    ]
    prompt = Prompt(Key(0, 0, 0), messages_json=json.dumps(messages))
    said = completions_row(finished(prompt=prompt), kind)["messages"]
    assert isinstance(said, list)
    assert json.loads(said[1]["tool_calls"]) == call
    assert (said[2]["name"], said[2]["tool_call_id"], said[2]["tool_calls"]) == ("f", "c1", None)
    assert said[3] == {
        "role": "assistant",
        "content": "said",
        "name": None,
        "tool_calls": None,
        "tool_call_id": None,
    }


def test_a_continued_turn_is_one_message_with_its_beginning() -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "I "}]
    prompt = Prompt(Key(0, 0, 0), messages_json=json.dumps(messages), is_continued=True)
    row = completions_row(finished(prompt=prompt), FULL)
    assert row["completion"] == "said"
    assert row["messages"] == [messages[0], {"role": "assistant", "content": "I said"}]


def test_kept_columns_keep_their_type_and_say_where_they_are_json(tmp_path: Path) -> None:
    keep = (
        KeptColumn("score", pa.float64(), False),
        KeptColumn("tags", pa.list_(pa.string()), False),
        KeptColumn("meta", pa.string(), True),
    )
    kind = completions_schema(keep=keep, store=STORE)
    prompt = Prompt(Key(0, 0, 0), text="x", kept=(1.5, ["a", None], '{"a": 1}'))
    read = read_back([completions_row(finished(prompt=prompt), kind)], kind, tmp_path)
    row = read.select([column.name for column in keep]).to_pylist()[0]
    assert row == {"score": 1.5, "tags": ["a", None], "meta": '{"a": 1}'}
    assert kept_columns(read.schema) == kept_columns(kind) == keep


@pytest.mark.parametrize("names", [["id"], ["slot"], ["topic", "topic"]])
def test_a_kept_column_must_not_hide_another(names: list[str]) -> None:
    keep = tuple(KeptColumn(name, pa.string(), False) for name in names)
    with pytest.raises(ValueError, match=r"data\.keep_columns=.*is a column of the output"):
        completions_schema(keep=keep, store=STORE)


def test_only_known_extras_are_stored() -> None:
    with pytest.raises(ValueError, match=r"output\.store=\['logits'\].*prompt_ids, acceptance"):
        completions_schema(keep=(), store=["logits"])


def test_a_row_that_ends_in_prefill_has_no_rounds() -> None:
    row = finished(accepted=())
    assert completions_row(row, FULL)["mean_acceptance_length"] is None
    assert completions_row(row, FULL)["num_steps"] == 0
    table = acceptance_row(row)
    assert plain(table)["accepted"] == table["drafted"] == table["histogram"] == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=9), st.booleans())
def test_counts_of_both_tables_agree(accepted: list[int], bonus_cut: bool) -> None:
    row = finished(accepted=tuple(accepted), bonus_cut=bonus_cut and bool(accepted))
    done, rounds = completions_row(row, FULL), acceptance_row(row)
    assert list(done) == FULL.names
    assert list(rounds) == acceptance_schema().names
    histogram = rounds["histogram"]
    assert isinstance(histogram, list)
    assert sum(histogram) == done["num_steps"] == len(accepted)
    assert sum(j * count for j, count in enumerate(histogram)) == done["accepted_tokens"]


def test_counts_that_disagree_are_a_bug() -> None:
    row = finished()
    done = row.completion
    for wrong in (
        {"depth": (5, 5)},
        {"depth": (5, 5, 2)},
        {"depth": (5, 5, 8)},
        {"token_ids": done.token_ids[:-2]},
        {"token_ids": (*done.token_ids, 1)},
        {"token_ids": ()},
        {"key": Key(1, 0, 0)},
    ):
        broken = replace(row, completion=replace(done, **wrong))
        with pytest.raises(AssertionError):
            completions_row(broken, FULL)
    with pytest.raises(AssertionError):
        completions_row(replace(row, max_new_tokens=8), FULL)


def test_row_groups_stay_within_both_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [completions_row(finished(n, text="x" * 997), FULL) for n in range(33)]
    sizes = {}
    for bound, value in (("GROUP_ROWS", 5), ("GROUP_BYTES", 10_000), ("GROUP_BYTES", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(parquet, bound, value)
            write_table(rows, FULL, tmp_path / "x.parquet")
        metadata = pq.ParquetFile(tmp_path / "x.parquet").metadata
        groups = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
        assert sum(groups) == 33
        sizes[bound, value] = max(groups)
    assert sizes["GROUP_ROWS", 5] <= 5
    assert sizes["GROUP_BYTES", 10_000] in range(2, 10)
    assert sizes["GROUP_BYTES", 10] == 1
    read = pq.read_table(tmp_path / "x.parquet").to_pylist()
    rounded = {"mean_acceptance_length": pytest.approx(8 / 3)}
    assert read == [{**plain(row), **rounded} for row in rows]
    with pytest.raises(AssertionError):
        write_table([], FULL, tmp_path / "y.parquet")
