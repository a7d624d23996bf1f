"""Whole runs over a fake engine: every row once, and the same command goes on where it stopped."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import Run, key_of, prompts, rows_of, write_jsonl

from ddbatch.core import Key, Shard
from ddbatch.data.folder import RunFolder
from ddbatch.jobs import generate as generate_module
from ddbatch.jobs.generating import feed as feed_module
from ddbatch.jobs.generating import worker as worker_module

Captured = pytest.CaptureFixture[str]


def test_every_row_ends_once_in_one_of_the_tables(tmp_path: Path, capsys: Captured) -> None:
    rows: list[object] = [*prompts(23), "{bad", {"other": 1}, {"prompt": " "}, *prompts(8)]
    run = Run(tmp_path, rows)
    assert run("data.id_column=name", "data.keep_columns=[name]") == 0
    assert run.all_keys() == rows_of(34)
    assert [row["code"] for row in run.table("rejected")] == [
        "bad_json",
        "missing_field",
        "missing_field",
    ]
    done = run.table()
    assert [key_of(row) for row in done] == [key_of(row) for row in run.table("acceptance")]
    assert done[9]["id"] == done[9]["name"] == "row 9"
    for file in (run.out / "completions").iterdir():
        keys = [key_of(row) for row in pq.read_table(file).to_pylist()]
        assert keys == sorted(keys)
        assert len(keys) <= 5
    assert "31 finished" in capsys.readouterr().out


def test_a_shard_is_a_range_of_rows_and_nothing_else_shows_it(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(23))
    assert run() == 0
    whole = run.content()
    for number, rows in enumerate(("1", "3", "23", "100")):
        out = tmp_path / f"out{number}"
        assert run(f"output_dir={out}", f"shards.rows={rows}", "output.part_rows=4096") == 0
        assert run.content(out) == whole
        assert len(list((out / ".ddbatch" / "commits").iterdir())) == -(-23 // int(rows))


def test_equal_prompts_are_different_rows(tmp_path: Path) -> None:
    run = Run(tmp_path, [{"prompt": "w1 w2"}] * 10)
    assert run() == 0
    assert run.all_keys() == rows_of(10)


def changes(out: Path) -> dict[Path, int]:
    """When each file of a run was written, caches and the mark for readers' caches aside."""
    files = (file for file in out.rglob("*") if file.is_file() and file.parent.name != "index")
    named = (file for file in files if file.name != ".huggingface.yaml")
    return {file: file.stat().st_mtime_ns for file in named}


def test_the_same_command_again_has_nothing_to_do(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, prompts(9))
    assert run() == 0
    before = changes(run.out)
    capsys.readouterr()
    assert run() == 0
    assert "nothing to do" in capsys.readouterr().out
    assert changes(run.out) == before


@pytest.mark.parametrize("step", [1, 3, 6, 9, 12, 15])
def test_a_broken_engine_loses_nothing_that_is_finished(tmp_path: Path, step: int) -> None:
    run = Run(tmp_path, prompts(31))
    with pytest.raises(RuntimeError, match="broke"):
        run(engine=fake.FakeOptions(fail_at_step=step))
    done = run.all_keys()
    assert len(set(done)) == len(done)
    assert run() == 0
    assert run.all_keys() == rows_of(31)
    attempts = [json.loads(f.read_text()) for f in run.out.glob(".ddbatch/attempts/*.end.json")]
    assert {attempt["exit_code"] for attempt in attempts} == {0, 1}


def test_a_fault_of_the_device_is_an_engine_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    run = Run(tmp_path, prompts(9))
    text = "CUDA error: an illegal memory access was encountered\nCompile with ..."
    monkeypatch.setattr(fake, "FAILURE", text)
    assert run(engine=fake.FakeOptions(fail_at_step=3)) == 4
    said = capsys.readouterr().err
    assert "the device failed: CUDA error: an illegal memory access was encountered\n" in said
    (end,) = [json.loads(f.read_text()) for f in run.out.glob(".ddbatch/attempts/*.end.json")]
    assert end["exit_code"] == 4
    assert run() == 0
    assert run.all_keys() == rows_of(9)


def test_a_resumed_run_decodes_only_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, prompts(40))
    with pytest.raises(RuntimeError, match="broke"):
        run(engine=fake.FakeOptions(fail_at_step=20))
    num_done = len(run.all_keys())
    assert 5 < num_done < 40
    asked: list[Key] = []

    def count(prompt: fake.TokenPrompt) -> list[int]:
        asked.append(prompt.key)
        return real(prompt)

    real = fake.answer
    monkeypatch.setattr(fake, "answer", count)
    assert run() == 0
    assert len(asked) == len(set(asked)) == 40 - num_done


