"""Exactly once: workers that race, die and lie about what worked leave every key in one place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import interrupts
import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from interrupts import CHANGES, Process, cut_off, quickly, run_hooked
from small_run import (
    SHARDS,
    Log,
    check,
    check_complete,
    committed_keys,
    generate,
    keys_of,
    visible_keys,
    write_part,
)

from ddbatch.core import Key
from ddbatch.data.commits import (
    clean_tmp,
    commit,
    read_shard,
    recover,
    roll_forward,
)
from ddbatch.data.folder import RunFolder

MAX_PROCESSES = 4
# Calls that a network file system makes twice: the second time it reports what the first did.
LIES = {"link": FileExistsError, "rename": FileNotFoundError, "unlink": FileNotFoundError}
NUMBERS = st.integers(0, MAX_PROCESSES - 1)


class Workers(RuleBasedStateMachine):
    """Up to four processes at once; a rule lets one of them go on by some calls to the system."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="ddbatch-protocol-"))
        self.folder = RunFolder(self.place)
        self.processes: list[Process] = []
        self.logs: list[Log] = []
        self.num_started = 0
        self.seen: set[Key] = set()
        self.hooks = interrupts.hooks()
        self.hooks.__enter__()

    def choose(self, number: int) -> Process:
        return self.processes[number % len(self.processes)]

    def run(self, process: Process, num_calls: int, before: str | None = None) -> None:
        """Let it make calls, up to a number or before one of a name; look at the disk meanwhile."""
        for _ in range(num_calls):
            made = process.step()
            if made in ("link", "rename", "unlink"):
                self.look()
            if process.next_call in (None, before):
                break
        if process.next_call is None:
            self.processes.remove(process)

    def look(self) -> None:
        check(self.folder)
        committed = set(committed_keys(self.folder))
        assert self.seen <= committed, "what was committed is gone"
        self.seen = committed

    @initialize(seed=st.integers(0, 9))
    def start_two(self, seed: int) -> None:
        self.start_worker(seed, 1)
        self.start_worker(seed, 2)

    @precondition(lambda self: len(self.processes) < MAX_PROCESSES)
    @rule(seed=st.integers(0, 9), part_units=st.integers(1, 3))
    def start_worker(self, seed: int, part_units: int) -> None:
        self.num_started += 1
        name = f"attempt{self.num_started}"

        def work() -> None:
            self.logs.append(generate(self.folder, name, seed, part_units, self.over))

        self.processes.append(Process(work, name))

    def over(self) -> set[str]:
        """Attempts that were killed or have come to their end."""
        started = {f"attempt{number + 1}" for number in range(self.num_started)}
        return started - {process.name for process in self.processes}

    @precondition(lambda self: len(self.processes) < MAX_PROCESSES)
    @rule()
    def start_reader(self) -> None:
        indices = [shard.index for shard in SHARDS]
        self.processes.append(Process(lambda: [recover(self.folder, shard) for shard in indices]))

    @precondition(lambda self: self.processes)
    @rule(number=NUMBERS, num_calls=st.integers(1, 6) | st.integers(20, 100))
    def go_on(self, number: int, num_calls: int) -> None:
        self.run(self.choose(number), num_calls)

    @precondition(lambda self: self.processes)
    @rule(number=NUMBERS, call=st.sampled_from(["link", "rename", "unlink", "opened", "read"]))
    def go_on_until_before(self, number: int, call: str) -> None:
        self.run(self.choose(number), 1000, before=call)

    @rule()
    def all_go_on_until_before_the_link(self) -> None:
        for process in list(self.processes):
            if process.next_call != "link":
                self.run(process, 1000, before="link")

    @precondition(lambda self: self.processes)
    @rule(number=NUMBERS, call=st.sampled_from([*CHANGES, "stat", "read"]))
    def kill_before(self, number: int, call: str) -> None:
        process = self.choose(number)
        self.run(process, 1000, before=call)
        if process in self.processes:
            process.kill()
            self.processes.remove(process)
            self.look()

    @precondition(lambda self: self.processes)
    @rule(number=NUMBERS, call=st.sampled_from(sorted(LIES)))
    def a_call_that_works_reports_a_failure(self, number: int, call: str) -> None:
        self.choose(number).lies[call] = LIES[call]

    def teardown(self) -> None:
        try:
            last = run_hooked(lambda: generate(self.folder, "last", over=self.over), quickly)
            self.logs.append(last)
            check_complete(self.folder)
            while self.processes:  # stale by now
                self.run(self.processes[0], 100_000)
            check_complete(self.folder)
            clean_tmp(self.folder, self.over())
            check_complete(self.folder)
            records = [
                record for shard in SHARDS for record in read_shard(self.folder, shard.index)
            ]
            won = [record for log in self.logs for record in log.won]
            assert all(record in records for record in won)
            assert not any(record in records for log in self.logs for record in log.lost)
            event(f"numbers lost: {sum(len(log.lost) for log in self.logs)}")
        finally:
            for process in self.processes:
                process.kill()
            self.hooks.__exit__(None, None, None)
            shutil.rmtree(self.place)


Workers.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    phases=[Phase.generate],  # shrinking takes minutes; add it to look into a failure
    suppress_health_check=list(HealthCheck),
)
TestWorkers = Workers.TestCase


