"""job=bench on the embedded pair: what it measures, what it says of it, and what it leaves."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import torch

from ddbatch.__main__ import main
from ddbatch.demo import demo_paths
from ddbatch.engine.round import STAGES
from ddbatch.jobs.benching import measuring, running

Captured = pytest.CaptureFixture[str]
PAIR = [f"model.path={demo_paths().model}", f"drafter.path={demo_paths().drafter}"]
CPU = [*PAIR, "engine.device=cpu"]
SMALL = ["bench.context=[48]", "bench.new_tokens=8", "bench.repeats=2", "bench.prompts=4"]


class Done(NamedTuple):
    """What a run printed and left."""

    place: Path
    said: str
    rows: list[dict[str, Any]]
    document: dict[str, Any]

    def of(self, arm: str, rows: int) -> dict[str, Any]:
        """The one entry of an arm."""
        (found,) = (
            item for item in self.document["arms"] if (item["arm"], item["rows"]) == (arm, rows)
        )
        return dict(found)

    def repeats(self, arm: str, rows: int) -> list[dict[str, Any]]:
        """The rows of an arm's repeats."""
        return [row for row in self.rows if (row["arm"], row["rows"]) == (arm, rows)]


def bench(place: Path, capsys: Captured, *options: str) -> Done:
    with pytest.MonkeyPatch.context() as shorter:
        shorter.setitem(measuring.ROUND_SECONDS, "cpu", 0.02)
        shorter.setattr(measuring, "STAGE_SECONDS", 0.02)
        assert main(["job=bench", f"output_dir={place}", *CPU, *SMALL, *options]) == 0
    return Done(
        place,
        capsys.readouterr().out,
        pq.read_table(place / "bench.parquet").to_pylist(),
        json.loads((place / "bench.json").read_text(encoding="utf-8")),
    )


@pytest.fixture(scope="module")
def keep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    return {}


@pytest.fixture
def done(keep: dict[str, Done], tmp_path_factory: pytest.TempPathFactory, capsys: Captured) -> Done:
    """A run over the demo's prompts with a peer, made once."""
    if "done" not in keep:
        keep["done"] = bench(
            tmp_path_factory.mktemp("bench") / "out",
            capsys,
            f"data.path={demo_paths().data}",
            "bench.rows=[1,3]",
            "bench.arms=[autoregressive,chain:2,ddtree:5/4]",
            "bench.peers=[transformers]",
        )
    return keep["done"]


OURS = ("autoregressive", "chain 2", "ddtree 5, block 4")
ALL = (*OURS, "transformers", "transformers static")


def test_the_table_has_a_row_an_arm_and_repeat(done: Done) -> None:
    keys = [(row["rows"], row["arm"], row["repeat"]) for row in done.rows]
    assert keys == [(rows, arm, at) for rows in (1, 3) for arm in ALL for at in range(2)]
    budgets = {row["arm"]: (row["method"], row["budget"], row["block"]) for row in done.rows}
    assert budgets["autoregressive"] == ("autoregressive", 0, None)
    assert budgets["chain 2"] == ("chain", 2, 8)
    assert budgets["ddtree 5, block 4"] == ("ddtree", 5, 4)
    assert budgets["transformers"] == (None, None, None)
    assert {(row["call_prompts"], row["call_output_tokens"]) for row in done.rows} == {(4, 32)}


def test_each_figure_is_the_median_of_its_repeats_with_its_spread(done: Done) -> None:
    columns = {
        "round_ms": "round_ms",
        "tokens_per_second": "call_tokens_per_second",
        "steady_tokens_per_second": "steady_tokens_per_second",
        "acceptance_length": "acceptance_length",
    }
    for rows in (1, 3):
        for arm in OURS:
            item, repeats = done.of(arm, rows), done.repeats(arm, rows)
            for name, column in columns.items():
                values = [row[column] for row in repeats]
                middle = statistics.median(values)
                expected = {"median": middle, "low": min(values), "high": max(values)}
                assert item[name] == pytest.approx(expected), (arm, name)
            for stage, spread in item["stages_ms"].items():
                values = [row[f"{stage}_ms"] for row in repeats]
                assert spread["median"] == pytest.approx(statistics.median(values))


