"""Bad input and bad days: one bad row costs one row, and no state is believed that is not whole."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import Run, kill, prompts, rows_of, write_jsonl

from ddbatch.data import sink as sink_module
from ddbatch.data.folder import RunFolder
from ddbatch.data.manifest import Manifest
from ddbatch.jobs import generate as generate_module

Captured = pytest.CaptureFixture[str]

# A row of each kind, and the code that it gets.
BAD_ROWS: list[tuple[object, str]] = [
    ("{not json", "bad_json"),
    ('{"prompt": "w1"', "bad_json"),
    ("[1, 2]", "wrong_type"),
    ({"name": "no prompt"}, "missing_field"),
    ({"prompt": None}, "missing_field"),
    ({"prompt": 7}, "wrong_type"),
    ({"prompt": ["w1"]}, "wrong_type"),
    ({"prompt": ""}, "empty_prompt"),
    ({"prompt": " \n"}, "empty_prompt"),
    ('{"prompt": "\\ud800"}', "bad_text"),
    ({"prompt": " ".join(["w1"] * 99)}, "prompt_too_long"),
    ({"prompt": "w1", "how": {"top_p": 2}}, "bad_sampling"),
]
BAD_CHATS: list[tuple[object, str]] = [
    ({"messages": []}, "empty_prompt"),
    ({"messages": "w1"}, "bad_json"),
    ({"messages": [{"content": "w1"}]}, "missing_field"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "wrong_type"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "unsupported_content"),
    ({"messages": [{"role": "boom", "content": "w1"}]}, "template_error"),
]
RAISING = "{% for m in messages %}{% if m.role == 'boom' %}{{ raise_exception('no') }}{% endif %}"


def codes(run: Run) -> dict[int, str]:
    return {row["row_id"]: row["code"] for row in run.table("rejected")}


def test_every_bad_row_gets_its_code_and_costs_nothing_else(tmp_path: Path) -> None:
    rows = [row for bad, _ in BAD_ROWS for row in (bad, {"prompt": "w1", "name": "good"})]
    run = Run(tmp_path, rows)
    options = ("data.sampling_column=how", "data.keep_columns=[name]")
    assert run(*options) == 0
    assert codes(run) == {2 * n: code for n, (_, code) in enumerate(BAD_ROWS)}
    assert [row["row_id"] for row in run.table()] == list(range(1, 2 * len(BAD_ROWS), 2))
    assert run("job=check") == 0


def test_every_bad_chat_gets_its_code(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "w1"}]}
    run = Run(tmp_path, [*(row for row, _ in BAD_CHATS), good])
    fake.write_tokenizer(run.model, RAISING + fake.TEMPLATE.removeprefix("{% for m in messages %}"))
    assert run() == 0
    assert codes(run) == {n: code for n, (_, code) in enumerate(BAD_CHATS)}
    assert len(run.table()) == 1


def test_token_ids_outside_the_vocabulary_are_rejected(tmp_path: Path) -> None:
    run = Run(tmp_path, [{"token_ids": ids} for ids in ([5], [97], [-1], [5.5], ["a"])])
    assert run() == 0
    out, wrong = "token_out_of_range", "wrong_type"
    assert codes(run) == {1: out, 2: out, 3: wrong, 4: wrong}


def test_rejected_rows_keep_what_was_read(tmp_path: Path) -> None:
    run = Run(tmp_path, ["{not json", {"prompt": 7, "name": "x"}])
    assert run("data.id_column=name") == 0
    first, second = run.table("rejected")
    assert (first["raw_json"], first["id"]) == ("{not json", None)
    assert (json.loads(second["raw_json"]), second["id"]) == ({"prompt": 7, "name": "x"}, "x")


def test_text_that_is_no_utf8_costs_one_row_of_a_parquet_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.data = tmp_path / "p.parquet"
    binary = pa.array([b"w1", b"\xff\xfe", b"w2"])
    text = pa.Array.from_buffers(pa.string(), 3, binary.buffers())
    pq.write_table(pa.table({"prompt": text}), run.data)
    assert run() == 0
    assert codes(run) == {1: "bad_text"}
    other = tmp_path / "other"
    pq.write_table(pa.table({"prompt": ["w1", "w2", "w3"], "junk": text}), run.data)
    assert run(f"output_dir={other}") == 0  # nobody asked for that column
    assert len(run.table(out=other)) == 3


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize("form", ["parquet", "gz", "arrow"])
def test_an_input_file_cut_short_is_refused_before_any_work(
    tmp_path: Path, capsys: Captured, form: str
) -> None:
    import gzip

    table = pa.Table.from_pylist(prompts(50))
    run = Run(tmp_path)
    if form == "parquet":
        run.data = tmp_path / "p.parquet"
        pq.write_table(table, run.data)
    elif form == "gz":
        run.data = tmp_path / "p.jsonl.gz"
        lines = "".join(json.dumps(row) + "\n" for row in prompts(50))
        run.data.write_bytes(gzip.compress(lines.encode()))
    else:
        run.data = tmp_path / "p.arrow"
        with pa.ipc.new_stream(run.data, table.schema) as file:
            file.write_table(table)
    cut(run.data)
    assert run() == 2
    assert run.data.name in capsys.readouterr().err
    assert not run.out.exists()


@pytest.mark.parametrize("rows", [[], ["", "  "]])
def test_an_empty_data_set_is_refused(tmp_path: Path, capsys: Captured, rows: list[object]) -> None:
    run = Run(tmp_path, rows)
    assert run() == 2
    assert "no rows" in capsys.readouterr().err
    assert not run.out.exists()


def test_a_folder_that_is_no_place_for_a_run_is_refused(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, prompts(3))
    (tmp_path / "file").write_text("")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "README.md").write_text("mine")
    for place, said in (
        (tmp_path / "file", "is no folder"),
        (tmp_path / "file" / "run", "is no folder that can be written to"),
        (tmp_path / "thesis", "holds thesis.tex, which is no part of a run"),
        (tmp_path / "card", "holds a README.md of something else"),
        (Path("/proc/run"), "/proc"),
    ):
        assert run(f"output_dir={place}") == 2, place
        assert said in capsys.readouterr().err
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "mine"


def test_a_file_system_without_hard_links_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    run = Run(tmp_path, prompts(3))
    assert run() == 2
    assert "has no hard links" in capsys.readouterr().err
    assert not (run.out / "manifest.json").exists()
    monkeypatch.undo()
    assert run() == 0  # what the attempt left is no obstacle


def first(run: Run, pattern: str) -> Path:
    return sorted(run.out.glob(pattern))[0]


def damaged(run: Run, damage: str) -> str:
    """Do some damage to a run of 30 rows; the name that must be told."""
    record = first(run, ".ddbatch/commits/shard-00001/000000.json")
    if damage == "record cut":
        cut(record)
    elif damage == "record empty":
        record.write_bytes(b"")
    elif damage == "record of another part":
        record.write_bytes(first(run, ".ddbatch/commits/shard-00002/000000.json").read_bytes())
    elif damage == "record gone":
        record.unlink()
    elif damage == "file gone":
        file = first(run, "completions/shard-00001-part-000000.parquet")
        file.unlink()
        return file.name
    elif damage == "file cut":
        file = first(run, "acceptance/shard-00001-part-000001.parquet")
        cut(file)
        return file.name
    else:
        raise AssertionError(damage)
    return f"{record.parent.name}/{record.name}"


DAMAGES = [
    "record cut",
    "record empty",
    "record of another part",
    "record gone",
    "file gone",
    "file cut",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_state_is_a_hard_error_by_name_and_repair_mends_it(
    tmp_path: Path, capsys: Captured, damage: str
) -> None:
    run = Run(tmp_path, prompts(30))
    assert run() == 0
    whole = run.content()
    name = damaged(run, damage)
    for job in ("generate", "check", "merge"):
        assert run(f"job={job}", f"merge.output_dir={tmp_path / 'merged'}") == 4, job
        said = capsys.readouterr().err
        assert name in said
        assert "output.resume=repair" in said
    assert run("output.resume=repair") == 0
    assert run.content() == whole
    assert run.all_keys() == rows_of(30)
    assert run("job=check") == 0
    assert list(run.out.glob(".ddbatch/aside/*/*"))


def test_repair_of_a_sound_run_moves_nothing(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, prompts(9))
    assert run() == 0
    assert run("output.resume=repair") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not list(run.out.glob(".ddbatch/aside/*"))


def test_an_input_file_that_changed_between_runs_is_refused_by_name(
    tmp_path: Path, capsys: Captured
) -> None:
    run = Run(tmp_path, prompts(20))
    with pytest.raises(RuntimeError):
        run(engine=fake.FakeOptions(fail_at_step=8))
    before = run.data.read_text()
    for text in (before.replace("w1", "w2", 1), before + '{"prompt": "w1"}\n', ""):
        run.data.write_text(text)
        assert run() == 2
        assert "p.jsonl" in capsys.readouterr().err
    run.data.unlink()
    assert run() == 2
    run.data.write_text(before)
    assert run() == 0
    assert run.all_keys() == rows_of(20)


def test_an_input_file_that_vanishes_in_the_middle_is_a_failure_that_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    run = Run(tmp_path)
    run.data = tmp_path / "data"
    write_jsonl(run.data / "1.jsonl", prompts(20))
    write_jsonl(run.data / "2.jsonl", prompts(20, first=20))
    real = fake.FakeDecoder.step

    def step(self: fake.FakeDecoder) -> None:
        real(self)
        (run.data / "2.jsonl").unlink(missing_ok=True)

    monkeypatch.setattr(fake.FakeDecoder, "step", step)
    assert run() == 4
    assert "2.jsonl" in capsys.readouterr().err
    assert 0 < len(run.all_keys()) <= 21
    monkeypatch.undo()
    write_jsonl(run.data / "2.jsonl", prompts(20, first=20))
    assert run() == 0
    assert run.all_keys() == rows_of(40)


def test_two_starts_at_the_same_instant_make_one_run(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(60))
    pair = [run.start(step_seconds=0.005) for _ in range(4)]
    for process in pair:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert run.all_keys() == rows_of(60)
    assert run("job=check") == 0


@pytest.mark.parametrize("looked_at", ["out", "inputs", "completions", "commits"])
def test_a_run_that_another_begins_while_its_folder_is_looked_at_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: str
) -> None:
    run = Run(tmp_path, prompts(9))
    for name in (".ddbatch/inputs", ".ddbatch/commits", "completions"):
        (run.out / name).mkdir(parents=True)
    real = os.listdir
    others: list[object] = []

    def listdir(path: str | Path = ".") -> list[str]:
        names = real(path)
        if Path(path).name == looked_at and not others:
            others.append("starts")
            others.append(run())  # between the look and what is made of it
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    assert run() == 0
    assert others == ["starts", 0]
    assert run.all_keys() == rows_of(9)


def test_who_starts_a_moment_later_takes_the_template_date_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = generate_module.create_manifest

    def second(folder: RunFolder, attempt: str, manifest: Manifest) -> Manifest:
        earlier = replace(manifest, template_date="2011-01-01T00:00:00")
        identity = {**manifest.identity, "data.template_date": earlier.template_date}
        real(folder, "f" * 12, replace(earlier, identity=identity))
        return real(folder, attempt, manifest)

    monkeypatch.setattr(generate_module, "create_manifest", second)
    run = Run(tmp_path, prompts(5))
    dated = "{% for m in messages %}<s> {{ m.content }} {{ strftime_now('w%y') }}{% endfor %}"
    fake.write_tokenizer(run.model, dated)
    assert run() == 0
    assert {row["prompt_token_ids"][-1] for row in run.table()} == {15}  # w11


def test_two_different_runs_started_at_the_same_instant_do_not_mix(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(40))
    pair = [run.start(f"sampling.seed={seed}", step_seconds=0.01) for seed in (1, 2)]
    ends = {}
    for seed, process in zip((1, 2), pair, strict=True):
        _, said = process.communicate(timeout=60)
        ends[process.returncode] = (seed, said)
    assert set(ends) == {0, 2}
    assert "sampling.seed" in ends[2][1]
    assert {row["seed"] for row in run.table()} == {ends[0][0]}
    assert run.all_keys() == rows_of(40)


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, jump: float
) -> None:
    run = Run(tmp_path, prompts(30))
    real, calls = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + jump * (next(calls) % 3))
    with pytest.raises(RuntimeError):
        run(engine=fake.FakeOptions(fail_at_step=9))
    assert run() == 0
    assert run.all_keys() == rows_of(30)
    for job in ("check", "status"):
        assert run(f"job={job}") == 0
    assert "nan" not in capsys.readouterr().out


def test_a_part_for_which_the_disk_has_no_room_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    run = Run(tmp_path, prompts(30))
    real, calls = sink_module.write_table, iter(range(10**9))

    def full(rows, schema, file):  # type: ignore[no-untyped-def]
        real(rows, schema, file)
        if next(calls) >= 5:
            cut(file)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sink_module, "write_table", full)
    assert run() == 4
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "the same command goes on" in said
    assert 0 < len(run.all_keys()) < 30
    assert not list(run.out.glob(".ddbatch/tmp/*/*.parquet"))  # it gives the room back
    monkeypatch.undo()
    assert run() == 0
    assert run.all_keys() == rows_of(30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """A file system of 1 MB at tmp_path/out that can be made larger."""
    place = tmp_path / "out"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")

    def resize(size: str) -> None:
        again = ["mount", "-o", f"remount,size={size}", str(place)]
        subprocess.run(again, check=True, capture_output=True)

    yield resize
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_real_disk_that_gets_full_in_the_middle_of_a_part(
    tmp_path: Path, small_disk: Callable[[str], None], capsys: Captured
) -> None:
    run = Run(tmp_path, prompts(400))
    assert run() == 4
    assert "No space left on device" in capsys.readouterr().err
    done = run.all_keys()
    assert 0 < len(set(done)) == len(done) < 400
    for file in run.out.glob("*/*.parquet"):
        assert pq.read_table(file).num_rows > 0, file
    assert run() == 4  # still full: nothing is damaged
    small_disk("64m")
    assert run() == 0
    assert run.all_keys() == rows_of(400)
    assert run("job=check") == 0


def test_a_kill_between_the_record_and_the_final_names_is_rolled_forward_by_anybody(
    tmp_path: Path,
) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(fake.__file__).parent)!r})
import runs
from pathlib import Path
run = runs.Run(Path({str(tmp_path)!r}))
os.rename = lambda *names: os._exit(9)
run()
"""
    run = Run(tmp_path, prompts(9))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 9
    assert not list(run.out.glob("completions/*"))
    assert list(run.out.glob(".ddbatch/commits/*/*.json"))
    assert run("job=check") == 0
    assert len(run.table()) == 5
    assert run() == 0
    assert run.all_keys() == rows_of(9)


def test_a_start_that_was_cut_off_anywhere_may_begin_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(30))
    for delay in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        process = run.start(step_seconds=0.01)
        time.sleep(delay)
        kill(process, signal.SIGKILL)
    assert run() == 0
    assert run.all_keys() == rows_of(30)
