"""job=check finds every kind of fault, names it, and passes what is right."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake import run as run_fake
from fake import write_model
from made_run import (
    SHARD_ROWS,
    change_cell,
    change_counts,
    change_record,
    change_table,
    make_run,
)

from ddbatch.__main__ import main
from ddbatch.config import Config
from ddbatch.core import Key, Rejected
from ddbatch.data.checking import rules
from ddbatch.data.commits import KeyBlock, Record, read_shard, recover
from ddbatch.data.folder import RunFolder, StateError
from ddbatch.data.manifest import read_manifest
from ddbatch.data.sink import Sink
from ddbatch.jobs import check

Captured = pytest.CaptureFixture[str]
Fault = tuple[Callable[[RunFolder], object], list[str]]

SEED = 5  # its first part has completed, cut and rejected rows
FIRST = "completions/shard-00000-part-000000.parquet"
FIRST_STATS = "acceptance/shard-00000-part-000000.parquet"
FIRST_RECORD = ".ddbatch/commits/shard-00000/000000.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A sound run of 23 rows x 2 samples in 3 shards."""
    return make_run(tmp_path_factory.mktemp("sound") / "run", seed=SEED)


@pytest.fixture
def folder(sound: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of it, to spoil."""
    shutil.copytree(sound.place, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def check_run(folder: RunFolder) -> int:
    return check.run(Config(job="check", output_dir=str(folder.place)))


def finding(folder: RunFolder) -> str:
    with pytest.raises(StateError) as found:
        check_run(folder)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"samples": 1, "rows": 1},
        {"turns": 3},
        {"store": ("acceptance",)},
        {"store": ()},
        {"rows": 2 * SHARD_ROWS, "part_rows": 1000},
        {"rows": 13, "samples": 1, "part_rows": 1},
        {"top_logprobs": 0},
        {"top_logprobs": 1},
        {"top_logprobs": 97, "store": ()},
        {"top_logprobs": 5, "turns": 2},
    ],
)
def test_a_sound_run_passes(tmp_path: Path, capsys: Captured, options: dict[str, Any]) -> None:
    folder = make_run(tmp_path / "run", **options)
    assert check_run(folder) == 0
    said = capsys.readouterr().out
    units = options.get("rows", 23) * options.get("samples", 2)
    assert f"{units} of {units}, each once; the run is complete" in said
    assert "nothing is wrong" in said


def test_what_is_left_to_do_is_told_and_is_no_fault(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "run", skipped=(0, 5, 22))
    assert check_run(folder) == 0
    assert "40 of 46, each once; 6 are left to do" in capsys.readouterr().out


def test_a_run_of_which_nothing_is_committed_passes(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "run", skipped=tuple(range(23)))
    assert check_run(folder) == 0
    assert "0 of 46" in capsys.readouterr().out


def test_a_run_with_rejected_rows_only_passes(tmp_path: Path) -> None:
    skipped = tuple(row for row in range(23) if row % 7 != 3)
    folder = make_run(tmp_path / "run", skipped=skipped)
    assert not (folder.place / "completions").exists()
    assert check_run(folder) == 0


def test_figures_are_those_of_the_tables(folder: RunFolder, capsys: Captured) -> None:
    check_run(folder)
    said = capsys.readouterr().out
    done = pq.read_table(folder.place / "completions")
    tokens = sum(done.column("output_tokens").to_pylist())
    rounds = sum(done.column("num_steps").to_pylist())
    assert f"{done.num_rows} with {tokens} tokens in {rounds} rounds" in said
    refused = pq.read_table(folder.place / "rejected").num_rows
    assert f"rejected     {refused} (" in said


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["data.turns=all"],
        ["sampling.n=3", "sampling.temperature=1"],
        ["sampling.logprobs=true"],
        ["sampling.logprobs=true", "sampling.top_logprobs=4", "output.store=[]"],
    ],
)
def test_a_run_of_job_generate_passes(tmp_path: Path, capsys: Captured, options: list[str]) -> None:
    asked, answered = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}
    rows = [[asked, answered] * (1 + n % 3) + [asked] * (n % 2) for n in range(61)]
    data = tmp_path / "p.jsonl"
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows) + "{no json\n")
    command = [
        f"model.path={write_model(tmp_path / 'model')}",
        f"data.path={data}",
        f"output_dir={tmp_path / 'run'}",
        "sampling.max_new_tokens=12",
        "shards.rows=17",
        "output.part_rows=9",
        "output.max_error_rate=1",
    ]
    assert main([*command, *options], run_fake) == 0
    capsys.readouterr()
    assert main(["job=check", f"output_dir={tmp_path / 'run'}"]) == 0
    assert "the run is complete" in capsys.readouterr().out


def test_a_committed_part_is_rolled_forward_first(folder: RunFolder) -> None:
    (record, *_) = read_shard(folder, 0)
    for file in record.files:
        tmp = folder.place / file.tmp
        tmp.parent.mkdir(parents=True, exist_ok=True)
        (folder.place / file.final).rename(tmp)
    assert check_run(folder) == 0
    assert all((folder.place / file.final).is_file() for file in record.files)


def test_a_part_that_is_committed_meanwhile_is_no_foreign_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    folder = make_run(tmp_path / "run", skipped=(22,))
    number = len(read_shard(folder, 2))

    def recover_and_go_on(folder: RunFolder, shard: int) -> tuple[Record, ...]:
        records = recover(folder, shard)
        if shard == 2:
            sink = Sink(folder, "b0b", read_manifest(folder).schemas, part_rows=9, part_seconds=9)
            sink.open_shard(2, number)
            sink.add(2, [Rejected(Key(22, 0, 0), "bad_json", "why", None, "{}")])
            assert sink.commit_part(2) is not None
        return records

    monkeypatch.setattr(check, "recover", recover_and_go_on)
    assert check_run(folder) == 0
    assert "44 of 46, each once; 2 are left" in capsys.readouterr().out


def test_dot_files_and_other_folders_are_not_looked_at(folder: RunFolder) -> None:
    (folder.place / "completions" / ".nfs0001").write_text("")
    (folder.place / "rounds").mkdir()
    (folder.place / "rounds" / "worker-a-0000.parquet").write_text("no promise")
    assert check_run(folder) == 0


def flip_a_byte(folder: RunFolder) -> None:
    file = folder.place / FIRST
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_the_end(folder: RunFolder) -> None:
    file = folder.place / FIRST_STATS
    file.write_bytes(file.read_bytes()[:-9])


def add_an_empty_parquet_file(folder: RunFolder) -> None:
    file = folder.place / FIRST
    pq.write_table(pq.read_schema(file).empty_table(), folder.place / "rejected" / "x.parquet")


FILE_FAULTS: dict[str, Fault] = {
    "a byte is flipped": (flip_a_byte, [FIRST, "was changed after it was committed"]),
    "the end is cut": (cut_the_end, [FIRST_STATS, "bytes instead of"]),
    "a file is gone": (lambda f: (f.place / FIRST).unlink(), [FIRST, "is nowhere"]),
    "a foreign file": (
        lambda f: (f.place / "completions" / "mine.parquet").write_text("x"),
        ["completions/mine.parquet is named by no record"],
    ),
    "a foreign folder": (
        lambda f: (f.place / "acceptance" / "old").mkdir(),
        ["acceptance/old is named by no record"],
    ),
    "an empty Parquet file": (
        add_an_empty_parquet_file,
        ["rejected/x.parquet is named by no record"],
    ),
    "a record is cut": (
        lambda f: (f.place / FIRST_RECORD).write_text('{"version": 1'),
        [FIRST_RECORD, "cut off"],
    ),
    "a record is gone": (
        lambda f: (f.place / FIRST_RECORD).unlink(),
        [FIRST_RECORD, "is missing"],
    ),
    "a foreign file among the records": (
        lambda f: (f.records(0) / "notes.txt").write_text("x"),
        ["shard-00000/notes.txt", "is no record"],
    ),
    "a record of no shard": (
        lambda f: f.records(2).rename(f.records(9)),
        ["part 0 of shard 2"],
    ),
    "the manifest is cut": (lambda f: f.manifest.write_text("{"), ["manifest.json"]),
}


@pytest.mark.parametrize("name", FILE_FAULTS)
def test_a_fault_of_a_file_is_found(folder: RunFolder, name: str) -> None:
    plant, parts = FILE_FAULTS[name]
    plant(folder)
    said = finding(folder)
    assert all(part in said for part in parts), said


def swap_rows(table: pa.Table) -> pa.Table:
    return table.take([0, 2, 1, *range(3, table.num_rows)])


def repeat_row(table: pa.Table) -> pa.Table:
    return table.take([0, 1, 1, *range(2, table.num_rows)])


def without_row(table: pa.Table) -> pa.Table:
    return table.take([0, *range(2, table.num_rows)])


def as_int64(table: pa.Table) -> pa.Table:
    at = table.schema.get_field_index("slot")
    return table.set_column(at, "slot", table.column("slot").cast(pa.int64()))


def in_both(*change: Callable[[pa.Table], pa.Table]) -> Callable[[RunFolder], None]:
    """The same change in completions and acceptance."""

    def plant(folder: RunFolder) -> None:
        for table in ("completions", "acceptance"):
            change_table(folder, table, change[0])

    return plant


def turn_one_later(folder: RunFolder) -> None:
    """The last row's only turn becomes turn 1."""
    for table in ("completions", "acceptance"):
        change_cell(folder, table, "turn", plus, row=-1)


def spoil(folder: RunFolder) -> None:
    """Bytes that are no Parquet, under a record that knows them."""
    file = folder.place / FIRST
    file.write_bytes(b"junk" * 9)

    def fits(record: Any) -> Any:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        files = (replace(record.files[0], size=36, sha256=digest), *record.files[1:])
        return replace(record, files=files)

    change_record(folder, fits)


TABLE_FAULTS: dict[str, Fault] = {
    "two rows are swapped": (
        in_both(swap_rows),
        [FIRST, "row 2", "sorted by key", "the row before is row_id"],
    ),
    "a row comes twice": (in_both(repeat_row), [FIRST, "row 2", "each key once"]),
    "a row is gone": (in_both(without_row), [FIRST_RECORD, "is one of its keys and in none"]),
    "a turn has no first": (turn_one_later, [FIRST_RECORD, "turn 0", "is one of its keys"]),
    "no rows": (lambda f: change_table(f, "acceptance", lambda t: t.slice(0, 0)), ["has 0 rows"]),
    "another type": (
        lambda f: change_table(f, "completions", as_int64),
        [FIRST, "column slot of type int64 where the manifest has column slot of type int32"],
    ),
    "a column less": (
        lambda f: change_table(f, "completions", lambda t: t.drop_columns("slot")),
        [FIRST, "no column where the manifest has column slot"],
    ),
    "a column more": (
        lambda f: change_table(f, "acceptance", lambda t: t.append_column("x", t.column(0))),
        [FIRST_STATS, "column x of type int64 where the manifest has no column"],
    ),
    "acceptance lacks a row": (
        lambda f: change_table(f, "acceptance", without_row),
        [FIRST_STATS, "row 1: the keys are not those of the completions"],
    ),
    "acceptance lacks its last row": (
        lambda f: change_table(f, "acceptance", lambda t: t.slice(0, t.num_rows - 1)),
        [FIRST_STATS, "no row here"],
    ),
    "a file of junk with a fitting record": (
        spoil,
        [FIRST, "cannot be read"],
    ),
}


@pytest.mark.parametrize("name", TABLE_FAULTS)
def test_a_fault_of_a_table_is_found(folder: RunFolder, name: str) -> None:
    plant, parts = TABLE_FAULTS[name]
    plant(folder)
    said = finding(folder)
    assert all(part in said for part in parts), said


def plus(value: Any) -> Any:
    return value + 1


CELL_FAULTS: dict[tuple[str, str], tuple[Callable[[Any], Any], list[str]]] = {
    ("completions", "row_id"): (lambda row: -1, ["row_id is in 0..", "row_id=-1"]),
    ("completions", "sample"): (lambda sample: None, ["sample is in 0..", "sample=None"]),
    ("completions", "output_tokens"): (plus, ["output_tokens is the length of output_token_ids"]),
    ("completions", "output_token_ids"): (lambda ids: [*ids, 5], ["is the length of output_"]),
    ("completions", "prompt_token_ids"): (lambda ids: ids[1:], ["is the length of prompt_"]),
    ("completions", "prompt_tokens"): (plus, ["prompt_tokens is the length of prompt_token_ids"]),
    ("completions", "max_new_tokens"): (lambda cap: 0, ["output_tokens is at most max_new_tokens"]),
    ("completions", "finish_reason"): (lambda why: "eos", ["is one of stop, length", "=eos"]),
    ("completions", "stop_reason"): (lambda why: None, ["stop_reason tells a stop's cause"]),
    ("completions", "num_steps"): (
        lambda n: n + 3,
        ["accepted_tokens + num_steps - (output_tokens - 1)"],
    ),
    ("completions", "accepted_tokens"): (lambda n: n - 5, ["num_steps - (output_tokens - 1)"]),
    ("completions", "draft_tokens"): (plus, ["draft_tokens of the completion is what the lists"]),
    ("completions", "mean_acceptance_length"): (plus, ["is (output_tokens - 1) / num_steps"]),
    ("acceptance", "accepted"): (lambda kept: [4, *kept[1:]], ["accepted is at most depth"]),
    ("acceptance", "depth"): (lambda depth: [*depth, 1], ["depth is as long as accepted"]),
    ("acceptance", "drafted"): (
        lambda runs: [{"rounds": runs[0]["rounds"], "drafted": 2}],
        ["depth is at most drafted"],
    ),
    ("acceptance", "histogram"): (
        lambda counts: [counts[0] + 1, *counts[1:]],
        ["histogram[j] is the number of rounds that accepted j"],
    ),
    ("rejected", "code"): (lambda code: "sad", ["code is one of bad_json", "code=sad"]),
    ("rejected", "reason"): (lambda reason: None, ["reason is not null"]),
}


@pytest.mark.parametrize(("table", "column"), CELL_FAULTS)
def test_a_wrong_value_is_found_with_its_row(folder: RunFolder, table: str, column: str) -> None:
    change, parts = CELL_FAULTS[table, column]
    row = busy_row(folder) if table != "rejected" else 0
    change_cell(folder, table, column, change, row=row)
    said = finding(folder)
    assert f"{table if column != 'draft_tokens' else 'acceptance'}/shard-00000-part-0000" in said
    assert f"row {row}" in said
    assert all(part in said for part in parts), said


def busy_row(folder: RunFolder) -> int:
    """A row of the first part that stopped by itself after rounds in which tokens were accepted."""
    rows = pq.read_table(folder.place / FIRST).to_pylist()
    stats = pq.read_table(folder.place / FIRST_STATS).to_pylist()
    for row, values in enumerate(rows):
        is_deep = max(stats[row]["depth"], default=0) == 3
        if values["finish_reason"] == "stop" and values["accepted_tokens"] and is_deep and row:
            return row
    raise AssertionError("the seed gives no such row")


def test_a_completion_without_tokens_is_found(folder: RunFolder) -> None:
    row = busy_row(folder)
    change_cell(folder, "completions", "output_token_ids", lambda ids: [], row=row)
    change_cell(folder, "completions", "output_tokens", lambda n: 0, row=row)
    assert "a completion has at least 1 token; output_tokens=0" in finding(folder)


OTHER_CELLS: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("acceptance", "accepted", lambda kept: kept[:-1], "depth is as long as accepted"),
    (
        "acceptance",
        "drafted",
        lambda runs: [],
        "drafted runs over all rounds; drafted=0, accepted=",
    ),
    (
        "acceptance",
        "drafted",
        lambda runs: [
            {"rounds": -1, "drafted": 4},
            {"rounds": runs[0]["rounds"] + 1, "drafted": 4},
        ],
        "runs of drafted have rounds and no negative count",
    ),
    (
        "acceptance",
        "drafted",
        lambda runs: [{"rounds": None, "drafted": 4}],
        "runs of drafted have rounds and no negative count",
    ),
    ("acceptance", "histogram", lambda counts: [0] * 257, "histogram ends at 255"),
    ("acceptance", "histogram", lambda counts: None, "histogram is not null"),
    ("acceptance", "depth", lambda depth: [None, *depth[1:]], "depth has a null in a list"),
    ("completions", "num_steps", lambda n: -1, "num_steps is not negative"),
    ("completions", "draft_tokens", lambda n: 0, "accepted_tokens is between 0 and draft_tokens"),
    ("completions", "mean_acceptance_length", lambda mean: None, "(output_tokens - 1) / num_steps"),
    ("completions", "reasoning_end", lambda end: 0, "reasoning_end is null or in 1..output_tokens"),
    ("completions", "reasoning_end", lambda end: 13, "reasoning_end is null or in 1..output_tok"),
    (
        "completions",
        "output_logprobs",
        lambda scores: [],
        "output_logprobs is null in a run with sampling.logprobs=false",
    ),
]


