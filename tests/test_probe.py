"""job=probe: it finds the width at which a planted op breaks, however that shows, and plans keep
below it afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import KERNEL_DEVICE
from fake import write_tokenizer
from faulty_probe import plant
from interpreted import use_kernels
from tiny import write_target

from ddbatch.__main__ import main
from ddbatch.config import Config
from ddbatch.core import ExitCode, RunError, ShapePlan
from ddbatch.engine.numerics import FLOAT32_GAP
from ddbatch.engine.plan import plan_shapes
from ddbatch.engine.probe import LAYERS, WidthErrors, measure_width, random_target, reduced
from ddbatch.jobs.probe import run
from ddbatch.jobs.probing.candidate import Tried, try_candidate
from ddbatch.jobs.probing.child import Task
from ddbatch.jobs.probing.search import Search
from ddbatch.models import decoder
from ddbatch.models.families import read_target_dims

Captured = pytest.CaptureFixture[str]
FAULTY = str(Path(__file__).with_name("faulty_probe.py"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A target without weights."""
    folder = write_target(tmp_path / "target", vocab=97, max_positions=80)
    (folder / "model.safetensors").unlink()
    return folder


def probe(
    model: Path,
    fault: str,
    tokens: int,
    *,
    step: int,
    widest: int,
    timeout: int = 300,
    device: str = "cpu",
) -> int:
    """The job, with candidates that break beyond so many tokens."""
    config = Config(job="probe")
    config.model.path, config.engine.device = str(model), device
    config.probe.step, config.probe.widest, config.probe.timeout = step, widest, timeout
    return run(config, [sys.executable, FAULTY, fault, str(tokens)])


def verdicts(captured: Captured) -> dict[int, str]:
    """Verdict and detail of each candidate in the table."""
    lines = captured.readouterr().out.splitlines()[1:]
    table = lines[: lines.index("")]
    return {int(line.split()[0]): " ".join(line.split()[1:]) for line in table}


def held(cache: Path) -> dict[str, object]:
    (file,) = (cache / "ddbatch" / "limits").iterdir()
    found = json.loads(file.read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("step", "most"), [(1, 100), (3, 100), (8, 64), (64, 64), (7, 50)])
def test_the_search_ends_less_than_a_step_below_what_breaks(step: int, most: int) -> None:
    for breaks_at in range(2, most + 3):
        search, tried = Search(step, most), list[int]()
        while (tokens := search.next()) is not None:
            assert tokens not in tried
            assert 1 <= tokens <= most
            tried.append(tokens)
            search.tell(tokens, is_sound=tokens < breaks_at)
        if breaks_at <= step:
            assert (search.works, tried) == (0, [step])
        elif breaks_at > most:
            assert (search.works, search.fails) == (most, None)
        else:
            assert search.works < breaks_at <= search.works + step
        assert len(tried) <= 16


def test_a_crash_is_found_within_a_step_and_kept(
    model: Path, cache: Path, capsys: Captured
) -> None:
    assert probe(model, "abort", 75, step=32, widest=128) == ExitCode.DONE
    found = verdicts(capsys)
    assert {tokens for tokens, text in found.items() if text.startswith("ok")} == {32, 64}
    assert found[96].startswith("crashed")
    assert found[128].endswith("128 x 1: SIGABRT")
    assert (held(cache)["tokens"], held(cache)["tried"]) == (64, 64)


