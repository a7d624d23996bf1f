"""job=merge: the committed rows of runs as one data set, each once, in order, or nothing at all."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_run import make_run as make_scored_run
from merge_runs import SCHEMA, MadeRun, Row, completion, key_of, make_run, rejected

from ddbatch.config import Config, MergeConfig
from ddbatch.core import Key, RunError
from ddbatch.data import parquet
from ddbatch.data.batching.columns import KeptColumn
from ddbatch.data.export import merging, parts, publishing
from ddbatch.data.folder import RunFolder, StateError
from ddbatch.data.schema import completions_schema
from ddbatch.jobs import merge
from ddbatch.jobs.merge import run


def merged(config: Config) -> list[Row]:
    """Run the job; the rows of its files in order."""
    assert run(config) == 0
    return rows_of(Path(config.merge.output_dir or ""))


def rows_of(place: Path) -> list[Row]:
    rows: list[Row] = []
    for file in sorted((place / "data").iterdir()):
        if file.suffix == ".parquet":
            table = pq.read_table(file)
            assert table.num_rows, "an empty file"
            rows += table.to_pylist()
        else:
            rows += [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return rows


def config_for(folder: RunFolder, out: Path, *others: RunFolder, **options: Any) -> Config:
    runs = [str(other.place) for other in others]
    options = {"output_dir": str(out), "runs": runs} | options
    return Config(job="merge", output_dir=str(folder.place), merge=MergeConfig(**options))


def row_ids(rows: Iterable[Row]) -> list[int]:
    return [row["row_id"] for row in rows]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk; what is asked of it is looked at where it matters."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows at a time everywhere, so that a few rows cross every border."""
    make_small(monkeypatch)


def make_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(merging, "STRETCH_ROWS", 4)
    patch.setattr(merge, "_CHUNK_ROWS", 3)
    patch.setattr(parts, "_BATCH_ROWS", 2)
    patch.setattr(parts, "_HELD_PARTS", 2)
    patch.setattr(parquet, "GROUP_ROWS", 5)


def test_rows_come_in_the_order_of_their_keys_whatever_part_they_are_in(
    tmp_path: Path, small: None
) -> None:
    folder = make_run(tmp_path / "run", range(20))
    rows = merged(config_for(folder, tmp_path / "out"))
    assert rows == [completion(Key(row_id, 0, 0)) for row_id in range(20)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "data"]


def test_what_was_committed_is_rolled_forward_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [3, 5, 17])
    assert not (folder.place / "completions").exists()
    assert row_ids(merged(config_for(folder, tmp_path / "out"))) == [3, 5, 17]
    assert len(list((folder.place / "completions").iterdir())) == 3


