"""job=estimate: what it says of an input is what a count by hand gives, and it needs no weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake import write_tokenizer

from ddbatch.__main__ import main
from ddbatch.config import Config
from ddbatch.jobs.estimate import run
from ddbatch.jobs.estimating.costs import Totals, disk_bytes
from ddbatch.jobs.estimating.histogram import Lengths
from ddbatch.jobs.estimating.measuring import Repeats
from ddbatch.jobs.show import clipped, clipped_ids, duration, facts, number, share, size

Captured = pytest.CaptureFixture[str]
CONTEXT = 80


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "max_position_embeddings": CONTEXT,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return file


def estimate(model: Path, data: Path, *options: str) -> int:
    """The job; numbers and words as options have them."""
    config = Config(job="estimate")
    for option in (f"model.path={model}", f"data.path={data}", *options):
        key, value = option.split("=")
        group, name = key.split(".")
        setattr(getattr(config, group), name, int(value) if value.isdecimal() else value)
    return run(config)


def said_of(text: str, name: str) -> str:
    """What the report says under a name, on one line."""
    found = re.search(rf"^{name}  +(.*(?:\n  .*)*)", text, re.MULTILINE)
    assert found is not None, f"{name} is not in:\n{text}"
    return " ".join(found[1].split())


def ids(count: int) -> dict[str, list[int]]:
    return {"token_ids": [5 + at % 80 for at in range(count)]}


LENGTHS = [1, 3, 7, 8, 9, 40, 64, 70, 79, 80, 200]


def test_figures_are_those_of_a_count_by_hand(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    data = write_rows(tmp_path / "p.jsonl", [ids(n) for n in LENGTHS])
    assert estimate(model, data, "sampling.max_new_tokens=12") == 0
    said = capsys.readouterr().out
    runs = [n for n in LENGTHS if n < CONTEXT]
    assert said_of(said, "data").endswith(f"p.jsonl: 1 file, {size(data.stat().st_size)}, 11 rows")
    assert said_of(said, "columns") == "token_ids (token_ids)"
    assert said_of(said, "rows") == "9 can run, 2 are rejected (2 prompt_too_long)"
    mean = sum(LENGTHS) / len(LENGTHS)
    assert said_of(said, "prompts") == (
        f"{mean:.1f} tokens in the mean, p50 40, p90 80, p99 200, max 200; {sum(LENGTHS)} in all"
    )
    assert said_of(said, "too long").startswith("2 prompts above 79 tokens, of a context of 80: re")
    assert said_of(said, "cap lowered").startswith("2 rows:")  # 70 + 12 and 79 + 12 pass 80
    assert said_of(said, "prefill") == f"{sum(runs)} prompt tokens, each prompt once"
    most = sum(min(12, CONTEXT - n) for n in runs)
    assert said_of(said, "output").startswith(f"at most {most} output tokens: every completion")
    assert said_of(said, "completions") == "9"
    assert "unknown" in said_of(said, "time")


def test_the_histogram_has_a_bar_for_each_power_of_two(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    data = write_rows(tmp_path / "p.jsonl", [ids(n) for n in LENGTHS])
    estimate(model, data)
    lines = capsys.readouterr().out.split("prompt tokens, rows\n")[1].split("\n\n")[0].split("\n")
    counts = {line.split()[0]: int(line.split()[1]) for line in lines}
    spans = Counter(
        next(f"{low}-{2 * low - 1}" if low > 1 else "1" for low in powers if low <= n < 2 * low)
        for n in LENGTHS
        for powers in [[1, 2, 4, 8, 16, 32, 64, 128]]
    )
    assert counts == {span: spans[span] for span in counts}
    assert list(counts) == ["1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255"]
    assert lines[6].count("#") == 40
    assert lines[4].count("#") == 0


def test_a_cut_prompt_leaves_room_for_its_completion(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    data = write_rows(tmp_path / "p.jsonl", [ids(200), ids(75)])
    options = ("data.on_long=truncate_left", "sampling.max_new_tokens=12")
    assert estimate(model, data, *options) == 0
    said = capsys.readouterr().out
    assert said_of(said, "rows") == "2 can run, none is rejected"
    assert "their head is cut off" in said_of(said, "too long")
    assert said_of(said, "prefill").startswith("143 prompt tokens")  # 80 - 12, and 75
    assert "at most 17 output tokens" in said_of(said, "output")  # 12, and 80 - 75
    assert "row_id 0, 68 tokens, 132 more cut off at its head" in said
    shown = [str(5 + at % 80) for at in range(132, 200)]
    assert f"ids {' '.join(shown[:16])} ... 20 ids ... {' '.join(shown[-32:])}" in said


def test_bad_rows_are_counted_by_their_code(model: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = [{"prompt": "w1"}, "{no json", {"prompt": " "}, {"prompt": 7}, {"x": 1}, {"prompt": " "}]
    data = write_rows(tmp_path / "p.jsonl", rows)
    assert estimate(model, data, "data.prompt_column=prompt") == 0
    assert said_of(capsys.readouterr().out, "rows") == (
        "1 can run, 5 are rejected (2 empty_prompt, 1 bad_json, 1 missing_field, 1 wrong_type)"
    )


def test_rows_whose_own_sampling_does_not_go_with_the_run_are_counted(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    own: list[object] = [None, {"temperature": 0}, {"stop": ["</s>"]}, {"top_k": 3}, {"top_k": -1}]
    data = write_rows(tmp_path / "p.jsonl", [{"prompt": "w1 w2", "s": item} for item in own])
    config = Config(job="estimate")
    config.model.path, config.data.path = str(model), str(data)
    config.data.sampling_column = "s"
    config.sampling.n, config.sampling.temperature = 2, 0.5
    assert run(config) == 0
    said = capsys.readouterr().out
    assert said_of(said, "rows") == "2 can run, 3 are rejected (3 bad_sampling)"


def test_stops_that_a_run_refuses_are_refused(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "p.jsonl", [{"prompt": "w1"}])
    for name, value in (("stop", ["</s>"]), ("stop_token_ids", [97])):
        config = Config(job="estimate")
        config.model.path, config.data.path = str(model), str(data)
        setattr(config.sampling, name, value)
        with pytest.raises(ValueError, match=f"sampling.{name}="):
            run(config)


def test_an_input_without_a_good_row_is_told_and_shows_no_prompt(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    data = write_rows(tmp_path / "p.jsonl", ["{no json", "[1]"])
    assert estimate(model, data, "estimate.tokens_per_second=5") == 0
    said = capsys.readouterr().out
    assert said_of(said, "rows") == "0 can run, 2 are rejected (1 bad_json, 1 wrong_type)"
    assert "first prompt" not in said


def test_what_comes_twice_is_counted_and_generated(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    rows = [{"prompt": f"w{n % 4}", "name": f"n{n % 6}"} for n in range(7)]
    data = write_rows(tmp_path / "p.jsonl", rows)
    assert estimate(model, data, "data.id_column=name") == 0
    said = capsys.readouterr().out
    assert said_of(said, "repeats") == (
        "3 rows with a prompt that came before (one comes 2 times); 1 row with an id that came "
        "before; all are generated"
    )
    assert said_of(said, "rows").startswith("7 can run")


def test_the_first_and_the_longest_prompt_are_shown_as_the_model_sees_them(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "w1 w2"}]},
        {"messages": [{"role": "user", "content": " ".join(["w3"] * 60)}]},
    ]
    data = write_rows(tmp_path / "p.jsonl", rows)
    assert estimate(model, data) == 0
    said = capsys.readouterr().out
    assert (
        "first prompt: row_id 0, 6 tokens\n'<s> user w1 w2 <s> assistant'\nids 0 2 5 6 0 3" in said
    )
    assert "longest prompt: row_id 1, 64 tokens\n'<s> user w3 w3" in said
    assert said.rstrip().endswith("7 7 0 3")


@pytest.mark.parametrize("num_rows", [1, 2, 513, 1100])
def test_rows_left_out_are_scaled_up(
    model: Path, tmp_path: Path, capsys: Captured, num_rows: int
) -> None:
    data = write_rows(tmp_path / "p.jsonl", [ids(1 + n % 9) for n in range(1100)])
    options = (f"estimate.rows={num_rows}", "sampling.max_new_tokens=10")
    assert estimate(model, data, *options) == 0
    said = capsys.readouterr().out
    mark = "~" if num_rows < 1100 else ""
    assert said_of(said, "completions") == f"{mark}1,100"
    looked = sum(1 + n % 9 for n in range(num_rows))
    prefill = round(1100 / num_rows * looked)
    assert said_of(said, "prefill") == f"{mark}{prefill:,} prompt tokens, each prompt once"
    assert f"at most {mark}11,000 output tokens" in said_of(said, "output")
    assert ("looked at" in said) == (num_rows < 1100)


def test_samples_multiply_completions_but_not_prompts(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    data = write_rows(tmp_path / "p.jsonl", [ids(4), ids(5)])
    options = ("sampling.n=3", "sampling.temperature=1", "sampling.max_new_tokens=10")
    assert estimate(model, data, *options) == 0
    said = capsys.readouterr().out
    assert said_of(said, "completions") == "6, 3 samples of each row"
    assert said_of(said, "prefill").startswith("9 prompt tokens")
    assert "at most 60 output tokens" in said_of(said, "output")


def test_turns_are_counted(model: Path, tmp_path: Path, capsys: Captured) -> None:
    asked, answered = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}
    rows = [{"messages": [asked, answered] * 2}, {"messages": [asked]}]
    data = write_rows(tmp_path / "p.jsonl", rows)
    assert estimate(model, data, "data.turns=all", "sampling.max_new_tokens=10") == 0
    said = capsys.readouterr().out
    assert said_of(said, "completions").startswith("3; 1.50 turns a row (data.turns=all)")
    assert "at most 30 output tokens" in said_of(said, "output")
    assert said_of(said, "prefill").startswith("10 prompt tokens")  # the first turns only


def test_time_is_tokens_by_speed(model: Path, tmp_path: Path, capsys: Captured) -> None:
    data = write_rows(tmp_path / "p.jsonl", [ids(4)] * 720)
    options = ["sampling.max_new_tokens=50", "estimate.tokens_per_second=2"]
    assert estimate(model, data, *options) == 0
    assert said_of(capsys.readouterr().out, "time") == (
        "at most 5 h 0 min on one GPU at 2 tokens/s = at most 5 GPU-hours; on 8 GPUs at most 38 min"
    )
    assert estimate(model, data, *options, "estimate.output_tokens=20") == 0
    said = capsys.readouterr().out
    assert "14,400 output tokens, estimate.output_tokens=20" in said_of(said, "output")
    assert said_of(said, "time") == (
        "2 h 0 min to 5 h 0 min on one GPU at 2 tokens/s = 2 to 5 GPU-hours; on 8 GPUs 15 min to "
        "38 min"
    )


@pytest.mark.parametrize("kind", ["text", "messages", "token_ids"])
def test_disk_grows_with_everything_that_is_stored(kind: Any) -> None:
    small = Totals(completions=10, prompt_tokens=100, most_tokens=1000, expected_tokens=None)
    full = disk_bytes(small, 1, kind, ["prompt_ids", "acceptance"])
    assert 0 < full.low < full.high
    bare = disk_bytes(small, 1, kind, [])
    assert bare.low < full.low
    assert bare.high < full.high
    expected = Totals(10, 100, most_tokens=1000, expected_tokens=500)
    assert disk_bytes(expected, 1, kind, []).high < bare.high
    scores, top_5 = (disk_bytes(small, 1, kind, [], top) for top in (0, 5))
    assert bare.low + 3 * 1000 <= scores.low < scores.high <= bare.high + 4 * 1000
    assert (top_5.low, top_5.high) > (scores.low + 10 * 1000, scores.high + 15 * 1000)
    several = disk_bytes(small, 3, kind, ["prompt_ids"])
    one = disk_bytes(small, 1, kind, ["prompt_ids"])
    assert (several.low, several.high > one.high) == (one.low, True)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("model.path=/nowhere", "model.path=/nowhere: no such folder"),
        ("data.path=/nowhere.jsonl", "data.path=/nowhere.jsonl"),
        ("data.prompt_column=absent", "data.prompt_column=absent"),
        ("engine.max_len=81", "engine.max_len=81: allowed: 2..80"),
        ("estimate.rows=0", "estimate.rows=0"),
        ("estimate.tokens_per_second=0", "estimate.tokens_per_second=0"),
    ],
)
def test_a_mistake_is_refused(
    model: Path, tmp_path: Path, capsys: Captured, option: str, text: str
) -> None:
    data = write_rows(tmp_path / "p.jsonl", [ids(4)])
    given = {"model.path": str(model), "data.path": str(data)}
    key, value = option.split("=")
    assert main(["job=estimate", *(f"{k}={v}" for k, v in {**given, key: value}.items())]) == 2
    assert text in capsys.readouterr().err


def test_the_job_writes_nothing_and_does_not_wait_for_torch(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "p.jsonl", [{"prompt": "w1 w2"}])
    arguments = ["job=estimate", f"model.path={model}", f"data.path={data}"]
    code = (
        f"import sys; from ddbatch.__main__ import main; code = main({arguments!r}); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert [file.name for file in tmp_path.iterdir()] == ["p.jsonl"]


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_those_of_the_sorted_lengths(seed: int) -> None:
    values = np.random.default_rng(seed).integers(1, 50, size=1 + 37 * seed).tolist()
    lengths = Lengths()
    for value in values:
        lengths.add(value)
    assert (lengths.total, lengths.num) == (sum(values), len(values))
    for per_cent in (1, 50, 90, 99, 100):
        wanted = np.percentile(values, per_cent, method="inverted_cdf")
        assert lengths.percentile(per_cent) == wanted


def test_repeats_are_those_of_a_counter() -> None:
    values = np.random.default_rng(0).integers(0, 40, size=101).tolist()
    repeats = Repeats()
    assert repeats.count() == (0, 0)
    for value in values:
        repeats.add(str(value).encode())
    counts = Counter(values)
    assert repeats.count() == (len(values) - len(counts), max(counts.values()))


def test_a_long_text_keeps_its_head_and_its_tail() -> None:
    text = "".join(f"line {n}\n" for n in range(100)) + "the end\x1b"
    shown = clipped(text, indent=2).split("\n  ")
    assert len(shown) == 21
    assert shown[0] == r"'line 0\n'"
    assert shown[-1] == r"'the end\x1b'"  # nothing reaches the terminal but what can be read
    hidden = len(text) - sum(len(f"line {n}\n") for n in [*range(10), *range(91, 100)]) - 8
    assert shown[10] == f"... {hidden} characters ..."
    assert clipped("short\n", indent=0) == r"'short\n'"
    assert clipped_ids(range(48)) == " ".join(map(str, range(48)))
    assert clipped_ids(range(49)).split(" ... ")[1] == "1 ids"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (duration(0.04), "0.0 s"),
        (duration(59.4), "59 s"),
        (duration(59.6), "1 min"),
        (duration(3599), "1 h 0 min"),
        (duration(2 * 86400), "2 d 0 h"),
        (duration(1e9), "11,574 d 2 h"),
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(999.6), "1 kB"),
        (size(1.23e15), "1.23 PB"),
        (share(0, 0), "0%"),
        (share(1, 10_000), "<0.1%"),
        (share(9_999, 10_000), ">99.9%"),
        (share(1, 1), "100.0%"),
        (number(1234.5), "1,234"),
        (number(0.0123), "0.0123"),
        (facts([("a", "b"), ("long", "c")]), "a     b\nlong  c"),
    ],
)
def test_figures_are_shown_for_people(shown: str, text: str) -> None:
    assert shown == text
