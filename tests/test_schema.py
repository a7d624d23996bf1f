"""The tables of a run: what a finished row becomes, and how a file is written."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_logprobs import made_logprobs

from ddbatch.core import Completion, Key, Prompt, Rejected, TokenLogprobs
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
    logprobs_row,
    logprobs_schema,
    rejected_row,
    rejected_schema,
)

STORE = ("prompt_ids", "acceptance")
FULL = completions_schema(keep=(), store=STORE)
TOP_3 = logprobs_schema(3)


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
        drafted=(7,) * len(accepted),
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


def with_logprobs(row: FinishedRow, top: int) -> FinishedRow:
    told = made_logprobs(row.completion.token_ids, top, vocab=31)
    return replace(row, completion=replace(row.completion, logprobs=told))


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
    row = replace(finished(9, text="s\u00e4gt \u4f60"), reasoning_end=4)
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
        "reasoning_end": 4,
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
        ("logprobs", TOP_3, logprobs_row(with_logprobs(finished(), 3), TOP_3)),
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


@settings(max_examples=50)
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


def as_lists(told: TokenLogprobs) -> TokenLogprobs:
    return told


def as_arrays(told: TokenLogprobs) -> TokenLogprobs:
    """Pieces of larger buffers, of other types than the table's."""
    ids, top = np.array(told.top_ids, np.int64), np.array(told.top, np.float32)
    return TokenLogprobs(np.array([*told.token, 7], np.float32), ids, top).first(len(ids))  # type: ignore[arg-type]


def as_std_arrays(told: TokenLogprobs) -> TokenLogprobs:
    ids = [array("q", of_token) for of_token in told.top_ids]
    return TokenLogprobs(array("f", told.token), ids, [array("f", top) for top in told.top])


@pytest.mark.parametrize("kind", [as_lists, as_arrays, as_std_arrays])
@pytest.mark.parametrize("top", [1, 3, 31])
def test_log_probs_come_back_from_any_kind_of_sequence(
    tmp_path: Path, kind: Callable[[TokenLogprobs], TokenLogprobs], top: int
) -> None:
    rows = [finished(n, accepted=(2,) * n) for n in (4, 0, 2)]
    told = [made_logprobs(row.completion.token_ids, top, vocab=31) for row in rows]
    given = [
        replace(row, completion=replace(row.completion, logprobs=kind(its)))
        for row, its in zip(rows, told, strict=True)
    ]
    schema = logprobs_schema(top)
    read = read_back([logprobs_row(row, schema) for row in given], schema, tmp_path)
    assert read.schema.equals(schema)
    assert read["top_token_ids"].to_pylist() == [its.top_ids for its in told]
    assert read["top_logprobs"].to_pylist() == [
        np.array(its.top, np.float32).astype(np.float16).tolist() for its in told
    ]
    done = read_back([completions_row(row, FULL) for row in given], FULL, tmp_path)
    assert done["output_logprobs"].to_pylist() == [
        np.array(its.token, np.float32).tolist() for its in told
    ]


def test_a_rows_arrays_do_not_hold_the_engines_buffers() -> None:
    row = finished()
    num_tokens = len(row.completion.token_ids)
    buffers = np.zeros(1000, np.float32), np.zeros((1000, 3), np.int32), np.zeros((1000, 3))
    told = TokenLogprobs(*buffers).first(num_tokens)  # type: ignore[arg-type]
    row = replace(row, completion=replace(row.completion, logprobs=told))
    for values in (completions_row(row, FULL), logprobs_row(row, TOP_3)):
        arrays = [value for value in values.values() if isinstance(value, np.ndarray)]
        assert all(value.base is None for value in arrays)