@pytest.mark.parametrize("file_type", ["parquet", "jsonl"])
def test_log_probs_stay_with_their_completions(tmp_path: Path, small: None, file_type: str) -> None:
    """Whatever is left out, replaced or told apart: the column moves with its row."""
    folders = []
    for number, row_ids_here in enumerate((range(20), range(3, 20, 4))):
        made = MadeRun(tmp_path / f"run-{number}")
        for shard in range(2):
            keys = [Key(row_id, 0, 0) for row_id in row_ids_here if row_id // 10 == shard]
            for part in (keys[::2], keys[1::2]):
                made.add(
                    completion(
                        key,
                        completion=f"run {number} said {key.row_id % 9}",
                        output_logprobs=[-key.row_id - 0.5, -1.0 * number],
                    )
                    for key in part
                )
        folders.append(made.folder)
    options = {"filter": "row_id != 2", "dedup": ["completion"], "file_type": file_type}
    rows = merged(config_for(folders[0], tmp_path / "out", folders[1], **options))
    assert 5 < len(rows) < 20
    for row in rows:
        number = int(row["row_id"] % 4 == 3)
        assert row["completion"] == f"run {number} said {row['row_id'] % 9}"
        assert row["output_logprobs"] == [-row["row_id"] - 0.5, -1.0 * number]


def test_the_table_of_log_probs_is_left_where_it_is(tmp_path: Path) -> None:
    folder = make_scored_run(tmp_path / "run", top_logprobs=3)
    rows = merged(config_for(folder, tmp_path / "out"))
    done = pq.read_table(folder.place / "completions").to_pylist()
    said = {key_of(row): row["output_logprobs"] for row in done}
    assert {key_of(row): row["output_logprobs"] for row in rows} == said
    assert "top_logprobs" not in rows[0]


# --- the streaming merge and a sort in memory -----------------------------------------------------

Split = tuple[list[tuple[int, int, int]], int]


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Some (row_id, sample, part of its shard), and the rows of a shard."""
    units = draw(
        st.lists(st.tuples(st.integers(0, 13), st.integers(0, 1)), unique=True, min_size=1)
    )
    return [(*unit, draw(st.integers(0, 2))) for unit in units], draw(st.sampled_from([3, 5, 14]))


def make_split(place: Path, number: int, split: Split) -> tuple[RunFolder, list[Row]]:
    """A run of these units; odd rows have two turns, every fifth no id."""
    units, shard_rows = split
    made = MadeRun(place, rows=14, shard_rows=shard_rows, samples=2)
    by_part: dict[tuple[int, int], list[Row]] = {}
    for row_id, sample, part in units:
        for turn in range(1 + row_id % 2):
            key = Key(row_id, turn, sample)
            user_id = None if row_id % 5 == 0 else f"id-{row_id % 3}"
            row = completion(key, id=user_id, completion=f"run {number} said {key}")
            by_part.setdefault((row_id // shard_rows, part), []).append(row)
    for rows in by_part.values():
        made.add(rows)
    return made.folder, sorted((row for rows in by_part.values() for row in rows), key=key_of)


def last_by_key(runs: Sequence[list[Row]]) -> list[Row]:
    taken = {key_of(row): row for rows in runs for row in rows}
    return [taken[key] for key in sorted(taken)]


def last_by_id(runs: Sequence[list[Row]]) -> list[Row]:
    """The slow twin: walk all rows; at an id's first row come all rows of the last run with it."""
    last = {row["id"]: number for number, rows in enumerate(runs) for row in rows}
    seen: set[str] = set()
    result: list[Row] = []
    for rows in runs:
        for row in rows:
            holders = [any(row["id"] == other["id"] for other in rows) for rows in runs]
            if row["id"] is None or sum(holders) == 1:
                result.append(row)
            elif row["id"] not in seen:
                seen.add(row["id"])
                result += [other for other in runs[last[row["id"]]] if other["id"] == row["id"]]
    return result


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(splits(), min_size=1, max_size=3), by=st.sampled_from(["key", "id"]))
def test_the_streaming_merge_equals_a_sort_in_memory(
    tmp_path_factory: pytest.TempPathFactory, made: list[Split], by: str
) -> None:
    place = tmp_path_factory.mktemp("merge")
    with pytest.MonkeyPatch.context() as patch:
        splits = [make_split(place / f"run-{at}", at, split) for at, split in enumerate(made)]
        folders, rows = zip(*splits, strict=True)
        make_small(patch)
        config = config_for(folders[0], place / "out", *folders[1:], by=by)
        if by == "id" and loses_rows(rows):
            with pytest.raises(ValueError, match=r"merge\.by=id: .* rows would be lost"):
                merged(config)
            return
        found = merged(config)
    expected = last_by_key(rows) if by == "key" else last_by_id(rows)
    assert found == expected


def loses_rows(runs: Sequence[list[Row]]) -> bool:
    """Whether an id stands in more rows of a run than of the last run that has it."""
    counts = [Counter(row["id"] for row in rows if row["id"] is not None) for rows in runs]
    last = {value: count for of_run in counts for value, count in of_run.items()}
    return any(count > last[value] for of_run in counts for value, count in of_run.items())


def test_ids_that_repeat_are_refused_where_rows_would_be_lost(tmp_path: Path) -> None:
    first, second = (MadeRun(tmp_path / name) for name in ("first", "second"))
    first.add(completion(Key(at, 0, 0), id=f"r{at % 2}") for at in range(4))
    second.add([completion(Key(0, 0, 0), id="r1")])
    with pytest.raises(ValueError, match=r"merge\.by=id: 1 values stand in more rows of a run"):
        merged(config_for(first.folder, tmp_path / "out", second.folder, by="id"))
    assert not (tmp_path / "out").exists()


# --- several runs ---------------------------------------------------------------------------------


