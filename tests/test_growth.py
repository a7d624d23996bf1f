"""Workers whose views of a run differ, and runs of which something was taken away."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake
import pytest
from datasets import load_dataset
from runs import Run, prompts, rows_of, wait_until

from ddbatch.data.attempts import end_attempt, new_attempt, read_attempts, start_attempt
from ddbatch.data.folder import RunFolder
from ddbatch.jobs.generating import worker as worker_module

Captured = pytest.CaptureFixture[str]


def test_a_worker_with_a_smaller_view_does_not_touch_what_a_living_one_writes(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, prompts(60))
    assert run("data.limit=10") == 0
    folder = RunFolder(run.out)
    living = new_attempt()
    start_attempt(folder, living, {})
    mine = folder.tmp(living) / "completions-shard-00007-part-000000.parquet"
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_bytes(b"half")
    assert run("data.limit=10") == 0  # nothing to do: it sweeps
    assert mine.exists()
    end_attempt(folder, living, 75, "stopped")
    assert run("data.limit=10") == 0
    assert not mine.exists()


def test_workers_with_different_limits_make_one_run(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(120))
    processes = []
    for limit in ("30", "120", "60", "null"):
        processes.append(run.start(f"data.limit={limit}", "output.part_rows=1", step_seconds=0.005))
        time.sleep(0.15)
    ends = {process.wait(timeout=60): process.communicate()[1] for process in processes}
    assert set(ends) <= {0, 2}, ends  # 2: the input is longer than this limit by now
    assert run() == 0
    assert run.all_keys() == rows_of(120)
    assert run("job=check") == 0


def test_more_samples_while_a_worker_with_fewer_runs_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, prompts(30))
    hot = "sampling.temperature=0.5"
    grown: list[int] = []
    real = worker_module.Worker._open_shards

    def grow(self: worker_module.Worker) -> None:
        if not grown:
            grown.append(1)
            assert run(hot, "sampling.n=3") == 0  # another worker, with more samples, is done
        real(self)

    monkeypatch.setattr(worker_module.Worker, "_open_shards", grow)
    assert run(hot, "sampling.n=1") == 0
    assert run.all_keys() == rows_of(30, 3)


def test_an_attempt_that_was_killed_here_is_known_to_be_over(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(400))
    process = run.start(step_seconds=0.05)
    wait_until(lambda: list(run.out.glob(".ddbatch/attempts/*")))
    (attempt,) = read_attempts(RunFolder(run.out))
    assert not attempt.is_over
    process.kill()
    process.communicate()
    (attempt,) = read_attempts(RunFolder(run.out))
    assert attempt.is_gone
    assert attempt.is_over
    file = run.out / ".ddbatch" / "attempts" / f"{attempt.name}.json"
    file.write_text(file.read_text().replace('"machine": "', '"machine": "another '))
    (attempt,) = read_attempts(RunFolder(run.out))
    assert not attempt.is_over


def test_status_tells_a_killed_worker_from_a_running_one(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, prompts(600))
    process = run.start("output.part_rows=2", step_seconds=0.05)
    wait_until(lambda: list(run.out.glob("completions/*")))
    assert run("job=status") == 0
    assert " running " in capsys.readouterr().out
    process.kill()
    process.communicate()
    assert run("job=status") == 0
    said = capsys.readouterr().out
    assert " killed " in said
    assert "none is running" in said


@pytest.mark.parametrize("name", ["inputs/000000.json", "inputs"])
def test_a_lost_input_log_is_not_replaced_by_another(
    tmp_path: Path, capsys: Captured, name: str
) -> None:
    run = Run(tmp_path, prompts(20))
    assert run() == 0
    lost = run.out / ".ddbatch" / name
    lost.rename(tmp_path / "lost")
    for job in ("generate", "check", "status", "merge"):
        assert run(f"job={job}", f"merge.output_dir={tmp_path / 'm'}") == 4, job
        assert "inputs is empty, and the run has commits" in capsys.readouterr().err
    (tmp_path / "lost").rename(lost)
    assert run("job=check") == 0


def test_a_lost_manifest_is_told_as_such(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, prompts(5))
    assert run() == 0
    (run.out / "manifest.json").unlink()
    assert run() == 2
    assert "holds parts of a run whose manifest.json is gone" in capsys.readouterr().err


def test_a_lost_card_is_made_again_and_an_edited_one_stays(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(5))
    assert run() == 0
    card = run.out / "README.md"
    text = card.read_text()
    card.unlink()
    assert run() == 0
    assert card.read_text() == text
    card.write_text("mine")
    assert run() == 0
    assert card.read_text() == "mine"


def test_changed_bytes_are_found_by_check_and_mended_by_repair(
    tmp_path: Path, capsys: Captured
) -> None:
    run = Run(tmp_path, prompts(30))
    assert run() == 0
    whole = run.content()
    file = sorted(run.out.glob("completions/*"))[2]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert run("job=check") == 4
    said = capsys.readouterr().err
    assert file.name in said
    assert "output.resume=repair" in said
    assert run("output.resume=repair") == 0
    assert run("job=check") == 0
    assert run.content() == whole


def test_input_that_is_rewritten_with_its_size_kept_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    run = Run(tmp_path, prompts(40))
    before, real = run.data.read_text(), fake.FakeDecoder.step

    def step(self: fake.FakeDecoder) -> None:
        real(self)
        run.data.write_text(before.replace("w1", "w2"))

    monkeypatch.setattr(fake.FakeDecoder, "step", step)
    assert run() == 4
    assert "has changed since this run began" in capsys.readouterr().err
    monkeypatch.undo()
    run.data.write_text(before)
    assert run() == 0
    whole = tmp_path / "whole"
    assert run(f"output_dir={whole}") == 0
    assert run.content() == run.content(whole)


def test_a_relative_folder_with_a_colon_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, prompts(7))
    monkeypatch.chdir(tmp_path)
    assert run("output_dir=run:1") == 0
    assert run("output_dir=run:1", "job=check") == 0
    assert run("output_dir=run:1", "job=merge", "merge.output_dir=clean:1") == 0
    assert len(run.table(out=tmp_path / "run:1")) == 7


def test_messages_keep_what_the_model_saw_of_tools_and_a_run_over_the_run_sees_it_too(
    tmp_path: Path,
) -> None:
    call = [{"id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}]
    chat = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "w2", "tool_call_id": "c1"},
    ]
    plain = [{"role": "user", "content": "w3"}]
    run = Run(tmp_path, [{"messages": plain}, {"messages": chat}])
    template = "{% for m in messages %}<s> {{ m.content }} {{ m.tool_calls | tojson }} {% endfor %}"
    fake.write_tokenizer(run.model, template.replace("m.tool_calls", "(m.tool_calls or [])"))
    assert run() == 0
    messages = run.table()[1]["messages"]
    assert json.loads(messages[1]["tool_calls"]) == call
    assert messages[2]["tool_call_id"] == "c1"
    again = tmp_path / "again"
    assert run(f"data.path={run.out}", f"output_dir={again}", "data.messages_column=messages") == 0
    ids = [row["prompt_token_ids"] for row in run.table(out=again)]
    assert ids == [row["prompt_token_ids"] for row in run.table()]


def test_two_merges_of_one_name_are_not_taken_for_each_other(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(9))
    assert run() == 0
    sizes = []
    for place, more in (("a", []), ("b", ["merge.filter=row_id < 3"])):
        out = tmp_path / place / "clean"
        out.parent.mkdir()
        arguments = ["job=merge", f"merge.output_dir={out}", *(f"{o!r}" for o in ())]
        assert run(*arguments, *(f'merge.filter="{o.partition("=")[2]}"' for o in more)) == 0
        sizes.append(len(load_dataset(str(out), cache_dir=str(tmp_path / "cache"))["train"]))
    assert sizes == [9, 3]


def test_two_runs_of_one_name_are_not_taken_for_each_other(tmp_path: Path) -> None:
    sizes = []
    for count in (3, 5):
        run = Run(tmp_path / str(count), prompts(count))
        assert run() == 0
        sizes.append(len(load_dataset(str(run.out), cache_dir=str(tmp_path / "cache"))["train"]))
    assert sizes == [3, 5]


def test_a_signal_while_the_options_are_read_is_a_stop_too(tmp_path: Path) -> None:
    code = """
