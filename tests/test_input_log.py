"""The input log's entries and the caches beside it: what is broken is named, or not believed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from input_files import write

from ddbatch.core import RunError, Shard
from ddbatch.data.batching.columns import ColumnType, Row
from ddbatch.data.folder import RunFolder, StateError, link_new
from ddbatch.data.source import inputs
from ddbatch.data.source import looks as input_looks
from ddbatch.data.source.cache import load_index, load_verified, save_index, save_verified
from ddbatch.data.source.column_types import JSON, Column
from ddbatch.data.source.files import list_inputs
from ddbatch.data.source.inputs import Inputs, open_log
from ddbatch.data.source.log import EMPTY, Entry, InputFile, append_entry, read_log

COLUMNS = (Column("a", JSON), Column("\u00e9\udcff", ColumnType(pa.list_(pa.int8()), False)))


def entries() -> list[Entry]:
    first = InputFile("x.parquet", 10, 7, "0" * 64, COLUMNS)
    second = InputFile("odd\udcff\n.jsonl", 10, 5, "f" * 64, ())
    shards = (Shard(0, 0, 4), Shard(1, 4, 2)), (), (Shard(2, 6, 6),)
    return [
        Entry((first,), 6, 1, shards[0], "all", "0" * 40),
        Entry((), 6, 3, shards[1], "all", "0" * 40),
        Entry((second,), 12, 3, shards[2], "all", "1" * 40),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with three entries."""
    folder = RunFolder(tmp_path / "out")
    for number, entry in enumerate(entries()):
        assert append_entry(folder, "a", number, entry)
    return folder


def entry_file(folder: RunFolder, number: int) -> Path:
    return folder.state("inputs") / f"{number:06d}.json"


def test_the_log_is_all_entries_together(folder: RunFolder, tmp_path: Path) -> None:
    log = read_log(folder)
    assert log.files == tuple(file for entry in entries() for file in entry.files)
    assert log.shards == tuple(shard for entry in entries() for shard in entry.shards)
    assert (log.num_rows, log.rows_listed, log.samples, log.entries) == (12, 12, 3, 3)
    assert (log.select, log.revision) == ("all", "1" * 40)
    assert not append_entry(folder, "b", 2, entries()[2])
    assert read_log(RunFolder(tmp_path / "none")) == EMPTY
    (folder.state("inputs") / ".nfs0001").write_text("a network file system's")
    assert read_log(folder) == log


def test_a_missing_entry_is_named(folder: RunFolder) -> None:
    for number in (1, 0):
        entry_file(folder, number).unlink()
        with pytest.raises(StateError, match=rf"00000{number}\.json is missing"):
            read_log(folder)


@pytest.mark.parametrize(
    ("number", "old", "new"),
    [
        (0, "{", ""),
        (0, "{", "[" * 10_000 + "{"),
        (0, '"version": 1', '"version": true'),
        (0, '"version": 1', '"version": 0'),
        (0, '"samples": 1', '"samples": 0'),
        (0, '"samples": 1', '"samples": 1, "more": 1'),
        (0, '"samples": 1,', ""),
        (0, '"num_rows": 6', '"num_rows": 8'),
        (0, '"num_rows": 6', '"num_rows": 6.0'),
        (0, '"rows": 7', '"rows": 5'),
        (0, '"rows": 7', '"rows": -7'),
        (0, '"size": 10', '"size": "10"'),
        (0, "0" * 64, "0" * 63 + "x"),
        (0, '"x.parquet"', "null"),
        (0, '["list", "int8"]', '["list", "int9"]'),
        (0, '["a", "json"]', '"a"'),
        (0, "[0, 0, 4]", "[0, 0, 3]"),
        (0, "[1, 4, 2]", "[2, 4, 2]"),
        (0, "[1, 4, 2]", "[1, 4, 2, 0]"),
        (0, '"all"', '"some"'),
        (1, '"samples": 3', '"samples": 0'),
        (1, '"all"', '"truncated"'),
        (2, '"samples": 3', '"samples": 2'),
        (2, '"num_rows": 12', '"num_rows": 11'),
        (2, r'"odd\udcff\n.jsonl"', '"x.parquet"'),
        (2, "[2, 6, 6]", "[2, 5, 7]"),
        (2, f'"{"1" * 40}"', "3"),
    ],
)
def test_an_entry_with_anything_wrong_is_named(
    folder: RunFolder, number: int, old: str, new: str
) -> None:
    file = entry_file(folder, number)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(StateError, match=rf"00000{number}\.json is no sound input log entry: "):
        read_log(folder)


def test_an_entry_cut_anywhere_is_named(folder: RunFolder) -> None:
    file = entry_file(folder, 2)
    whole = file.read_bytes()
    for keep in range(0, len(whole) - 2, 7):
        file.write_bytes(whole[:keep])
        with pytest.raises(StateError, match=r"000002\.json is no sound"):
            read_log(folder)


def test_an_entry_of_a_later_version_is_not_called_broken(folder: RunFolder) -> None:
    file = entry_file(folder, 1)
    file.write_text(json.dumps({"version": 2, "news": []}))
    with pytest.raises(RunError, match="version 2, this ddbatch reads 1") as caught:
        read_log(folder)
    assert not isinstance(caught.value, StateError)