def test_a_later_run_replaces_rows_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run(tmp_path / "first", range(0, 20, 2))
    second = make_run(tmp_path / "second", range(0, 20, 3), said="again", is_split=False)
    rows = merged(config_for(first, tmp_path / "out", second))
    assert {row["row_id"]: row["completion"].split()[0] for row in rows} == {
        row_id: "said" if row_id % 3 else "again"
        for row_id in range(20)
        if row_id % 3 == 0 or row_id % 2 == 0
    }
    out = capsys.readouterr().out
    assert re.search(r"rows +17 completions of 2 runs: first, second", out)
    assert re.search(r"left out +4 replaced by another run", out)


def test_a_rerun_of_truncated_rows_comes_back_by_id(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "first")
    keys = [Key(row_id, 0, 0) for row_id in range(10)]
    made.add(
        completion(key, finish_reason="length" if key.row_id in (3, 7) else "stop") for key in keys
    )
    again = MadeRun(tmp_path / "again", rows=2, select="truncated")
    again.add([completion(Key(0, 0, 0), id="id-7"), completion(Key(1, 0, 0), id="id-3")])
    config = config_for(made.folder, tmp_path / "out", again.folder)
    with pytest.raises(
        ValueError, match=r"merge\.by=key: .*data\.select=truncated; .*merge\.by=id"
    ):
        run(config)
    config.merge.by = "id"
    rows = merged(config)
    assert [row["id"] for row in rows] == [f"id-{row_id}" for row_id in range(10)]
    assert {row["finish_reason"] for row in rows} == {"stop"}
    assert [row["row_id"] for row in rows] == [0, 1, 2, 1, 4, 5, 6, 0, 8, 9]


