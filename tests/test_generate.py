"""`python -m ddbatch` from a prompts file to Parquet, with a tiny pair: what a user of it sees."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fake import VOCAB
from runs import wait_until
from tiny import edit_config, edit_tensors, load_tiny_pair, write_cli_pair
from tokenizers import Tokenizer

from ddbatch.__main__ import main
from ddbatch.engine import oracle

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target/ and drafter/."""
    return write_cli_pair(tmp_path_factory.mktemp("pair"))


def command(pair: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={pair / 'target'}",
        f"drafter.path={pair / 'drafter'}",
        f"data.path={data}",
        f"output_dir={out}",
        "sampling.max_new_tokens=12",
        *more,
    ]


def write_jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return file


def table(out: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out / name).to_pylist()
    return rows


def test_a_model_folder_that_is_not_there_is_missed_before_its_tokenizer(
    pair: Path, tmp_path: Path, capsys: Captured
) -> None:
    data = write_jsonl(tmp_path / "p.jsonl", PROMPTS)
    for key in ("model.path", "drafter.path"):
        line = [item for item in command(pair, data, tmp_path / "out") if not item.startswith(key)]
        assert main([*line, f"{key}=targte"]) == 2
        assert f"error: {key}=targte: no such folder; allowed: a Hugging" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rows_for_which_there_is_no_memory_are_a_failure_that_names_the_option(
    pair: Path, tmp_path: Path, capsys: Captured
) -> None:
    data = write_jsonl(tmp_path / "p.jsonl", PROMPTS)
    assert main(command(pair, data, tmp_path / "out", "engine.rows=10000000000000")) == 4
    assert "engine.rows=10000000000000: no memory for so many rows" in capsys.readouterr().err


PROMPTS = [{"prompt": f"w{n} w{n + 7} w{3 * n}", "name": f"row {n}"} for n in range(7)]


@pytest.mark.parametrize(
    "options",
    [
        ["engine.budget=6"],
        ["engine.method=chain"],
        ["engine.method=autoregressive"],
        ["engine.budget=0"],
        ["engine.page=3", "engine.rows=2"],
        ["model.dtype=float32"],
    ],
)
def test_completions_are_what_the_target_says(
    pair: Path, tmp_path: Path, capsys: Captured, options: list[str]
) -> None:
    data, out = write_jsonl(tmp_path / "prompts.jsonl", PROMPTS), tmp_path / "out"
    assert main(command(pair, data, out, "data.id_column=name", *options)) == 0
    rows = table(out, "completions")
    target, _ = load_tiny_pair(tmp_path / "again", vocab=VOCAB, block=4, max_positions=80)
    for number, row in enumerate(rows):
        assert (row["row_id"], row["turn"], row["sample"]) == (number, 0, 0)
        assert row["id"] == PROMPTS[number]["name"]
        words = f"<s> user {PROMPTS[number]['prompt']} <s> assistant".split()
        tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
        assert row["prompt_token_ids"] == [tokenizer.token_to_id(word) for word in words]
        steps = oracle.decode(
            target, tuple(row["prompt_token_ids"]), max_new_tokens=12, stop_token_ids=(1,)
        )
        assert row["output_token_ids"] == [step.token_id for step in steps]
        assert row["completion"].split() == [
            tokenizer.id_to_token(i) for i in row["output_token_ids"] if i > 1
        ]
    assert len(rows) == 7
    said = capsys.readouterr().out
    assert "7 finished" in said
    assert str(out) in said


def test_acceptance_and_completions_hold_the_same_rows(pair: Path, tmp_path: Path) -> None:
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "out"
    assert main(command(pair, data, out, "engine.budget=5", "output.part_rows=3")) == 0
    assert len(list((out / "completions").iterdir())) == 3
    for done, stats in zip(table(out, "completions"), table(out, "acceptance"), strict=True):
        assert done["row_id"] == stats["row_id"]
        assert done["num_steps"] == len(stats["accepted"]) == len(stats["depth"])
        assert done["accepted_tokens"] == sum(stats["accepted"])
        assert done["draft_tokens"] == 5 * done["num_steps"]


def test_bad_rows_are_kept_with_their_reason_and_cost_nothing_else(
    pair: Path, tmp_path: Path, capsys: Captured
) -> None:
    rows: list[Any] = [
        PROMPTS[0],
        "{no json",
        {"prompt": "  "},
        {"prompt": 7},
        {"other": 1},
        PROMPTS[1],
        {"prompt": " ".join(["w1"] * 90)},
    ]
    data, out = write_jsonl(tmp_path / "p.jsonl", rows), tmp_path / "out"
    assert main(command(pair, data, out)) == 3  # more than 1% of the rows
    assert [row["row_id"] for row in table(out, "completions")] == [0, 5]
    rejected = {row["row_id"]: row for row in table(out, "rejected")}
    assert {row_id: row["code"] for row_id, row in rejected.items()} == {
        1: "bad_json",
        2: "empty_prompt",
        3: "wrong_type",
        4: "missing_field",
        6: "prompt_too_long",
    }
    assert "79" in rejected[6]["reason"]  # the context of 80, less one token to emit
    said = capsys.readouterr()
    assert "5 rejected" in said.out
    assert "5 of 7 rows were rejected, more than output.max_error_rate=0.01" in said.err