def test_what_identifies_a_run_must_not_change(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, prompts(9))
    assert run() == 0
    for option, said in (
        ("sampling.temperature=0.5", "sampling.temperature: 0.0 in the run, 0.5 now"),
        ("sampling.max_new_tokens=13", "sampling.max_new_tokens: 12 in the run, 13 now"),
        ("sampling.seed=1", "sampling.seed: 0 in the run, 1 now"),
        ("data.system_prompt=w1", "data.system_prompt: null in the run, digest"),
        ("data.id_column=name", 'data.id_column: null in the run, "name" now'),
        ("data.keep_columns=[name]", 'data.keep_columns: [] in the run, ["name"] now'),
        ("data.turns=all", 'data.turns: "last" in the run, "all" now'),
        ("data.on_long=truncate_left", "data.on_long"),
        ("data.template_date=2026-01-01", "data.template_date"),
        ("data.chat_template_kwargs={a: 1}", "data.chat_template_kwargs"),
        ("engine.max_len=70", "engine.max_len: 80 in the run, 70 now"),
        ("output.store=[acceptance]", "output.store"),
        ("data.prompt_column=name", 'data.prompt_column: "prompt" in the run, "name" now'),
    ):
        assert run(option) == 2, option
        assert said in capsys.readouterr().err, option
    tokenizer = run.model / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert run() == 2
    assert "tokenizer: digest" in capsys.readouterr().err


def test_what_is_free_may_change_on_the_way(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(29))
    with pytest.raises(RuntimeError):
        run(engine=fake.FakeOptions(fail_at_step=8))
    more = ("engine.rows=2", "output.part_rows=3", "output.part_seconds=9", "shards.rows=1000")
    assert run(*more, "data.prompt_column=prompt", engine=fake.FakeOptions(rows=2)) == 0
    assert run.all_keys() == rows_of(29)


def test_the_template_date_is_that_of_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, prompts(20))
    dated = "{% for m in messages %}<s> {{ m.content }} {{ strftime_now('w%M%S') }}{% endfor %}"
    fake.write_tokenizer(run.model, dated)
    with pytest.raises(RuntimeError):
        run(engine=fake.FakeOptions(fail_at_step=6))
    pinned = json.loads((run.out / "manifest.json").read_text())["template_date"]
    assert run() == 0
    assert len({tuple(row["prompt_token_ids"][-1:]) for row in run.table()}) == 1
    assert json.loads((run.out / "manifest.json").read_text())["template_date"] == pinned


def test_resume_modes_say_what_they_want(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, prompts(5))
    for mode in ("require", "repair"):
        assert run(f"output.resume={mode}") == 2
        assert "holds no run" in capsys.readouterr().err
    assert not run.out.exists()
    assert run("output.resume=never") == 0
    assert run("output.resume=never") == 2
    assert "output.resume=never" in capsys.readouterr().err
    assert run("output.resume=require") == run("output.resume=repair") == 0


def test_samples_of_a_row_are_rows_of_their_own_and_may_become_more(
    tmp_path: Path, capsys: Captured
) -> None:
    run = Run(tmp_path, [*prompts(9), "{bad"])
    hot = "sampling.temperature=0.5"
    assert run(hot, "sampling.n=2") == 0
    assert run.all_keys() == rows_of(10, 2)
    first = run.content()
    assert run(hot, "sampling.n=3") == 0
    assert run.all_keys() == rows_of(10, 3)
    assert [row for row in run.content() if row["sample"] < 2] == first
    assert len(run.table("rejected")) == 3
    assert run(hot, "sampling.n=2") == 2
    assert "sampling.n=2" in capsys.readouterr().err


CHAT = [
    {"role": "user", "content": "w1"},
    {"role": "assistant", "content": "old"},
    {"role": "user", "content": "w2"},
    {"role": "assistant", "content": "old"},
    {"role": "user", "content": "w3"},
]


