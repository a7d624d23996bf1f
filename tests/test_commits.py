"""Commit records on the disk: who gets a number, what is refused, when files get final names."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from interrupts import Process, cut_off, hooks, quickly, run_hooked
from small_run import check, keys_of, visible_keys, write_part

from ddbatch.core import RunError
from ddbatch.data.commits import (
    Record,
    clean_tmp,
    commit,
    discard,
    read_shard,
    recover,
    roll_forward,
    shards_with_records,
)
from ddbatch.data.folder import RunFolder, StateError, write_new
from ddbatch.data.records import KeyBlock, to_json

UNITS = [[(0, 0), (1, 1), (2, 0)], [(0, 1)], [(3, 0), (3, 1)], [(1, 0)]]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def committed(folder: RunFolder, number: int = 1, attempt: str = "first") -> list[Record]:
    """The shard's first records, committed and not rolled forward."""
    records = [write_part(folder, 0, n, attempt, UNITS[n]) for n in range(number)]
    assert all(commit(folder, record) for record in records)
    return records


def files_in(place: Path) -> dict[str, bytes]:
    return {
        file.relative_to(place).as_posix(): file.read_bytes()
        for file in place.rglob("*")
        if file.is_file()
    }


def test_a_committed_record_is_read_back(folder: RunFolder) -> None:
    assert read_shard(folder, 0) == ()
    records = committed(folder, 3)
    assert read_shard(folder, 0) == tuple(records)
    assert read_shard(folder, 1) == ()
    assert not visible_keys(folder)
    assert recover(folder, 0) == tuple(records)
    check(folder)
    assert sorted(visible_keys(folder)) == sorted(
        key for units in UNITS[:3] for unit in units for key in keys_of(unit)
    )
    assert not list(folder.tmp("first").iterdir())


def test_the_second_to_take_a_number_loses_and_changes_nothing(folder: RunFolder) -> None:
    (first,) = committed(folder)
    second = write_part(folder, 0, 0, "second", UNITS[1])
    before = files_in(folder.place)
    assert not commit(folder, second)
    assert files_in(folder.place) == before
    discard(folder, second)
    assert not list(folder.tmp("second").iterdir())
    assert recover(folder, 0) == (first,)
    check(folder)


