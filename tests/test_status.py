"""job=status: figures from records alone, and no nonsense from clocks that jump."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_run import ATTEMPT, make_run

from ddbatch.__main__ import main
from ddbatch.core import Shard
from ddbatch.data.attempts import Attempt, end_attempt, start_attempt
from ddbatch.data.commits import read_shard
from ddbatch.data.folder import RunFolder
from ddbatch.data.records import KeyBlock, PartCounts, PartFile, Record, to_json
from ddbatch.jobs.show import Range
from ddbatch.jobs.standing import RECENT_SECONDS, Standing, standing
from ddbatch.jobs.status import as_text

Captured = pytest.CaptureFixture[str]
NOW = 1_800_000_000.0
SHARDS = (Shard(0, 0, 100), Shard(1, 100, 100), Shard(2, 200, 31))


def part(
    shard: int,
    number: int,
    *,
    rows: int = 10,
    closed_at: float = NOW,
    tokens: int = 1000,
    attempt: str = "a",
    seconds: float = 1.0,
    rejected: dict[str, int] | None = None,
) -> Record:
    """A record of the next rows of a shard."""
    first = SHARDS[shard].first_row + rows * number
    codes = rejected or {}
    counts = PartCounts(rows - sum(codes.values()), codes, 50, tokens, 300, 400, 3)
    name = f"completions-shard-{shard:05d}-part-{number:06d}.parquet"
    file = PartFile("completions", f"tmp/{name}", f"completions/{name}", "0" * 64, 9, rows)
    block = KeyBlock(first, rows, 0, 1, 1)
    return Record(shard, number, attempt, (file,), (block,), counts, closed_at, seconds)


def attempt(name: str = "a", started_at: float = NOW - 100, **more: Any) -> Attempt:
    ended = {"exit_code": None, "reason": None, "ended_at": None, **more}
    return Attempt(name, {}, started_at, "host", 1, **ended)


def stand(
    parts: Sequence[Record], attempts: Sequence[Attempt] = (), now: float = NOW, samples: int = 1
) -> Standing:
    by_shard: dict[int, list[Record]] = {}
    for record in parts:
        by_shard.setdefault(record.shard, []).append(record)
    return standing(SHARDS, samples, by_shard, attempts, now)


def said_of(text: str, name: str) -> str:
    found = re.search(rf"^{name}  +(.*(?:\n  .*)*)", text, re.MULTILINE)
    assert found is not None, f"{name} is not in:\n{text}"
    return " ".join(found[1].split())


def test_counts_are_those_of_the_tables(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "run", skipped=(0, 1, 22))
    start_attempt(folder, ATTEMPT, {})
    assert main(["job=status", f"output_dir={folder.place}"]) == 0
    said = capsys.readouterr().out
    done = pq.read_table(folder.place / "completions")
    refused = pq.read_table(folder.place / "rejected").num_rows
    tokens = sum(done.column("output_tokens").to_pylist())
    emitted, rounds = tokens - done.num_rows, sum(done.column("num_steps").to_pylist())
    assert said_of(said, "rows") == "40 of 46 done, 6 left (23 input rows x 2 samples)"
    assert said_of(said, "rejected").startswith(f"{refused} (")
    assert said_of(said, "acceptance") == f"{emitted / rounds:.2f} tokens a round"
    assert f"{tokens} output tokens in {done.num_rows} completions" in said_of(said, "tokens")
    assert "1 done, 2 open, 0 not begun" in said_of(said, "shards")
    assert "87.0% done, 1 worker running" in said_of(said, "state")
    assert re.search(rf"^{ATTEMPT} .* running .* 40 .* {tokens} ", said, re.MULTILINE)


def test_the_same_in_one_json_object(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "run", skipped=(0,))
    start_attempt(folder, ATTEMPT, {"device": "cpu"})
    end_attempt(folder, ATTEMPT, 4, "disk full")
    assert main(["job=status", f"output_dir={folder.place}", "status.json=true"]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    found = json.loads(said)
    assert (found["rows"], found["rows_done"], found["rows_left"]) == (46, 44, 2)
    assert found["shards_done"] + found["shards_open"] == found["shards"] == 3
    assert found["last_error"] == "disk full"
    (worker,) = found["workers"]
    assert (worker["name"], worker["state"], worker["exit_code"]) == (ATTEMPT, "ended", 4)
    assert worker["rows"] == 44


def test_nothing_is_written_and_no_table_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for file in folder.place.glob("*/*.parquet"):
        file.write_text("torn")
    before = sorted(folder.place.rglob("*"))
    assert main(["job=status", f"output_dir={folder.place}"]) == 0
    assert sorted(folder.place.rglob("*")) == before


def test_a_run_of_which_nothing_is_committed_is_shown(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "run", skipped=tuple(range(23)))
    assert main(["job=status", f"output_dir={folder.place}"]) == 0
    said = capsys.readouterr().out
    assert said_of(said, "rows").startswith("0 of 46 done, 46 left")
    assert said_of(said, "tokens") == "none yet"
    assert said_of(said, "rate") == said_of(said, "time left") == "unknown"


def test_a_run_whose_input_is_not_listed_yet_is_shown(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "run", skipped=tuple(range(23)))
    (folder.state("inputs") / "000000.json").unlink()
    assert main(["job=status", f"output_dir={folder.place}"]) == 0
    assert "its input is not listed yet" in said_of(capsys.readouterr().out, "state")


@pytest.mark.parametrize(("name", "text"), [("none", "does not exist"), ("some", "holds no run")])
def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: Captured, name: str, text: str
) -> None:
    (tmp_path / "some").mkdir()
    assert main(["job=status", f"output_dir={tmp_path / name}"]) == 2
    assert f"output_dir={tmp_path / name} {text}" in capsys.readouterr().err


def test_a_broken_record_is_named_with_exit_code_4(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "run")
    folder.record(1, 0).write_text("{")
    assert main(["job=status", f"output_dir={folder.place}"]) == 4
    assert "shard-00001/000000.json" in capsys.readouterr().err


def test_a_complete_run_has_no_time_left() -> None:
    parts = [part(s, n, rows=SHARDS[s].num_rows) for s in range(3) for n in [0]]
    found = stand(parts, [attempt(ended_at=NOW, exit_code=0, reason="done")])
    assert (found.rows_left, found.shards_done) == (0, 3)
    text = as_text("run", found)
    assert said_of(text, "state") == "complete"
    assert said_of(text, "time left") == "none"


def test_samples_multiply_rows() -> None:
    found = stand([part(0, 0)], samples=3)
    assert (found.input_rows, found.rows, found.rows_left) == (231, 693, 683)


def test_rejected_rows_are_counted_by_their_code_most_frequent_first() -> None:
    found = stand([part(0, 0, rejected={"bad_json": 1}), part(0, 1, rejected={"bad_text": 3})])
    text = as_text("run", found)
    assert said_of(text, "rejected") == "4 (3 bad_text, 1 bad_json)"
    assert found.completions == 16


def test_the_rate_lies_between_the_last_parts_and_the_whole_life() -> None:
    # Slow for two hours, then twice as fast.
    parts = [part(0, n, closed_at=NOW - 7200 + 1200 * n) for n in range(6)]
    parts += [part(1, n, closed_at=NOW - 600 + 600 * n) for n in range(2)]
    found = stand(parts, [attempt(started_at=NOW - 8400)])
    assert found.rate is not None
    assert found.rate.low == pytest.approx(8000 / 8400)
    recent = [r for r in parts if r.closed_at > NOW - RECENT_SECONDS]
    assert len(recent) == 3
    assert found.rate.high == pytest.approx(3000 / 2400)  # since the last part before them
    assert found.eta_seconds is not None
    assert found.eta_seconds.low == pytest.approx(151 * 100 / found.rate.high)
    assert found.eta_seconds.high == pytest.approx(151 * 100 / found.rate.low)


def test_workers_that_run_add_up_and_others_do_not() -> None:
    parts = [
        part(0, 0, attempt="a"),
        part(0, 1, attempt="b", closed_at=NOW - 4000),
        part(1, 0, attempt="c"),
        part(1, 1, attempt="d"),
    ]
    ends = {"ended_at": NOW, "exit_code": 0, "reason": "done"}
    attempts = [
        attempt("a"),
        attempt("b", NOW - 4100),
        attempt("c", **ends),
        attempt("d", NOW - 50),
        attempt("e", NOW - 10),
    ]
    found = stand(parts, attempts)
    states = {worker.name: worker.state for worker in found.workers}
    assert states == {"a": "running", "b": "silent", "c": "ended", "d": "running", "e": "running"}
    assert found.rate == Range(1000 / 100 + 1000 / 50, 1000 / 100 + 1000 / 50)


def test_a_worker_with_long_parts_is_not_called_silent_so_soon() -> None:
    parts = [part(0, 0, closed_at=NOW - 3000, seconds=1800.0)]
    (worker,) = stand(parts, [attempt(started_at=NOW - 9000)]).workers
    assert worker.state == "running"
    (worker,) = stand(parts, [attempt(started_at=NOW - 9000)], now=NOW + 3000).workers
    assert worker.state == "silent"


def test_time_left_widens_with_the_spread_of_the_parts() -> None:
    worker = [attempt(started_at=NOW - 100)]
    even = stand([part(0, n, tokens=1000) for n in range(4)], worker)
    uneven = stand([part(0, n, tokens=500 + 1000 * (n % 2)) for n in range(4)], worker)
    assert even.eta_seconds is not None
    assert uneven.eta_seconds is not None
    assert even.eta_seconds == Range(191 * 100 / 40, 191 * 100 / 40)
    assert uneven.eta_seconds.low < even.eta_seconds.low < uneven.eta_seconds.high
    # Four parts of 10 rows with 500 or 1500 tokens: two standard errors of the mean.
    error = math.sqrt(4 * 500**2 * 4 / 3) / 40
    assert uneven.eta_seconds.high == pytest.approx(191 * (100 + 2 * error) / 40)


def test_one_part_says_little() -> None:
    found = stand([part(0, 0)], [attempt()])
    assert found.eta_seconds is not None
    assert found.eta_seconds.high == 4 * found.eta_seconds.low


def test_without_a_running_worker_the_time_is_that_of_one_like_before() -> None:
    ends = {"ended_at": NOW, "exit_code": 75, "reason": "stopped by SIGTERM"}
    found = stand([part(0, 0), part(0, 1)], [attempt(**ends)])
    assert (found.rate, found.eta_seconds) == (None, None)
    text = as_text("run", found)
    assert said_of(text, "rate") == "none is running; one worker made 20 tokens/s"
    assert said_of(text, "time left") == "unknown; one worker like those before would take 18 min"
    assert "no worker is running as far as known" in said_of(text, "state")
    assert "last error" not in text  # a stop is none


YEARS = 86400.0 * 365


@pytest.mark.parametrize("jump", [-1e5, -3600.0, 3600.0, 2 * YEARS, 90 * YEARS, -60 * YEARS, 1e300])
@pytest.mark.parametrize("what", ["start", "part", "all parts", "here"])
def test_a_jumping_clock_breaks_nothing(jump: float, what: str) -> None:
    moved = {"part": [1], "all parts": [0, 1, 2]}.get(what, [])
    parts = [
        part(0, n, closed_at=NOW - 90 + 30 * n + (jump if n in moved else 0), seconds=20.0)
        for n in range(3)
    ]
    started = NOW - 120 + (jump if what == "start" else 0)
    found = stand(parts, [attempt(started_at=started)], NOW + (jump if what == "here" else 0))
    assert (found.rows_done, found.output_tokens) == (30, 3000)
    for span in (found.rate, found.eta_seconds, found.worker_seconds):
        assert span is None or 0 <= span.low <= span.high < 1e12
    text = as_text("run", found)
    assert not re.search(r"-\d+ (s|min|h|d)\b|nan|inf\b|e\+", text), text


@pytest.mark.parametrize("started_at", [math.nan, math.inf, -1.0, 0.0, 10**400, 1e18])
def test_an_unbelievable_start_is_unknown(started_at: float) -> None:
    found = stand([part(0, 0)], [attempt(started_at=started_at)])
    (worker,) = found.workers
    assert (worker.started_at, worker.rate) == (None, None)
    assert "unknown" in as_text("run", found).split("\n\n")[1]


def test_a_clock_set_back_within_a_part_gives_no_rate() -> None:
    parts = [part(0, 0, closed_at=NOW - 95, seconds=600.0)]  # open for longer than the worker lives
    (worker,) = stand(parts, [attempt(started_at=NOW - 100)]).workers
    assert worker.rate is None


def test_the_last_error_is_shown_and_does_not_fill_the_screen() -> None:
    ends = {"ended_at": NOW, "exit_code": 4, "reason": "no space left\non device " + "x " * 500}
    older = {"ended_at": NOW - 9, "exit_code": 1, "reason": "a bug"}
    attempts = [attempt("a", NOW - 99, **ends), attempt("b", NOW - 98, **older), attempt("c")]
    text = as_text("run", stand([part(0, 0)], attempts))
    last = said_of(text, "last error")
    assert ", a, exit code 4: no space left on device x x" in last
    assert len(last) < 450
    assert max(map(len, text.split("\n"))) < 150


def test_many_workers_still_fit_the_screen() -> None:
    attempts = [
        attempt(f"w{n:03}", NOW - 9000 + n, ended_at=NOW, exit_code=0, reason="done")
        for n in range(200)
    ]
    attempts.append(attempt("live"))
    text = as_text("run", stand([part(0, 0)], attempts))
    assert text.count("\n") < 30
    table = text.split("\n\n")[1].split("\n")
    assert table[1].startswith("live ")
    assert table[2].startswith("w199 ")
    assert table[-1] == "... and 189 more (status.json=true has them all)"


def test_500_records_are_read_in_no_time(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "run", rows=1, samples=1)
    log = folder.state("inputs") / "000000.json"
    entry = json.loads(log.read_text())
    entry["num_rows"] = entry["files"][0]["rows"] = 50_000
    entry["shards"] = [[index, 2500 * index, 2500] for index in range(20)]
    log.write_text(json.dumps(entry))
    start_attempt(folder, ATTEMPT, {})
    write_records(folder, shards=20, numbers=25)
    started = time.process_time()
    assert main(["job=status", f"output_dir={folder.place}"]) == 0
    seconds = time.process_time() - started
    said = capsys.readouterr().out
    assert "50,000 of 50,000 done" in said_of(said, "rows")
    assert "500 parts" in said_of(said, "shards")
    assert seconds < 2, f"{seconds:.2f} s"  # of work; a third of it does


def write_records(folder: RunFolder, shards: int, numbers: int) -> None:
    """Records as long as those of a run: rows finish out of order, so that keys have gaps."""

    def filled(record: Record, shard: int, number: int) -> Record:
        first = 2500 * shard + 100 * number
        blocks = tuple(KeyBlock(first + 2 * n, 1, 0, 1, 1) for n in range(50))
        blocks += tuple(KeyBlock(first + 2 * n + 1, 1, 0, 1, 1) for n in range(50))
        files = tuple(
            replace(file, final=folder.relative(folder.part(file.table, shard, number)))
            for file in record.files
        )
        return replace(record, shard=shard, number=number, files=files, keys=blocks)

    (first,) = read_shard(folder, 0)
    for shard in range(shards):
        folder.records(shard).mkdir(parents=True, exist_ok=True)
        for number in range(numbers):
            folder.record(shard, number).write_text(to_json(filled(first, shard, number)))
