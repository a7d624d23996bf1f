"""A plan that dies with a CUDA fault: the process starts again without it, and the run is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from ddbatch.core import ExitCode
from ddbatch.data.attempts import read_attempts
from ddbatch.data.folder import RunFolder

FAULTY = Path(__file__).with_name("faulty.py")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_plan_that_dies_is_left_out_by_the_restarted_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = subprocess.run(
        [sys.executable, str(FAULTY), f"output_dir={out}", "sampling.max_new_tokens=20"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == ExitCode.DONE, ran.stderr
    assert "starting again without the plan that was tried" in ran.stderr
    assert "captured: left out: a process died, or was killed, while it was tried" in ran.stderr
    assert pq.read_table(out / "completions").num_rows == 24
    died, finished = read_attempts(RunFolder(out))
    assert died.exit_code == ExitCode.ENGINE
    assert "CUDA" in str(died.reason)
    assert finished.exit_code == ExitCode.DONE
    (excluded,) = finished.about["excluded_plans"]  # type: ignore[misc]
    assert '"is_captured": true' in excluded