def test_every_arm_has_its_stages_and_no_other(done: Done) -> None:
    assert list(done.of("chain 2", 1)["stages_ms"]) == list(STAGES)
    plain = [name for name in STAGES if name != "draft"]
    assert list(done.of("autoregressive", 3)["stages_ms"]) == plain
    assert {row["draft_ms"] for row in done.repeats("autoregressive", 3)} == {None}
    assert done.of("transformers", 1)["stages_ms"] == {}


def test_rates_follow_from_times_and_ceilings(done: Done) -> None:
    item, ceilings = done.of("ddtree 5, block 4", 3), done.document["ceilings"]
    memory = max(ceilings["read_bytes_per_second"], ceilings["copy_bytes_per_second"])
    ms = item["round_ms"]["median"]
    works = [(num_bytes, ops) for _, _, num_bytes, ops in item["floor_by_stage_and_op"]]
    floors = [
        1000 * max(num_bytes / memory, ops / ceilings["matmul_flop_per_second"])
        for num_bytes, ops in works
    ]
    assert item["floor_ms"] == pytest.approx(sum(floors))
    assert item["floor_share"] == pytest.approx(sum(floors) / ms)
    assert item["bytes_per_second"] == pytest.approx(1000 * sum(a for a, _ in works) / ms)
    assert item["memory_share"] == pytest.approx(item["bytes_per_second"] / memory)
    assert item["matmul_share"] == pytest.approx(
        1000 * sum(b for _, b in works) / ms / ceilings["matmul_flop_per_second"]
    )
    first = done.repeats("ddtree 5, block 4", 3)[0]
    expected = 3 * first["acceptance_length"] * 1000 / first["round_ms"]
    assert first["steady_tokens_per_second"] == pytest.approx(expected)


def test_in_float32_every_arm_and_peer_says_what_plain_decoding_says(done: Done) -> None:
    for rows in (1, 3):
        assert done.of("autoregressive", rows)["equal_outputs"] is None
        for arm in ALL[1:]:
            assert done.of(arm, rows)["equal_outputs"] == 4, arm


def test_acceptance_of_data_needs_no_label_and_of_plain_decoding_there_is_none(done: Done) -> None:
    labels = {row["arm"]: row["acceptance_of"] for row in done.rows}
    assert [labels[arm] for arm in ALL] == [None, "data", "data", None, None]
    assert {row["acceptance_length"] for row in done.repeats("autoregressive", 1)} == {1.0}
    assert done.repeats("transformers", 1)[0]["acceptance_length"] is None
    assert "synthetic" not in done.said
    assert "random ids" not in done.said


def test_no_file_names_a_place(done: Done) -> None:
    text = (done.place / "bench.json").read_text(encoding="utf-8")
    for place in (demo_paths().model, str(done.place.parent), str(Path.home())):
        assert place not in text
    head = done.document["headline"]
    assert head["model"] == "target with drafter"
    assert head["dtype"] == "float32"
    assert {"torch", "transformers", "ddbatch"} <= set(head)
    assert head["command"].startswith(
        "python -m ddbatch job=bench output_dir=out model.path=target"
    )
    assert "bench.peers=[transformers]" in head["command"]
    assert done.document["is_whole"] is True
    assert sorted(file.name for file in done.place.iterdir()) == ["bench.json", "bench.parquet"]


def test_what_is_printed_fits_a_page_and_says_what_bounds_a_round(done: Done) -> None:
    assert max(map(len, done.said.splitlines())) <= 100
    assert len(re.findall(r"(latency|memory|compute)-bound: \d+% of", done.said)) == 6
    assert "watts and clocks: not measured: no GPU" in done.said
    assert done.said.count("no GPU") == 1
    for row in done.rows:
        assert row["watts"] is row["sm_mhz"] is row["call_watts"] is None
    for item in done.document["arms"]:
        assert item["sentence"] is None or item["sentence"] in done.said


def test_a_folder_with_an_earlier_measurement_or_a_run_is_refused(
    done: Done, capsys: Captured, tmp_path: Path
) -> None:
    assert main(["job=bench", f"output_dir={done.place}", *CPU, *SMALL]) == 2
    assert "holds an earlier measurement (bench.json)" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["job=bench", f"output_dir={tmp_path}", *CPU, *SMALL]) == 2
    assert "holds a run (manifest.json); allowed: another output_dir" in capsys.readouterr().err
    assert (tmp_path / "manifest.json").read_text() == "{}"