def test_a_log_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(RunError, match=r"000000\.json cannot be written"):
        append_entry(RunFolder(tmp_path / "out"), "a", 0, entries()[0])


def test_an_entry_is_tried_again_when_the_own_folder_was_swept(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(tmp: Path, final: Path) -> bool:
        tmp.unlink()
        return link_new(tmp, final)

    monkeypatch.setattr("ddbatch.data.folder.link_new", sweep)
    assert not append_entry(folder, "a", 3, entries()[1])
    assert read_log(folder).entries == 3


def start(place: Path) -> Inputs:
    listing = list_inputs(
        str(place / "data"), name=None, revision=None, split="train", select="all"
    )
    return open_log(
        RunFolder(place / "out"), "a", listing, limit=None, samples=1, shard_rows=99, grow="append"
    )


def make_input(place: Path) -> None:
    """A JSONL and a Parquet file that nobody has touched for a while."""
    (place / "data").mkdir()
    write(place / "data/a.jsonl", [{"n": n} for n in range(1000)])
    write(place / "data/b.parquet", [{"n": n} for n in range(1000, 1010)])


def numbers(found: Inputs, first: int, stop: int) -> list[object]:
    return [row.values["n"] for _, row in found.rows(first, stop) if isinstance(row, Row)]


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a minute pass."""
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 60 * 10**9)


def test_a_broken_index_is_made_anew_and_never_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_input(tmp_path)
    settle(monkeypatch)
    folder = RunFolder(tmp_path / "out")
    (sha256, _) = (file.sha256 for file in start(tmp_path).log.files)
    file = folder.state("index") / f"{sha256[:32]}.npy"
    whole = file.read_bytes()
    right = load_index(folder, sha256)
    assert right is not None
    assert len(right) == 4
    foreign = "f" * 32 + sha256[32:]
    save_index(folder, "a", foreign, right + 1)
    other = (folder.state("index") / f"{foreign[:32]}.npy").read_bytes()
    wrong = (b"", whole[:50], whole[:-1], whole[:-8], whole[:-20] + b"\1" + whole[-19:], other)
    for content in wrong:
        file.write_bytes(content)
        assert load_index(folder, sha256) is None
        assert numbers(start(tmp_path), 700, 1005) == list(range(700, 1005))
        assert file.read_bytes() == whole
    np.save(file, np.array([{}], object))
    assert load_index(folder, sha256) is None
    file.unlink()
    file.mkdir()  # cannot be replaced by a file
    assert numbers(start(tmp_path), 700, 1005) == list(range(700, 1005))


def test_an_index_spares_reading_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_input(tmp_path)
    settle(monkeypatch)
    start(tmp_path)
    monkeypatch.setattr(inputs, "scan_file", None)
    again = start(tmp_path)
    assert numbers(again, 999, 1001) == [999, 1000]
    assert not again.looks.scans


def test_content_is_verified_once_and_again_when_anything_about_the_file_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_input(tmp_path)
    settle(monkeypatch)
    folder, data = RunFolder(tmp_path / "out"), tmp_path / "data"
    start(tmp_path)
    seen: list[str] = []
    real = input_looks.Looks._hash

    def spy(looks: input_looks.Looks, file: InputFile, *more: object) -> object:
        seen.append(file.name)
        return real(looks, file, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(input_looks.Looks, "_hash", spy)

    def read_again() -> list[str]:
        seen.clear()
        start(tmp_path)
        return sorted(seen)

    assert read_again() == []
    os.utime(data / "a.jsonl")
    assert read_again() == ["a.jsonl"]
    assert read_again() == []
    content = (data / "b.parquet").read_bytes()
    (data / "b.parquet").rename(data / "old")
    (data / "b.parquet").write_bytes(content)
    stat = (data / "old").stat()
    os.utime(data / "b.parquet", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert read_again() == ["b.parquet"]
    file = folder.state("index") / "verified.json"
    for broken in ("", "[]", "{", '{"a.jsonl": 3}', '{"a.jsonl": [1, "x"]}', "[" * 99_999):
        file.write_text(broken)
        assert read_again() == ["a.jsonl", "b.parquet"]
    # Same size, same mtime, other content: the inode's change time gives it away.
    whole, stat = (data / "a.jsonl").read_bytes(), (data / "a.jsonl").stat()
    (data / "a.jsonl").write_bytes(whole.replace(b"9", b"8", 1))
    os.utime(data / "a.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ValueError, match=r"a\.jsonl has changed"):
        start(tmp_path)


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    make_input(tmp_path)
    folder = RunFolder(tmp_path / "out")
    hashes = start(tmp_path).looks.hashes
    assert set(hashes) == {"a.jsonl", "b.parquet"}
    assert load_verified(folder) == {}
    old = {
        name: known._replace(stamp=known.stamp._replace(mtime_ns=0, ctime_ns=0))
        for name, known in hashes.items()
    }
    save_verified(folder, "a", old)
    assert load_verified(folder) == old