@pytest.mark.filterwarnings("error")
def test_what_half_precision_cannot_hold_becomes_minus_infinity(tmp_path: Path) -> None:
    row = finished(accepted=())
    told = TokenLogprobs([-1e-8], [[5, 3, 4]], [[-1e-8, -1e9, -np.inf]])
    row = replace(row, completion=replace(row.completion, logprobs=told))
    (read,) = read_back([logprobs_row(row, TOP_3)], TOP_3, tmp_path).to_pylist()
    assert read["top_logprobs"] == [[0.0, -np.inf, -np.inf]]


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("token", lambda scores: scores[:-1]),
        ("token", lambda scores: [*scores, -1.0]),
        ("token", lambda scores: [1e-6, *scores[1:]]),
        ("token", lambda scores: [*scores[:-1], np.nan]),
        ("token", lambda scores: [*scores[:-1], -np.inf]),
        ("top_ids", lambda ids: ids[:-1]),
        ("top_ids", lambda ids: [*ids[:-1], [1, 2]]),
        ("top_ids", lambda ids: [[1, 2, 3, 4] for _ in ids]),
        ("top_ids", lambda ids: [*ids[:-1], [1, 2, -1]]),
        ("top", lambda top: [*top, top[0]]),
        ("top", lambda top: [[], *top[1:]]),
        ("top", lambda top: [*top[:-1], [0.5, -1.0, -2.0]]),
        ("top", lambda top: [*top[:-1], [-1.0, -2.0, np.nan]]),
    ],
)
def test_log_probs_that_cannot_be_are_a_bug(part: str, change: Callable[[Any], Any]) -> None:
    row = with_logprobs(finished(), 3)
    told = row.completion.logprobs
    assert told is not None
    wrong = told._replace(**{part: change(getattr(told, part))})
    broken = replace(row, completion=replace(row.completion, logprobs=wrong))
    with pytest.raises(AssertionError):
        completions_row(broken, FULL), logprobs_row(broken, TOP_3)


def test_a_completion_without_log_probs_has_no_place_in_their_table() -> None:
    with pytest.raises(AssertionError, match="no log-probabilities"):
        logprobs_row(finished(), TOP_3)


def test_without_top_tokens_the_completions_have_their_log_probs_alone() -> None:
    row = with_logprobs(finished(), 0)
    assert row.completion.logprobs is not None
    scores = completions_row(row, FULL)["output_logprobs"]
    assert np.array_equal(scores, np.array(row.completion.logprobs.token, np.float32))  # type: ignore[arg-type]


def test_matrices_are_written_as_lists_of_lists_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [logprobs_row(with_logprobs(finished(n, accepted=(1,) * n), 3), TOP_3) for n in range(9)]
    twin = pa.Table.from_pylist([plain(row) for row in rows], schema=TOP_3)
    for bound in (10, 500, 1 << 20):
        monkeypatch.setattr(parquet, "GROUP_BYTES", bound)
        assert read_back(rows, TOP_3, tmp_path).equals(twin)
        groups = pq.ParquetFile(tmp_path / "x.parquet").metadata.num_row_groups
        assert {10: groups == 9, 500: 1 < groups < 9, 1 << 20: groups == 1}[bound]


def test_log_probs_are_split_by_bytes_and_a_kept_column_of_their_name_is_not(
    tmp_path: Path,
) -> None:
    keep = tuple(
        KeptColumn(name, kind, False)
        for name, kind in (
            ("top_logprobs", pa.list_(pa.list_(pa.string()))),
            ("top_token_ids", pa.list_(pa.struct([("a", pa.int32())]))),
        )
    )
    kind = completions_schema(keep=keep, store=())
    prompt = Prompt(Key(0, 0, 0), text="x", kept=([["a"]], [{"a": 1}]))
    write_table(
        [completions_row(with_logprobs(finished(prompt=prompt), 0), kind)], kind, tmp_path / "c"
    )
    write_table([logprobs_row(with_logprobs(finished(), 3), TOP_3)], TOP_3, tmp_path / "l")
    found = set()
    for name in ("c", "l"):
        group = pq.ParquetFile(tmp_path / name).metadata.row_group(0)
        columns = [group.column(at) for at in range(group.num_columns)]
        found |= {
            (name, column.path_in_schema.split(".")[0])
            for column in columns
            if "BYTE_STREAM_SPLIT" in column.encodings
        }
    assert found == {("c", "output_logprobs"), ("l", "top_token_ids"), ("l", "top_logprobs")}
