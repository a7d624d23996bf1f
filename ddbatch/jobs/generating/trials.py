"""Which plans were tried on a device, and what became of them: verdicts that last, and plans that
killed their process.

A CUDA fault is sticky: the process can do nothing more on its device. So a plan's name stands in
the run's folder while it is tried. Whoever finds it there when its attempt is over leaves the plan
out, once: the fault may have been the machine's. Knows nothing about what a plan is, nor what is
tried, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ddbatch.core import RunError
from ddbatch.data.attempts import Attempt, read_attempts
from ddbatch.data.folder import RunFolder, list_names, write_new
from ddbatch.jobs.show import one_line, say

# What a restarted process inherits: the name of the plan to leave out. A name in the folder could
# be claimed by another worker that starts in the same moment.
_RESTARTED = "DDBATCH_RESTARTED_WITHOUT"


class Trials:
    """The trials of one attempt; a name is any text that tells a plan and all that its verdict
    depends on (versions, device, weights).

    The run's folder may not exist yet: folders are made when something is written. What the disk
    refuses is a RunError.
    """

    def __init__(self, folder: RunFolder, attempt: str) -> None:
        self._folder, self._attempt = folder, attempt
        inherited = os.environ.get(_RESTARTED)
        self._is_restarted = inherited is not None
        self._excluded = set() if inherited is None else {inherited}
        self._killer: str | None = None  # the plan that this process cannot go on after

    def verdict(self, name: str) -> Mapping[str, object] | None:
        """What was found about a plan before, by any attempt; None = nothing that can be read."""
        match _read(self._gate(name)):
            case {"name": str() as known, "verdict": dict() as verdict} if known == name:
                return verdict
        return None

    def keep(self, name: str, verdict: Mapping[str, object]) -> None:
        """Have a verdict last; of several the first stays.

        A file that tells of none is replaced: verdicts only save work, and it would cost every
        later start the trial.
        """
        file = self._gate(name)
        text = json.dumps({"name": name, "verdict": dict(verdict)}, indent=1) + "\n"
        with self._disk():
            if self.verdict(name) is None:
                file.unlink(missing_ok=True)
            write_new(text, self._folder.tmp(self._attempt) / "verdict.json", file)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """While the block runs the plan's name stands in the folder; it stays there if the process
        dies, or if the block ends with a CUDA fault. A device tells of a fault late: the block must
        wait for it before it ends."""
        file = self._folder.state("trying") / f"{self._attempt}.json"
        text = json.dumps({"name": name}) + "\n"
        with self._disk():
            is_new = write_new(text, self._folder.tmp(self._attempt) / "trying.json", file)
        assert is_new, f"{name} is tried while another plan is"
        try:
            yield
        except Exception as error:
            if is_cuda_fault(error):
                self._killer = name
            raise
        finally:
            if self._killer is None:
                with self._disk():
                    file.unlink(missing_ok=True)

    def excluded(self) -> frozenset[str]:
        """Plans that this process must leave out: those that were tried when other attempts died.

        Each is claimed by one process, for its own life.
        """
        place = self._folder.state("trying")
        files = [place / name for name in list_names(place) if name.endswith(".json")]
        if files:
            over = {attempt.name for attempt in self._attempts() if attempt.is_over}
            with self._disk():
                self._excluded.update(
                    name for file in files if file.stem in over for name in _claim(file)
                )
        return frozenset(self._excluded)

    def found_before(self, name: str) -> object:
        """What the last attempt that has noted something by this name found; None = none has."""
        return next((a.found[name] for a in reversed(self._attempts()) if name in a.found), None)

    def restart(self, reason: str) -> None:
        """Run the same command anew, in this process, without the plan that a CUDA fault ended.

        Returns where that must not be: there was no fault while a plan was tried, or this is a
        restart already. The attempt's end must have been noted.
        """
        if self._killer is None or self._is_restarted:
            return
        with suppress(OSError):  # the name goes to the successor in any case
            (self._folder.state("trying") / f"{self._attempt}.json").unlink()
        say(f"ddbatch: {one_line(reason, 300)}; starting again without the plan that was tried")
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or not there
                stream.flush()
        os.environ[_RESTARTED] = self._killer
        os.execv(sys.executable, sys.orig_argv)

    def _gate(self, name: str) -> Path:
        return self._folder.state("gates") / f"{hashlib.sha256(name.encode()).hexdigest()}.json"

    def _attempts(self) -> list[Attempt]:
        try:
            return read_attempts(self._folder)
        except RunError as error:  # nothing that keeps the run right depends on them
            say(f"note: {error}")
            return []

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"output_dir={self._folder.place}: {error}") from error


def failure_of_device(error: BaseException) -> str | None:
    """What a device did, where that is what an error says: no bug of ours."""
    if is_cuda_fault(error):
        return "the device failed"
    return "no memory, choose fewer engine.rows" if is_out_of_memory(error) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the machine, has no more memory; a CPU's error has no class of its
    own."""
    is_told = re.search("allocate memory|out of memory", str(error)) is not None
    return isinstance(error, RuntimeError) and is_told


def is_cuda_fault(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that CUDA failed: the process's context is lost."""
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        text = str(error)
        if "AcceleratorError" in names or (
            isinstance(error, RuntimeError)
            and ("CUDA error" in text or "Triton Error [CUDA]" in text)
        ):
            return True
        error = error.__cause__
    return False


def _read(file: Path) -> object:
    """What a JSON file holds; None where it is missing, damaged or out of reach."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _claim(file: Path) -> list[str]:
    """The name of the plan in a file that is ours now; nothing if another was faster."""
    held = _read(file)
    try:
        file.unlink()
    except FileNotFoundError:
        return []
    match held:
        case {"name": str() as name}:
            return [name]
    return []
