"""Completions out: what a row becomes, and that files are whole, final and loadable."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddbatch.core import Completion, Key, Prompt, Rejected, RunError
from ddbatch.data import schema, sink
from ddbatch.data.schema import (
    FinishedRow,
    acceptance_row,
    acceptance_schema,
    completions_row,
    completions_schema,
    write_table,
)
from ddbatch.data.sink import Sink

STORE = ("prompt_ids", "acceptance")
FULL = completions_schema(keep_columns=(), store=STORE)


def finished(
    row_id: int = 0,
    *,
    prompt: Prompt | None = None,
    accepted: tuple[int, ...] = (2, 0, 3),
    bonus_cut: bool = False,
    text: str = "said",
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
        completion=completion,
        text=text,
        stop_reason=None,
        max_new_tokens=100,
        seed=11,
    )


def rejected(row_id: int) -> Rejected:
    raw_json = '{"prompt": "\ud800"}'
    return Rejected(Key(row_id, 0, 0), "bad_text", "a \ud800 in it", f"user-{row_id}", raw_json)


def make_sink(
    output_dir: Path,
    *,
    keep_columns: Sequence[str] = (),
    store: Collection[str] = STORE,
    part_rows: int = 4,
    manifest: str = '{"seed": 11}',
) -> Sink:
    return Sink(
        output_dir, keep_columns=keep_columns, store=store, part_rows=part_rows, manifest=manifest
    )


def names(output_dir: Path) -> list[str]:
    """Every file of a run, with the attempts' own folder names left out."""
    files = (file.relative_to(output_dir) for file in output_dir.rglob("*") if file.is_file())
    return sorted(file.as_posix() for file in files)


def row_ids(output_dir: Path, table: str) -> list[list[int]]:
    files = sorted((output_dir / table).iterdir())
    return [pq.read_table(file)["row_id"].to_pylist() for file in files]


def test_a_completion_comes_back_as_it_was_written(tmp_path: Path) -> None:
    row = finished(9, text="s\u00e4gt \u4f60")
    with make_sink(tmp_path / "run") as out:
        out.write(row)
    name = "shard-00000-part-000000.parquet"
    (read,) = pq.read_table(tmp_path / "run" / "completions" / name).to_pylist()
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
    (read,) = pq.read_table(tmp_path / "run" / "acceptance" / name).to_pylist()
    assert read == {
        "row_id": 9,
        "turn": 0,
        "sample": 0,
        "accepted": [2, 0, 3],
        "drafted": [{"rounds": 3, "drafted": 7}],
        "depth": [5, 5, 5],
        "histogram": [1, 0, 1, 1],
    }
    assert not list((tmp_path / "run" / "rejected").iterdir())


def test_files_carry_the_schema_and_the_settings(tmp_path: Path) -> None:
    with make_sink(tmp_path / "run", keep_columns=["topic"]) as out:
        prompt = Prompt(Key(0, 0, 0), text="x", kept_json='{"topic": 1}')
        out.write(finished(prompt=prompt))
        out.reject(rejected(1))
    for table in ("completions", "acceptance", "rejected"):
        (file,) = (tmp_path / "run" / table).iterdir()
        written = pq.ParquetFile(file)
        about = json.loads(written.schema_arrow.metadata[b"ddbatch"])
        assert about == {"schema_version": 1, "table": table}
        column = written.metadata.row_group(0).column(0)
        assert (column.compression, column.has_column_index) == ("ZSTD", True)
        for field in written.schema_arrow:
            assert not pa.types.is_large_string(field.type)
            assert not pa.types.is_null(field.type)
    assert completions_schema(keep_columns=(), store=()).names == [
        name for name in FULL.names if name != "prompt_token_ids"
    ]


def test_messages_keep_role_and_text_only(tmp_path: Path) -> None:
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


def test_kept_columns_are_json_strings_named_as_in_the_input(tmp_path: Path) -> None:
    kept = {"topic": "m\u00e4h", "score": {"a": [1.5, None]}, "none": None, "bad": "\ud800"}
    prompt = Prompt(Key(0, 0, 0), text="x", kept_json=json.dumps(kept))
    with make_sink(tmp_path / "run", keep_columns=list(kept)) as out:
        out.write(finished(prompt=prompt))
    (read,) = pq.read_table(tmp_path / "run" / "completions").select(list(kept)).to_pylist()
    assert read["topic"] == '"m\u00e4h"'
    assert read["none"] is None
    assert {name: json.loads(read[name] or "null") for name in kept} == kept
    for clash in (["id"], ["slot"], ["topic", "topic"]):
        with pytest.raises(ValueError, match=r"data\.keep_columns=.*is a column of the output"):
            make_sink(tmp_path / "other", keep_columns=clash)
    with pytest.raises(ValueError, match=r"output\.store=\['logits'\].*prompt_ids, acceptance"):
        make_sink(tmp_path / "other", store=["logits"])
    assert not (tmp_path / "other").exists()


