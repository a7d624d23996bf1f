"""Who worked on the run, when, and how it ended: for people, and for `status`.

Nothing that keeps the run right depends on it: not on a name, not on a clock. Standard library
only.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddbatch.core import RunError
from ddbatch.data.folder import RunFolder, list_names, write_new

_STARTED, _ENDED = ".json", ".end.json"
_RUNS: dict[str, object] = {"ended_at": None, "exit_code": None, "reason": None}


@dataclass(frozen=True)
class Attempt:
    """One process that worked on the run; times are unix seconds of its own clock.

    about: what it was started with. exit_code, reason and ended_at are None while it runs, and for
    ever if it was killed. found: what it noted at its end of device and data.
    """

    name: str
    about: Mapping[str, object]
    started_at: float
    host: str
    pid: int
    exit_code: int | None
    reason: str | None
    ended_at: float | None
    found: Mapping[str, object] = field(default_factory=dict)
    is_gone: bool = False  # it was killed on this machine; of other machines nothing is known

    @property
    def is_over(self) -> bool:
        """Whether it surely works on the run no more."""
        return self.ended_at is not None or self.is_gone


def new_attempt() -> str:
    """A name for an attempt, random: clocks and process ids repeat."""
    return uuid.uuid4().hex[:12]


def start_attempt(folder: RunFolder, name: str, about: Mapping[str, object]) -> None:
    """Note that an attempt works on the run from now on."""
    started: dict[str, object] = {
        "started_at": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": _machine(),
        "about": dict(about),
    }
    is_new = _write(folder, name + _STARTED, started, name)
    assert is_new, f"attempt {name} is there already"


def end_attempt(
    folder: RunFolder,
    attempt: str,
    exit_code: int,
    reason: str,
    found: Mapping[str, object] | None = None,
) -> None:
    """Note how an attempt ended; the first note stays. An OSError is passed on."""
    ended = {
        "ended_at": time.time(),
        "exit_code": exit_code,
        "reason": reason,
        "found": dict(found or {}),
    }
    _write(folder, attempt + _ENDED, ended, attempt)


def read_attempts(folder: RunFolder) -> list[Attempt]:
    """All attempts, in the order of their starts as far as clocks can tell."""
    names = list_names(folder.state("attempts"))
    attempts = [
        _read_attempt(folder, name.removesuffix(_STARTED), names)
        for name in names
        if name.endswith(_STARTED) and not name.endswith(_ENDED)
    ]
    return sorted(attempts, key=lambda attempt: (attempt.started_at, attempt.name))


def killed_early(folder: RunFolder) -> set[str]:
    """Attempts of this machine that were killed before their start was noted: the note lies among
    their temporary files."""
    noted, found = set(list_names(folder.state("attempts"))), set()
    for name in list_names(folder.state("tmp")):
        file = folder.tmp(name) / (name + _STARTED)
        if name + _STARTED in noted or not file.exists():
            continue
        try:
            values = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # it may be written just now
        match values:
            case {"pid": int() as pid, "machine": str() | None as machine}:
                if _is_gone(machine, pid):
                    found.add(name)
    return found


def _read_attempt(folder: RunFolder, name: str, names: Collection[str]) -> Attempt:
    started = _read(folder, name + _STARTED)
    ended = _read(folder, name + _ENDED) if name + _ENDED in names else _RUNS
    match started, ended:
        case (
            {
                "started_at": int() | float() as started_at,
                "host": str() as host,
                "pid": int() as pid,
                "machine": str() | None as machine,
                "about": dict() as about,
            },
            {
                "ended_at": int() | float() | None as ended_at,
                "exit_code": int() | None as exit_code,
                "reason": str() | None as reason,
                **others,
            },
        ) if isinstance(found := others.get("found", {}), dict):  # earlier versions wrote none
            is_gone = ended is _RUNS and _is_gone(machine, pid)
            return Attempt(
                *(name, about, started_at, host, pid, exit_code, reason, ended_at), found, is_gone
            )
    raise _not_told(folder, name, "a field is missing or of a wrong kind")


def _machine() -> str | None:
    """Boot and process namespace, where a process id means something; None where none is told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _is_gone(machine: str | None, pid: int) -> bool:
    """Whether a process of this machine surely runs no more; of other machines nothing is known."""
    return machine == _machine() and not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    """Whether this machine has the process; one that has taken its number counts too."""
    if _machine() is None:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(folder: RunFolder, name: str) -> object:
    try:
        return json.loads((folder.state("attempts") / name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise _not_told(folder, name, str(error)) from error


def _not_told(folder: RunFolder, name: str, what: str) -> RunError:
    place = folder.state("attempts")
    return RunError(
        f"{place}: {name} tells of no attempt: {what}; the files there are for people only and "
        "may be deleted"
    )


def _write(folder: RunFolder, name: str, values: Mapping[str, object], attempt: str) -> bool:
    text = json.dumps(values, indent=1) + "\n"
    return write_new(text, folder.tmp(attempt) / name, folder.state("attempts") / name)