def test_synthetic_acceptance_is_labelled_everywhere(capsys: Captured, tmp_path: Path) -> None:
    arms = "bench.arms=[autoregressive,chain]"
    done = bench(tmp_path / "out", capsys, "bench.acceptance=1", arms, "bench.rows=[2]")
    label = {row["arm"]: row["acceptance_of"] for row in done.rows}
    assert label == {"autoregressive": None, "chain": "synthetic 1"}
    assert done.of("chain", 2)["acceptance_of"] == "synthetic 1"
    assert done.of("chain", 2)["equal_outputs"] is None
    (line,) = re.findall(r"^chain .*\(synthetic 1\).*$", done.said, re.M)
    # The coin never fails: a block of 8, or what the cap leaves of it.
    assert done.repeats("chain", 2)[0]["acceptance_length"] == 7.0, line
    assert "synthetic: a coin decides what is accepted" in done.said
    assert any("synthetic" in note for note in done.document["notes"])


def test_random_ids_say_that_their_acceptance_means_nothing(
    capsys: Captured, tmp_path: Path
) -> None:
    done = bench(tmp_path / "out", capsys, "bench.arms=[chain:1]", "bench.rows=[1]")
    assert done.rows[0]["acceptance_of"] == "random ids"
    assert re.search(r"^chain 1 .*\(random ids\)", done.said, re.M)
    assert "their acceptance length means nothing" in " ".join(done.said.split())
    assert done.of("chain 1", 1)["against_plain"] is None


def test_a_lack_of_memory_is_no_bug_and_keeps_what_was_measured(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = running.measure_group

    def measure_few(setting: Any, arms: Any, *others: Any) -> Any:
        if arms[0].rows > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate a lot")
        return measure(setting, arms, *others)

    monkeypatch.setattr(running, "measure_group", measure_few)
    monkeypatch.setitem(measuring.ROUND_SECONDS, "cpu", 0.02)
    options = ["bench.arms=[autoregressive]", "bench.rows=[1,2]"]
    command = ["job=bench", f"output_dir={tmp_path}/out", *CPU, *SMALL, *options]
    assert main(command) == 4
    said = capsys.readouterr().err
    assert "no memory for all arms side by side at bench.rows=2 and 48 tokens of context" in said
    report = tmp_path / "out" / "bench.json"
    assert json.loads(report.read_text())["is_whole"] is False
    assert len(pq.read_table(tmp_path / "out" / "bench.parquet")) == 2
    monkeypatch.setattr(running, "measure_group", measure)
    assert main(command) == 0
    assert json.loads(report.read_text())["is_whole"] is True
    assert len(pq.read_table(tmp_path / "out" / "bench.parquet")) == 4


def test_plain_decoding_needs_no_drafter(capsys: Captured, tmp_path: Path) -> None:
    options = ["bench.arms=[autoregressive]", "bench.rows=[1]"]
    assert (
        main(
            [
                "job=bench",
                f"output_dir={tmp_path}/out",
                PAIR[0],
                "engine.device=cpu",
                *SMALL,
                *options,
            ]
        )
        == 0
    )
    assert "target, float32" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_rounds_are_captured_and_its_watts_are_told(
    capsys: Captured, tmp_path: Path
) -> None:
    arms = "bench.arms=[autoregressive,chain,ddtree:5/4]"
    options = ["bench.rows=[1,3]", "bench.acceptance=0.7", "bench.peers=[transformers]", arms]
    assert main(["job=bench", f"output_dir={tmp_path}/out", *PAIR, *SMALL, *options]) == 0
    said = capsys.readouterr().out
    rows = pq.read_table(tmp_path / "out" / "bench.parquet").to_pylist()
    ours = [row for row in rows if row["method"] is not None]
    assert len(ours) == 12
    assert all(row["watts"] > 0 and row["sm_mhz"] > 0 for row in ours)
    assert said.count("% of the power limit") == 6
    assert "transformers static, compiled" in said
    document = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert document["watts"] in ("pynvml", "nvidia-smi")
    assert "driver" in document["headline"]["machine"]