@pytest.mark.parametrize(("table", "column", "change", "text"), OTHER_CELLS)
def test_other_wrong_values_are_found(
    folder: RunFolder, table: str, column: str, change: Callable[[Any], Any], text: str
) -> None:
    change_cell(folder, table, column, change, row=busy_row(folder))
    assert text in finding(folder)


TOP = 4
FIRST_TOP = "logprobs/shard-00000-part-000000.parquet"


@pytest.fixture(scope="module")
def sound_with_logprobs(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("scores") / "run", seed=SEED, top_logprobs=TOP)


@pytest.fixture
def scored(sound_with_logprobs: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of a run with log-probs, to spoil."""
    shutil.copytree(sound_with_logprobs.place, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def in_first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of what is told of the first token."""
    return lambda tokens: [change(tokens[0]), *tokens[1:]]


LOGPROB_CELLS: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("completions", "output_logprobs", lambda s: None, "output_logprobs is not null"),
    ("completions", "output_logprobs", in_first(lambda s: None), "output_logprobs has a null in"),
    ("completions", "output_logprobs", lambda s: s[1:], "output_logprobs has an entry per output"),
    ("completions", "output_logprobs", in_first(lambda s: 0.5), "finite and at most 0; places ag"),
    ("completions", "output_logprobs", in_first(lambda s: -math.inf), "finite and at most 0"),
    ("completions", "output_logprobs", in_first(lambda s: math.nan), "finite and at most 0"),
    ("logprobs", "top_token_ids", lambda ids: None, "top_token_ids is not null"),
    ("logprobs", "top_token_ids", in_first(lambda ids: None), "top_token_ids has a null in a list"),
    (
        "logprobs",
        "top_logprobs",
        in_first(lambda top: [*top[:-1], None]),
        "top_logprobs has a null in a list",
    ),
    ("logprobs", "top_token_ids", lambda ids: ids[1:], "top_token_ids has an entry per output"),
    ("logprobs", "top_logprobs", lambda top: [*top, top[0]], "top_logprobs has an entry per outpu"),
    (
        "logprobs",
        "top_token_ids",
        in_first(lambda ids: [*ids[:-1], -1]),
        "top_token_ids are not negative; tokens against it=1",
    ),
    (
        "logprobs",
        "top_token_ids",
        in_first(lambda ids: [*ids[:-1], ids[0]]),
        "top_token_ids of a token are distinct; tokens against it=1",
    ),
    ("logprobs", "top_logprobs", in_first(lambda t: [1.0, *t[1:]]), "top_logprobs are at most 0"),
    ("logprobs", "top_logprobs", in_first(lambda t: [*t[:-1], math.nan]), "are at most 0"),
    ("logprobs", "top_logprobs", in_first(lambda t: t[::-1]), "top_logprobs descend; tokens ag"),
]