import os, signal, sys
import ddbatch.cli as cli
def stopped(arguments, real=cli.read):
    os.kill(os.getpid(), signal.SIGUSR1)
    return real(arguments)
cli.read = stopped
from ddbatch.__main__ import main
sys.exit(main(["model.path=m", "data.path=d", "output_dir=o"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 75
    assert done.stderr == "ddbatch: stopped by SIGUSR1\n"


def test_a_reader_that_leaves_costs_no_row_and_no_traceback(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(9))
    process = run.start(step_seconds=0.01)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait(timeout=30) == 4
    assert said == "ddbatch: error: not everything could be said on stdout: Broken pipe\n"
    assert run.all_keys() == rows_of(9)


@pytest.mark.parametrize(("stdout", "code"), [(">&-", 0), ("> /dev/full", 4)])
def test_a_stdout_that_is_closed_or_full_costs_no_row_and_no_traceback(
    tmp_path: Path, stdout: str, code: int
) -> None:
    run = Run(tmp_path, prompts(9))
    command = shlex.join([sys.executable, str(Path(fake.__file__)), *run.arguments()])
    env = {**os.environ, "FAKE": "{}"}
    done = subprocess.run(["bash", "-c", f"{command} {stdout}"], env=env, capture_output=True)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert (b"not everything could be said on stdout: No space left" in done.stderr) == (code == 4)
    assert run.all_keys() == rows_of(9)


def test_names_that_a_terminal_cannot_show_end_no_job(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(3))
    run.out = tmp_path / "\u65e5\u672c"
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "FAKE": "{}"}
    command = [sys.executable, str(Path(fake.__file__)), *run.arguments()]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\\u65e5" in done.stdout


def test_signals_are_the_default_again_after_a_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    assert Run(tmp_path, prompts(3))() == 0
    assert signal.getsignal(signal.SIGUSR2) is before