def test_a_link_that_works_and_reports_that_the_name_is_taken_is_ours(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def repeated(tmp: Path, final: Path) -> None:
        link(tmp, final)
        link(tmp, final)

    monkeypatch.setattr(os, "link", repeated)
    record = write_part(folder, 0, 0, "first", UNITS[0])
    assert commit(folder, record)
    assert read_shard(folder, 0) == (record,)
    assert not commit(folder, write_part(folder, 0, 0, "second", UNITS[0]))
    assert write_new("ours", folder.tmp("first") / "x", folder.place / "x")
    assert not write_new("theirs", folder.tmp("second") / "x", folder.place / "x")


@pytest.mark.parametrize("is_rolled", [False, True])
def test_a_part_that_is_committed_is_ours_however_often_we_ask(
    folder: RunFolder, is_rolled: bool
) -> None:
    (record,) = committed(folder)
    if is_rolled:
        roll_forward(folder, record)
    assert commit(folder, record)
    assert commit(folder, record)
    recover(folder, 0)
    check(folder)


def test_a_name_of_a_committed_record_is_never_written_through(folder: RunFolder) -> None:
    """Killed between the link and the unlink, a temporary file is another name of the record."""
    record = write_part(folder, 0, 0, "first", UNITS[0])
    folder.records(0).mkdir(parents=True)
    for after in range(9):
        assert cut_off(lambda: commit(folder, record), after)
        if folder.record(0, 0).exists():
            break
    (tmp,) = folder.tmp("first").glob("record*")
    assert tmp.samefile(folder.record(0, 0))
    assert not write_new("something else", tmp, folder.record(0, 0))
    assert commit(folder, record)
    assert read_shard(folder, 0) == (record,)


def test_discard_never_deletes_a_committed_part(folder: RunFolder) -> None:
    (record,) = committed(folder)
    with pytest.raises(AssertionError, match="committed"):
        discard(folder, record)
    check(folder)


def test_a_number_is_taken_only_after_the_one_before_it(folder: RunFolder) -> None:
    record = write_part(folder, 0, 1, "first", UNITS[1])
    with pytest.raises(StateError, match=r"000001\.json: the record before it"):
        commit(folder, record)
    assert read_shard(folder, 0) == ()


def test_a_part_whose_files_are_gone_is_not_committed(folder: RunFolder) -> None:
    record = write_part(folder, 0, 0, "first", UNITS[0])
    shutil.rmtree(folder.tmp("first"))
    with pytest.raises(FileNotFoundError):
        commit(folder, record)
    assert read_shard(folder, 0) == ()
    committed(folder, attempt="second")
    assert not commit(folder, record), "the number is taken: it has just lost"
    discard(folder, record)


def test_a_part_that_has_lost_a_file_is_not_committed(folder: RunFolder) -> None:
    record = write_part(folder, 0, 0, "first", UNITS[0])
    file = folder.place / record.files[1].tmp
    text = file.read_text()
    file.write_text(text[:-1])
    with pytest.raises(AssertionError, match="bytes"):
        commit(folder, record)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        commit(folder, record)
    assert read_shard(folder, 0) == ()
    file.write_text(text)
    assert commit(folder, record)


def test_a_part_whose_files_are_swept_meanwhile_is_not_committed(tmp_path: Path) -> None:
    for num_calls in count():
        folder = RunFolder(tmp_path / f"after-{num_calls}")
        record = write_part(folder, 0, 0, "first", UNITS[0])
        told: list[bool] = []
        with hooks():
            worker = Process(
                lambda folder=folder, record=record, told=told: told.append(commit(folder, record))
            )
            for _ in range(num_calls):
                worker.step()
            if worker.next_call is None:
                break
            was_committed = folder.record(0, 0).exists()
            shutil.rmtree(folder.tmp("first"))
            with nullcontext() if was_committed else pytest.raises(FileNotFoundError):
                while worker.step():
                    pass
        assert folder.record(0, 0).exists() == was_committed
        assert told == [True] * was_committed
    assert num_calls > 10


@pytest.mark.parametrize(
    "change",
    [
        {"keys": ()},
        {"files": ()},
        {"keys": (KeyBlock(0, 0, 0, 1, 1),)},
        {"seconds": -1.0},
        {"attempt": "../second"},
        {"attempt": "second"},
        {"number": -1},
        {"shard": 3},
    ],
    ids=str,
)
def test_a_record_that_nobody_would_read_is_our_mistake(
    folder: RunFolder, change: dict[str, Any]
) -> None:
    record = replace(write_part(folder, 0, 0, "first", UNITS[0]), **change)
    with pytest.raises(AssertionError):
        commit(folder, record)
    assert not folder.state("commits").exists()


def edit(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode())

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"\xff" + content,
        lambda content: content + b"{}",
        edit('"number": 1', '"number": 2'),
        edit('"shard": 0', '"shard": 1'),
        edit('"size": ', '"size": -'),
        edit('"closed_at"', '"closed"'),
        edit(' "seconds"', ' "extra": 1, "seconds"'),
        edit("-part-000001.parquet", "-part-000000.parquet"),
        edit('"final": "completions/', '"final": "elsewhere/'),
        edit(".ddbatch/tmp/first/", ".ddbatch/tmp/second/"),
        edit(".ddbatch/tmp/first/", ".ddbatch/tmp/first/../first/"),
        edit('"tmp": "', '"tmp": "/'),
    ],
)
def test_a_record_that_cannot_be_trusted_is_named(
    folder: RunFolder, change: Callable[[bytes], bytes]
) -> None:
    committed(folder, 3)
    file = folder.record(0, 1)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(StateError) as refused:
        recover(folder, 0)
    assert str(file) in str(refused.value)
    assert "output.resume=repair moves it" in str(refused.value)


def test_a_record_of_a_later_version_is_not_for_repair(folder: RunFolder) -> None:
    committed(folder)
    file = folder.record(0, 0)
    file.write_bytes(edit('"version": 1', '"version": 2')(file.read_bytes()))
    with pytest.raises(RunError, match="go on with that version") as refused:
        read_shard(folder, 0)
    assert not isinstance(refused.value, StateError)


def test_a_gap_in_the_numbers_is_named(folder: RunFolder) -> None:
    committed(folder, 3)
    folder.record(0, 1).unlink()
    with pytest.raises(
        StateError, match=r"000001\.json is missing, but 000002\.json is there.*repair"
    ):
        read_shard(folder, 0)


