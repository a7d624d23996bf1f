"""Stopping by signal: SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 mean the same.

Outside of a `patient` block the first signal raises KeyboardInterrupt, which ends a job that has
nothing to save. Inside it only sets a flag, so that a commit is never cut in two. Everywhere a
second signal ends the process at once. Knows nothing about what is saved.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from ddbatch.core import ExitCode

# Slurm sends TERM, schedulers with a warning USR1 or USR2, people INT, a terminal that closes HUP.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Stop:
    """The signal that asked for an end; None while there was none."""

    signal_name: str | None = None


@contextmanager
def impatient() -> Iterator[None]:
    """Signals interrupt the block with KeyboardInterrupt(name), whatever it becomes on its way."""
    stop = Stop()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        _listen(_exit_now)
        stop.signal_name = signal.Signals(signum).name
        raise KeyboardInterrupt(stop.signal_name)

    with _handled_by(interrupt):
        try:
            yield
        except BaseException as error:
            if stop.signal_name is None or isinstance(error, KeyboardInterrupt):
                raise
            # A library that was cut off in the middle may fail at its own cleaning up: OmegaConf
            # does, with an AttributeError that would be taken for a mistake in the options.
            raise KeyboardInterrupt(stop.signal_name) from error


@contextmanager
def patient(grace_seconds: float) -> Iterator[Stop]:
    """A signal sets the flag; the block sees to it within grace_seconds or the process ends.

    The end by the clock has the same exit code: committed parts are whole, the rest is redone.
    """
    stop = Stop()
    watchdog = threading.Timer(grace_seconds, _exit_late, (grace_seconds,))
    watchdog.daemon = True

    def note(signum: int, frame: FrameType | None) -> None:
        _listen(_exit_now)
        stop.signal_name = signal.Signals(signum).name
        watchdog.start()

    with _handled_by(note):
        try:
            yield stop
        finally:
            watchdog.cancel()


@contextmanager
def _handled_by(handler: signal._HANDLER) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in _heard()}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _listen(handler: signal._HANDLER) -> None:
    """Hand later signals to another; a terminal that closes sends several, and means one."""
    for number in _heard():
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else handler)


def _heard() -> list[signal.Signals]:
    """nohup means it: who started us may want us to outlive the terminal."""
    is_kept_up = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (is_kept_up and number == signal.SIGHUP)]


def _exit_now(signum: int, frame: FrameType | None) -> None:
    os._exit(ExitCode.STOPPED_TWICE)


def _exit_late(grace_seconds: float) -> None:
    sys.stderr.write(
        f"ddbatch: output.grace_seconds={grace_seconds:g} are over before everything was written; "
        "committed parts are whole, the same command resumes\n"
    )
    sys.stderr.flush()
    os._exit(ExitCode.STOPPED)