@pytest.mark.parametrize(("table", "column", "change", "text"), LOGPROB_CELLS)
def test_a_wrong_log_prob_is_found_with_its_row(
    scored: RunFolder, table: str, column: str, change: Callable[[Any], Any], text: str
) -> None:
    row = 2
    change_cell(scored, table, column, change, row=row)
    said = finding(scored)
    assert said.startswith(f"{table}/shard-00000-part-000000.parquet: ")
    assert text in said
    assert f"row {row} (" in said or "null in a list" in said


def emitted_among_top(folder: RunFolder, *, is_among: bool) -> tuple[int, int]:
    """A row and a token of it whose emitted id is among the top ids, or is not."""
    done = pq.read_table(folder.place / FIRST).to_pylist()
    for row, best in enumerate(pq.read_table(folder.place / FIRST_TOP).to_pylist()):
        for at, ids in enumerate(best["top_token_ids"]):
            if (done[row]["output_token_ids"][at] in ids) == is_among:
                return row, at
    raise AssertionError("the seed gives no such token")


@pytest.mark.parametrize(
    ("is_among", "text"),
    [
        (True, "the emitted token has its log-probability of output_logprobs among top_logprobs"),
        (False, "an emitted token that is none of top_token_ids is no more probable than they are"),
    ],
)
def test_a_log_prob_that_two_tables_tell_differently_is_found(
    scored: RunFolder, is_among: bool, text: str
) -> None:
    row, at = emitted_among_top(scored, is_among=is_among)

    def change(to: Callable[[float], float]) -> None:
        def changed(scores: list[float]) -> list[float]:
            return [*scores[:at], to(scores[at]), *scores[at + 1 :]]

        change_cell(scored, "completions", "output_logprobs", changed, row=row)

    change(lambda score: score - 5e-5)
    assert check_run(scored) == 0  # the engine's own noise
    lowest = pq.read_table(scored.place / FIRST_TOP)["top_logprobs"].to_pylist()[row][at][-1]
    change(lambda score: score * 1.01 - 0.01 if is_among else lowest * 0.99 + 0.001)
    said = finding(scored)
    assert said.startswith(f"{FIRST_TOP}: row {row} (")
    assert f"broken rule: {text}; tokens against it=1" in said


