"""A failed audit leaves a mark: no start, check or merge takes the run for a sound one."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import ddbatch.engine.round as round_module
from ddbatch.__main__ import main
from ddbatch.core import ExitCode
from ddbatch.engine.verify import verify


def test_a_run_whose_audit_failed_is_refused_until_the_mark_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row draws the token beside its own: everything it writes looks right."""
    run = [f"output_dir={tmp_path / 'out'}", "engine.device=cpu", "sampling.max_new_tokens=12"]

    def wrong(*given: object) -> None:
        verify(*given)  # type: ignore[arg-type]
        state = given[1]
        choice_BN: Tensor = state.choice_BN  # type: ignore[attr-defined]
        choice_BN[3] = (choice_BN[3] + 1) % 100

    with monkeypatch.context() as planted:
        planted.setattr(round_module, "verify", wrong)
        assert main([*run, "engine.audit_rate=1"]) == ExitCode.ENGINE
    assert "The engine's output cannot be trusted" in capsys.readouterr().err
    for arguments in (
        run,
        ["job=check", run[0]],
        ["job=merge", run[0], f"merge.output_dir={tmp_path / 'merged'}"],
    ):
        assert main(arguments) == ExitCode.ENGINE
        said = capsys.readouterr().err
        assert "an audit of this run has failed, so its rows cannot be trusted: audit of" in said
        assert "removes" in said
    assert not (tmp_path / "merged").exists()
    (mark,) = (tmp_path / "out" / ".ddbatch" / "distrust").iterdir()
    mark.unlink()
    assert main(run) == ExitCode.DONE