def test_the_conversation_that_the_model_saw_is_kept(pair: Path, tmp_path: Path) -> None:
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS[:2]), tmp_path / "out"
    assert main(command(pair, data, out, "data.system_prompt=w9 w8")) == 0
    for row in table(out, "completions"):
        assert [turn["role"] for turn in row["messages"]] == ["system", "user", "assistant"]
        assert row["messages"][0]["content"] == "w9 w8"
        assert row["messages"][-1]["content"] == row["completion"]


def test_a_prompt_that_is_cut_leaves_room_for_the_completion(pair: Path, tmp_path: Path) -> None:
    long = {"token_ids": [5 + n % 80 for n in range(100)]}
    data = write_jsonl(tmp_path / "p.jsonl", [long, {"token_ids": [5] * 75}])
    out = tmp_path / "out"
    options = ["data.on_long=truncate_left", "sampling.ignore_eos=true"]
    assert main(command(pair, data, out, *options)) == 0
    cut, fitting = table(out, "completions")
    assert cut["prompt_token_ids"] == long["token_ids"][-68:]
    assert (cut["output_tokens"], fitting["prompt_tokens"]) == (12, 75)


def test_equal_ids_are_noted_and_all_rows_are_made(
    pair: Path, tmp_path: Path, capsys: Captured
) -> None:
    data = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w1", "id": "a"}] * 3)
    assert main(command(pair, data, tmp_path / "out", "data.id_column=id")) == 0
    assert "2 rows with an id (data.id_column) that came before" in capsys.readouterr().out
    assert len(table(tmp_path / "out", "completions")) == 3


def test_a_cap_that_does_not_fit_the_context_is_lowered_and_said(
    pair: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "p.jsonl", [{"token_ids": [5] * n} for n in (1, 70, 79)])
    out = tmp_path / "out"
    assert main(command(pair, data, out, "sampling.ignore_eos=true", "engine.budget=4")) == 0
    rows = table(out, "completions")
    assert [row["max_new_tokens"] for row in rows] == [12, 10, 1]
    assert [row["output_tokens"] for row in rows] == [12, 10, 1]
    assert [row["finish_reason"] for row in rows] == ["length"] * 3
    assert [row["stop_reason"] for row in rows] == [None, "context", "context"]


def test_stop_ids_are_the_union_of_what_the_model_and_the_user_name(
    pair: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "p.jsonl", PROMPTS)
    plain = ["engine.method=autoregressive", "sampling.ignore_eos=true"]
    assert main(command(pair, data, tmp_path / "free", *plain)) == 0
    free = {
        row["row_id"]: row["output_token_ids"] for row in table(tmp_path / "free", "completions")
    }
    user_stop, model_stop = free[0][4], free[1][2]
    target = tmp_path / "stops"
    target.mkdir()
    (target / "drafter").symlink_to(pair / "drafter")
    (target / "target").mkdir()
    for file in (pair / "target").iterdir():
        (target / "target" / file.name).write_bytes(file.read_bytes())
    (target / "target" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, model_stop], "temperature": 0.6})
    )
    out = tmp_path / "out"
    assert main(command(target, data, out, f"sampling.stop_token_ids=[{user_stop}]")) == 0
    for row in table(out, "completions"):
        output = free[row["row_id"]]
        ends = [output.index(stop) for stop in (1, user_stop, model_stop) if stop in output]
        if ends:
            assert row["output_token_ids"] == output[: min(ends) + 1]
            assert row["stop_reason"] == str(output[min(ends)])
        else:
            assert row["output_token_ids"] == output


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["drafter.block=5"], ["drafter.block=5", "4"]),
        (["sampling.stop_token_ids=[97]"], ["sampling.stop_token_ids", "97", "0..96"]),
        (["engine.max_len=81"], ["engine.max_len=81", "2..80"]),
        (["engine.gemm_limit=20", "engine.budget=6", "engine.rows=4"], ["gemm_limit=20", "2 rows"]),
        (["engine.device=cuda:99"], ["engine.device=cuda:99"]),
        (["engine.device=cpu", "engine.reproducible=true"], ["engine.reproducible=true", "CPU"]),
        (["model.path=/nowhere"], ["model.path=/nowhere"]),
        (["drafter.path=/nowhere"], ["drafter.path=/nowhere"]),
        (["data.path=/nowhere.jsonl"], ["data.path=/nowhere.jsonl"]),
        (["engine.topk=5", "engine.method=chain"], ["engine.topk=5", "engine.method=chain"]),
        (["engine.budget=2000"], ["engine.budget=2000", "[0, 1024]"]),
        (["data.prompt_column=absent"], ["data.prompt_column", "absent"]),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(
    pair: Path, tmp_path: Path, capsys: Captured, options: list[str], parts: list[str]
) -> None:
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "out"
    changed = {option.split("=")[0] for option in options}
    arguments = [a for a in command(pair, data, out) if a.split("=")[0] not in changed]
    assert main([*arguments, *options]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in parts), said
    assert not out.exists()