def test_all_turns_are_generated_in_order_and_committed_together(tmp_path: Path) -> None:
    chats = [{"messages": CHAT[: 1 + n % 5]} for n in range(17)]
    run = Run(tmp_path, [*chats, "{bad"])
    with pytest.raises(RuntimeError):
        run("data.turns=all", engine=fake.FakeOptions(fail_at_step=14))
    for turn_counts in (run.table(),):
        for row in turn_counts:
            assert row["turn"] < (2 + row["row_id"] % 5) // 2
    assert run("data.turns=all") == 0
    wanted = [Key(n, turn, 0) for n in range(17) for turn in range(1 + n % 5 // 2)]
    assert run.all_keys() == sorted([*wanted, Key(17, 0, 0)])
    said = {key_of(row): row for row in run.table()}
    last = said[Key(4, 2, 0)]
    contents = [message["content"] for message in last["messages"]]
    earlier = [said[Key(4, turn, 0)]["completion"] for turn in (0, 1)]
    assert contents == ["w1", earlier[0], "w2", earlier[1], "w3", last["completion"]]
    for file in (run.out / "completions").iterdir():
        keys = [key_of(row) for row in pq.read_table(file).to_pylist()]
        for row_id in {key.row_id for key in keys}:
            turns = [key.turn for key in keys if key.row_id == row_id]
            assert turns == list(range(1 + row_id % 5 // 2))


def test_a_turn_that_cannot_be_made_rejects_those_after_it_too(tmp_path: Path) -> None:
    long = [dict(turn) for turn in CHAT]
    long[2]["content"] = " ".join(["w5"] * 79)
    run = Run(tmp_path, [{"messages": long}, {"messages": CHAT}])
    assert run("data.turns=all") == 0
    assert [key_of(row) for row in run.table("rejected")] == [Key(0, 1, 0), Key(0, 2, 0)]
    assert {row["code"] for row in run.table("rejected")} == {"prompt_too_long"}
    assert len(run.table()) == 4


def test_a_turn_is_continued_from_its_beginning(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w7 w8"}]
    run = Run(tmp_path, [{"messages": chat}])
    assert run("data.turns=continue") == 0
    (row,) = run.table()
    assert row["prompt_token_ids"][-2:] == [11, 12]  # w7 w8
    assert row["messages"][1]["content"] == "w7 w8" + row["completion"]


def test_a_row_may_have_its_own_sampling(tmp_path: Path) -> None:
    rows = [
        {"prompt": "w1", "how": {"max_new_tokens": 3, "seed": 5}},
        {"prompt": "w1", "how": None},
        {"prompt": "w1"},
        {"prompt": "w1", "how": {"max_new_tokens": 0}},
        {"prompt": "w1", "how": {"temprature": 1}},
        {"prompt": "w1", "how": {"max_new_tokens": 60}},
    ]
    run = Run(tmp_path, rows)
    assert run("data.sampling_column=how") == 0
    done = {row["row_id"]: row for row in run.table()}
    assert [done[n]["max_new_tokens"] for n in (0, 1, 2, 5)] == [3, 12, 12, 60]
    assert [done[n]["seed"] for n in (0, 1)] == [5, 0]
    assert {row["row_id"]: row["code"] for row in run.table("rejected")} == {
        3: "bad_sampling",
        4: "bad_sampling",
    }


def test_long_prompts_are_rejected_or_cut_and_said(tmp_path: Path, capsys: Captured) -> None:
    rows = [{"token_ids": [5] * length} for length in (3, 75, 79, 80, 99)]
    run = Run(tmp_path, rows)
    assert run() == 0
    assert {row["row_id"]: row["code"] for row in run.table("rejected")} == {
        3: "prompt_too_long",
        4: "prompt_too_long",
    }
    caps = [(row["max_new_tokens"], row["stop_reason"]) for row in run.table()]
    assert [cap for cap, _ in caps] == [12, 5, 1]
    out = tmp_path / "cut"
    assert run("data.on_long=truncate_left", f"output_dir={out}") == 0
    cut = [
        (row["prompt_tokens"], row["dropped_prompt_tokens"], row["max_new_tokens"])
        for row in run.table(out=out)
    ]
    assert cut == [(3, 0, 12), (75, 0, 5), (79, 0, 1), (68, 12, 12), (68, 31, 12)]
    assert "2 prompts cut at the beginning" in capsys.readouterr().out


def decoders(monkeypatch: pytest.MonkeyPatch) -> list[fake.FakeDecoder]:
    """The decoders that runs make from here on."""
    made: list[fake.FakeDecoder] = []

    class Seen(fake.FakeDecoder):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(fake, "FakeDecoder", Seen)
    return made


def test_room_grows_with_the_prompts_and_shorter_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "WINDOW_UNITS", 4)
    monkeypatch.setattr(worker_module, "_MIN_ROOM", 16)
    lengths = [2, 3, 1, 2, 30, 1, 3, 2, 70, 5]
    run = Run(tmp_path, [{"token_ids": [5] * length} for length in lengths])
    made = decoders(monkeypatch)
    assert run("shards.rows=100") == 0
    assert made[0].grown == [16, 64, 80]
    assert run.all_keys() == rows_of(10)


def test_room_does_not_grow_row_by_row_where_the_context_is_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would drain for it; the longest prompts, which may emit the least, come first."""
    run = Run(tmp_path, [{"token_ids": [5] * length} for length in range(20, 1, -1)])
    made = decoders(monkeypatch)
    assert run("sampling.max_new_tokens=1000") == 0
    assert made[0].grown == [80]
    assert run.all_keys() == rows_of(19)


def test_refill_does_not_drain_at_the_end_of_a_shard(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, prompts(60))
    assert run("shards.rows=5") == 0
    said = capsys.readouterr().out
    share = float(said.split("% of row-rounds useful")[0].split()[-1])
    assert share >= 85  # the end of the run drains, the end of a shard does not


def test_no_more_than_three_shards_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    real = feed_module.Feed.open_shard

    def count(self: feed_module.Feed, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        most.append(self.num_open)

    monkeypatch.setattr(feed_module.Feed, "open_shard", count)
    run = Run(tmp_path, prompts(40))
    assert run("shards.rows=2") == 0
    assert max(most) == 3
    assert run.all_keys() == rows_of(40)


def test_many_rejected_rows_stop_the_run_early_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(worker_module, "MIN_ROWS_FOR_RATE", 20)
    monkeypatch.setattr(feed_module, "WINDOW_UNITS", 16)
    rows = [
        row for n, row in enumerate(prompts(300)) for row in ([row, "{bad"] if n % 4 else [row])
    ]
    run = Run(tmp_path, rows)
    assert run("output.max_error_rate=0.2") == 3
    num_done = len(run.all_keys())
    assert 0 < num_done < 200
    assert "larger output.max_error_rate goes on" in capsys.readouterr().err
    assert run("output.max_error_rate=0.2") == 3
    assert num_done <= len(run.all_keys()) < 200
    assert run("output.max_error_rate=0.5") == 0
    assert run.all_keys() == rows_of(len(rows))


def test_a_complete_run_with_many_rejected_rows_exits_with_3_each_time(tmp_path: Path) -> None:
    run = Run(tmp_path, [*prompts(9), "{bad"])
    assert run("output.max_error_rate=0.05") == 3
    assert run("output.max_error_rate=0.05") == 3
    assert run("output.max_error_rate=0.1") == 0


def test_an_engine_of_nan_scores_rejects_nothing_and_the_rest_is_kept(
    tmp_path: Path, capsys: Captured
) -> None:
    run = Run(tmp_path, [*prompts(12), *[{"prompt": f"w91 w{n}"} for n in range(20)]])
    assert run("shards.rows=12", engine=fake.FakeOptions(nan_words=(95,))) == 4
    assert "the last 8 rows all had scores that are not finite" in capsys.readouterr().err
    assert run.all_keys() == rows_of(12)
    assert run() == 0
    assert run.all_keys() == rows_of(32)


def test_few_rows_with_nan_scores_are_rejected(tmp_path: Path) -> None:
    rows = [{"prompt": "w91" if n % 5 == 2 else "w1"} for n in range(30)]
    run = Run(tmp_path, [*rows, {"prompt": "w91"}])
    assert run(engine=fake.FakeOptions(nan_words=(95,))) == 0
    assert [row["row_id"] for row in run.table("rejected")] == [*range(2, 30, 5), 30]
    assert {row["code"] for row in run.table("rejected")} == {"nan_logits"}
    assert run.all_keys() == rows_of(31)


def test_the_input_grows_at_its_end(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path)
    run.data = tmp_path / "data"
    write_jsonl(run.data / "b.jsonl", prompts(9))
    assert run("data.limit=4") == 0
    assert run("data.limit=6") == 0
    assert run.all_keys() == rows_of(6)
    write_jsonl(run.data / "a.jsonl", prompts(5, first=100))
    capsys.readouterr()
    assert run("data.grow=refuse") == 2
    assert "data.grow=refuse" in capsys.readouterr().err
    assert run("data.id_column=name") == 2  # not before the run is the same one
    assert run() == 0
    assert "input grew" in capsys.readouterr().err
    assert run.all_keys() == rows_of(14)
    assert run("data.limit=6") == 2
    assert "data.limit=6" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["jsonl", "gz", "parquet", "arrow", "saved"])
def test_every_form_of_input_gives_the_same_rows(tmp_path: Path, form: str) -> None:
    run = Run(tmp_path, prompts(23))
    assert run("data.id_column=name") == 0
    table = pa.Table.from_pylist(prompts(23))
    place = tmp_path / "data"
    place.mkdir()
    if form == "jsonl":
        write_jsonl(place / "1.jsonl", prompts(11))
        write_jsonl(place / "2.jsonl", prompts(12, first=11))
    elif form == "gz":
        with gzip.open(place / "1.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in prompts(23))
    elif form == "parquet":
        pq.write_table(table, place / "1.parquet", row_group_size=4)
    elif form == "arrow":
        with pa.ipc.new_file(place / "1.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=5)
    else:
        from datasets import Dataset

        Dataset(table).save_to_disk(place / "saved")
        place = place / "saved"
    out = tmp_path / form
    assert run(f"data.path={place}", f"output_dir={out}", "data.id_column=name") == 0
    assert run.content(out) == run.content()


def test_truncated_and_rejected_rows_of_a_run_become_the_input_of_another(tmp_path: Path) -> None:
    bad = [json.dumps({"prompt": " ".join(["w1"] * 90), "name": "long"}), "{bad"]
    run = Run(tmp_path, [*prompts(20), *bad])
    assert run("data.id_column=name") == 0
    cut = [row for row in run.table() if row["finish_reason"] == "length"]
    assert 2 <= len(cut) < 20
    again = tmp_path / "again"
    options = (f"data.path={run.out}", f"output_dir={again}", "data.id_column=id")
    assert run(*options, "data.select=truncated", "sampling.max_new_tokens=40") == 0
    redone = run.table(out=again)
    assert [row["id"] for row in redone] == [row["id"] for row in cut]
    assert [row["prompt_token_ids"] for row in redone] == [row["prompt_token_ids"] for row in cut]
    third = tmp_path / "third"
    options = (f"data.path={run.out}", f"output_dir={third}", "data.select=rejected")
    assert run(*options, "data.on_long=truncate_left", "data.prompt_column=prompt") == 0
    assert [row["prompt_tokens"] for row in run.table(out=third)] == [68]
    assert len(run.table("rejected", third)) == 1


def test_the_card_gets_what_the_user_adds(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(3))
    assert run("output.card.license=apache-2.0", "output.card.tags=[a,b]") == 0
    assert '"license": "apache-2.0"\n"tags": ["a", "b"]\n' in (run.out / "README.md").read_text()


def test_nothing_that_is_published_names_the_machine_or_a_place(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(9))
    assert run("data.id_column=name") == 0
    import os

    for file in [run.out / "README.md", run.out / "manifest.json", *run.out.rglob("*.parquet")]:
        for secret in (str(tmp_path), os.uname().nodename):
            assert secret.encode() not in file.read_bytes(), file


def test_prompts_go_into_no_log(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, [{"prompt": "w17 w18"}, {"prompt": ["w17 w18"]}])
    assert run() == 0
    assert "w17" not in "".join(capsys.readouterr())
    state = RunFolder(run.out).state("")
    for file in state.rglob("*"):
        assert not file.is_file() or b"w17" not in file.read_bytes(), file


def test_a_bad_row_that_is_known_early_weighs_no_more_than_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MIN_ROWS_FOR_RATE", 20)
    rows: list[object] = [*prompts(85), *["{bad"] * 10]  # all in one window
    run = Run(tmp_path, rows)
    assert run("output.max_error_rate=0.12", "shards.rows=100") == 0
    assert run.all_keys() == rows_of(95)


def test_another_plan_is_noted_where_rounding_makes_it_matter(
    tmp_path: Path, capsys: Captured
) -> None:
    run = Run(tmp_path, prompts(40))
    for dtype in ("float32", "bfloat16"):
        out = f"output_dir={tmp_path / dtype}"
        for rows, step in ((4, 5), (4, 5), (3, None)):
            engine = fake.FakeOptions(rows=rows, fail_at_step=step, dtype=dtype)
            if step is not None:
                with pytest.raises(RuntimeError):
                    run(out, engine=engine)
            else:
                assert run(out, "output.part_rows=7", engine=engine) == 0
        said = capsys.readouterr().err
        assert said.count("rows changed since the last start") == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, 0),
        ({"ID": "0", "COUNT": "4"}, 0),
        ({"ID": "3", "COUNT": "4"}, 7),
        ({"ID": "13", "MIN": "10", "COUNT": "4"}, 7),
        ({"ID": "3"}, 0),
    ],
)
def test_tasks_of_an_array_begin_in_different_places(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], first: int
) -> None:
    for name in ("ID", "COUNT", "MIN"):
        monkeypatch.delenv(f"SLURM_ARRAY_TASK_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    shards = tuple(Shard(n, 5 * n, 5) for n in range(10))
    ordered = generate_module._from_start(shards, "auto")
    assert [shard.index for shard in ordered] == [(first + n) % 10 for n in range(10)]
    assert [shard.index for shard in generate_module._from_start(shards, 12)][:2] == [2, 3]
