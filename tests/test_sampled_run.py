"""Sampling in whole commands with a tiny pair: a completion depends on its row, its options and its
seed, and on nothing that is only about how the run was scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from runs import CONTENT, key_of, write_jsonl
from tiny import read_target, write_cli_pair

from ddbatch.__main__ import main
from ddbatch.core import Key, Sampling
from ddbatch.engine.oracle import Oracle
from ddbatch.engine.oracle_draw import draw_scores

Captured = pytest.CaptureFixture[str]

ROWS = [{"prompt": " ".join(f"w{(n * 7 + k) % 90}" for k in range(1 + n % 5))} for n in range(11)]
OPTIONS = (
    "sampling.temperature=0.9",
    "sampling.top_p=0.95",
    "sampling.top_k=30",
    "sampling.seed=7",
)
SAMPLING = Sampling(0.9, 0.95, 30, 0.0, 7)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target/ and drafter/."""
    return write_cli_pair(tmp_path_factory.mktemp("pair"))


class Runs:
    """Runs of one input, each in a folder of its own; their completions sorted by key."""

    def __init__(self, pair: Path, place: Path) -> None:
        self.pair, self.place = pair, place
        self.data = write_jsonl(place / "p.jsonl", ROWS)

    def __call__(self, name: str, *more: str, options: tuple[str, ...] = OPTIONS) -> None:
        arguments = {
            "model.path": str(self.pair / "target"),
            "drafter.path": str(self.pair / "drafter"),
            "data.path": str(self.data),
            "output_dir": str(self.place / name),
            "sampling.max_new_tokens": "12",
            **dict(option.split("=", 1) for option in (*options, *more)),
        }
        assert main([f"{key}={value}" for key, value in arguments.items() if value]) == 0

    def table(self, name: str, table: str = "completions") -> list[dict[str, Any]]:
        files = sorted((self.place / name / table).glob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        return sorted(rows, key=key_of)

    def content(self, name: str) -> list[dict[str, Any]]:
        return [{column: row[column] for column in CONTENT} for row in self.table(name)]


@pytest.fixture
def run(pair: Path, tmp_path: Path) -> Runs:
    return Runs(pair, tmp_path)


def test_every_token_is_the_keyed_draw_of_the_oracle(pair: Path, run: Runs) -> None:
    run("out")
    target = read_target(pair / "target")
    for row in run.table("out"):
        prompt, output = row["prompt_token_ids"], row["output_token_ids"]
        scores = Oracle(target).scores([*prompt, *output[:-1]])[len(prompt) - 1 :]
        drawn = draw_scores(scores, SAMPLING, Key(row["row_id"], 0, 0), 0)
        assert drawn.tokens.tolist() == output
        assert row["seed"] == 7


def test_a_sampled_run_does_not_depend_on_shards_parts_plan_and_method(run: Runs) -> None:
    """Each row has a temperature and filters of its own."""
    filters: list[dict[str, Any]] = [
        {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}
    ]  # fmt: skip
    kinds = [{"temperature": t, **own} for t in (0.3, 0.7, 1.0, 1.5) for own in filters]
    write_jsonl(run.data, [{**ROWS[n % len(ROWS)], "s": own} for n, own in enumerate(kinds)])
    plain = ("data.sampling_column=s",)
    run("out", options=plain)
    assert len({tuple(row["output_token_ids"]) for row in run.table("out")}) == len(kinds)
    for place, more in enumerate(
        (
            ["shards.rows=2", "output.part_rows=3"],
            ["shards.rows=3", "shards.start=2", "engine.rows=1"],
            ["engine.budget=9", "engine.rows=5", "engine.page=3"],
            ["engine.method=chain", "engine.rows=2"],
            ["engine.method=autoregressive", "drafter.path="],
        )
    ):
        run(f"out{place}", *more, options=plain)
        assert run.content(f"out{place}") == run.content("out")


def test_another_seed_says_something_else_and_is_another_run(run: Runs, capsys: Captured) -> None:
    run("out")
    run("other", "sampling.seed=8")
    texts = [[row["completion"] for row in run.table(name)] for name in ("out", "other")]
    assert all(ours != theirs for ours, theirs in zip(*texts, strict=True))
    with pytest.raises(AssertionError):
        run("out", "sampling.seed=8")
    assert "sampling.seed" in capsys.readouterr().err


def test_samples_differ_and_more_of_them_can_be_asked_for_later(run: Runs) -> None:
    run("out")
    first = run.content("out")
    run("out", "sampling.n=3")
    assert [row for row in run.content("out") if row["sample"] == 0] == first
    run("whole", "sampling.n=3", "shards.rows=2")
    assert run.content("out") == run.content("whole")
    rows = run.table("whole")
    assert len({tuple(row["output_token_ids"]) for row in rows}) == len(rows) == 3 * len(ROWS)


def test_a_rows_own_options_are_worth_the_runs(run: Runs) -> None:
    """Rows with all kinds of options in one batch say what a run with those options says."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"temperature": 1.5, "seed": 3},
        {"top_k": 2, "top_p": 1.0},
        {"min_p": 0.2, "max_new_tokens": 5},
        {"stop_token_ids": [4, 9, 20, 33], "ignore_eos": True},
        {"stop": ["w1", "w7 w"]},
    ]
    data = [{**row, "s": kinds[place % len(kinds)]} for place, row in enumerate(ROWS)]
    write_jsonl(run.place / "own.jsonl", data)
    run("own", f"data.path={run.place / 'own.jsonl'}", "data.sampling_column=s", "engine.rows=4")
    mixed = run.content("own")
    for number, kind in enumerate(kinds):
        more = [
            f"sampling.{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in kind.items()
            if name != "stop"
        ]
        if "stop" in kind:
            more.append('sampling.stop=["w1","w7 w"]')
        run(f"kind{number}", *more)
        same = [row for row in run.content(f"kind{number}") if row["row_id"] % len(kinds) == number]
        assert [row for row in mixed if row["row_id"] % len(kinds) == number] == same


@pytest.mark.parametrize("budget", [0, 7])
def test_log_probs_go_with_their_ids_and_check_finds_them_sound(
    run: Runs, pair: Path, capsys: Captured, budget: int
) -> None:
    run(
        "out", "sampling.logprobs=true", "sampling.top_logprobs=4", f"engine.budget={budget}",
        'sampling.stop=["w1"]', "output.part_rows=4",
    )  # fmt: skip
    assert main(["job=check", f"output_dir={run.place / 'out'}"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    target = read_target(pair / "target")
    tops = run.table("out", "logprobs")
    for row, top in zip(run.table("out"), tops, strict=True):
        assert key_of(row) == key_of(top)
        prompt, output = row["prompt_token_ids"], row["output_token_ids"]
        scores = Oracle(target).scores([*prompt, *output[:-1]])[len(prompt) - 1 :]
        exact = scores.log_softmax(dim=-1)
        assert len(output) == len(row["output_logprobs"]) == len(top["top_token_ids"])
        for place, token in enumerate(output):
            assert abs(row["output_logprobs"][place] - exact[place, token].item()) < 1e-4
            assert sorted(top["top_token_ids"][place]) == sorted(
                exact[place].topk(4).indices.tolist()
            )


def test_more_log_probs_than_tokens_are_refused(run: Runs, capsys: Captured) -> None:
    with pytest.raises(AssertionError):
        run("out", "sampling.logprobs=true", "sampling.top_logprobs=98")
    assert "sampling.top_logprobs=98: the vocabulary has 97 tokens" in capsys.readouterr().err
    assert not (run.place / "out").exists()


def test_a_bfloat16_run_notes_its_score_errors(run: Runs) -> None:
    from ddbatch.data.attempts import read_attempts
    from ddbatch.data.folder import RunFolder

    run("out", "model.dtype=bfloat16")
    (attempt,) = read_attempts(RunFolder(run.place / "out"))
    numerics = attempt.about["numerics"]
    assert isinstance(numerics, dict)
    assert numerics["dtype"] == "bfloat16"
    assert 0 < numerics["engine"] <= 1.5 * numerics["plain"]
    assert numerics["gap"] == pytest.approx(4 * numerics["plain"])
    run("exact")
    assert "numerics" not in read_attempts(RunFolder(run.place / "exact"))[0].about
