"""Halt real code between two of its calls to the system: to end it there, or to let others go on.

Knows nothing about what the code does. A process that is killed runs no handler and no `finally`:
after Killed every further call of the same run raises Killed as well.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

# What changes the disk. A file opened for writing is one call more once it is there, and empty.
CHANGES = ("link", "rename", "replace", "unlink", "mkdir", "rmdir", "fsync", "open", "opened")
READS = ("listdir", "stat", "read")

Call = Callable[[], Any]
Hook = Callable[[str, Call], Any]

_local = threading.local()


class Killed(BaseException):
    """The process is no more."""


@contextmanager
def hooks() -> Iterator[None]:
    """Within: the hook of a thread that has one sees each call by its name, and makes it or not."""
    with (
        mock.patch.multiple(
            os,
            **{name: _hooked(name, getattr(os, name)) for name in (*CHANGES[:7], *READS[:2])},
        ),
        mock.patch.object(io, "open", _hooked_open(io.open)),
    ):
        yield


def _hooked(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        hook: Hook | None = getattr(_local, "hook", None)
        return real(*args, **kwargs) if hook is None else hook(name, lambda: real(*args, **kwargs))

    return call


def _hooked_open(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        hook: Hook | None = getattr(_local, "hook", None)
        if hook is None:
            return real(file, mode, *args, **kwargs)
        is_new = "w" in mode or "x" in mode
        opened = hook("open" if is_new else "read", lambda: real(file, mode, *args, **kwargs))
        if is_new:
            try:
                hook("opened", lambda: None)
            except BaseException:
                opened.close()
                raise
        return opened

    return call


def run_hooked(work: Call, hook: Hook) -> Any:
    """What `work` returns when each of its calls goes through the hook."""
    _local.hook = hook
    try:
        return work()
    finally:
        _local.hook = None


def quickly(name: str, call: Call) -> Any:
    """A hook that makes every call but waits for no disk: only processes die here."""
    return None if name == "fsync" else call()


def cut_off(work: Call, after: int) -> bool:
    """Run `work` and kill it once it has changed the disk so many times; whether it came so far."""
    num_changes = 0

    def hook(name: str, call: Call) -> Any:
        nonlocal num_changes
        if name in CHANGES:
            if num_changes == after:
                raise Killed
            num_changes += 1
        return quickly(name, call)

    with hooks():
        try:
            run_hooked(work, hook)
        except Killed:
            return True
    return False


class Process:
    """A thread that halts before each of its calls until it is told to go on.

    Only one thread at a time runs: the one that is told to, or the one that tells.
    """

    def __init__(self, work: Call, name: str = "") -> None:
        self.name = name
        self.next_call: str | None = "start"  # None once it has ended
        self.lies: dict[str, type[OSError]] = {}  # a call by name that works and reports a failure
        self.error: BaseException | None = None
        self._is_killed = False
        self._go, self._halted = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def step(self) -> str | None:
        """Make the call that it halts before, and go to the next one; the name of the call made."""
        made = self.next_call
        if made is not None:
            self._go.release()
            self._halted.acquire()
            if self.error is not None:
                raise self.error
        return made

    def kill(self) -> None:
        """End it where it is; its files stay."""
        self._is_killed = True
        self.step()
        assert self.next_call is None

    def _run(self, work: Call) -> None:
        self._go.acquire()
        try:
            if not self._is_killed:
                run_hooked(work, self._hook)
        except Killed:
            assert self._is_killed
        except BaseException as error:
            self.error = error
        self.next_call = None
        self._halted.release()

    def _hook(self, name: str, call: Call) -> Any:
        if not self._is_killed:
            self.next_call = name
            self._halted.release()
            self._go.acquire()
        if self._is_killed:
            raise Killed
        result = quickly(name, call)
        if name in self.lies:
            raise self.lies.pop(name)("reported although it worked")
        return result