def test_a_record_that_comes_while_the_folder_is_listed_makes_no_gap(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = committed(folder, 3)
    listdir = os.listdir
    for seen in ([], ["000000.json"], ["000001.json"], ["000000.json", "000002.json"]):
        # A listing may have any of those that come meanwhile, and the records come in order.
        monkeypatch.setattr(os, "listdir", lambda place, seen=seen: seen)
        assert read_shard(folder, 0) == tuple(records)
    monkeypatch.setattr(os, "listdir", listdir)
    assert read_shard(folder, 0) == tuple(records)


def test_a_reader_may_be_overtaken_anywhere(tmp_path: Path) -> None:
    for num_calls in count():
        folder = RunFolder(tmp_path / f"after-{num_calls}")
        committed(folder)
        read: list[tuple[Record, ...]] = []
        with hooks():
            reader = Process(lambda folder=folder, read=read: read.append(read_shard(folder, 0)))
            for _ in range(num_calls):
                reader.step()
            if reader.next_call is None:
                break
            for number in (1, 2):
                assert commit(folder, write_part(folder, 0, number, "second", UNITS[number]))
            while reader.step():
                pass
        assert read[0] == read_shard(folder, 0)[: len(read[0])]
        assert len(read[0]) in (1, 3)
    assert num_calls > 3


@pytest.mark.parametrize("name", ["000001.json~", "0000001.json", "1.json", "000001", "x.json"])
def test_what_is_no_record_is_refused_by_name(folder: RunFolder, name: str) -> None:
    committed(folder)
    (folder.records(0) / name).write_text("{}")
    with pytest.raises(StateError, match=r"is no record; output\.resume=repair") as refused:
        read_shard(folder, 0)
    assert str(folder.records(0) / name) in str(refused.value)


def test_dot_files_are_left_alone(folder: RunFolder) -> None:
    records = committed(folder)
    (folder.records(0) / ".nfs0000001").write_text("")
    (folder.state("commits") / ".DS_Store").write_text("")
    assert read_shard(folder, 0) == tuple(records)
    assert shards_with_records(folder) == [0]


def test_the_shards_with_records_are_listed_in_order(folder: RunFolder) -> None:
    assert shards_with_records(folder) == []
    for shard in (123456, 7, 10):
        folder.records(shard).mkdir(parents=True)
    assert shards_with_records(folder) == [7, 10, 123456]
    (folder.state("commits") / "shard-7").mkdir()
    with pytest.raises(StateError, match=r"shard-7 is no shard's folder"):
        shards_with_records(folder)


@pytest.mark.parametrize("is_rolled", [False, True])
def test_a_file_that_is_nowhere_is_named_with_its_record(
    folder: RunFolder, is_rolled: bool
) -> None:
    (record,) = committed(folder)
    file = record.files[1]
    if is_rolled:
        roll_forward(folder, record)
    (folder.place / (file.final if is_rolled else file.tmp)).unlink()
    with pytest.raises(StateError) as refused:
        roll_forward(folder, record)
    assert str(folder.record(0, 0)) in str(refused.value)
    assert f"{file.final} is nowhere; output.resume=repair" in str(refused.value)


@pytest.mark.parametrize("is_rolled", [False, True])
def test_a_file_of_another_size_is_refused_and_does_not_become_visible(
    folder: RunFolder, is_rolled: bool
) -> None:
    (record,) = committed(folder)
    file = record.files[1]
    if is_rolled:
        roll_forward(folder, record)
    with (folder.place / (file.final if is_rolled else file.tmp)).open("a") as content:
        content.write("more")
    with pytest.raises(StateError, match=f"has {file.size + 4} bytes instead of {file.size}; "):
        roll_forward(folder, record)
    assert (folder.place / file.final).exists() == is_rolled


def test_a_final_file_is_not_replaced(folder: RunFolder) -> None:
    """Whatever lies there: the name is taken."""
    (record,) = committed(folder)
    file = record.files[0]
    final = folder.place / file.final
    final.parent.mkdir(parents=True)
    final.write_text("x" * file.size)
    roll_forward(folder, record)
    assert final.read_text() == "x" * file.size


def test_where_all_is_in_place_roll_forward_looks_once_at_each_file(folder: RunFolder) -> None:
    (record,) = committed(folder)
    roll_forward(folder, record)
    calls: Counter[str] = Counter()

    def counted(name: str, call: Callable[[], Any]) -> Any:
        calls[name] += 1
        return quickly(name, call)

    with hooks():
        run_hooked(lambda: roll_forward(folder, record), counted)
    assert calls == {"stat": 3}


def test_sweeping_leaves_who_may_still_run_and_what_records_point_at(folder: RunFolder) -> None:
    clean_tmp(folder, ["first"])  # nothing is there
    records = committed(folder, 2)
    write_part(folder, 0, 2, "second", UNITS[2])
    write_part(folder, 0, 2, "last", UNITS[2])
    clean_tmp(folder, ["first", "second", "third"])
    assert [place.name for place in folder.state("tmp").iterdir()] == ["last"]
    assert len(list(folder.tmp("last").iterdir())) == 2
    check(folder)
    assert all((folder.place / file.final).exists() for r in records for file in r.files)


def test_sweeping_stops_where_a_record_is_broken(folder: RunFolder) -> None:
    (record,) = committed(folder)
    folder.record(0, 0).write_text(to_json(record)[:-9])
    with pytest.raises(StateError):
        clean_tmp(folder, ["first", "second"])
    assert len(list(folder.tmp("first").iterdir())) == 3


def test_sweepers_do_not_mind_each_other(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in ("first", "second"):
        write_part(folder, 0, 0, attempt, UNITS[0])
    rmdir, unlink = os.rmdir, os.unlink

    def twice(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)  # another one has done it
            real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "rmdir", twice(rmdir))
    monkeypatch.setattr(os, "unlink", twice(unlink))
    clean_tmp(folder, ["first", "second"])
    assert not list(folder.state("tmp").iterdir())
