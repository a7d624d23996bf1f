"""Real processes killed at random moments: no row is lost, none is there twice, none is half."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import RealPair
from datasets import load_dataset
from runs import CONTENT, Run, key_of, prompts, wait_until, write_jsonl

from ddbatch.data.folder import RunFolder

CHECKOUT = Path(__file__).resolve().parent.parent


def loaded_keys(out: Path, cache: Path, name: str | None = None) -> list[Any]:
    """Keys as load_dataset sees them, none before the first part."""
    if not any((out / (name or "completions")).glob("*.parquet")):
        return []
    rows = load_dataset(str(out), name, cache_dir=str(cache))["train"]
    return [key_of(row) for row in rows.select_columns(["row_id", "turn", "sample"])]


def num_parts(out: Path) -> int:
    return len(list(out.glob("completions/*")))


def wait_for_parts(out: Path, count: int, process: subprocess.Popen[Any]) -> None:
    """Until so many are there, or the run is done before."""
    wait_until(lambda: num_parts(out) >= count or process.poll() is not None)


def assert_none_is_twice(out: Path, cache: Path) -> int:
    """Both tables, as a reader sees them in the middle of the run; how many rows there are."""
    keys = loaded_keys(out, cache) + loaded_keys(out, cache, "rejected")
    twice = [key for key, count in Counter(keys).items() if count > 1]
    assert not twice, twice
    return len(keys)


def test_twenty_kills_of_three_owners_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    rows = [row if n % 50 else "{bad" for n, row in enumerate(prompts(2400))]
    run = Run(tmp_path, rows)
    options = ("shards.rows=60", "output.part_rows=16", "data.id_column=name")
    chance = random.Random(3)

    def start() -> subprocess.Popen[str]:
        # Each begins somewhere else, as the tasks of an array do, and they meet.
        begin = f"shards.start={chance.randrange(40)}"
        return run.start(*options, begin, step_seconds=0.02)

    owners = [start() for _ in range(3)]
    num_while_working = 0
    for _ in range(20):
        # A count of parts and then a moment: a machine's speed does not say how far the run is.
        enough = num_parts(run.out) + chance.randrange(6)
        wait_until(
            lambda enough=enough: (
                num_parts(run.out) >= enough or all(owner.poll() is not None for owner in owners)
            )
        )
        time.sleep(chance.uniform(0, 0.1))
        at = chance.randrange(3)
        number = chance.choice([signal.SIGKILL, signal.SIGTERM])
        owners[at].send_signal(number)
        _, said = owners[at].communicate(timeout=60)
        if number == signal.SIGTERM:  # before Python listens, or after
            assert owners[at].returncode in (75, -signal.SIGTERM, 0), said
        # The others stand still wherever they are: while a slow machine reads, they would be done.
        others = [owner for owner in owners if owner is not owners[at]]
        for owner in others:
            owner.send_signal(signal.SIGSTOP)
        try:
            num_while_working += assert_none_is_twice(run.out, tmp_path / "cache") < len(rows)
        finally:
            for owner in others:
                owner.send_signal(signal.SIGCONT)
        owners[at] = start()
    for owner in owners:
        _, said = owner.communicate(timeout=120)
        assert owner.returncode == 0, said
    assert num_while_working >= 15
    whole = tmp_path / "whole"
    assert run(f"output_dir={whole}", "data.id_column=name") == 0
    assert run.content() == run.content(whole)
    assert [row["row_id"] for row in run.table("rejected")] == list(range(0, 2400, 50))
    assert run("job=check") == 0
    assert run("shards.rows=60", "data.id_column=name") == 0  # nothing to do, but to sweep
    assert not list(RunFolder(run.out).state("tmp").iterdir())


def test_resume_after_a_resume_that_was_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(300))
    for _ in range(3):
        process = run.start(step_seconds=0.02)
        seen, parts = len(run.all_keys()), num_parts(run.out)
        wait_for_parts(run.out, parts + 2, process)
        process.kill()
        process.communicate()
        keys = run.all_keys()
        assert len(set(keys)) == len(keys) > seen
    assert run() == 0
    assert [key.row_id for key in run.all_keys()] == list(range(300))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
)
def test_a_signal_commits_what_is_finished_and_exits_with_75(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = Run(tmp_path, prompts(400))
    steps = tmp_path / "steps"
    # Parts that would stay open for ever: what is there afterwards was committed by the signal.
    process = run.start(
        "output.part_rows=4096", "shards.rows=1000", step_seconds=0.02, steps_file=str(steps)
    )
    wait_until(lambda: steps.exists() and steps.stat().st_size >= 20)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 75
    assert f"stopped by {number.name}" in said
    num_done = len(run.all_keys())
    assert 4 <= num_done < 400
    assert f"{num_done} of 400 rows are committed" in said
    assert run() == 0
    assert [key.row_id for key in run.all_keys()] == list(range(400))


def test_the_real_pair_survives_kills_with_the_same_content(
    real_pair: RealPair, tmp_path: Path
) -> None:
    texts = ["Hello", "Name a colour.", "Count to three.", "What is rain?", "Say hi.", "Why?"]
    data = write_jsonl(tmp_path / "p.jsonl", [{"prompt": text} for text in texts * 2])

    def command(out: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "ddbatch",
            f"model.path={real_pair.target}",
            f"drafter.path={real_pair.drafter}",
            f"data.path={data}",
            f"output_dir={out}",
            "model.dtype=float32",
            "sampling.max_new_tokens=24",
            "engine.budget=8",
            "engine.rows=2",
            "output.part_rows=2",
        ]

    out, chance = tmp_path / "out", random.Random(5)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        parts = num_parts(out)
        process = subprocess.Popen(command(out), cwd=CHECKOUT, stderr=subprocess.DEVNULL)
        wait_for_parts(out, parts + 1, process)  # a GPU may be done before the signal comes
        time.sleep(chance.uniform(0, 0.5))
        process.send_signal(number)
        assert process.wait(timeout=60) in (75, -signal.SIGKILL, 0)
        assert 0 < assert_none_is_twice(out, tmp_path / "cache") <= len(texts) * 2
    for place in (out, tmp_path / "whole"):
        subprocess.run(command(place), cwd=CHECKOUT, check=True, capture_output=True)
    tables = []
    for place in (out, tmp_path / "whole"):
        rows = load_dataset(str(place), cache_dir=str(tmp_path / "cache"))["train"]
        content = [{name: row[name] for name in CONTENT} for row in rows]
        tables.append(sorted(content, key=key_of))
    assert tables[0] == tables[1]
    assert len(tables[0]) == len(texts) * 2