def test_runs_of_other_inputs_are_not_merged_by_key(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", [1])
    second = make_run(tmp_path / "second", [1], content="1")
    config = config_for(first, tmp_path / "out", second)
    with pytest.raises(
        ValueError, match=r"merge\.by=key.*prompts\.jsonl of merge\.runs=.*second is"
    ):
        run(config)
    config.merge.by = "id"
    assert len(merged(config)) == 1


def test_rows_of_one_run_never_replace_each_other_by_column(tmp_path: Path) -> None:
    first, second = (MadeRun(tmp_path / name) for name in ("first", "second"))
    first.add(completion(Key(at, 0, 0), id="same", completion=f"first {at}") for at in range(3))
    second.add(completion(Key(at, 0, 0), id=None, completion=f"second {at}") for at in range(3))
    rows = merged(config_for(first.folder, tmp_path / "out", second.folder, by="id"))
    assert [row["completion"] for row in rows] == [
        f"{name} {at}" for name in ("first", "second") for at in range(3)
    ]
    alone = merged(config_for(first.folder, tmp_path / "alone", by="id"))
    assert len(alone) == 3


def test_runs_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", [1])
    schemas = {
        r"topic is new": completions_schema(
            keep=[KeptColumn("topic", pa.string(), False)], store=("prompt_ids",)
        ),
        r"prompt_token_ids is missing": completions_schema(keep=(), store=()),
        r"messages is list<.*tool_calls.*, not list<": completions_schema(
            keep=(), store=("prompt_ids",), message_fields=("name", "tool_calls", "tool_call_id")
        ),
    }
    for at, (difference, schema) in enumerate(schemas.items()):
        other = MadeRun(tmp_path / f"other-{at}", schema=schema)
        other.add_tables({"completions": table_of([completion(Key(1, 0, 0))], schema)})
        with pytest.raises(ValueError, match=rf"merge\.runs=.*other-{at}: .*: {difference}"):
            run(config_for(first, tmp_path / "out", other.folder))
    with pytest.raises(ValueError, match=r"merge\.runs=.*first: this run is named twice"):
        run(config_for(first, tmp_path / "out", RunFolder(tmp_path / "x" / ".." / "first")))
    with pytest.raises(ValueError, match=r"merge\.runs=.*nowhere is no run"):
        run(config_for(first, tmp_path / "out", RunFolder(tmp_path / "nowhere")))
    empty = MadeRun(tmp_path / "empty")
    empty.add((), [rejected(Key(0, 0, 0))])
    for others in ((empty.folder, first), (first, empty.folder)):
        with pytest.raises(ValueError, match=r"=.*empty has no committed completions yet"):
            run(config_for(others[0], tmp_path / "out", others[1]))
    assert not (tmp_path / "out").exists()


def table_of(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    narrow = [{name: row.get(name) for name in schema.names} for row in rows]
    return pa.Table.from_pylist(narrow, schema=schema)


# --- filter, dedup, what is refused ---------------------------------------------------------------


def test_filter_comes_before_dedup_and_both_are_counted(
    tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    made = MadeRun(tmp_path / "run")
    texts = ["a", "b", "a", None, "a", "b", "c", None, "c", "d"]
    made.add(
        completion(Key(at, 0, 0), id=text, finish_reason="length" if at in (0, 9) else "stop")
        for at, text in enumerate(texts)
    )
    options = {"filter": "finish_reason == 'stop'", "dedup": ["id"]}
    rows = merged(config_for(made.folder, tmp_path / "out", **options))
    assert row_ids(rows) == [1, 2, 3, 6, 7]
    out = capsys.readouterr().out
    assert re.search(r"left out +2 by the filter, 3 as duplicates\n", out)
    assert re.search(r"written +5 rows in 1 file, .*B, to ", out)
    assert f'datasets.load_dataset("{tmp_path / "out"}")' in out


def test_rows_are_duplicates_only_if_all_columns_are_equal(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    values = [("a", None), ("a", "2"), ("a", None), (None, None), (None, None), ("2", "a")]
    made.add(
        completion(Key(at, 0, 0), id=user_id, stop_reason=reason)
        for at, (user_id, reason) in enumerate(values)
    )
    rows = merged(config_for(made.folder, tmp_path / "out", dedup=["id", "stop_reason"]))
    assert row_ids(rows) == [0, 1, 3, 4, 5]
    ids = merged(config_for(made.folder, tmp_path / "ids", dedup=["output_token_ids", "turn"]))
    assert row_ids(ids) == list(range(6))


def test_nothing_left_is_refused_with_what_was_dropped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", range(4))
    match = r"merge\.filter=turn > 0: nothing is left of 4 completions: 4 by the filter"
    with pytest.raises(ValueError, match=match):
        run(config_for(folder, tmp_path / "out", filter="turn > 0"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_columns_that_are_not_there_are_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1])
    for options, match in (
        (
            {"by": "ids"},
            r"merge\.by=ids: no such column \(did you mean id\?\); allowed: key, row_id",
        ),
        ({"dedup": ["id", "compltion"]}, r"merge\.dedup=compltion: .*did you mean completion"),
        ({"filter": "tokens > 1"}, r"merge\.filter=tokens > 1: `tokens` is no column"),
    ):
        with pytest.raises(ValueError, match=match):
            run(config_for(folder, tmp_path / "out", **options))


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for place, match in (
        ("full", r"merge\.output_dir=.*full is not empty; choose another"),
        ("file", r"merge\.output_dir=.*file is no folder"),
        ("run", r"merge\.output_dir=.*run is not empty"),
        ("run/merged", r"merge\.output_dir=.*merged is inside the run output_dir=.*run"),
        ("file/out", r"merge\.output_dir=.*cannot be made"),
    ):
        with pytest.raises(ValueError, match=match):
            run(config_for(folder, tmp_path / place))
    (tmp_path / "empty").mkdir()
    assert len(merged(config_for(folder, tmp_path / "empty"))) == 1
    assert len(merged(config_for(folder, tmp_path / "new" / "deep" / "out"))) == 1


def test_a_run_that_is_not_complete_is_merged_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", range(19))
    merged(config_for(folder, tmp_path / "out"))
    note = f"note: output_dir={folder.place} is not complete: 19 of 20 rows are committed"
    assert capsys.readouterr().err.startswith(note)
    whole = make_run(tmp_path / "whole", range(20))
    merged(config_for(whole, tmp_path / "other"))
    assert capsys.readouterr().err == ""


def test_answers_that_train_nobody_well_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = MadeRun(tmp_path / "run")
    texts = ["<think>never", "<think>hm</think>\n", "hm</think>Yes.", "hm, the cap", "", "<think>"]
    made.add(
        completion(
            Key(at, 0, 0), completion=text, finish_reason="stop" if at in (1, 2) else "length"
        )
        for at, text in enumerate(texts)
    )
    rows = merged(config_for(made.folder, tmp_path / "out", reasoning="drop"))
    assert [row["completion"] for row in rows] == ["", "", "Yes.", "hm, the cap", "", ""]
    out = capsys.readouterr().out
    assert re.search(r"answers +2 with reasoning that never ends, 2 empty\n", out)
    assert re.search(r"note +2 answers were cut by their cap before any </think>", out)
    merged(config_for(made.folder, tmp_path / "stop", filter="finish_reason == 'stop'"))
    assert "note" not in capsys.readouterr().out


# --- broken state ---------------------------------------------------------------------------------


def break_rows(file: Path) -> None:
    pq.write_table(pq.read_table(file).slice(1), file)


def break_columns(file: Path) -> None:
    pq.write_table(pq.read_table(file).drop_columns(["seed"]), file)


def break_order(file: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.take(list(reversed(range(table.num_rows)))), file)


def break_bytes(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-4:] = b"oops"
    file.write_bytes(content)


def break_pages(file: Path) -> None:
    """The footer stays whole, so that only reading rows can tell."""
    column = next(
        column
        for at in range(30)
        if (column := pq.read_metadata(file).row_group(0).column(at)).path_in_schema == "completion"
    )
    start = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (break_rows, r"part-000001\.parquet: 4 rows, its record says 5"),
        (
            break_columns,
            r"part-000001\.parquet: its columns are not those that manifest\.json says",
        ),
        (break_order, r"part-000001\.parquet: row 1 \(row_id 7\) is not sorted by key"),
        (break_bytes, r"part-000001\.parquet cannot be read"),
        (break_pages, r"part-000001\.parquet cannot be read"),
    ],
)
def test_a_part_that_is_not_what_it_should_be_is_named(
    tmp_path: Path, spoil: Callable[[Path], None], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", range(20))
    monkeypatch.setattr(parts, "_BATCH_ROWS", 2)
    merged(config_for(folder, tmp_path / "before"))
    file = folder.part("completions", 0, 1)
    size = file.stat().st_size
    spoil(file)
    fit_record(folder, size, file.stat().st_size)
    with pytest.raises(StateError, match=match):
        run(config_for(folder, tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "run"]


def fit_record(folder: RunFolder, old: int, new: int) -> None:
    """Let the record believe in the spoilt file's size."""
    record = folder.record(0, 1)
    text = record.read_text()
    assert f'"size": {old},' in text
    record.write_text(text.replace(f'"size": {old},', f'"size": {new},'))


def test_a_key_that_a_run_has_twice_is_named(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    made.add([completion(Key(4, 0, 0)), completion(Key(5, 0, 0))])
    made.add([completion(Key(5, 0, 0))], [rejected(Key(4, 0, 0))])
    match = r"row_id 5, turn 0, sample 0 is in .*part-000000\.parquet and in .*part-000001\.parquet"
    with pytest.raises(StateError, match=match):
        run(config_for(made.folder, tmp_path / "out"))
    with pytest.raises(StateError, match=r"row_id 4, .*completions.* and in .*rejected|rejected"):
        run(config_for(made.folder, tmp_path / "out", format="openai_batch"))


# --- files ----------------------------------------------------------------------------------------


def test_a_killed_merge_leaves_no_output_and_can_be_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", range(20))
    code = (
        "import os, signal\n"
        "from ddbatch.config import Config, MergeConfig\n"
        "from ddbatch.data.export import publishing\n"
        "from ddbatch.jobs.merge import run\n"
        "publishing.make_card = lambda *about: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"config = Config(job='merge', output_dir={str(folder.place)!r})\n"
        f"config.merge = MergeConfig(output_dir={str(tmp_path / 'out')!r})\n"
        "run(config)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert not (tmp_path / "out").exists()
    (left,) = (path for path in tmp_path.iterdir() if path.name.startswith(".out.tmp-"))
    assert len(merged(config_for(folder, tmp_path / "out"))) == 20
    assert f"note: {left} is left of a merge that was cut off" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_merge_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    folder = make_run(tmp_path / "run", range(20))

    def fail(*_: object, **__: object) -> None:
        raise error

    expected = RunError if isinstance(error, OSError) else KeyboardInterrupt
    for owner, name in ((pq.ParquetWriter, "write_table"), (publishing.os, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(expected) as caught:
                run(config_for(folder, tmp_path / "out"))
        if expected is RunError:
            assert re.search(r"merge\.output_dir=.*out cannot be written: .*No space", str(caught))
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_disk_has_everything_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", range(20))
    merged(config_for(folder, tmp_path / "before"))
    happened: list[str] = []
    rename = os.rename

    def watched(old: Path, new: Path) -> None:
        happened.append("named")
        rename(old, new)

    monkeypatch.setattr(publishing, "sync", lambda path: happened.append(path.name))
    monkeypatch.setattr(publishing.os, "rename", watched)
    merged(config_for(folder, tmp_path / "out"))
    data, card, names, tmp, *rest = happened
    assert (data, card, names) == ("train-00000.parquet", "README.md", "data")
    assert tmp.startswith(".out.tmp-")
    assert rest == ["named", tmp_path.name]


@pytest.mark.parametrize("file_type", ["parquet", "jsonl"])
def test_files_have_about_the_size_that_was_asked_for(tmp_path: Path, file_type: str) -> None:
    chance = random.Random(1)
    made = MadeRun(tmp_path / "run", rows=70, shard_rows=70)
    made.add(
        completion(Key(at, 0, 0), completion=chance.randbytes(25_000).hex()) for at in range(70)
    )
    config = config_for(made.folder, tmp_path / "out", file_type=file_type, file_mb=1)
    assert row_ids(merged(config)) == list(range(70))
    files = sorted((tmp_path / "out" / "data").iterdir())
    assert [file.name for file in files] == [
        f"train-{number:05d}.{file_type}" for number in range(len(files))
    ]
    sizes = [file.stat().st_size for file in files]
    assert 3 <= len(files) <= 8
    assert all(1_000_000 <= size < 2_100_000 for size in sizes[:-1])
    if file_type == "parquet":
        groups = [pq.read_metadata(file).row_group(0) for file in files]
        assert all(group.total_byte_size < 1_100_000 for group in groups)
        assert all(group.column(0).compression == "ZSTD" for group in groups)


def test_the_card_tells_what_was_done_and_nothing_of_the_machine(tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name, range(20)) for name in ("first", "second"))
    options = {"filter": "turn == 0 or id == 'a|b'", "dedup": ["id"], "reasoning": "split"}
    merged(config_for(first, tmp_path / "out", second, **options))
    card = (tmp_path / "out" / "README.md").read_text()
    for line in (
        "    path: data/train-*.parquet",
        "| rows | 20 |",
        "| runs | first, second |",
        "| format | full |",
        "| reasoning | split |",
        "| equal rows | by key, the last run's is taken |",
        "| filter | `turn == 0 or id == 'a\\|b'` |",
        "| dedup | id |",
    ):
        assert line in card.splitlines()
    for file in (tmp_path / "out").rglob("*"):
        if file.is_file():
            for secret in (str(tmp_path), os.uname().nodename):
                assert secret.encode() not in file.read_bytes()


def test_a_batch_has_a_line_for_every_row_and_completions_win(tmp_path: Path, small: None) -> None:
    first, second = (MadeRun(tmp_path / name, shard_rows=20) for name in ("first", "second"))
    first.add(
        [completion(Key(at, 0, 0)) for at in (0, 2, 3, 6)],
        [rejected(Key(at, 0, 0)) for at in (1, 4, 5)],
    )
    second.add([completion(Key(4, 0, 0))], [rejected(Key(5, 0, 0), code="nan_logits")])
    second.add([completion(Key(7, 0, 0))], [rejected(Key(6, 0, 0))])
    options = {"format": "openai_batch", "filter": "row_id != 2", "dedup": ["prompt_tokens", "id"]}
    for by in ("key", "id"):
        lines = merged(config_for(first.folder, tmp_path / by, second.folder, by=by, **options))
        assert [line["custom_id"] for line in lines] == [f"id-{at}" for at in (0, 1, 3, 4, 5, 6, 7)]
        assert [line["error"] and line["error"]["code"] for line in lines] == [
            *(None, "bad_json", None, None, "nan_logits", None, None)
        ]
        body = lines[0]["response"]["body"]
        assert body["model"] == "toy"
        assert body["choices"][0]["message"]["content"] == "said 0"


LOADED = """
import json, sys
from pathlib import Path
from ddbatch.__main__ import main
run, place = sys.argv[1:]
kinds = {
    "full": ["merge.reasoning=split"],
    "lines": ["merge.file_type=jsonl", "merge.reasoning=split"],
    "conversations": ["merge.format=conversations", "merge.file_type=jsonl"],
    "text": ["merge.format=text", "merge.filter=\\"row_id < 15 and finish_reason == 'stop'\\""],
    "openai_batch": ["merge.format=openai_batch"],
}
for name, options in kinds.items():
    arguments = ["job=merge", f"output_dir={run}", f"merge.output_dir={place}/{name}", *options]
    assert main(arguments) == 0, name
assert "torch" not in sys.modules
from datasets import load_dataset
for name in kinds:
    loaded = load_dataset(f"{place}/{name}")
    assert list(loaded) == ["train"], loaded
    train = loaded["train"]
    print("loaded", json.dumps([name, train.column_names, train.num_rows, train[0], train[-1]]))
"""


def test_every_kind_loads_with_datasets_and_needs_no_torch(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", rows=2000, shard_rows=2000)
    # Nulls for longer than a reader of JSON looks ahead, then texts.
    made.add(
        (
            completion(Key(at, 0, 0), completion="<think>a</think>b" if at == 1998 else "x" * 9000)
            for at in range(1999)
        ),
        [rejected(Key(1999, 0, 0))],
        group_rows=500,
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-c", LOADED, str(made.folder.place), str(tmp_path / "merged")]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, list[Any]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("loaded "):
            name, *rest = json.loads(line.removeprefix("loaded "))
            loaded[name] = rest
    for name in ("full", "lines"):
        columns, num_rows, first, last = loaded[name]
        assert columns == [
            *SCHEMA.names[: SCHEMA.names.index("completion") + 1],
            "reasoning",
            *SCHEMA.names[SCHEMA.names.index("completion") + 1 :],
        ]
        assert (num_rows, first["reasoning"], last["reasoning"]) == (1999, None, "a")
        assert last["messages"][-1]["content"] == "b"
        assert last["messages"][-1]["reasoning_content"] == "a"
    assert loaded["lines"] == loaded["full"]
    assert loaded["conversations"][3]["conversations"][0] == {
        "from": "human",
        "value": "asked 1998",
    }
    assert loaded["text"][1] == 15
    assert loaded["text"][2]["prompt"] == "asked 0"
    assert loaded["openai_batch"][3]["error"] == {"code": "bad_json", "message": "why"}


# --- memory ---------------------------------------------------------------------------------------


def make_large(place: Path, num_shards: int) -> RunFolder:
    """Shards of 5,000 rows of 2 kB of text in two parts that interleave."""
    made = MadeRun(place, rows=5000 * num_shards, shard_rows=5000)
    text = pa.array([random.Random(at).randbytes(1000).hex() for at in range(2500)])
    for shard in range(num_shards):
        for part in range(2):
            row_id = np.arange(shard * 5000 + part, (shard + 1) * 5000, 2)
            columns: dict[str, Any] = {
                field.name: pa.nulls(2500, field.type) for field in SCHEMA
            } | {
                "row_id": pa.array(row_id),
                "turn": pa.array(np.zeros(2500, np.int16)),
                "sample": pa.array(np.zeros(2500, np.int16)),
                "completion": text,
                "finish_reason": pa.array(["stop"] * 2500),
            }
            made.add_tables({"completions": pa.table(columns, schema=SCHEMA)}, group_rows=2500)
    return made.folder


def test_memory_does_not_grow_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "STRETCH_ROWS", 2000)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 4 << 20)
    monkeypatch.setattr(merge, "_CHUNK_BYTES", 1 << 20)
    peaks = {}
    take, arrow = parts.Rows.take, [0]

    def watched(self: parts.Rows, part: parts.Ints, position: parts.Ints) -> pa.Table:
        table = take(self, part, position)
        arrow[0] = max(arrow[0], pa.total_allocated_bytes() - before)
        return table

    monkeypatch.setattr(parts.Rows, "take", watched)
    for num_shards in (1, 10):
        folder = make_large(tmp_path / f"run-{num_shards}", num_shards)
        arrow[0], before = 0, pa.total_allocated_bytes()
        tracemalloc.start()
        assert run(config_for(folder, tmp_path / f"out-{num_shards}")) == 0
        peaks[num_shards] = (arrow[0], tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    print(peaks)
    written = sorted((tmp_path / "out-10" / "data").iterdir())
    assert sum(pq.read_metadata(file).num_rows for file in written) == 50_000
    for few, many in zip(peaks[1], peaks[10], strict=True):
        assert many < few + (2 << 20)
    assert sum(peaks[10]) < 40 << 20  # the rows are 100 MB
