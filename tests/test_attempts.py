"""Who worked on a run: names that never repeat, and ends that may be missing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddbatch.core import RunError
from ddbatch.data.attempts import (
    end_attempt,
    killed_early,
    new_attempt,
    read_attempts,
    start_attempt,
)
from ddbatch.data.folder import RunFolder
from ddbatch.jobs.generating.noting import note_changes, sweep


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def start(folder: RunFolder, about: Mapping[str, object]) -> str:
    name = new_attempt()
    start_attempt(folder, name, about)
    return name


def test_an_attempt_tells_who_started_it_with_what_and_how_it_ended(folder: RunFolder) -> None:
    about = {"config": {"method": "tree"}, "versions": ["torch 2.8", None]}
    before = time.time()
    name = start(folder, about)
    (running,) = read_attempts(folder)
    assert (running.name, running.about) == (name, about)
    assert (running.host, running.pid) == (socket.gethostname(), os.getpid())
    assert before <= running.started_at <= time.time()
    assert (running.exit_code, running.reason, running.ended_at) == (None, None, None)
    end_attempt(folder, name, 75, "SIGTERM \ud800")
    (ended,) = read_attempts(folder)
    assert (ended.exit_code, ended.reason) == (75, "SIGTERM \ud800")
    assert ended.ended_at is not None
    assert running.started_at <= ended.ended_at <= time.time()
    assert not list(folder.tmp(name).iterdir())
    with pytest.raises(AssertionError, match="there already"):
        start_attempt(folder, name, {})


def test_names_are_random_and_plain(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.75e9)  # a clock that stands still
    names = {start(folder, {}) for _ in range(20)}
    assert len(names) == 20
    assert all(len(name) == 12 and set(name) <= set("0123456789abcdef") for name in names)
    assert {attempt.name for attempt in read_attempts(folder)} == names


def test_a_clock_that_jumps_changes_the_order_only(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for now in (2e9, 5.0, 1.75e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        names.append(start(folder, {}))
    end_attempt(folder, names[0], 0, "done")  # before it started
    attempts = read_attempts(folder)
    assert [attempt.name for attempt in attempts] == [names[1], names[2], names[0]]
    assert attempts[-1].ended_at == 1.75e9


def test_the_first_end_stays(folder: RunFolder) -> None:
    name = start(folder, {})
    end_attempt(folder, name, 0, "done")
    end_attempt(folder, name, 4, "late")
    (attempt,) = read_attempts(folder)
    assert (attempt.exit_code, attempt.reason) == (0, "done")


def test_without_attempts_there_are_none(folder: RunFolder) -> None:
    assert read_attempts(folder) == []
    start(folder, {})
    (folder.state("attempts") / ".nfs0001.json").write_text("")
    (folder.state("attempts") / "orphan.end.json").write_text("{}")
    (folder.state("attempts") / "notes.txt").write_text("")
    assert len(read_attempts(folder)) == 1


def test_an_attempt_is_over_once_it_has_ended_or_was_killed_on_this_machine(
    folder: RunFolder,
) -> None:
    ours, ended = start(folder, {}), start(folder, {})
    end_attempt(folder, ended, 0, "done")
    code = (
        "import os, sys; from pathlib import Path; from ddbatch.data.attempts import start_attempt;"
        "from ddbatch.data.folder import RunFolder;"
        "start_attempt(RunFolder(Path(sys.argv[1])), 'killed', {}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder.place)])
    away = folder.state("attempts") / "away.json"
    values = json.loads((folder.state("attempts") / "killed.json").read_text())
    away.write_text(json.dumps({**values, "machine": "another"}))
    over = {attempt.name: attempt.is_over for attempt in read_attempts(folder)}
    is_known = values["machine"] is not None
    assert over == {ours: False, ended: True, "killed": is_known, "away": False}


def test_a_disk_that_fails_is_not_hidden(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = start(folder, {})

    def fail(tmp: Path, final: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(OSError, match="No space left"):
        end_attempt(folder, name, 0, "done")


@pytest.mark.parametrize("text", [{}, {"found": {"planner": {"plans": [1]}}}])
def test_an_end_of_an_earlier_version_found_nothing(
    folder: RunFolder, text: dict[str, object]
) -> None:
    name = start(folder, {})
    end_attempt(folder, name, 0, "done")
    file = folder.state("attempts") / f"{name}.end.json"
    values = json.loads(file.read_text())
    del values["found"]
    file.write_text(json.dumps(values | text))
    (attempt,) = read_attempts(folder)
    assert (attempt.reason, attempt.found) == ("done", text.get("found", {}))


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        (field, kind)
        for field in ("started_at", "host", "pid", "about", "ended_at", "exit_code", "found")
        for kind in ("missing", "odd", "cut")
        if (field, kind) != ("found", "missing")
    ],
)
def test_a_file_that_tells_of_no_attempt_is_named(folder: RunFolder, field: str, kind: str) -> None:
    name = start(folder, {})
    end_attempt(folder, name, 0, "done")
    is_end = field in ("ended_at", "exit_code", "found")
    file = folder.state("attempts") / (name + (".end.json" if is_end else ".json"))
    values = json.loads(file.read_text())
    del values[field]
    text = json.dumps(values if kind == "missing" else {**values, field: [1]})
    file.write_text(text[:-3] if kind == "cut" else text)
    with pytest.raises(RunError, match=rf"attempts: {name}.* tells of no attempt.*deleted"):
        read_attempts(folder)


@pytest.mark.parametrize(
    ("now", "is_told"),
    [
        ({"rows": 8}, True),
        ({"reproducible": True}, True),
        ({"reproducible": True, "was": True, "plan": 8, "method": "chain", "drafter": "b"}, False),
        ({"reproducible": True, "was": True, "torch": "2"}, True),
    ],
)
def test_what_may_change_bits_is_noted(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], now: dict[str, object], is_told: bool
) -> None:
    """Of a reproducible run neither plan nor drafter does; was: whether it always was one."""
    was = bool(now.pop("was", False))
    before: dict[str, object] = {"dtype": "bfloat16", "rows": 4, "plan": 4, "method": "ddtree"}
    before |= {"reproducible": was, "drafter": "a", "torch": "1"}
    start(folder, before)
    note_changes(folder, before | now)
    assert ("changed since the last start" in capsys.readouterr().err) == is_told


def test_what_an_attempt_left_that_was_killed_before_its_start_was_noted_is_swept(
    folder: RunFolder,
) -> None:
    """It had written its note, and not made it final."""
    code = "import os; print(os.getpid())"
    gone = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    start(folder, {})
    about = json.loads(next(folder.state("attempts").iterdir()).read_text())
    for name, text in [
        ("killed", json.dumps(about | {"pid": gone})),
        ("begins", json.dumps(about)),
        ("elsewhere", json.dumps(about | {"pid": gone, "machine": "another"})),
        ("half", json.dumps(about | {"pid": gone})[:40]),
    ]:
        folder.tmp(name).mkdir(parents=True)
        (folder.tmp(name) / f"{name}.json").write_text(text)
    assert killed_early(folder) == {"killed"}
    sweep(folder)
    left = {place.name for place in folder.state("tmp").iterdir()}
    assert left & {"killed", "begins", "elsewhere", "half"} == {"begins", "elsewhere", "half"}
