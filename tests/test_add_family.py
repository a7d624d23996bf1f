"""What docs/families.md says about adding a family, done in a copy of the checkout: a new family
passes the tests of all families when the page is followed to the letter.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"


class Step(NamedTuple):
    """The words of a step and the block below them."""

    words: str
    code: str

    @property
    def names(self) -> list[str]:
        """What stands in backquotes: the file first, then a table in it."""
        return re.findall(r"`([^`]+)`", self.words)


def read_steps() -> list[Step]:
    """The numbered steps that have a block of code."""
    part = PAGE.read_text(encoding="utf-8").split("## Adding a family")[1]
    found = re.findall(r"^\d\. ([^`](?:(?!^\d\. |^```).)*)^```\w+\n(.*?)^```", part, re.M | re.S)
    return [Step(*pair) for pair in found]


def insert(file: Path, table: str, code: str) -> None:
    """Put imports behind the file's imports, and entries at the end of a table."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    fresh = code.splitlines(keepends=True)
    imports = [line for line in fresh if line.startswith("from ")]
    entries = [line for line in fresh if not line.startswith("from ")]
    (start,) = (number for number, line in enumerate(lines) if re.match(rf"{table}\b.*= {{$", line))
    end = lines.index("}\n", start)
    last_import = max(n for n, line in enumerate(lines[:start]) if line.startswith("from "))
    lines[end:end] = entries
    lines[last_import + 1 : last_import + 1] = imports
    file.write_text("".join(lines), encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the steps touch and need."""
    for name in ("ddbatch", "kernels", "tests"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "outputs")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_a_family_added_as_the_page_says_passes_the_tests_of_all(checkout: Path) -> None:
    new_file, *insertions, run = read_steps()
    assert len(insertions) == 4
    file = checkout / new_file.names[0]
    assert not file.exists()
    file.write_text(new_file.code, encoding="utf-8")
    for step in insertions:
        insert(checkout / step.names[0], step.names[1], step.code)
    program, *arguments = shlex.split(run.code)
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *arguments, "-p", "no:cacheprovider"],
        cwd=checkout,
        # The copy goes before what is installed.
        env={**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'kernels'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    # Two variants against transformers, one pair against the oracle.
    assert int(passed[1]) >= 40, done.stdout


def test_every_family_of_the_table_stands_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    source = (ROOT / "ddbatch" / "models" / "families.py").read_text(encoding="utf-8")
    names = re.findall(r'"(\w+)": read_', source)
    assert len(names) >= 4
    for name in names:
        assert f"| `{name}` |" in page
