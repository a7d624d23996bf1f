"""`python -m ddbatch` alone: the embedded demo, and what every run says at its end."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import Run, prompts
from tiny import write_cli_pair

from ddbatch import demo
from ddbatch.__main__ import main
from ddbatch.cli import as_typed
from ddbatch.config import Config
from ddbatch.jobs import show
from ddbatch.jobs.generating import closing

Captured = pytest.CaptureFixture[str]

CHECKOUT = Path(__file__).resolve().parent.parent
ROWS = 9
NEXT = "python -m ddbatch model.path=MODEL data.path=prompts.jsonl output_dir=out"
SHORT = "sampling.max_new_tokens=12"  # a tiny random pair has nothing to say


@pytest.fixture(scope="module")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random pair and prompts, laid out as the package's."""
    folder = write_cli_pair(tmp_path_factory.mktemp("embedded"))
    texts = [str(row["prompt"]) for row in prompts(ROWS)]
    ids = [f"p{number}" for number in range(ROWS)]
    pq.write_table(pa.table({"id": ids, "prompt": texts}), folder / "prompts.parquet")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(tiny_demo: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo is the tiny one, and the current folder is empty; returns the demo's folder."""
    monkeypatch.setattr(demo, "demo_folder", lambda: tiny_demo)
    return tiny_demo


def accepted(*arguments: str) -> Config:
    """The configuration that a command line becomes."""
    seen: list[Config] = []

    def remember(config: Config) -> int:
        seen.append(config)
        return 0

    assert main(arguments, remember) == 0
    return seen[0]


def rows(out: Path) -> list[dict[str, Any]]:
    table = pq.read_table(out / "completions").sort_by("row_id")
    found: list[dict[str, Any]] = table.to_pylist()
    return found


@pytest.mark.parametrize(
    "unset", [[], ["model.path=null", "drafter.path=null", "data.path=null", "output_dir=null"]]
)
def test_without_pair_and_prompts_the_embedded_ones_are_run(tiny: Path, unset: list[str]) -> None:
    config = accepted(*unset, "engine.budget=8", "data.limit=5")
    assert config.model.path == str(tiny / "target")
    assert config.drafter.path == str(tiny / "drafter")
    assert config.data.path == str(tiny / "prompts.parquet")
    assert config.output_dir == "outputs/demo"
    assert (config.engine.budget, config.data.limit) == (8, 5)


def test_the_demo_writes_where_it_is_told(tiny: Path) -> None:
    assert accepted("output_dir=elsewhere").output_dir == "elsewhere"


def test_a_model_of_ones_own_is_no_demo_and_gets_no_drafter(tiny: Path) -> None:
    config = accepted("model.path=/m", "data.path=/d", "output_dir=/o")
    assert config.drafter.path is None
    assert not demo.is_demo(config)


def test_the_demo_ends_with_a_summary_three_completions_and_what_to_type_next(
    tiny: Path, here: Path, capsys: Captured
) -> None:
    assert main([SHORT]) == 0
    out, err = capsys.readouterr()
    assert re.match(r"ddbatch: the embedded demo: .* kB\).*; writes to outputs/demo\n", err)
    assert re.search(r"^rows +9 finished \(.*\), 0 rejected", out, re.M)
    assert re.search(r"^tokens +.* tokens/s$", out, re.M)
    assert re.search(r"^acceptance length +\d\.\d\d tokens a round", out, re.M)
    share = re.search(r"^prefill +\d+ prompt tokens in .* s, ([\d.]+)% of the time$", out, re.M)
    assert share is not None
    assert 0 < float(share[1]) < 100
    assert re.search(r"^written to +outputs/demo$", out, re.M)
    done = rows(here / "outputs" / "demo")
    for row in (done[0], done[ROWS // 2], done[-1]):
        assert f"prompt  {row['messages'][0]['content']}\ntext    {row['completion']}\n" in out
    assert out.count("prompt  ") == 3
    assert f"\n  {NEXT}\n" in out
    assert max(map(len, out.splitlines())) <= 100

    # Other parts, order and method: the same is shown.
    again = [SHORT, "output_dir=other", "engine.rows=2", "output.part_rows=2", "engine.budget=0"]
    assert main(again) == 0
    assert len(list((here / "other" / "completions").iterdir())) > 2
    shown = out[out.index("prompt  ") :]
    assert capsys.readouterr().out.endswith(shown)


def test_the_demo_again_has_nothing_to_do_and_says_what_to_type_next(
    tiny: Path, here: Path, capsys: Captured
) -> None:
    assert main([SHORT], fake.run) == 0
    capsys.readouterr()
    assert main([SHORT, "engine.rows=2"], fake.run) == 0
    out = capsys.readouterr().out
    assert out.startswith("nothing to do: outputs/demo is complete, 9 finished")
    assert f"\n  {NEXT}\n" in out


def test_another_sampling_names_the_difference_and_how_to_write_elsewhere(
    tiny: Path, here: Path, capsys: Captured
) -> None:
    assert main([SHORT], fake.run) == 0
    capsys.readouterr()
    assert main([SHORT, "sampling.temperature=0.5"], fake.run) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "sampling.temperature: 0.0 in the run, 0.5 now" in error
    assert "another output_dir" in error
    assert hint.endswith("add output_dir=DIR")


def test_a_place_that_cannot_be_is_explained_to_who_never_named_it(
    tiny: Path, here: Path, capsys: Captured
) -> None:
    (here / "outputs").touch()
    assert main([], fake.run) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert f"{here / 'outputs'} is no folder that can be written to" in error
    assert hint.startswith("ddbatch: hint: the demo writes to outputs/demo unless")
    assert main(["output_dir=outputs/mine"], fake.run) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_broken_installation_is_named(
    tiny: Path, here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = here / "embedded"
    shutil.copytree(tiny, broken)
    (broken / "drafter" / "model.safetensors").unlink()
    monkeypatch.setattr(demo, "demo_folder", lambda: broken)
    assert main([]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "the embedded demo is not whole in this installation" in error
    assert "lacks drafter/model.safetensors; install ddbatch again" in error
    assert not (here / "outputs").exists()


def test_no_file_of_the_run_tells_where_the_package_is(tiny: Path, here: Path) -> None:
    assert main([SHORT]) == 0
    files = [file for file in (here / "outputs").rglob("*") if file.is_file()]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        assert str(tiny).encode() not in content, file
        assert str(here).encode() not in content, file


def test_other_jobs_need_an_output_dir_and_the_hint_knows_the_demos(
    tiny: Path, here: Path, capsys: Captured
) -> None:
    assert main(["job=status"]) == 2
    assert "job=status output_dir=DIR" in capsys.readouterr().err
    assert main([SHORT], fake.run) == 0
    capsys.readouterr()
    for job in ("status", "check"):
        assert main([f"job={job}"]) == 2
        hint = capsys.readouterr().err.splitlines()[1].removeprefix("ddbatch: hint: ")
        assert main(shlex.split(hint)[3:]) == 0
        assert "outputs/demo" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["out", 'it\'s "my" run, {1} = a', "${x} \\", "r/"])
def test_the_next_command_of_a_run_works_as_it_is_printed(
    tmp_path: Path, capsys: Captured, name: str
) -> None:
    run = Run(tmp_path, prompts(3))
    out = f"{tmp_path}/{name}"
    assert run(as_typed_here("output_dir", out)) == 0
    said, err = capsys.readouterr()
    assert not re.search(r"\bw0\b", said + err)  # no prompt goes into a log
    command = said.splitlines()[-1]
    assert command.startswith("  python -m ddbatch job=merge ")
    assert main(shlex.split(command)[3:]) == 0
    merged = Path(f"{out.rstrip('/')}-merged")
    assert sum(pq.read_metadata(file).num_rows for file in merged.rglob("*.parquet")) == 3


def test_a_run_without_a_completion_names_no_next_command(tmp_path: Path, capsys: Captured) -> None:
    assert Run(tmp_path, ["{bad"])() == 0  # output.max_error_rate=1
    assert "job=merge" not in capsys.readouterr().out


def as_typed_here(key: str, value: str) -> str:
    """KEY=VALUE as the shell hands it on."""
    return shlex.split(as_typed(key, value))[0]


def test_a_run_in_the_current_folder_is_not_merged_into_itself(here: Path) -> None:
    for place in (".", "./", "a/.."):
        assert f"merge.output_dir={here}-merged" in closing.after_run_text(place)
    assert f"merge.output_dir={here.parent}-merged" in closing.after_run_text("..")


def test_an_excerpt_is_whole_words_on_a_few_lines() -> None:
    text = "one two\n\n" + "word " * 100 + "\x1b[2Jend"
    lines = show.excerpt(text, "text", lines=3, indent=8).splitlines()
    assert lines[0] == "text    one two"
    assert len(lines) == 3
    assert all(line.startswith("        word word") for line in lines[1:])
    assert max(map(len, lines)) <= 100
    assert lines[-1].endswith("word ...")
    assert show.excerpt("\x1b[31mred\t!", "text", lines=3, indent=8) == "text     [31mred !"
    assert show.excerpt(" \n", "text", lines=3, indent=8) == "text    (empty)"


def test_a_narrow_terminal_gets_shorter_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show.width() == 100  # no terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns, width in ((80, 80), (200, 100), (10, 40)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert show.width() == width
        line = show.facts([("note", "word " * 60)])
        assert max(map(len, line.splitlines())) <= width


# From here on: the package's own pair and prompts (ddbatch/assets/demo), which must be there.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo, run as a user does in an empty folder, and what it has printed."""
    place = tmp_path_factory.mktemp("user")
    process = start(place)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return place, out


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ddbatch", *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_embedded_pair_drafts_well_and_its_run_is_whole(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    place, out = finished
    length = re.search(r"^acceptance length +(\S+) tokens a round", out, re.M)
    assert length is not None
    assert float(length[1]) >= 2.0
    num_prompts = pq.read_metadata(demo.demo_paths().data).num_rows
    assert re.search(rf"^rows +{num_prompts} finished \(.*\), 0 rejected", out, re.M)
    assert re.search(r"^tokens +.* tokens/s$", out, re.M)
    assert len(re.findall(r"^prompt  \w", out, re.M)) == len(re.findall(r"^text    \w", out, re.M))
    assert len(re.findall(r"^prompt  \w", out, re.M)) == 3
    assert f"\n  {NEXT}\n" in out
    assert max(map(len, out.splitlines())) <= 100
    monkeypatch.chdir(place)
    assert main(["job=check", "output_dir=outputs/demo"]) == 0
    assert main([]) == 0
    assert "nothing to do: outputs/demo is complete" in capsys.readouterr().out


def test_the_embedded_pair_says_what_its_target_says(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = finished
    monkeypatch.chdir(place)
    assert main(["engine.budget=0", "output_dir=plain"]) == 0
    tree, plain = rows(place / "outputs" / "demo"), rows(place / "plain")
    assert {row["draft_tokens"] for row in plain} == {0}
    assert all(row["draft_tokens"] for row in tree)
    ids = [(row["row_id"], row["output_token_ids"], row["stop_reason"]) for row in plain]
    assert ids == [(row["row_id"], row["output_token_ids"], row["stop_reason"]) for row in tree]


def test_the_demo_stopped_in_the_middle_is_finished_by_the_same_command(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = finished
    command = ["output_dir=stopped", "data.limit=12", "output.part_rows=1"]
    process = start(place, *command)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(place.glob("stopped/completions/*.parquet")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert "stopped by SIGINT" in err
    assert "of 12 rows are committed" in err
    assert "the same command resumes" in err
    monkeypatch.chdir(place)
    assert main(command) == 0
    whole, resumed = rows(place / "outputs" / "demo"), rows(place / "stopped")
    assert [row["output_token_ids"] for row in resumed] == [
        row["output_token_ids"] for row in whole[:12]
    ]
