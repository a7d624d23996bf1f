"""Plans that were tried: verdicts last, and a plan that killed its process is left out once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake import FAILURE, FakeOptions
from runs import Run, prompts, wait_until

from ddbatch.core import RunError
from ddbatch.data.attempts import end_attempt, read_attempts, start_attempt
from ddbatch.data.folder import RunFolder
from ddbatch.jobs.generating.trials import Trials, is_cuda_fault

CHECKOUT = Path(__file__).resolve().parent.parent
# A job that tries the plans "wide" and "narrow" until one works. Arguments: the run's folder, what
# happens to a plan that is no good, and which are no good.
PROGRAM = """
import os, sys, time
from pathlib import Path
from ddbatch.data.attempts import end_attempt, new_attempt, start_attempt
from ddbatch.data.folder import RunFolder
from ddbatch.jobs.generating.trials import Trials

folder, fate, bad = RunFolder(Path(sys.argv[1])), sys.argv[2], sys.argv[3].split(",")
attempt = new_attempt()
start_attempt(folder, attempt, {})
trials = Trials(folder, attempt)
without = trials.excluded()
print("without", *sorted(without), flush=True)

def lose_the_device():
    import torch
    held = torch.empty(int(0.7 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")
    held[torch.tensor([len(held) + 7], device="cuda")] += 1
    torch.cuda.synchronize()

def meet_its_fate():
    if fate == "abort":
        os.abort()
    elif fate == "wait":
        time.sleep(600)
    elif fate == "real":
        lose_the_device()
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def work():
    for plan in ("wide", "narrow"):
        if plan in without:
            continue
        with trials.trying(plan):
            if plan in bad:
                meet_its_fate()
            if fate == "real":
                import torch
                free, whole = torch.cuda.mem_get_info()
                assert free > 0.6 * whole, "the lost context keeps its memory"
            print("works:", plan, flush=True)
            return

code, reason = 0, "done"
try:
    work()
except RuntimeError as error:
    code, reason = 4, str(error).splitlines()[0]
end_attempt(folder, attempt, code, reason)
trials.restart(reason)
sys.exit(code)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def start(folder: RunFolder, fate: str, bad: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(folder.place), fate, bad]
    return subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
    )


def run(folder: RunFolder, fate: str, bad: str) -> tuple[int, list[str]]:
    """The exit code, and the lines on stdout, those of a restart among them."""
    process = start(folder, fate, bad)
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err, err
    return process.returncode, out.splitlines()


def opened(folder: RunFolder, attempt: str) -> Trials:
    start_attempt(folder, attempt, {})
    return Trials(folder, attempt)


def names_in(folder: RunFolder, state: str) -> list[str]:
    return sorted(path.name for path in folder.state(state).glob("*"))


def test_a_plan_that_kills_its_process_is_left_out_by_the_next_start_alone(
    folder: RunFolder,
) -> None:
    assert run(folder, "abort", "wide") == (-signal.SIGABRT, ["without"])
    assert len(names_in(folder, "trying")) == 1
    assert run(folder, "abort", "wide") == (0, ["without wide", "works: narrow"])
    assert names_in(folder, "trying") == []
    assert run(folder, "abort", "wide") == (-signal.SIGABRT, ["without"])


def test_a_cuda_fault_starts_the_command_again_without_the_plan(folder: RunFolder) -> None:
    assert run(folder, "fault", "wide") == (0, ["without", "without wide", "works: narrow"])
    first, second = read_attempts(folder)
    assert first.pid == second.pid
    assert (first.exit_code, second.exit_code) == (4, 0)
    assert "illegal memory access" in str(first.reason)
    assert names_in(folder, "trying") == []


def test_a_restart_is_not_restarted(folder: RunFolder) -> None:
    assert run(folder, "fault", "wide,narrow") == (4, ["without", "without wide"])
    assert len(names_in(folder, "trying")) == 1
    assert run(folder, "fault", "narrow") == (0, ["without narrow", "works: wide"])


def test_the_plan_that_another_process_is_trying_is_left_alone(folder: RunFolder) -> None:
    process = start(folder, "wait", "wide")
    wait_until(lambda: names_in(folder, "trying"))
    ours, later = opened(folder, "ours"), opened(folder, "later")
    assert ours.excluded() == frozenset()
    assert len(names_in(folder, "trying")) == 1
    process.kill()
    process.communicate(timeout=60)
    claimed = ours.excluded()
    assert claimed == {"wide"}
    assert later.excluded() == frozenset()
    assert ours.excluded() == claimed


def test_a_plan_that_ends_without_a_cuda_fault_leaves_nothing(folder: RunFolder) -> None:
    trials = opened(folder, "ours")
    with trials.trying("wide"):
        assert names_in(folder, "trying") == ["ours.json"]
    for error in (ValueError("no"), KeyboardInterrupt(), RuntimeError("CUDA out of memory")):
        with pytest.raises(type(error)), trials.trying("wide"):
            raise error
        assert names_in(folder, "trying") == []
        trials.restart("nothing to restart for")


def test_a_restart_leaves_out_its_own_plan_whoever_claims_what(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that start together die together, and the first to come back claims all names."""
    called = []
    monkeypatch.setattr(os, "execv", lambda *call: called.append(call))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    killed = [opened(folder, name) for name in ("a", "b")]
    for trials in killed:
        with pytest.raises(RuntimeError), trials.trying("wide"):
            raise RuntimeError("CUDA error: misaligned address")
    end_attempt(folder, "a", 4, "CUDA error")
    end_attempt(folder, "b", 4, "CUDA error")
    assert Trials(folder, "c").excluded() == {"wide"}
    killed[1].restart("CUDA error")
    assert called == [(sys.executable, sys.orig_argv)]
    assert Trials(folder, "b2").excluded() == {"wide"}


def test_verdicts_last_and_the_first_stays(folder: RunFolder) -> None:
    trials = Trials(folder, "ours")
    assert trials.verdict("wide") is None
    assert trials.excluded() == frozenset()
    assert not folder.place.exists()
    trials.keep("wide", {"is_passed": False, "reason": "\ud800 no"})
    trials.keep("narrow", {"is_passed": True})
    Trials(folder, "theirs").keep("wide", {"is_passed": True})
    later = Trials(folder, "later")
    assert later.verdict("wide") == {"is_passed": False, "reason": "\ud800 no"}
    assert later.verdict("narrow") == {"is_passed": True}
    assert not list(folder.tmp("ours").iterdir())


def test_what_runs_found_is_there_for_later_attempts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Run(tmp_path, prompts(9))
    trials = Trials(RunFolder(whole.out), "ours")
    assert trials.found_before("planner") is None
    notes: list[dict[str, object]] = [{"planner": 1}, {"planner": {"a": [2.5]}}, {"other": 3}]
    for found in notes:
        with pytest.raises(RuntimeError, match=FAILURE):
            whole(engine=FakeOptions(found=found, fail_at_step=2))
    assert trials.found_before("planner") == {"a": [2.5]}
    assert trials.found_before("other") == 3
    assert whole(engine=FakeOptions(found={"planner": 4})) == 0
    assert trials.found_before("planner") == 4
    next(RunFolder(whole.out).state("attempts").glob("*.end.json")).write_text("{")
    assert trials.found_before("planner") is None
    assert "tells of no attempt" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "another", "verdict": {}}'])
def test_a_damaged_verdict_is_none_and_is_replaced(folder: RunFolder, text: str) -> None:
    trials = Trials(folder, "ours")
    trials.keep("wide", {"is_passed": False})
    (file,) = folder.state("gates").iterdir()
    file.write_text(text)
    assert trials.verdict("wide") is None
    trials.keep("wide", {"is_passed": True})
    assert trials.verdict("wide") == {"is_passed": True}


def test_a_damaged_name_of_a_plan_is_removed(folder: RunFolder) -> None:
    trials = opened(folder, "ours")
    end_attempt(folder, "ours", 4, "CUDA error")
    folder.state("trying").mkdir()
    (folder.state("trying") / "ours.json").write_text("{")
    assert trials.excluded() == frozenset()
    assert names_in(folder, "trying") == []


def test_a_disk_that_refuses_is_no_bug(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tmp: Path, final: Path) -> None:
        raise OSError(28, "No space left on device")

    trials = opened(folder, "ours")
    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(RunError, match="No space left"):
        trials.keep("wide", {})
    with pytest.raises(RunError, match="No space left"), trials.trying("wide"):
        pass


def test_cuda_faults_are_told_from_other_errors() -> None:
    class AcceleratorError(RuntimeError):
        pass

    wrapped = RunError("the round failed")
    wrapped.__cause__ = RuntimeError("Triton Error [CUDA]: an illegal memory access")
    assert is_cuda_fault(AcceleratorError("unspecified launch failure"))
    assert is_cuda_fault(RuntimeError("CUDA error: device-side assert triggered"))
    assert is_cuda_fault(wrapped)
    assert not is_cuda_fault(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_cuda_fault(ValueError("CUDA error: of a user"))
    assert not is_cuda_fault(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_cuda_fault_gives_the_memory_back(folder: RunFolder) -> None:
    code, lines = run(folder, "real", "wide")
    assert (code, lines[-1]) == (0, "works: narrow")
