"""Try one candidate in a process of its own, and say what became of it.

A CUDA fault is sticky and a hang has no end: neither may reach the process that asks. Knows what a
candidate's process says (child.py), and nothing about limits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from ddbatch.core import RunError
from ddbatch.engine.probe import WidthErrors
from ddbatch.jobs.probing.child import Task
from ddbatch.jobs.show import one_line

COMMAND = (sys.executable, "-m", "ddbatch.jobs.probing.child")
KILL_SECONDS = 30.0  # until a killed process must be gone

Outcome = Literal["ok", "wrong values", "crashed", "timed out", "no memory"]


@dataclass(frozen=True)
class Tried:
    """What became of a candidate. detail: for people."""

    tokens: int
    outcome: Outcome
    detail: str
    seconds: float


def try_candidate(task: Task, timeout: float, command: Sequence[str] = COMMAND) -> Tried:
    """Run a candidate for at most so many seconds. command: what the task is given to."""
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, json.dumps(asdict(task))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts can be killed with it
    )
    is_late = False
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        is_late = True
        out, err = _kill(process, task)
    finally:
        if process.returncode is None:
            _kill(process, task)
    outcome, detail = _judge(process.returncode, out, err, timeout if is_late else None)
    return Tried(task.tokens, outcome, detail, time.monotonic() - started)


def _kill(process: subprocess.Popen[str], task: Task) -> tuple[str, str]:
    """End a process and those that it started; what they had said."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=KILL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"job=probe: the process of {task.tokens} tokens ({process.pid}) hangs and cannot be "
            "killed; the device may need a reset"
        ) from error


def _judge(code: int, out: str, err: str, late: float | None) -> tuple[Outcome, str]:
    """What a process that has ended says, and its end. late: its time, where that was over."""
    where, found = "before its first round", list[str]()
    for line in _lines(out):
        match line:
            case {"rows": int() as rows, "nodes": int() as nodes}:
                where = f"{rows} x {nodes}"
            case {"errors": dict() as told}:
                errors = WidthErrors(**told)
                found.append(_errors(where, errors))
                if not errors.is_sound:
                    return "wrong values", found[-1]
            case {"no_memory": str() as text}:
                return "no memory", f"{where}: {one_line(text, 100)}"
    if late is not None:
        return "timed out", f"{where}: not done after {late:g} s"
    if code == -signal.SIGKILL:  # nobody here sent it: a machine does that to who takes its memory
        return "no memory", f"{where}: killed from outside"
    if code < 0:
        return "crashed", f"{where}: {signal.Signals(-code).name}"
    if code or not found:
        return "crashed", f"{where}: {one_line(_reason(err) or f'exit code {code}', 160)}"
    return "ok", "; ".join(found)


def _reason(err: str) -> str:
    """The line of a traceback that names the error; CUDA's go on with advice below it."""
    lines = err.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines or [""])[-1]


def _lines(out: str) -> list[object]:
    """The JSON objects among the lines; libraries may say something of their own."""
    found: list[object] = []
    for line in out.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _errors(where: str, errors: WidthErrors) -> str:
    """The figure that decides."""
    if errors.engine <= errors.allowed and not errors.is_sound:
        return f"{where}: a score is off by {errors.worst:.2g}, allowed {errors.allowed_worst:.2g}"
    return f"{where}: error {errors.engine:.2g}, allowed {errors.allowed:.2g}"