def test_a_row_that_ends_in_prefill_has_no_rounds() -> None:
    row = finished(accepted=())
    assert completions_row(row, FULL)["mean_acceptance_length"] is None
    assert completions_row(row, FULL)["num_steps"] == 0
    table = acceptance_row(row)
    assert (table["accepted"], table["drafted"], table["histogram"]) == ([], [], [])


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


def test_parts_hold_part_rows_completions_sorted_by_key(tmp_path: Path) -> None:
    order = list(range(11))
    random.Random(5).shuffle(order)
    with make_sink(tmp_path, part_rows=4) as out:
        for row_id in order:
            out.write(finished(row_id))
            if row_id == order[5]:
                out.reject(rejected(21))
                out.reject(rejected(20))
    expected = [sorted(order[:4]), sorted(order[4:8]), sorted(order[8:])]
    assert row_ids(tmp_path, "completions") == expected
    assert row_ids(tmp_path, "acceptance") == expected
    parts = [f"shard-00000-part-{part:06d}.parquet" for part in range(3)]
    assert names(tmp_path) == [
        "README.md",
        *(f"acceptance/{part}" for part in parts),
        *(f"completions/{part}" for part in parts),
        "manifest.json",
        f"rejected/{parts[1]}",
    ]
    read = pq.read_table(tmp_path / "rejected" / parts[1]).to_pylist()
    assert [row["row_id"] for row in read] == [20, 21]
    assert (read[0]["id"], read[0]["code"]) == ("user-20", "bad_text")
    assert (read[0]["reason"], read[0]["raw_json"]) == ("a \\ud800 in it", '{"prompt": "\\ud800"}')


def test_many_rejected_rows_do_not_wait_for_completions(tmp_path: Path) -> None:
    with make_sink(tmp_path, part_rows=2) as out:
        for row_id in range(5):
            out.reject(rejected(row_id))
    assert row_ids(tmp_path, "rejected") == [[0, 1], [2, 3], [4]]
    assert row_ids(tmp_path, "completions") == []


def test_without_acceptance_there_is_no_such_table(tmp_path: Path) -> None:
    with make_sink(tmp_path, store=["prompt_ids"]) as out:
        out.write(finished())
    assert not (tmp_path / "acceptance").exists()
    assert "acceptance" not in (tmp_path / "README.md").read_text()


def test_an_exception_passes_and_loses_nothing_that_is_finished(tmp_path: Path) -> None:
    out = make_sink(tmp_path)

    def stopped_run() -> None:
        with out:
            for row_id in range(6):
                out.write(finished(row_id))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped_run()
    assert row_ids(tmp_path, "completions") == [[0, 1, 2, 3], [4, 5]]
    assert not list((tmp_path / ".ddbatch" / "tmp").iterdir())
    out.close()
    with pytest.raises(AssertionError, match="after close"):
        out.write(finished(7))


def test_a_part_that_cannot_be_written_shows_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(rows: Sequence[schema.TableRow], kind: pa.Schema, file: Path) -> None:
        write_table(rows[:1], kind, file)

    out = make_sink(tmp_path).__enter__()
    for row_id in range(4):
        out.write(finished(row_id))
    monkeypatch.setattr(sink, "write_table", cut_short)
    out.write(finished(4))
    out.write(finished(5))
    with pytest.raises(RunError, match=r"1 of 2 rows on disk"):
        out.close()
    assert row_ids(tmp_path, "completions") == [[0, 1, 2, 3]]
    assert row_ids(tmp_path, "acceptance") == [[0, 1, 2, 3]]


def test_a_row_written_twice_is_a_bug(tmp_path: Path) -> None:
    with make_sink(tmp_path) as out:
        out.write(finished(1))
        with pytest.raises(AssertionError, match="came twice"):
            out.write(finished(1))