def test_log_probs_beyond_half_precision_are_no_fault(scored: RunFolder) -> None:
    row, at = emitted_among_top(scored, is_among=True)
    emitted = pq.read_table(scored.place / FIRST)["output_token_ids"].to_pylist()[row][at]
    ids = pq.read_table(scored.place / FIRST_TOP)["top_token_ids"].to_pylist()[row][at]
    num_finite = ids.index(emitted) + 1
    assert num_finite < TOP

    def changed(tokens: list[list[float]]) -> list[list[float]]:
        excluded = [*tokens[at][:num_finite], *[-math.inf] * (TOP - num_finite)]
        return [*tokens[:at], excluded, *tokens[at + 1 :]]

    change_cell(scored, "logprobs", "top_logprobs", changed, row=row)
    assert check_run(scored) == 0


def drop_logprobs(folder: RunFolder) -> None:
    (folder.place / FIRST_TOP).unlink()
    change_record(
        folder, lambda r: replace(r, files=tuple(f for f in r.files if f.table != "logprobs"))
    )


def wider(table: pa.Table) -> pa.Table:
    kind = pa.list_(pa.list_(pa.int32(), TOP + 1))
    ids = [[[*range(TOP + 1)] for _ in row] for row in table["top_token_ids"].to_pylist()]
    return table.set_column(3, "top_token_ids", pa.array(ids, kind))