def test_the_answer_is_printed_and_the_next_run_keeps_to_it(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert probe(model, "wrong", 40, step=32, widest=64) == ExitCode.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "64 wrong values" in said
    assert "limit 32 tokens a round, rows x (budget + 1); 64 fail." in said
    assert f"kept in {tmp_path / 'cache'}" in said
    write_tokenizer(model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    more = [f"model.path={model}", f"data.path={prompts}", f"output_dir={tmp_path / 'out'}"]
    assert main([*more, "engine.rows=40", "engine.device=cpu"]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert (
        "engine.rows=40 x (engine.budget=0 + 1) = 40 tokens exceed engine.gemm_limit=auto" in error
    )
    assert "which is 32 here (job=probe on a CPU" in error
    assert "allowed: at most 32 rows for this budget" in error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_fault_in_a_captured_round_is_found(
    dtype: torch.dtype, tmp_path: Path, cache: Path, capsys: Captured
) -> None:
    folder = write_target(tmp_path / "target", head_width=16, vocab=300, dtype=dtype)
    assert probe(folder, "beyond", 75, step=32, widest=128, device="cuda") == ExitCode.DONE
    found = verdicts(capsys)
    ok = {tokens for tokens, text in found.items() if text.startswith("ok")}
    assert ok == {32, 64}, found
    assert "CUDA error" in found[96] + found[128]
    assert held(cache)["tokens"] == 64


def test_a_hang_is_cut_off_and_is_a_limit(model: Path, cache: Path, capsys: Captured) -> None:
    assert probe(model, "hang", 64, step=64, widest=128, timeout=20) == ExitCode.DONE
    found = verdicts(capsys)
    assert found[64].startswith("ok")
    assert "timed out" in found[128]
    assert "128 x 1: not done after 20 s" in found[128]
    assert held(cache)["tokens"] == 64


def test_short_memory_is_no_limit(model: Path, cache: Path, capsys: Captured) -> None:
    assert probe(model, "memory", 20, step=16, widest=32) == ExitCode.DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "no limit found up to 16 tokens; more do not fit into memory" in said
    assert (held(cache)["tokens"], held(cache)["tried"]) == (None, 16)


def test_a_model_that_fails_at_once_leaves_no_answer(model: Path, cache: Path) -> None:
    with pytest.raises(
        RunError, match=r"16 tokens fails already: crashed, 16 x 1: Runtime.*memory"
    ):
        probe(model, "cuda", 1, step=16, widest=32)
    assert not cache.exists()


def test_the_command_needs_a_model_alone_and_makes_no_folder(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    options = ["engine.device=cpu", "probe.step=32", "probe.widest=32", "model.dtype=bfloat16"]
    assert main(["job=probe", f"model.path={model}", *options]) == ExitCode.DONE
    assert "no limit found up to 32 tokens\n" in capsys.readouterr().out
    assert (held(cache)["tokens"], held(cache)["tried"]) == (None, 32)
    assert set(tmp_path.iterdir()) - before == {cache}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["probe.step=8", "probe.widest=4"], "probe.step=8 with probe.widest=4"),
        (["probe.timeout=0"], "probe.timeout=0: expected an integer >= 1"),
        (["engine.reproducible=true"], "engine.reproducible=true needs a CUDA device"),
        (["model.path=nowhere"], "model.path=nowhere: no such folder"),
    ],
)
def test_what_cannot_be_probed_is_refused(
    options: list[str], message: str, model: Path, capsys: Captured
) -> None:
    given = [] if options[0].startswith("model") else [f"model.path={model}"]
    assert main(["job=probe", "engine.device=cpu", *given, *options]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def say(*lines: str, then: str = "") -> list[str]:
    """A command that prints these lines and then does something else."""
    return [sys.executable, "-c", f"print({chr(10).join(lines)!r}, flush=True)\n{then}"]


ERRORS = {"is_float32": False, "plain": 1.0, "engine": 1.4, "gap": 4.0, "worst": 3.9}
SOUND = json.dumps({"errors": ERRORS})
WHERE = json.dumps({"rows": 3, "nodes": 5})


@pytest.mark.parametrize(
    ("command", "outcome", "detail"),
    [
        (say("hello", WHERE, SOUND), "ok", "3 x 5: error 1.4, allowed 1.5"),
        (say(WHERE, SOUND.replace("1.4", "1.6")), "wrong values", "3 x 5: error 1.6, allowed 1.5"),
        (say(WHERE, SOUND.replace("3.9", "4.1")), "wrong values", "off by 4.1, allowed 4"),
        (say(WHERE, SOUND.replace("3.9", "NaN")), "wrong values", "off by nan, allowed 4"),
        (say(WHERE, SOUND.replace("1.4", "NaN")), "wrong values", "error nan, allowed 1.5"),
        (say(WHERE, SOUND.replace("3.9", "Infinity")), "wrong values", "off by inf"),
        (say(WHERE), "crashed", "3 x 5: exit code 0"),  # it said nothing of what it found
        (
            say("", then="raise ValueError('no\\nsuch')"),
            "crashed",
            "before its first round: ValueError: no",
        ),
        (say(WHERE, then="import os; os.kill(os.getpid(), 11)"), "crashed", "3 x 5: SIGSEGV"),
        (say(WHERE, then="import os; os.kill(os.getpid(), 9)"), "no memory", "killed from outside"),
        (say(WHERE, then="import time; time.sleep(99)"), "timed out", "3 x 5: not done after 4 s"),
    ],
)
def test_what_a_process_says_and_its_end_make_the_verdict(
    command: list[str], outcome: str, detail: str
) -> None:
    task = Task("model", "cpu", "float32", 15, None, in_order=False, is_captured=False)
    found = try_candidate(task, 4.0, command)
    assert isinstance(found, Tried)
    assert (found.tokens, found.outcome) == (15, outcome)
    assert detail in found.detail


class Interrupted(subprocess.Popen[str]):
    """A process whose parent is interrupted as soon as it waits for it."""

    made: ClassVar[list[subprocess.Popen[str]]] = []

    def communicate(
        self, input: str | None = None, timeout: float | None = None
    ) -> tuple[str, str]:
        if self not in self.made:
            self.made.append(self)
            raise KeyboardInterrupt
        return super().communicate(input, timeout)


def test_who_is_interrupted_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    task = Task("model", "cpu", "float32", 15, None, in_order=False, is_captured=False)
    with pytest.raises(KeyboardInterrupt):
        try_candidate(task, 300, say(then="import time; time.sleep(300)"))
    (process,) = Interrupted.made
    assert process.returncode == -signal.SIGKILL


def plan_of(rows: int, budget: int, vocab: int) -> ShapePlan:
    return plan_shapes(
        "ddtree" if budget else "autoregressive",
        budget=budget,
        topk=None,
        rows=rows,
        block=16,
        vocab=vocab,
        gemm_limit=None,
    )


# Rows and budget: one row, odd ones, more than there are texts; plain and with trees.
WIDTHS = ((1, 0), (35, 0), (1, 16), (3, 7), (35, 2))


def errors_of(folder: Path, dtype: torch.dtype) -> list[WidthErrors]:
    dims = reduced(read_target_dims(folder))
    target = random_target(dims, dtype, torch.device("cpu"))
    plans = [plan_of(rows, budget, dims.vocab) for rows, budget in WIDTHS]
    return [measure_width(target, plan, is_captured=False) for plan in plans]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tied": False}),
        ("mistral", {"window": 4}),
        ("qwen2", {"window": 6, "full_layers": 2}),
        ("qwen3", {"layers": 1}),
    ],
)
def test_a_sound_engine_passes_at_any_width(
    family: str, options: dict[str, int], tmp_path: Path
) -> None:
    folder = write_target(tmp_path, family=family, **options)  # type: ignore[arg-type]
    dims = read_target_dims(folder)
    assert reduced(dims).layers == len(reduced(dims).windows) == LAYERS
    assert set(reduced(dims).windows) == set(dims.windows)  # sliding layers and others
    for dtype in (torch.float32, torch.bfloat16):
        for found in errors_of(folder, dtype):
            assert found.is_sound, (dtype, found)
            assert (found.plain < FLOAT32_GAP) == (dtype == torch.float32)