def test_a_drafter_of_another_target_is_refused_with_both_values(
    pair: Path, tmp_path: Path, capsys: Captured
) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    for file in (pair / "drafter").iterdir():
        (drafter / file.name).write_bytes(file.read_bytes())
    edit_config(drafter, rope_theta=1e6)
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "out"
    arguments = [a for a in command(pair, data, out) if not a.startswith("drafter.path")]
    assert main([*arguments, f"drafter.path={drafter}"]) == 2
    said = capsys.readouterr().err
    assert "rope_theta=1000000.0" in said
    assert "10000.0" in said


def test_weights_cut_short_are_refused(pair: Path, tmp_path: Path, capsys: Captured) -> None:
    broken = tmp_path / "target"
    broken.mkdir()
    for file in (pair / "target").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "out"
    arguments = [a for a in command(pair, data, out) if not a.startswith("model.path")]
    assert main([*arguments, f"model.path={broken}"]) == 2
    assert "model.safetensors is not a whole safetensors file" in capsys.readouterr().err
    assert not out.exists()


def test_the_same_command_again_has_nothing_to_do_and_another_is_refused(
    pair: Path, tmp_path: Path, capsys: Captured
) -> None:
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "out"
    assert main(command(pair, data, out)) == 0
    capsys.readouterr()
    assert main(command(pair, data, out, "engine.budget=3", "engine.rows=2")) == 0
    assert capsys.readouterr().out.startswith(f"nothing to do: {out} is complete, 7 finished")
    again = command(pair, data, out, "model.dtype=bfloat16", "sampling.ignore_eos=true")
    assert main(again) == 2
    said = capsys.readouterr().err
    assert 'model.dtype: "float32" in the run, "bfloat16" now' in said
    assert "sampling.ignore_eos: false in the run, true now" in said


def test_a_checkpoint_that_changed_is_another_run(
    pair: Path, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for file in (pair / "target").iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "out"
    arguments = [a for a in command(pair, data, out) if not a.startswith("model.path")]
    assert main([*arguments, f"model.path={target}"]) == 0
    edit_tensors(target, lambda tensors: tensors["model.norm.weight"].mul_(2))
    assert main([*arguments, f"model.path={target}"]) == 2
    assert "model weights: digest " in capsys.readouterr().err


def test_without_a_drafter_it_decodes_plainly_and_says_so(
    pair: Path, tmp_path: Path, capsys: Captured
) -> None:
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "out"
    arguments = [a for a in command(pair, data, out) if not a.startswith("drafter.path")]
    assert main(arguments) == 0
    assert "drafter.path is not set: plain autoregressive decoding" in capsys.readouterr().err
    assert {row["draft_tokens"] for row in table(out, "completions")} == {0}


def test_scores_that_are_never_finite_are_an_engine_failure(
    pair: Path, tmp_path: Path, capsys: Captured
) -> None:
    broken = tmp_path / "target"
    broken.mkdir()
    for file in (pair / "target").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    edit_tensors(broken, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS * 3), tmp_path / "out"
    arguments = [a for a in command(pair, data, out) if not a.startswith("model.path")]
    assert main([*arguments, f"model.path={broken}"]) == 4
    assert "not finite" in capsys.readouterr().err
    assert not list(out.glob("*/*.parquet"))  # never a mass rejection


def test_a_run_in_a_pipe_writes_plain_lines_and_the_summary(pair: Path, tmp_path: Path) -> None:
    data, out = write_jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "ddbatch", *command(pair, data, out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "acceptance length" in done.stdout
    assert "load_dataset" in done.stdout


def test_sigterm_keeps_what_is_finished_and_exits_75(pair: Path, tmp_path: Path) -> None:
    prompts = [{"token_ids": [5 + n % 80]} for n in range(4000)]
    data, out = write_jsonl(tmp_path / "p.jsonl", prompts), tmp_path / "out"
    arguments = command(pair, data, out, "engine.rows=2", "output.part_rows=20")
    process = subprocess.Popen(
        [sys.executable, "-m", "ddbatch", *arguments],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: list(out.glob("completions/*.parquet")))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    rows = table(out, "completions")
    assert 20 <= len(rows) < 4000
    assert len({row["row_id"] for row in rows}) == len(rows)
    said = process.stderr.read().decode() if process.stderr is not None else ""
    assert "stopped by SIGTERM" in said
    assert "the same command resumes" in said