LOGPROB_TABLES: dict[str, Fault] = {
    "a row is gone": (
        lambda f: change_table(f, "logprobs", without_row),
        [FIRST_TOP, "row 1: the keys are not those of the completions"],
    ),
    "two rows are swapped": (
        lambda f: change_table(f, "logprobs", swap_rows),
        [FIRST_TOP, "row 2", "sorted by key"],
    ),
    "another width": (
        lambda f: change_table(f, "logprobs", wider),
        [FIRST_TOP, "column top_token_ids of type", f"[{TOP + 1}]", "where the manifest has"],
    ),
    "no file": (
        drop_logprobs,
        [FIRST_RECORD, "a part has acceptance and completions and logprobs, or rejected"],
    ),
    "a foreign file": (
        lambda f: (f.place / "logprobs" / "mine.parquet").write_text("x"),
        ["logprobs/mine.parquet is named by no record"],
    ),
    "a file is gone": (lambda f: (f.place / FIRST_TOP).unlink(), [FIRST_TOP, "is nowhere"]),
}


@pytest.mark.parametrize("name", LOGPROB_TABLES)
def test_a_fault_of_the_table_of_log_probs_is_found(scored: RunFolder, name: str) -> None:
    plant, parts = LOGPROB_TABLES[name]
    plant(scored)
    said = finding(scored)
    assert all(part in said for part in parts), said