@pytest.mark.skipif(KERNEL_DEVICE != "cpu", reason="on a GPU candidates run the kernels")
def test_the_kernels_pass_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_target(tmp_path, family="qwen3", vocab=29, window=7, full_layers=1)
    use_kernels(monkeypatch)
    dims = reduced(read_target_dims(folder))
    target = random_target(dims, torch.float32, torch.device("cpu"))
    for plan in (plan_of(2, 0, dims.vocab), plan_of(2, 5, dims.vocab)):
        assert measure_width(target, plan, is_captured=False).is_sound


@pytest.mark.parametrize("fault", ["wrong", "nan"])
def test_a_single_wrong_token_of_a_wide_round_is_seen(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_target(tmp_path, family="qwen3")
    monkeypatch.setattr(decoder, "gated_linear", decoder.gated_linear)
    plant(fault, 34)
    for dtype in (torch.float32, torch.bfloat16):
        one, wide, tree, small, narrow = errors_of(folder, dtype)
        assert one.is_sound
        assert tree.is_sound
        assert small.is_sound
        assert not wide.is_sound
        assert not narrow.is_sound


def test_random_weights_are_the_same_in_every_process_of_a_probe(tmp_path: Path) -> None:
    dims = reduced(read_target_dims(write_target(tmp_path)))
    one, other = (
        random_target(dims, torch.float32, torch.device("cpu")).state_dict() for _ in range(2)
    )
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