def test_nothing_that_is_there_is_overwritten(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with make_sink(run) as out:
        out.write(finished())
    before = {file: (run / file).read_bytes() for file in names(run)}
    message = r"output_dir=.*already holds a run; resume is not built yet, choose another"
    with pytest.raises(ValueError, match=message):
        make_sink(run)
    (run / "manifest.json").unlink()
    with pytest.raises(ValueError, match=message):
        make_sink(run)
    del before["manifest.json"]
    assert before == {file: (run / file).read_bytes() for file in names(run)}

    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"holds a README\.md of something else"):
        make_sink(other)
    assert names(other) == ["README.md"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        make_sink(tmp_path / "file")
    with pytest.raises(ValueError, match=r"output\.part_rows=0"):
        make_sink(tmp_path / "new", part_rows=0)


def test_a_final_name_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    name = "shard-00000-part-000000.parquet"
    out = make_sink(tmp_path).__enter__()
    (tmp_path / "completions" / name).write_text("theirs")
    out.write(finished())
    with pytest.raises(RunError, match="File exists"):
        out.close()
    assert (tmp_path / "completions" / name).read_text() == "theirs"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"output_dir=.*holds thesis.tex, which is no part"):
        make_sink(tmp_path)


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"output_dir=.*file is no folder that can be written to"):
        make_sink(tmp_path / "file" / "run")


def test_a_start_that_was_cut_off_may_go_on(tmp_path: Path) -> None:
    with make_sink(tmp_path / "a"):
        pass
    (tmp_path / "a" / "manifest.json").unlink()
    with make_sink(tmp_path / "a", manifest='{"x": 1}'):
        pass
    assert (tmp_path / "a" / "manifest.json").read_text() == '{"x": 1}'


def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ValueError, match=r"output_dir=.*no hard links"):
        make_sink(tmp_path / "run").__enter__()


def test_no_file_names_the_machine_or_the_place(tmp_path: Path) -> None:
    with make_sink(tmp_path / "run") as out:
        out.write(finished())
    for file in names(tmp_path / "run"):
        content = (tmp_path / "run" / file).read_bytes()
        for secret in (str(tmp_path), os.uname().nodename):
            assert secret.encode() not in content


def test_row_groups_stay_within_both_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [completions_row(finished(n, text="x" * 997), FULL) for n in range(33)]
    sizes = {}
    for bound, value in (("_GROUP_ROWS", 5), ("_GROUP_BYTES", 10_000), ("_GROUP_BYTES", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(schema, bound, value)
            write_table(rows, FULL, tmp_path / "x.parquet")
        metadata = pq.ParquetFile(tmp_path / "x.parquet").metadata
        groups = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
        assert sum(groups) == 33
        sizes[bound, value] = max(groups)
    assert sizes["_GROUP_ROWS", 5] <= 5
    assert sizes["_GROUP_BYTES", 10_000] in range(2, 10)
    assert sizes["_GROUP_BYTES", 10] == 1
    read = pq.read_table(tmp_path / "x.parquet").to_pylist()
    rounded = {"mean_acceptance_length": pytest.approx(8 / 3)}
    assert read == [{**row, **rounded} for row in rows]
    with pytest.raises(AssertionError):
        write_table([], FULL, tmp_path / "y.parquet")


LOAD = """
import sys
from datasets import load_dataset
for folder in sys.argv[2:]:
    for config, rows in (("default", 9), ("acceptance", 9), ("rejected", 2)):
        if config == "rejected" and folder.endswith("none"):
            continue
        if config == "acceptance" and folder.endswith("bare"):
            continue
        loaded = load_dataset(folder, config, cache_dir=sys.argv[1])
        assert list(loaded) == ["train"], loaded
        assert loaded["train"].num_rows == rows, (folder, config, loaded)
    whole = load_dataset(folder, cache_dir=sys.argv[1])["train"]
    assert whole.column_names[:5] == ["row_id", "turn", "sample", "id", "messages"]
    assert sorted(whole["row_id"]) == list(range(9))
    assert whole[0]["messages"][-1] == {"role": "assistant", "content": "said"}
print("loaded")
"""


def test_load_dataset_reads_every_table(tmp_path: Path) -> None:
    # A path part called "test" would make datasets guess splits, but for the card's configs.
    folders = [tmp_path / "test" / name for name in ("all", "none", "bare")]
    for folder in folders:
        store = STORE if folder.name != "bare" else ("prompt_ids",)
        with make_sink(folder, store=store) as out:
            for row_id in range(9):
                out.write(finished(row_id))
            for row_id in (9, 10) if folder.name != "none" else ():
                out.reject(rejected(row_id))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "cache"), *map(str, folders)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )
    assert done.stdout.strip() == "loaded", done.stderr
