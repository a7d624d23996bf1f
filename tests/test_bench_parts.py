"""The parts of job=bench: options, the order of measuring, the sentence, watts, peers, files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ddbatch.__main__ import main
from ddbatch.config import Config, load
from ddbatch.core import Key, Sampling, TokenPrompt
from ddbatch.demo import demo_paths
from ddbatch.jobs.benching import files, measuring, peers, power
from ddbatch.jobs.benching.arms import Arm, parse_arm
from ddbatch.jobs.benching.calls import Pass
from ddbatch.jobs.benching.headline import command_of
from ddbatch.jobs.benching.options import check_bench, refuse_taken
from ddbatch.jobs.benching.power import Reading, Watch, medians, parse_smi
from ddbatch.jobs.benching.rates import Rates, Work
from ddbatch.jobs.benching.verdict import LATENCY_SHARE, sentence

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("memory", "matmul", "power_share", "expected"),
    [
        (0.71, 0.12, 0.38, "memory-bound: 71% of memory bandwidth, 38% of the power limit"),
        (0.20, 0.64, 0.99, "compute-bound: 64% of the matrix rate, 99% of the power limit"),
        (0.20, 0.03, None, "latency-bound: 20% of memory bandwidth"),
        (0.05, 0.28, 0.5, "latency-bound: 28% of the matrix rate, 50% of the power limit"),
        (LATENCY_SHARE, 0.1, None, "memory-bound: 40% of memory bandwidth"),
        (0.1, LATENCY_SHARE, None, "compute-bound: 40% of the matrix rate"),
        (0.5, 0.5, None, "memory-bound: 50% of memory bandwidth"),
        (0.399, 0.399, 0.0, "latency-bound: 40% of memory bandwidth, 0% of the power limit"),
    ],
)
def test_the_larger_share_names_the_bound_unless_both_are_small(
    memory: float, matmul: float, power_share: float | None, expected: str
) -> None:
    assert sentence(memory, matmul, power_share) == expected


def test_a_floor_is_the_longer_of_bytes_and_arithmetic() -> None:
    rates = Rates(read=100.0, copy=200.0, matmul=1000.0)
    assert Work(400.0, 1000.0).floor_ms(rates) == 2000.0
    assert Work(100.0, 3000.0).floor_ms(rates) == 3000.0


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("autoregressive", Arm("autoregressive", None, 3)),
        ("chain", Arm("chain", None, 3)),
        ("chain:4", Arm("chain", 4, 3)),
        ("ddtree", Arm("ddtree", None, 3)),
        ("ddtree:16", Arm("ddtree", 16, 3)),
        ("ddtree:16/8", Arm("ddtree", 16, 3, 8)),
    ],
)
def test_an_arm_is_a_method_with_a_budget_and_a_block(text: str, arm: Arm) -> None:
    assert parse_arm(text, 3) == arm


def config(**options: Any) -> Config:
    """Of job=bench with the demo's pair; a key's dots are double underscores."""
    composed: dict[str, Any] = {
        "job": "bench",
        "output_dir": "out",
        "model": {"path": demo_paths().model},
        "drafter": {"path": demo_paths().drafter},
    }
    for key, value in options.items():
        group, _, name = key.partition("__")
        composed.setdefault(group, {})[name] = value
    return load(composed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bench__arms": ["tree"]}, "bench.arms=[tree]: tree: expected autoregressive, chain["),
        ({"bench__arms": ["ddtree:x"]}, "bench.arms=[ddtree:x]: ddtree:x: expected"),
        ({"bench__arms": ["ddtree:0"]}, "BUDGET 0: expected an integer in [1, 1024]"),
        ({"bench__arms": ["chain:3/1"]}, "BLOCK 1: expected an integer >= 2"),
        ({"bench__arms": ["autoregressive:3"]}, "has no budget; allowed: autoregressive alone"),
        ({"bench__arms": []}, "bench.arms=[]: expected a list of one or more"),
        ({"bench__arms": ["chain", "chain"]}, "in which nothing comes twice"),
        ({"bench__rows": []}, "bench.rows=[]: expected a list of one or more"),
        ({"bench__rows": [2, 2]}, "bench.rows=[2,2]: expected a list in which nothing"),
        ({"drafter__path": None}, "chain, ddtree:16: needs drafter.path, which is not set"),
        (
            {"drafter__path": None, "bench__arms": ["autoregressive"], "bench__acceptance": 0.5},
            "bench.acceptance=0.5: needs drafter.path",
        ),
        ({"engine__rows": 8}, "engine.rows=8: has no part in job=bench, where bench.rows lists"),
        ({"engine__budget": 8}, "engine.budget=8: has no part in job=bench, where bench.arms"),
        ({"sampling__max_new_tokens": 8}, "sampling.max_new_tokens=8: has no part"),
        (
            {"bench__peers": ["transformers"], "sampling__temperature": 0.5},
            "peers decode greedily; allowed: sampling.temperature=0, or bench.peers=[]",
        ),
        ({"bench__rows": [0]}, "bench.rows=[0]: expected an integer in [1, 1000000]"),
        ({"bench__acceptance": 0.0}, "bench.acceptance=0.0: expected a number in (0, 1]"),
        ({"bench__acceptance": 1.5}, "bench.acceptance=1.5: expected a number in (0, 1]"),
        ({"bench__new_tokens": 1}, "bench.new_tokens=1: expected an integer in [2, 1000000]"),
        ({"bench__peers": ["vlm"]}, "transformers or vllm (did you mean vllm?)"),
    ],
)
def test_a_refused_option_names_key_value_and_what_is_allowed(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at
        check_bench(config(**options))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["bench.context=[64,150]"],
            "bench.context=[64,150]: 150 and 128 tokens more (bench.new_tokens, and room for a "
            "steady state) exceed the context of model.path, 256; allowed: 1..128",
        ),
        (
            ["bench.context=[8]", "bench.arms=[chain:3/9]"],
            "chain:3/9: BLOCK 9 is more than the drafter's block of 8; allowed: 2..8",
        ),
        (
            ["bench.context=[8]", "engine.gemm_limit=64"],
            "ddtree 16 at 8 rows: engine.rows=8 x (engine.budget=16 + 1) = 136 tokens exceed",
        ),
        (
            [
                "bench.context=[8]",
                f"data.path={demo_paths().data}",
                "bench.new_tokens=240",
            ],
            "no prompt can run with bench.new_tokens=240",
        ),
        (["bench.context=[8]", "data.path=nowhere.jsonl"], "data.path=nowhere.jsonl"),
        (["bench.context=[8]", "engine.capture=true"], "engine.capture=true: CUDA graphs need"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    options: list[str],
    words: str,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddbatch.jobs.benching.running.open_pair", None)
    pair = [f"model.path={demo_paths().model}", f"drafter.path={demo_paths().drafter}"]
    pair.append("engine.device=cpu")
    assert main(["job=bench", f"output_dir={tmp_path}/out", *pair, *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_peer_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "ddbatch.jobs.benching.options.find_spec", lambda name: None if name == "vllm" else name
    )
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at
        check_bench(config(bench__peers=["transformers", "vllm"]))
    assert str(caught.value) == (
        "bench.peers=[transformers,vllm]: not installed: vllm (python -m pip install vllm); "
        "allowed without: bench.peers=[transformers]"
    )


def test_calls_of_all_arms_take_turns_after_one_that_warms_each_up() -> None:
    made: list[str] = []

    def caller(name: str) -> Callable[[], Pass]:
        def call() -> Pass:
            made.append(name)
            return Pass(float(len(made)), 1.0, None, None, None, None, [])

        return call

    cpu = torch.device("cpu")
    setting = cast(measuring.Setting, SimpleNamespace(repeats=2, watch=Watch(cpu)))
    told = list(measuring._time_calls(setting, [caller("a"), caller("b"), caller("c")]))
    assert made == list("abcabcabc")
    assert [at for at, _ in told] == [0, 1, 2, 0, 1, 2]
    assert [call.result.tokens_per_second for _, call in told] == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


def test_rounds_of_all_arms_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        def reset(self) -> None:
            made.append(f"reset {self.name}")

    def bed(setting: object, engine: Engine, context: int) -> SimpleNamespace:
        made.append(f"fill {engine.name}")
        return SimpleNamespace(round=engine.name, stages={"admit": ""}, restore=None)

    def times(
        runs: list[str], device: object, *, before: object, repeats: int
    ) -> list[list[float]]:
        made.extend(filter(None, runs))
        return [[3.0, 1.0, 2.0] for _ in runs]

    monkeypatch.setattr(measuring, "_make_bed", bed)
    monkeypatch.setattr(measuring, "times_ms", times)
    cpu = torch.device("cpu")
    pair = SimpleNamespace(device=cpu)
    setting = SimpleNamespace(repeats=2, watch=Watch(cpu), pair=pair)
    time_rounds: Any = measuring._time_rounds
    told = list(time_rounds(setting, [Engine("a"), Engine("b")], 5))
    assert made == ["fill a", "fill b", "a", "b", *"abab", "reset a", "reset b"]
    assert [(at, rounds.ms, rounds.stages) for at, rounds in told] == [
        (at, 2.0, {"admit": 2.0}) for at in (0, 1, 0, 1)
    ]


def test_watts_are_read_of_what_nvidia_smi_says() -> None:
    assert parse_smi("690.58, 700.00, 1500, 3201\n") == Reading(690.58, 700.0, 1500.0, 3201.0)
    assert parse_smi("[N/A], 700.00, [Not Supported], 3201") == Reading(None, 700.0, None, 3201.0)
    assert parse_smi("Failed to initialize NVML") == Reading()
    assert medians([]) == Reading()
    readings = [Reading(1.0, 7.0), Reading(5.0, 7.0), Reading(2.0, None, 9.0)]
    assert medians(readings) == Reading(2.0, 7.0, 9.0, None)


def test_readings_count_once_what_was_before_is_out_of_their_mean() -> None:
    watch = Watch(torch.device("cpu"))
    assert watch.source == "not measured: no GPU"
    watch._readings = [(at / 10, Reading(float(at))) for at in range(100)]
    assert watch.during(2.0, 4.0) == Reading(35.0)
    assert watch.during(2.0, 2.0 + power.MEAN_SECONDS / 2) == Reading()


def test_nvidia_smi_is_followed_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nwhile :; do echo "350.5, 700.00, 1980, 3201"; sleep 0.01; done\n')
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(power, "find_spec", lambda name: None)
    monkeypatch.setattr(power, "MEAN_SECONDS", 0.0)
    properties = SimpleNamespace(uuid="fbde66d4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with Watch(torch.device("cuda")) as watch:
        assert watch.source == "nvidia-smi"
        started = time.monotonic()
        while watch.during(started, time.monotonic()) == Reading():
            assert time.monotonic() - started < 30
            time.sleep(0.01)
        assert watch.during(started, time.monotonic()) == Reading(350.5, 700.0, 1980.0, 3201.0)
    assert not watch._thread.is_alive()
    assert watch._smi is not None
    assert watch._smi.wait(timeout=30) != 0


def test_vllm_gets_the_ids_as_they_are_and_goes_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    class LLM:
        def __init__(self, **options: Any) -> None:
            told["model"] = options

        def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> list[Any]:
            told["prompts"], told["sampling"] = prompts, sampling
            return [
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7, 8, 9])]) for _ in prompts
            ]

    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    found = peers.Peers(["vllm"], Path("folder"), torch.bfloat16, torch.device("cpu"), 40)
    assert found.num_arms == 1
    (run,) = found.arms(3).values()
    result = run([TokenPrompt(Key(at, 0, 0), (1, 2 + at), 3, Sampling()) for at in range(2)])
    assert result.outputs == [(7, 8, 9), (7, 8, 9)]
    assert told["prompts"] == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 3]}]
    assert told["model"]["max_num_seqs"] == 3
    assert told["model"]["max_model_len"] == 40
    assert told["model"]["dtype"] == "bfloat16"
    assert told["model"]["enable_prefix_caching"] is False
    sampling = told["sampling"]
    assert (sampling["temperature"], sampling["max_tokens"], sampling["ignore_eos"]) == (0, 3, True)


def test_the_command_has_last_names_for_paths() -> None:
    said = command_of(config(data__path="/home/me/secret/chats.jsonl", bench__rows=[1, 2]))
    assert said == (
        "python -m ddbatch job=bench output_dir=out model.path=target drafter.path=drafter "
        "data.path=chats.jsonl 'bench.rows=[1,2]'"
    )


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path: Path) -> None:
    files.write(str(tmp_path), [], {"is_whole": False})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write(str(tmp_path), [], {"is_whole": True, "ms": float("nan")})
    assert json.loads((tmp_path / "bench.json").read_text()) == {"is_whole": False}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bench.json", "bench.parquet"]
    files.write(str(tmp_path), [], {"is_whole": True})
    with pytest.raises(ValueError, match="holds an earlier measurement"):
        refuse_taken(str(tmp_path))


def test_an_unfinished_measurement_may_be_made_anew(tmp_path: Path) -> None:
    files.write(str(tmp_path), [], {"is_whole": False})
    refuse_taken(str(tmp_path))
    (tmp_path / "bench.json").write_text('{"is_whole": fal')
    with pytest.raises(ValueError, match="holds an earlier measurement"):
        refuse_taken(str(tmp_path))


def test_a_refusal_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from ddbatch.__main__ import main; "
        f"main(['job=bench', 'model.path={demo_paths().model}', 'output_dir={tmp_path}/out']); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "chain, ddtree:16: needs drafter.path" in done.stderr