def test_log_probs_are_read_in_batches_of_bounded_size(
    scored: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    monkeypatch.setattr(rules, "_BATCH_BYTES", 400)
    for _, rows in rules.read_batches(scored.place / FIRST_TOP, "x", ["top_logprobs"]):
        sizes.append(len(rows.key))
    assert len(sizes) > 1
    assert sum(sizes) == pq.read_table(scored.place / FIRST_TOP).num_rows
    assert check_run(scored) == 0


def test_a_cut_completion_has_no_other_reason_than_context(folder: RunFolder) -> None:
    rows = pq.read_table(folder.place / FIRST).to_pylist()
    cut = next(row for row, values in enumerate(rows) if values["finish_reason"] == "length")
    change_cell(folder, "completions", "stop_reason", lambda why: "context", row=cut)
    assert check_run(folder) == 0
    change_cell(folder, "completions", "stop_reason", lambda why: "1", row=cut)
    assert "null or context; finish_reason=length, stop_reason=1" in finding(folder)


def test_a_cut_completion_is_as_long_as_its_cap(folder: RunFolder) -> None:
    rows = pq.read_table(folder.place / FIRST).to_pylist()
    cut = next(row for row, values in enumerate(rows) if values["finish_reason"] == "length")
    change_cell(folder, "completions", "max_new_tokens", plus, row=cut)
    assert "finish_reason length is at max_new_tokens; output_tokens=12" in finding(folder)


COUNTS = ("completions", "prompt_tokens", "output_tokens", "rounds", "accepted_tokens", "truncated")


@pytest.mark.parametrize("count", COUNTS)
def test_a_wrong_count_in_a_record_is_found(folder: RunFolder, count: str) -> None:
    told = getattr(read_shard(folder, 0)[0].counts, count)
    change_counts(folder, **{count: told + 1})
    assert finding(folder) == f"{FIRST_RECORD}: {count}={told + 1}, its rows give {told}"


@pytest.mark.parametrize("codes", [{}, {"bad_json": 99}, {"bad_text": 1}])
def test_wrong_rejected_counts_in_a_record_are_found(
    folder: RunFolder, codes: dict[str, int]
) -> None:
    change_counts(folder, rejected=codes)
    assert f"{FIRST_RECORD}: rejected={codes}, its rows give" in finding(folder)


def add_keys(folder: RunFolder, block: KeyBlock, number: int = 1) -> None:
    change_record(folder, lambda r: replace(r, keys=(*r.keys, block)), number=number)


def test_a_key_in_two_parts_is_found(folder: RunFolder) -> None:
    add_keys(folder, read_shard(folder, 0)[0].keys[0])
    said = finding(folder)
    assert "record 1 of shard 0" in said
    assert "claimed already" in said


def test_a_key_in_two_blocks_of_one_record_is_found(folder: RunFolder) -> None:
    add_keys(folder, read_shard(folder, 0)[0].keys[0], number=0)
    assert "claimed already" in finding(folder)


@pytest.mark.parametrize(
    "block",
    [
        KeyBlock(SHARD_ROWS, 1, 0, 1, 1),  # a row of the next shard
        KeyBlock(0, 1, 2, 1, 1),  # a third sample of two
        KeyBlock(10**12, 1, 0, 1, 1),
    ],
)
def test_a_key_outside_of_the_input_is_found(folder: RunFolder, block: KeyBlock) -> None:
    add_keys(folder, block)
    said = finding(folder)
    assert "record 1 of shard 0" in said
    assert "rows 0..9 with 2 samples" in said


def test_a_key_that_is_in_the_files_only_is_found(folder: RunFolder) -> None:
    (record, *_) = read_shard(folder, 0)
    change_record(folder, lambda r: replace(r, keys=r.keys[1:]))
    first = record.keys[0]
    said = finding(folder)
    assert said.startswith(f"{FIRST_RECORD}: row_id {first.first_row}, turn 0, sample")
    assert said.endswith("is in its files and none of its keys")


def test_a_key_that_is_in_the_record_only_is_found(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", skipped=(4,))
    add_keys(folder, KeyBlock(4, 1, 0, 2, 1), number=0)
    assert "row_id 4, turn 0, sample 0 is one of its keys and in none of its files" in finding(
        folder
    )


def test_a_key_that_is_completed_and_rejected_is_found(folder: RunFolder) -> None:
    row = pq.read_table(folder.place / FIRST).to_pylist()[0]
    for name in ("row_id", "turn", "sample"):
        change_cell(folder, "rejected", name, lambda _, name=name: row[name], row=0)
    said = finding(folder)
    assert f"row_id {row['row_id']}, turn 0" in said
    assert "both completed and rejected" in said or "sorted by key" in said


def test_records_of_a_shard_that_the_input_lacks_are_found(folder: RunFolder) -> None:
    log = folder.state("inputs") / "000000.json"
    log.write_text(
        log.read_text().replace('"num_rows": 23', '"num_rows": 20').replace(",\n  [2, 20, 3]", "")
    )
    assert finding(folder) == "there are records of shard 2, and the input has 2 shards"


def test_a_part_without_its_acceptance_is_found(folder: RunFolder) -> None:
    (folder.place / FIRST_STATS).unlink()
    change_record(
        folder,
        lambda r: replace(r, files=tuple(f for f in r.files if f.table != "acceptance")),
    )
    said = finding(folder)
    assert said.startswith(f"{FIRST_RECORD}: it names files of completions")
    assert "a part has acceptance and completions, or rejected, or all of them" in said


def test_the_command_ends_with_4_and_one_line(folder: RunFolder, capsys: Captured) -> None:
    flip_a_byte(folder)
    assert main(["job=check", f"output_dir={folder.place}"]) == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"ddbatch: error: {FIRST} was changed")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(("name", "text"), [("none", "does not exist"), ("some", "holds no run")])
def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: Captured, name: str, text: str
) -> None:
    (tmp_path / "some").mkdir()
    assert main(["job=check", f"output_dir={tmp_path / name}"]) == 2
    assert f"output_dir={tmp_path / name} {text}" in capsys.readouterr().err


def test_a_part_of_many_row_groups_and_batches_is_read_whole(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rows=SHARD_ROWS, samples=3, part_rows=1000)
    for table in ("completions", "acceptance"):
        many = pq.read_table(folder.part(table, 0, 0))
        pq.write_table(many, folder.part(table, 0, 0), row_group_size=4)
        change_table(folder, table, lambda content: content)
    assert check_run(folder) == 0
    change_cell(folder, "completions", "num_steps", plus, row=20)
    assert "row 20" in finding(folder)


@pytest.mark.parametrize("job", ["check", "status"])
def test_the_job_does_not_wait_for_torch(folder: RunFolder, job: str) -> None:
    code = (
        "import sys; from ddbatch.__main__ import main; "
        f"code = main(['job={job}', 'output_dir={folder.place}']); "
        "assert 'torch' not in sys.modules and 'datasets' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
