"""Progress: what a log gets every half minute, and how sure the time that is left is."""

from __future__ import annotations

import os
import re
import sys

import pytest
from test_schema import finished, rejected

from ddbatch.jobs.generating.progress import Progress
from ddbatch.jobs.generating.tally import Tally
from ddbatch.jobs.show import say


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def run(
    capsys: pytest.CaptureFixture[str], *, rates: list[int], num_units: int = 100_000
) -> list[str]:
    """The lines of a log; rates: rows a second, for so many minutes each."""
    clock, tally = Clock(), Tally(num_units)
    progress = Progress(tally, is_terminal=False, clock=clock)
    tokens = 0
    for rate in rates:
        for _ in range(60):
            clock.now += 1
            for _ in range(rate):
                row = finished(0)
                tally.add(0, [row])
                tokens += len(row.completion.token_ids)
            progress.show(tally, tokens)
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "\r" not in err
    return err.splitlines()


def test_a_log_gets_a_line_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, rates=[2] * 5)
    assert len(lines) == 10
    for line in lines:
        assert line.startswith("committed 0/100,000 rows, 18 tokens/s, ETA ")
        assert "0% truncated" in line


def test_tokens_a_second_are_those_of_the_last_minute(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, rates=[1, 1, 1, 10])
    rates = [int(found[1]) for line in lines if (found := re.search(r"(\d+) tokens/s", line))]
    assert rates[0] == rates[5] == 9
    assert rates[7] == 90


def test_the_time_left_is_a_range_between_the_last_minute_and_the_whole_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = run(capsys, rates=[1, 1, 1, 5], num_units=3600)
    assert "tokens/s, ETA 59 min, acc" in lines[1]
    # 480 rows are done; 3120 are left: at 5 a second, or at 2 as on the whole.
    assert "tokens/s, ETA 10 min to 26 min, acc" in lines[7]


def test_nothing_finished_means_an_unknown_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, rates=[0, 0])[-1].endswith("0 tokens/s, ETA unknown")


def test_rejected_rows_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    clock, tally = Clock(), Tally(9)
    progress = Progress(tally, is_terminal=False, clock=clock)
    tally.add(0, [rejected(1)])
    clock.now += 31
    progress.show(tally, 0)
    assert "1 rejected" in capsys.readouterr().err


def test_a_clock_that_stands_still_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    clock, tally = Clock(), Tally(9)
    progress = Progress(tally, is_terminal=False, clock=clock)
    for _ in range(5):
        progress.show(tally, 3)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_of_the_finished_rows(capsys: pytest.CaptureFixture[str]) -> None:
    clock, tally = Clock(), Tally(40)
    progress = Progress(tally, is_terminal=True, clock=clock)
    tally.add(0, [finished(1)])
    clock.now += 2
    progress.show(tally, 9)
    progress.close()
    said = capsys.readouterr().err
    assert "1/40, 4 tokens/s" in said
    assert "\r" in said


def test_a_line_that_nobody_reads_any_more_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who read stderr was killed: this line and the later ones go nowhere."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        say("heard")
        assert os.read(reader, 99) == b"heard\n"
        os.close(reader)
        for _ in range(3):
            say("into the void")
