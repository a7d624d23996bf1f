"""Open parts: when they are closed, how they are committed, and what a failure leaves."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_schema import FULL, TOP_3, finished, rejected, with_logprobs

from ddbatch.core import Key, Rejected, RunError
from ddbatch.data import sink
from ddbatch.data.commits import read_shard, recover
from ddbatch.data.folder import RunFolder
from ddbatch.data.parquet import TableRow, write_table
from ddbatch.data.schema import FinishedRow, acceptance_schema, rejected_schema
from ddbatch.data.sink import Sink

SCHEMAS = {"completions": FULL, "acceptance": acceptance_schema(), "rejected": rejected_schema()}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_sink(
    place: Path,
    *,
    attempt: str = "a" * 12,
    part_rows: int = 4,
    part_seconds: float = 300.0,
    clock: Clock | None = None,
    shard: int | None = 2,
    next_number: int = 0,
    schemas: dict[str, pa.Schema] | None = None,
) -> Sink:
    made = Sink(
        RunFolder(place),
        attempt,
        schemas or SCHEMAS,
        part_rows=part_rows,
        part_seconds=part_seconds,
        clock=clock or Clock(),
    )
    if shard is not None:
        made.open_shard(shard, next_number)
    return made


def row_ids(place: Path, table: str) -> list[list[int]]:
    files = sorted((place / table).iterdir()) if (place / table).exists() else []
    return [pq.read_table(file)["row_id"].to_pylist() for file in files]


def add(out: Sink, *rows: FinishedRow | Rejected, shard: int = 2) -> None:
    for row in rows:
        out.add(shard, [row])


def commit_due(out: Sink) -> list[int]:
    """The numbers of the parts that were due."""
    records = [out.commit_part(shard) for shard in out.due()]
    return [record.number for record in records if record is not None]


def test_a_part_is_closed_at_part_rows_and_sorted_by_key(tmp_path: Path) -> None:
    order = list(range(11))
    random.Random(5).shuffle(order)
    out = make_sink(tmp_path)
    numbers = []
    for at, row_id in enumerate(order):
        if at == 6:
            add(out, rejected(21), rejected(20))
        add(out, finished(row_id))
        numbers += commit_due(out)
    assert numbers == [0, 1, 2]
    assert not out.has_rows(2)
    assert row_ids(tmp_path, "completions") == row_ids(tmp_path, "acceptance")
    parts = [order[:4], order[4:7], order[7:]]
    assert row_ids(tmp_path, "completions") == [sorted(part) for part in parts]
    assert row_ids(tmp_path, "rejected") == [[20, 21]]
    names = [file.name for file in sorted((tmp_path / "completions").iterdir())]
    assert names == [f"shard-00002-part-{number:06d}.parquet" for number in range(3)]
    assert [file.name for file in (tmp_path / "rejected").iterdir()] == [names[1]]


def test_the_record_says_what_is_on_the_disk(tmp_path: Path) -> None:
    clock = Clock()
    out = make_sink(tmp_path, clock=clock)
    add(out, finished(7, accepted=(2, 0, 3)), finished(8, accepted=()), rejected(9))
    clock.now += 12.5
    record = out.commit_part(2)
    assert record is not None
    assert read_shard(RunFolder(tmp_path), 2) == (record,)
    keys = [key for block in record.keys for key in block.keys()]  # noqa: SIM118
    assert set(keys) == {
        Key(7, 0, 0),
        Key(8, 0, 0),
        Key(9, 0, 0),
    }
    assert record.counts.completions == 2
    assert record.counts.rejected == {"bad_text": 1}
    assert (record.counts.output_tokens, record.counts.rounds) == (10, 3)
    assert (record.counts.prompt_tokens, record.counts.accepted_tokens) == (6, 5)
    assert record.seconds == 12.5
    assert {file.table: file.rows for file in record.files} == {
        "completions": 2,
        "acceptance": 2,
        "rejected": 1,
    }
    for file in record.files:
        content = (tmp_path / file.final).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.size, file.sha256)
        assert not (tmp_path / file.tmp).exists()


def test_a_part_is_closed_when_it_is_old_by_a_clock_that_only_moves_forward(
    tmp_path: Path,
) -> None:
    clock = Clock()
    out = make_sink(tmp_path, part_seconds=60, clock=clock)
    clock.now += 500  # an empty part does not age
    add(out, finished(1))
    clock.now += 59.9
    assert out.due() == []
    clock.now += 0.1
    assert commit_due(out) == [0]
    add(out, finished(2))
    assert out.due() == []


def test_a_part_is_closed_when_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "PART_BYTES", 10_000)
    out = make_sink(tmp_path, part_rows=1000)
    for row_id in range(9):
        add(out, finished(row_id, text="x" * 900))
        if out.due():
            break
    assert 3 <= row_id <= 6


def test_rows_that_belong_together_come_into_one_part(tmp_path: Path) -> None:
    out = make_sink(tmp_path, part_rows=2)
    out.add(2, [finished(row_id) for row_id in range(5)])
    assert commit_due(out) == [0]
    assert row_ids(tmp_path, "completions") == [[0, 1, 2, 3, 4]]


def test_nothing_is_visible_before_it_is_committed(tmp_path: Path) -> None:
    out = make_sink(tmp_path)
    add(out, finished(0), finished(1))
    assert row_ids(tmp_path, "completions") == []
    assert out.has_rows(2)
    out.commit_part(2)
    assert not out.has_rows(2)
    assert row_ids(tmp_path, "completions") == [[0, 1]]


def test_who_comes_second_throws_its_part_away_and_gives_the_shard_up(tmp_path: Path) -> None:
    first, second = make_sink(tmp_path), make_sink(tmp_path, attempt="b" * 12)
    add(first, finished(0), finished(1))
    add(second, finished(1), finished(2))
    assert first.commit_part(2) is not None
    assert second.commit_part(2) is None
    assert second.open_shards() == []
    assert row_ids(tmp_path, "completions") == [[0, 1]]
    assert not list(RunFolder(tmp_path).tmp("b" * 12).iterdir())
    second.open_shard(2, len(recover(RunFolder(tmp_path), 2)))
    add(second, finished(2))
    assert second.commit_part(2) is not None
    assert row_ids(tmp_path, "completions") == [[0, 1], [2]]


def test_a_part_that_cannot_be_written_shows_no_file_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = make_sink(tmp_path)
    add(out, finished(0))
    assert out.commit_part(2) is not None
    add(out, finished(1), finished(2))

    def cut_short(rows: Sequence[TableRow], kind: pa.Schema, file: Path) -> None:
        write_table(rows[:1], kind, file)

    monkeypatch.setattr(sink, "write_table", cut_short)
    with pytest.raises(RunError, match=r"part 1 of shard 2 cannot be written: .*1 of 2 rows"):
        out.commit_part(2)
    assert row_ids(tmp_path, "completions") == row_ids(tmp_path, "acceptance") == [[0]]
    assert not list(RunFolder(tmp_path).tmp("a" * 12).iterdir())
    monkeypatch.undo()
    assert out.commit_part(2) is not None  # nothing of it was lost
    assert row_ids(tmp_path, "completions") == [[0], [1, 2]]


def test_every_value_is_cast_to_the_schema_or_the_part_fails(tmp_path: Path) -> None:
    narrow = pa.schema([pa.field(f.name, pa.int8() if f.name == "seed" else f.type) for f in FULL])
    out = make_sink(tmp_path, schemas={**SCHEMAS, "completions": narrow})
    add(out, finished(0, seed=1000))
    with pytest.raises(pa.ArrowInvalid):
        out.commit_part(2)
    assert row_ids(tmp_path, "completions") == []


def test_without_acceptance_there_is_no_such_table(tmp_path: Path) -> None:
    out = make_sink(tmp_path, schemas={"completions": FULL, "rejected": rejected_schema()})
    add(out, finished(0))
    assert out.commit_part(2) is not None
    assert not (tmp_path / "acceptance").exists()


WITH_LOGPROBS = {
    "completions": FULL,
    "acceptance": acceptance_schema(),
    "logprobs": TOP_3,
    "rejected": rejected_schema(),
}


def test_log_probs_come_in_the_same_parts_as_their_completions(tmp_path: Path) -> None:
    out = make_sink(tmp_path, schemas=WITH_LOGPROBS)
    add(out, *(with_logprobs(finished(row_id), 3) for row_id in (5, 1, 3)), rejected(2))
    assert commit_due(out) == [0]
    add(out, with_logprobs(finished(4), 3))
    record = out.commit_part(2)
    assert record is not None
    assert [file.table for file in record.files] == ["completions", "acceptance", "logprobs"]
    assert row_ids(tmp_path, "logprobs") == row_ids(tmp_path, "completions") == [[1, 3, 5], [4]]
    names = [file.name for file in (tmp_path / "logprobs").iterdir()]
    assert sorted(names) == [f"shard-00002-part-{number:06d}.parquet" for number in range(2)]


def test_a_part_of_rejected_rows_has_no_file_of_log_probs(tmp_path: Path) -> None:
    out = make_sink(tmp_path, schemas=WITH_LOGPROBS)
    add(out, rejected(7), rejected(8))
    record = out.commit_part(2)
    assert record is not None
    assert [file.table for file in record.files] == ["rejected"]
    assert not (tmp_path / "logprobs").exists()


def test_log_probs_count_for_the_size_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "PART_BYTES", 10_000)
    counts = {}
    for name, top in (("without", None), ("with", 3)):
        schemas = SCHEMAS if top is None else WITH_LOGPROBS
        out = make_sink(tmp_path / name, part_rows=1000, schemas=schemas)
        for row_id in range(100):
            row = finished(row_id, accepted=(3,) * 12)  # 49 tokens
            add(out, row if top is None else with_logprobs(row, top))
            if out.due():
                break
        counts[name] = row_id + 1
    # 4 bytes of a token id, 2 of the lists by round and 80 of texts; 4 + 6 x 3 of log-probs.
    assert counts["without"] in range(20, 50)
    assert counts["with"] in range(6, 9)


def test_a_row_that_comes_twice_is_a_bug(tmp_path: Path) -> None:
    out = make_sink(tmp_path)
    add(out, finished(1))
    with pytest.raises(AssertionError, match="came twice"):
        add(out, finished(1))


def test_no_file_names_the_machine_or_the_place(tmp_path: Path) -> None:
    out = make_sink(tmp_path)
    add(out, finished(0))
    assert out.commit_part(2) is not None
    for file in tmp_path.rglob("*.parquet"):
        for secret in (str(tmp_path), os.uname().nodename):
            assert secret.encode() not in file.read_bytes()
