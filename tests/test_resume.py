"""Resume at every part: progress is the set of committed keys, whatever the order of the rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import Run, prompts, rows_of

from ddbatch.jobs.generating import feed as feed_module

HERE = Path(fake.__file__).parent
# A run that is killed, as if by kill -9, in the middle of the commit of its k-th part.
KILLED = """
import os, sys
import fake, runs
from pathlib import Path
from ddbatch.data import sink
place, count, at, *options = sys.argv[1:]
calls = iter(range(10**9))
def die(folder, record, real=getattr(sink, at)):
    if next(calls) == int(count):
        os._exit(9)
    return real(folder, record)
setattr(sink, at, die)
sys.exit(runs.Run(Path(place))(*options))
"""


def killed(run: Run, count: int, at: str, *options: str) -> int:
    """Run it until the end or the kill; the exit code."""
    command = [sys.executable, "-c", KILLED, str(run.place), str(count), at, *options]
    return subprocess.run(command, cwd=HERE, capture_output=True).returncode


@pytest.mark.parametrize("at", ["commit", "roll_forward"])
def test_a_kill_in_any_part_costs_that_part_at_most(tmp_path: Path, at: str) -> None:
    rows = prompts(24)
    run = Run(tmp_path, rows)
    whole = tmp_path / "whole"
    assert run(f"output_dir={whole}") == 0
    for count in range(6):
        place = tmp_path / str(count)
        run = Run(place, rows)
        assert killed(run, count, at) == 9
        before = run.all_keys()
        assert len(set(before)) == len(before)
        assert run() == 0
        assert run.content() == run.content(whole)


def test_one_kill_after_another_and_each_start_gets_on(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(24))
    codes = [killed(run, 1, "commit") for _ in range(9)]
    assert set(codes) == {0, 9}
    assert codes == sorted(codes, reverse=True)
    assert run.all_keys() == rows_of(24)


def test_a_kill_in_the_middle_of_a_row_group_leaves_no_gap(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.data = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist(prompts(40)), run.data, row_group_size=7)
    option = f"data.path={run.data}"
    assert killed(run, 3, "commit", option, "shards.rows=40", "output.part_rows=4") == 9
    assert 0 < len(run.all_keys()) < 40
    assert run("shards.rows=40", "output.part_rows=4") == 0
    assert run.all_keys() == rows_of(40)


def test_what_a_killed_writer_left_is_never_read(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(24))
    assert killed(run, 2, "commit") == 9
    left = list(run.out.glob(".ddbatch/tmp/*/*.parquet"))
    assert left
    for size in (0, 1, 100, 1000):
        for file in left:
            file.write_bytes(file.read_bytes()[:size])
    assert run() == 0
    assert run.all_keys() == rows_of(24)
    assert not list(run.out.glob(".ddbatch/tmp/*/*"))


@pytest.mark.parametrize("size", [0, 4, 500, -1])
def test_a_final_file_cut_short_is_never_accepted(tmp_path: Path, size: int) -> None:
    run = Run(tmp_path, prompts(24))
    assert killed(run, 3, "commit") == 9
    file = sorted(run.out.glob("completions/*"))[0]
    file.write_bytes(file.read_bytes()[:size])
    assert run() == 4
    assert run("output.resume=repair") == 0
    assert run.all_keys() == rows_of(24)


def test_the_longest_prompts_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = fake.answer

    def note(prompt: fake.TokenPrompt) -> list[int]:
        asked.append(len(prompt.token_ids))
        return real(prompt)

    monkeypatch.setattr(fake, "answer", note)
    monkeypatch.setattr(feed_module, "WINDOW_UNITS", 10)
    run = Run(tmp_path, prompts(30))
    assert run("shards.rows=30") == 0
    for start in (0, 10, 20):
        assert asked[start : start + 10] == sorted(asked[start : start + 10], reverse=True)
    assert sorted(asked) != asked[::-1]


def test_rows_cut_by_their_cap_are_counted_and_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, prompts(20))
    assert run("sampling.max_new_tokens=1") == 0
    assert "20 of 20 completions were cut by their token cap" in capsys.readouterr().out
    assert {row["finish_reason"] for row in run.table()} == {"length"}


def test_a_run_of_bad_rows_only_does_not_end_well(tmp_path: Path) -> None:
    run = Run(tmp_path, ["{bad"] * 30)
    assert run("output.max_error_rate=0.01") == 3
    assert run.all_keys() == rows_of(30)


def test_a_manifest_that_was_damaged_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, prompts(5))
    assert run() == 0
    manifest = run.out / "manifest.json"
    manifest.write_bytes(b"\xff" + manifest.read_bytes()[1:])
    for job in ("generate", "check", "merge"):
        assert run(f"job={job}", f"merge.output_dir={tmp_path / 'merged'}") == 4, job
        assert "manifest.json" in capsys.readouterr().err, job


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    code = """
import resource, sys
import fake, runs
from pathlib import Path
assert runs.Run(Path(sys.argv[1]))("shards.rows=500", "output.part_rows=200") == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peaks = []
    for size in (600, 6000):
        place = tmp_path / str(size)
        with_rows = Run(place, [{"prompt": f"w{n % 90} w{n % 7}"} for n in range(size)])
        command = [sys.executable, "-c", code, str(with_rows.place)]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] < 1.15 * peaks[0], peaks
