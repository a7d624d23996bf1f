"""The option tables of README.md and docs/options.md: made from the options, and up to date."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddbatch import options
from ddbatch.checks import JOBS, NOT_BUILT, RULES, Rule, check, option
from ddbatch.config import Config, SamplingConfig, option_types
from ddbatch.demo import OUTPUT_DIR
from ddbatch.engine.plan import (
    AUTO_BUDGET,
    AUTO_PAGE_CUDA,
    AUTO_ROWS,
    MAX_AUTO_ROWS,
    MAX_TOPK,
)

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class ChangedSampling(SamplingConfig):
    """Another default, and an option that no table has."""

    max_new_tokens: int = 77


@dataclass
class ChangedConfig(Config):
    """The options with another group `sampling`."""

    sampling: SamplingConfig = field(default_factory=ChangedSampling)


def row(table: str, key: str) -> list[str]:
    """The cells of an option's row."""
    (line,) = (line for line in table.splitlines() if line.startswith(f"| `{key}` |"))
    return line.removeprefix("| ").removesuffix(" |").split(" | ")


def copy_pages(place: Path) -> Path:
    """A checkout of nothing but the two pages."""
    (place / "docs").mkdir()
    for name in ("README.md", "docs/options.md"):
        shutil.copy(ROOT / name, place / name)
    return place


def test_both_pages_hold_what_python_m_ddbatch_options_makes(tmp_path: Path) -> None:
    assert options.rewrite(copy_pages(tmp_path)) == []


def test_every_option_is_described_and_nothing_else_is() -> None:
    assert set(options.DESCRIPTIONS) == set(option_types())
    assert all(text.strip() == text != "" for text in options.DESCRIPTIONS.values())
    assert {*options.AUTO, *options.VALUES, *options.FIRST} <= set(option_types())


def test_the_page_has_every_option_once_and_the_readme_the_first_ones() -> None:
    names = r"^\| `([\w.]+)` \|"
    assert re.findall(names, options.all_tables(), re.M) == list(option_types())
    assert re.findall(names, options.first_table(), re.M) == list(options.FIRST)
    assert len(set(options.FIRST)) == len(options.FIRST)


@pytest.mark.parametrize(
    "table", [options.first_table(), options.all_tables()], ids=["README", "docs"]
)
def test_every_row_has_as_many_cells_as_its_head(table: str) -> None:
    for part in table.split("\n\n"):
        lines = [line for line in part.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1, part


def test_a_new_default_changes_both_tables() -> None:
    for make in (options.first_table, options.all_tables):
        assert row(make(Config), "sampling.max_new_tokens")[1] == "`1024`"
        assert row(make(ChangedConfig), "sampling.max_new_tokens")[1] == "`77`"


def test_a_new_word_of_a_rule_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "model.hash", Rule(("fast", "full", "none")))
    assert row(options.all_tables(), "model.hash")[2] == "`fast`, `full`, `none`"


def test_what_is_not_built_is_marked_with_what_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = options.all_tables()
    later = {f"{group}.{name}" for group, names in NOT_BUILT.items() for name in names.split()}
    marked = {key for key in option_types() if "**not built yet**" in row(table, key)[-1]}
    assert marked == later
    assert row(table, "shards.wait")[2] == "only `false`"
    monkeypatch.setitem(NOT_BUILT, "shards", "")
    assert row(options.all_tables(), "shards.wait")[2] == "`true`, `false`"
    assert "not built" not in row(options.all_tables(), "shards.wait")[-1]


def test_jobs_that_are_not_built_are_told_apart() -> None:
    cells = row(options.all_tables(), "job")
    assert "`generate`" in cells[2]
    assert "`verify`" not in cells[2]
    assert all(f"`{job}`" in cells[2] + cells[3] for job in JOBS)


def test_auto_is_told_with_the_numbers_of_the_planner() -> None:
    rows = row(options.first_table(), "engine.rows")[1]
    assert rows.startswith(f"`auto`: {AUTO_ROWS['cpu']} on a CPU; on CUDA ")
    assert f"at most {MAX_AUTO_ROWS} ({AUTO_ROWS['cuda']} with " in rows
    assert re.findall(r"\d+", options.AUTO["engine.budget"]) == [str(AUTO_BUDGET)]
    assert options.AUTO["engine.topk"].endswith(f"at most {MAX_TOPK}")
    assert options.AUTO["engine.page"].endswith(f"{AUTO_PAGE_CUDA} on CUDA")


def test_no_auto_hides_its_meaning() -> None:
    defaults = Config()
    autos = {key for key in option_types() if option(defaults, key) == "auto"}
    assert autos == set(options.AUTO)


def test_devices_of_the_page_are_accepted() -> None:
    words = re.findall("`([^`]+)`", options.VALUES["engine.device"])
    assert len(words) == 4
    for word in words:
        config = Config(output_dir="out")
        config.model.path, config.data.path = "target", "prompts.jsonl"
        config.engine.device = word.replace("N", "1")
        check(config)


def test_the_place_of_the_demo_is_told() -> None:
    assert f"`{OUTPUT_DIR}`" in row(options.first_table(), "output_dir")[-1]


def test_a_stale_table_is_rewritten_in_place(tmp_path: Path) -> None:
    root = copy_pages(tmp_path)
    page = root / "README.md"
    fresh = page.read_text(encoding="utf-8")
    page.write_text(fresh.replace("| `1024` |", "| `512` |"), encoding="utf-8")
    assert options.rewrite(root) == ["README.md"]
    assert page.read_text(encoding="utf-8") == fresh


@pytest.mark.parametrize(
    "page",
    [
        "no marks",
        options.BEGIN,
        f"{options.END}\n{options.BEGIN}",
        f"{options.BEGIN}\n{options.END}\n{options.END}",
    ],
    ids=["no marks", "no end", "the wrong order", "two ends"],
)
def test_a_page_without_its_marks_is_refused_by_name(page: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md: expected one line '<!-- options"):
        options.replaced(page, "body", "page.md")


def test_text_around_the_marks_stays() -> None:
    page = f"above\n{options.BEGIN}\nold\n{options.END}\nbelow"
    assert options.replaced(page, "new", "page.md") == (
        f"above\n{options.BEGIN}\n\nnew\n\n{options.END}\nbelow"
    )


def test_the_command_needs_a_checkout(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    ignored = shutil.ignore_patterns("__pycache__", "assets")
    shutil.copytree(ROOT / "ddbatch", installed / "ddbatch", ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-m", "ddbatch.options"], cwd=installed, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "the option tables are made in a checkout" in done.stderr
