"""Stopping: the first signal is noted or interrupts, a second one or the clock ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

import ddbatch.__main__ as command_line
from ddbatch.jobs.stopping import SIGNALS, impatient, patient


@pytest.fixture(autouse=True)
def _like_in_a_terminal() -> Iterator[None]:
    """Under nohup a suite would inherit that hangups are ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_patient_block_only_notes_the_signal(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with patient(grace_seconds=60) as stop:
        assert stop.signal_name is None
        signal.raise_signal(number)
        assert stop.signal_name == number.name
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", SIGNALS)
def test_an_impatient_block_is_interrupted(number: signal.Signals) -> None:
    def block() -> None:
        with impatient():
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt, match=number.name):
        block()


def test_an_interrupt_that_becomes_an_error_on_its_way_is_still_an_interrupt() -> None:
    def library() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise AttributeError("half undone")

    def block() -> None:
        with impatient():
            library()

    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        block()


@pytest.mark.parametrize("place", ["options", "job"])
def test_a_command_line_interrupted_where_a_library_fails_at_it_has_been_stopped(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(given: object) -> NoReturn:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise ValueError("half undone")

    if place == "options":
        monkeypatch.setattr(command_line, "_compose", fail)
    assert command_line.main(["job=status", "output_dir=out"], fail) == 75
    assert capsys.readouterr().err == "ddbatch: stopped by SIGTERM\n"


def test_a_patient_block_inside_an_impatient_one_wins() -> None:
    with impatient(), patient(grace_seconds=60) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal_name == "SIGTERM"


def test_a_terminal_that_closes_stops_a_run_unless_nohup_said_no() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with impatient(), patient(grace_seconds=60) as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.signal_name is None
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with patient(grace_seconds=60) as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.signal_name == "SIGHUP"
    signal.signal(signal.SIGHUP, before)


CODE = """
import sys, time
from ddbatch.jobs.stopping import patient
with patient(grace_seconds=float(sys.argv[1])) as stop:
    print("running", flush=True)
    while True:
        time.sleep(0.01)
        if stop.signal_name:
            print("stopping", flush=True)
            time.sleep(60)
"""


def started(grace_seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(grace_seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR2])
def test_a_second_signal_of_any_kind_exits_at_once_with_130(second: signal.Signals) -> None:
    process = started(60)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(second)
    assert process.wait(timeout=20) == 130


def test_a_second_hangup_is_no_second_signal() -> None:
    """The kernel and the shell both send one when a terminal closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = started(60)
    signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 130


def test_a_block_that_outlives_the_grace_time_ends_with_75_and_says_so() -> None:
    process = started(0.3)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 75
    assert time.monotonic() - begun < 10
    assert "output.grace_seconds=0.3 are over" in said