def new_folder(tmp_path: Path, *names: object) -> RunFolder:
    place = tmp_path / "-".join(map(str, names))
    place.mkdir()
    (place / "manifest.json").write_text('{"schemas": {"completions": "", "rejected": ""}}')
    return RunFolder(place)


FIRST_UNITS = [(0, 0), (1, 1), (2, 0)]
FIRST_KEYS = sorted(key for unit in FIRST_UNITS for key in keys_of(unit))


def commit_first_part(folder: RunFolder) -> None:
    record = write_part(folder, 0, 0, "first", FIRST_UNITS)
    assert len(record.files) == 3
    assert commit(folder, record)
    roll_forward(folder, record)


def finish(folder: RunFolder) -> Log:
    with interrupts.hooks():
        log: Log = run_hooked(lambda: generate(folder, "last"), quickly)
    check_complete(folder)
    return log


def test_a_part_is_committed_wholly_or_not_at_all_wherever_its_worker_dies(tmp_path: Path) -> None:
    num_committed = 0
    for after in count():
        folder = new_folder(tmp_path, after)
        if not cut_off(partial(commit_first_part, folder), after):
            break
        check(folder)
        is_committed = folder.record(0, 0).exists()
        assert is_committed or not visible_keys(folder)
        num_committed += is_committed
        recover(folder, 0)
        check(folder)
        assert sorted(visible_keys(folder)) == (FIRST_KEYS if is_committed else [])
        blocks = [block for record in finish(folder).won for block in record.keys]
        redone = {key for block in blocks for key in block.keys()}  # noqa: SIM118
        assert redone.isdisjoint(FIRST_KEYS) == is_committed
    assert after > 25, after
    assert 5 < num_committed < after - 5, (num_committed, after)


def test_roll_forward_goes_on_wherever_two_before_it_died(tmp_path: Path) -> None:
    num_pairs = 0
    for first in count():
        folder = new_folder(tmp_path, first)
        if not cut_off(partial(commit_first_part, folder), first):
            break
        for second in count():
            again = new_folder(tmp_path, first, second)
            shutil.copytree(folder.place, again.place, dirs_exist_ok=True)
            is_cut = cut_off(partial(recover, again, 0), second)
            check(again)
            recover(again, 0)
            check(again)
            expected = FIRST_KEYS if folder.record(0, 0).exists() else []
            assert sorted(visible_keys(again)) == expected
            if not is_cut:
                break
            num_pairs += 1
    assert num_pairs > 50, num_pairs


def test_the_disk_has_each_step_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    record = write_part(folder, 0, 0, "first", FIRST_UNITS)
    calls: list[tuple[str, int]] = []  # with the inode of what is synced, or made visible

    def traced(name: str, inode_of: Callable[..., int]) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            calls.append((name, inode_of(*args)))
            return real(*args)

        monkeypatch.setattr(os, name, call)

    traced("fsync", lambda handle: os.fstat(handle).st_ino)
    traced("link", lambda tmp, final: os.stat(tmp).st_ino)
    traced("rename", lambda tmp, final: os.stat(tmp).st_ino)
    assert commit(folder, record)
    linked = len(calls)
    roll_forward(folder, record)

    def inode(path: Path) -> int:
        return path.stat().st_ino

    link = calls.index(("link", inode(folder.record(0, 0))))
    assert ("fsync", inode(folder.record(0, 0))) in calls[:link]
    assert ("fsync", inode(folder.records(0))) in calls[link:linked]
    assert ("fsync", inode(folder.state("commits"))) in calls[:link]
    renames = [place for place, (name, _) in enumerate(calls) if name == "rename"]
    assert len(renames) == 3
    assert ("fsync", inode(folder.records(0))) in calls[linked : renames[0]]
    for file in record.files:
        renamed = calls.index(("rename", inode(folder.place / file.final)))
        assert ("fsync", inode((folder.place / file.final).parent)) in calls[renamed:]


RACER = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from small_run import write_part
from ddbatch.core import Shard
from ddbatch.data.commits import commit, discard, mark_finished, recover, roll_forward
from ddbatch.data.folder import RunFolder

os.fsync = lambda handle: None  # nobody cuts the power in a race
folder, name, won = RunFolder(Path(sys.argv[2])), sys.argv[3], []
print("ready", flush=True)
sys.stdin.readline()
for shard in [Shard(index, 20 * index, 20) for index in range(10)]:
    while True:
        records = recover(folder, shard.index)
        finished = mark_finished(records, shard, 1)
        if finished.all():
            break
        row_id = shard.first_row + int(finished[:, 0].argmin())  # all want the same
        record = write_part(folder, shard.index, len(records), name, [(row_id, 0)])
        if commit(folder, record):
            roll_forward(folder, record)
            won.append((record.shard, record.number))
        else:
            discard(folder, record)
print(json.dumps(won))
"""


def test_of_four_processes_exactly_one_gets_each_number(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    tests = str(Path(__file__).parent)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, tests, str(folder.place), f"racer{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    won = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        won.append(json.loads(racer.communicate()[0]))
        assert racer.returncode == 0
    numbers = [(shard, number) for shard in range(10) for number in range(20)]
    assert sorted(tuple(name) for names in won for name in names) == numbers
    assert sum(bool(names) for names in won) > 1, "there was no race"
    assert sorted(visible_keys(folder)) == sorted(
        key for row_id in range(200) for key in keys_of((row_id, 0))
    )
    assert not list(folder.state("tmp").glob("*/*"))
