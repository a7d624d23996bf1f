"""What README.md, CONTRIBUTING.md and the pages of docs/ name is there: files, headings, options,
columns and commands.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ddbatch import __main__ as command_line
from ddbatch.config import option_types
from ddbatch.data.schema import (
    acceptance_schema,
    completions_schema,
    logprobs_schema,
    rejected_schema,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
GROUPS = {key.split(".")[0] for key in option_types() if "." in key}
NO_OPTIONS = {"model.safetensors", "bench.parquet", "bench.json"}  # names of files
all_pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def without_code(text: str) -> str:
    """The page without its blocks of code, whose # and [] mean something else."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What `#` links to a page may name: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def options_named(text: str) -> set[str]:
    """Names like `sampling.top_k` in code of either kind, alone or with a value."""
    code = re.findall(r"```.*?```|`[^`]+`", text, re.S)
    words = "|".join(sorted(GROUPS))
    found = {name for part in code for name in re.findall(rf"(?<![\w./])(?:{words})\.\w+", part)}
    return found - NO_OPTIONS


def commands(text: str) -> list[str]:
    """Every `python -m ddbatch ...` of the page, and every `job=... ...` with more behind it."""
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"python -m ddbatch(?: [^`\n]*)?(?=[`\n])", joined)
    lines += [f"python -m ddbatch {words}" for words in re.findall(r"`(job=\w+ [^`]+)`", text)]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


@all_pages
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        links = re.findall(r"\]\(([\w./-]+\.md)", page.read_text(encoding="utf-8"))
        found = {(page.parent / link).resolve() for link in links}
        ahead += [file for file in found - seen if file.is_file()]
    assert set(PAGES) <= seen


@all_pages
def test_options_that_a_page_names_exist(page: Path) -> None:
    assert options_named(page.read_text(encoding="utf-8")) <= set(option_types())


def test_a_wrong_name_would_be_seen() -> None:
    text = "`sampling.topk=3`, `model.safetensors`, `docs/data.md`\n```\nengine.row=2\n```"
    assert options_named(text) == {"sampling.topk", "engine.row"}


@all_pages
def test_a_heading_has_text_below_it(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8")) + "\n# end"
    assert re.findall(r"^#+ .*\n\s*(?=^# |^## )", text, re.M) == []


def command_lines() -> list[str]:
    pages = (page.read_text(encoding="utf-8") for page in PAGES)
    return sorted({line for page in pages for line in commands(page)})


@pytest.mark.parametrize("line", command_lines())
def test_a_command_of_the_pages_is_accepted(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # names of files are relative, and nothing may be made here
    arguments = shlex.split(line)[3:]
    assert command_line.main(arguments, lambda config: 0) == 0, capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_pages_have_commands() -> None:
    lines = command_lines()
    assert "python -m ddbatch" in lines
    assert len(lines) >= 10


def test_the_readme_says_how_to_test_and_ci_finds_it() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n## Install and test\n") == 1
    block = re.search(
        r"^```bash\n(.*?)^```", readme.split("\n## Install and test\n")[1], re.M | re.S
    )
    assert block is not None
    parts = [part.strip() for part in block[1].split("&&")]
    assert parts[-4:] == ["python -m pytest", "ruff check .", "ruff format --check .", "mypy"]
    assert all(part.startswith("python -m pip install ") for part in parts[:-4])


def test_every_column_of_a_run_is_described() -> None:
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    stored = ("prompt_ids", "acceptance")
    for schema in (
        completions_schema(keep=(), store=stored),
        acceptance_schema(),
        logprobs_schema(1),
        rejected_schema(),
    ):
        for name in schema.names:
            assert f"`{name}`" in page, name


def test_columns_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("| column of `completions` |")[1].split("\n\n")[0]
    names = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
        if line.startswith("| `")
    ]
    assert len(names) >= 10
    assert set(names) <= set(completions_schema(keep=(), store=()).names)
