"""Where Triton keeps what it compiles: on this machine, in a folder that is the user's alone."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ddbatch.__main__ import main
from ddbatch.config import Config

Place = Callable[[], Path | None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """What a job finds, on a machine whose temp folder is tmp_path."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # so that its absence comes back
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[str | None] = []

    def look(config: Config) -> int:
        seen.append(os.environ.get("TRITON_CACHE_DIR"))
        return 0

    module = ModuleType("ddbatch.jobs.generate")
    module.run = look  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def found() -> Path | None:
        assert main(["model.path=/m", "data.path=/d", "output_dir=/o"]) == 0
        name = seen.pop()
        return None if name is None else Path(name)

    return found


def usual(tmp_path: Path) -> Path:
    return tmp_path / f"ddbatch-triton-{os.getuid()}"


def test_it_is_a_private_folder_of_this_machine_that_stays(place: Place, tmp_path: Path) -> None:
    first = place()
    assert first == usual(tmp_path)
    assert first.stat().st_mode & 0o777 == 0o700
    del os.environ["TRITON_CACHE_DIR"]  # another process
    assert place() == first


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_a_place_that_was_chosen_is_kept(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "/scratch/triton")
    chosen = {"TRITON_CACHE_DIR": Path("/scratch/triton"), "TRITON_HOME": None}[name]
    assert place() == chosen
    assert not list(tmp_path.glob("ddbatch-triton-*"))


@pytest.mark.parametrize("kind", ["another's", "open", "link", "dangling", "file"])
def test_a_folder_that_others_may_write_into_is_not_used(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    taken, other = usual(tmp_path), tmp_path / "other"
    if kind == "another's":
        monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
        taken = usual(tmp_path)
        taken.mkdir(mode=0o700)
    elif kind == "open":
        taken.mkdir()
        taken.chmod(0o777)
    elif kind == "link":
        other.mkdir()
        taken.symlink_to(other)
    elif kind == "dangling":
        taken.symlink_to(other)
    else:
        taken.write_text("")
    own = place()
    assert own is not None
    assert own not in (taken, other)
    assert own.parent == tmp_path
    assert own.stat().st_mode & 0o777 == 0o700


def test_who_only_looks_makes_no_folder(place: Place, tmp_path: Path) -> None:
    assert main(["--help"]) == main(["--version"]) == 0
    assert main(["model.path=/m"]) == 2
    assert not list(tmp_path.iterdir())
