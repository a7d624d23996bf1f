"""The rows of a run: by row_id over all files, in shards that stay, while the input grows."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from input_files import FORMATS, write

from ddbatch.core import RunError, Shard
from ddbatch.data.batching.columns import ColumnType, Row
from ddbatch.data.folder import RunFolder
from ddbatch.data.source import formats
from ddbatch.data.source import looks as input_looks
from ddbatch.data.source.files import Listing, list_inputs
from ddbatch.data.source.growth import Grow
from ddbatch.data.source.inputs import Inputs, open_log, scan
from ddbatch.data.source.log import read_log

Rows = list[dict[str, object]]


def numbered(count: int, first: int = 0) -> Rows:
    return [{"prompt": f"p{n}"} for n in range(first, first + count)]


class Run:
    """A folder of input files and the folder of a run over them."""

    def __init__(self, place: Path) -> None:
        self.data, self.folder = place / "data", RunFolder(place / "out")
        self.data.mkdir(parents=True)

    def listing(self, pattern: str = "") -> Listing:
        path = str(self.data / pattern)
        return list_inputs(path, name=None, revision=None, split="train", select="all")

    def start(
        self,
        *,
        limit: int | None = None,
        samples: int = 1,
        shard_rows: int = 4,
        grow: Grow = "append",
        pattern: str = "",
        attempt: str = "a",
        scanned: Inputs | None = None,
    ) -> Inputs:
        return open_log(
            self.folder,
            attempt,
            self.listing(pattern),
            limit=limit,
            samples=samples,
            shard_rows=shard_rows,
            grow=grow,
            scanned=scanned,
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def prompts(inputs: Inputs, start: int = 0, stop: int | None = None) -> list[object]:
    end = inputs.log.num_rows if stop is None else stop
    found = list(inputs.rows(start, end))
    assert [row_id for row_id, _ in found] == list(range(start, end))
    return [row.values["prompt"] if isinstance(row, Row) else row.fault.code for _, row in found]


def spans(inputs: Inputs) -> list[tuple[int, int]]:
    return [(shard.first_row, shard.num_rows) for shard in inputs.log.shards]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(FORMATS), st.integers(0, 700)), min_size=1, max_size=4),
    st.integers(1, 300),
    st.data(),
)
def test_rows_and_shards_are_slices_of_all_files_together(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[tuple[str, int]],
    shard_rows: int,
    data: st.DataObject,
) -> None:
    place = tmp_path_factory.mktemp("mixed")
    everything: Rows = []
    for at, (name, count) in enumerate(files):
        rows = numbered(count, len(everything))
        write(place / f"{at}{name}", rows, group=90)
        everything += rows
    total = len(everything)
    listing = list_inputs(str(place), name=None, revision=None, split="train", select="all")
    limit = data.draw(st.none() | st.integers(1, total + 5))
    if not total:
        with pytest.raises(ValueError, match="no rows in it"):
            scan(listing, limit=limit, samples=1, shard_rows=shard_rows)
        return
    inputs = scan(listing, limit=limit, samples=1, shard_rows=shard_rows)
    taken = total if limit is None else min(limit, total)
    assert (inputs.log.num_rows, inputs.log.rows_listed) == (taken, total)
    start, stop = sorted((data.draw(st.integers(0, taken)), data.draw(st.integers(0, taken))))
    assert prompts(inputs, start, stop) == [row["prompt"] for row in everything[start:stop]]
    covered = [n for shard in inputs.log.shards for n in range(shard.first_row, shard.stop_row)]
    assert covered == list(range(taken))
    assert [shard.index for shard in inputs.log.shards] == list(range(len(inputs.log.shards)))


def test_a_gzip_file_is_one_shard_and_others_are_cut(run: Run) -> None:
    write(run.data / "1.jsonl", numbered(3))
    write(run.data / "2.parquet", numbered(3, 3))
    write(run.data / "3.jsonl.gz", numbered(9, 6))
    write(run.data / "4.jsonl.gz", numbered(2, 15))
    write(run.data / "5.jsonl", numbered(5, 17))
    first = run.start(limit=8)
    assert spans(first) == [(0, 4), (4, 2), (6, 2)]
    second = run.start(limit=10, shard_rows=3)
    assert spans(second) == [*spans(first), (8, 2)]
    third = run.start(shard_rows=3)
    assert spans(third) == [*spans(second), (10, 5), (15, 2), (17, 3), (20, 2)]
    assert third.log.shards[0] == Shard(0, 0, 4)
    assert prompts(third, 7, 16) == [f"p{n}" for n in range(7, 16)]


def test_growth_in_many_steps_keeps_every_row_and_shard(run: Run) -> None:
    write(run.data / "m.jsonl", numbered(5))
    first = run.start()
    assert (first.growth, first.log.entries) == (None, 1)
    assert run.start().growth is None
    # Sorted before the first file, and still behind it.
    write(run.data / "a.parquet", numbered(3, 5))
    write(run.data / "b.jsonl", [])
    second = run.start(limit=7)
    assert second.growth == "input grew by 2 files, 2 rows"
    third = run.start(limit=7, samples=4)
    assert third.growth == "sampling.n grew from 1 to 4"
    fourth = run.start(samples=4)
    assert fourth.growth == "input grew by 1 row"
    write(run.data / "c.jsonl", numbered(1234, 8))
    last = run.start(samples=5, shard_rows=500)
    assert last.growth == "input grew by 1 file, 1,234 rows; sampling.n grew from 4 to 5"
    assert [file.name for file in last.log.files] == ["m.jsonl", "a.parquet", "b.jsonl", "c.jsonl"]
    assert (last.log.num_rows, last.log.samples, last.log.entries) == (1242, 5, 5)
    assert prompts(last) == [f"p{n}" for n in range(1242)]
    steps = [first, second, third, fourth, last]
    for before, after in pairwise(steps):
        assert spans(after)[: len(spans(before))] == spans(before)
    assert run.start(samples=5).log == last.log == read_log(run.folder)
    assert sorted(os.listdir(run.folder.state("inputs"))) == [f"{n:06d}.json" for n in range(5)]


def test_a_run_does_not_shrink(run: Run) -> None:
    write(run.data / "a.jsonl", numbered(9))
    run.start(limit=7, samples=3)
    with pytest.raises(ValueError, match=r"data\.limit=6: .*allowed: null or an integer >= 7"):
        run.start(limit=6, samples=3)
    with pytest.raises(ValueError, match=r"sampling\.n=2: .*allowed: an integer >= 3"):
        run.start(samples=2)
    assert run.start(samples=3, limit=8).growth == "input grew by 1 row"
    assert run.start(samples=3, limit=100).growth == "input grew by 1 row"
    assert run.start(samples=3, limit=9).growth is None


def test_growth_is_refused_where_it_is_not_wanted(run: Run) -> None:
    write(run.data / "a.jsonl", numbered(9))
    run.start(limit=7, grow="refuse")
    assert run.start(limit=7, samples=2, grow="refuse").growth == "sampling.n grew from 1 to 2"
    with pytest.raises(
        ValueError, match=r"data\.grow=refuse: .*2 rows by data\.limit; allowed: app"
    ):
        run.start(samples=2, grow="refuse")
    write(run.data / "b.jsonl", numbered(1))
    with pytest.raises(ValueError, match=r"data\.grow=refuse: .*1 file \(b\.jsonl\); allowed: app"):
        run.start(limit=7, samples=2, grow="refuse")


def test_a_listed_file_that_changed_or_is_gone_is_refused_by_name(run: Run) -> None:
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        write(run.data / name, numbered(3))
    run.start()
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        whole = (run.data / name).read_bytes()
        for changed in (whole[:-1], whole + b"\n", whole.replace(whole[9:10], b"?", 1)):
            (run.data / name).write_bytes(changed)
            with pytest.raises(ValueError, match=rf"{name} has changed since .*; put it back"):
                run.start()
        (run.data / name).unlink()
        with pytest.raises(ValueError, match=rf"{name} is gone, .*; put it back"):
            run.start()
        (run.data / name).write_bytes(whole)
        assert run.start().growth is None


def test_the_folder_may_move_and_the_pattern_may_change(run: Run) -> None:
    write(run.data / "a.jsonl", numbered(3))
    first = run.start()
    run.data = run.data.rename(run.data.with_name("moved"))
    assert run.start(pattern="*.jsonl").log == first.log


def test_an_input_in_the_output_or_without_rows_is_refused(run: Run) -> None:
    write(run.data / "a.jsonl", [])
    with pytest.raises(ValueError, match=r"data\.path=.*no rows in it; allowed: a \.jsonl"):
        run.start()
    write(run.data / "a.jsonl", numbered(1))
    run.folder = RunFolder(run.data)
    with pytest.raises(ValueError, match=r"a\.jsonl lies in output_dir=.*; allowed: input outside"):
        run.start()
    assert not run.folder.state("inputs").exists()


def test_a_file_that_is_not_whole_is_refused_by_name_before_anything_is_made(run: Run) -> None:
    file = write(run.data / "a.parquet", numbered(3))
    write(run.data / "b.jsonl", numbered(3))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(
        ValueError, match=r"data\.path=.*: a\.parquet cannot be read .*; allowed: a "
    ):
        run.start()
    file.unlink()
    file.symlink_to(run.data / "gone")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read .*No such file"):
        run.start()
    assert not run.folder.place.exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
def test_a_file_that_fails_later_stops_the_run_and_names_itself(run: Run, name: str) -> None:
    file = write(run.data / name, numbered(700), group=50)
    inputs = run.start()
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes(200) + whole[middle + 200 :])
    if name != "a.jsonl":  # whose damaged lines are bad rows
        with pytest.raises(RunError, match=rf"{name} (cannot be read any more|has changed)"):
            prompts(inputs)
    file.write_bytes(whole[:-30])
    with pytest.raises(RunError, match=rf"{name} has changed since this run began"):
        prompts(inputs)
    file.unlink()
    with pytest.raises(RunError, match=rf"{name} cannot be read any more"):
        prompts(inputs)


def test_a_file_with_fewer_rows_in_as_many_bytes_stops_the_run(run: Run) -> None:
    file = write(run.data / "a.jsonl", numbered(30))
    inputs = run.start()
    file.write_bytes(file.read_bytes().replace(b"\n", b" ", 3))
    with pytest.raises(RunError, match=r"a\.jsonl has changed since this run began"):
        prompts(inputs)


def test_starters_at_the_same_instant_make_one_log(run: Run) -> None:
    for n in range(3):
        write(run.data / f"{n}.jsonl", numbered(5, 5 * n))
    for limit in (4, 9, 15):
        ready = threading.Barrier(4)

        def start(attempt: str, limit: int = limit, ready: threading.Barrier = ready) -> Inputs:
            ready.wait()
            return run.start(limit=limit, attempt=attempt)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(start, "abcd"))
        assert all(inputs.log == read_log(run.folder) for inputs in found)
        assert found[0].log.num_rows == limit
        assert sum(inputs.growth is not None for inputs in found) == (limit > 4)
    assert read_log(run.folder).entries == 3


def test_a_starter_that_was_slower_looks_again_by_the_log_that_won(run: Run) -> None:
    write(run.data / "a.jsonl", numbered(9))
    scanned = scan(run.listing(), limit=5, samples=1, shard_rows=4)
    run.start(limit=7)
    with pytest.raises(ValueError, match=r"data\.limit=5: this run has taken 7"):
        run.start(limit=5, scanned=scanned)
    late = run.start(limit=9, scanned=scanned)
    assert (late.growth, spans(late)) == ("input grew by 2 rows", [(0, 4), (4, 3), (7, 2)])


def test_a_scan_writes_nothing_and_spares_a_second_look(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run.data / "a.jsonl", numbered(600))
    write(run.data / "b.parquet", [{"prompt": f"p{n}", "n": n} for n in range(600, 900)])
    scanned = scan(run.listing(), limit=None, samples=2, shard_rows=400, folder=run.folder)
    assert not run.folder.place.exists()
    text, number = ColumnType(pa.string(), False), ColumnType(pa.int64(), False)
    assert scanned.columns == {"prompt": text, "n": number}
    assert scanned.tables == {"a.jsonl": ("prompt",), "b.parquet": ("prompt", "n")}
    assert prompts(scanned, 500, 700) == [f"p{n}" for n in range(500, 700)]
    monkeypatch.setattr(input_looks, "scan_file", None)
    opened = run.start(samples=2, shard_rows=400, scanned=scanned)
    assert opened.log == scanned.log == read_log(run.folder)


def test_a_look_without_hashes_reads_no_more_of_a_table_than_its_metadata(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run.data / "a.parquet", numbered(9))
    write(run.data / "b.jsonl", numbered(300, 9))
    monkeypatch.setattr(formats._HashedFile, "finish", None)
    inputs = scan(run.listing(), limit=300, samples=1, shard_rows=4, is_hashed=False)
    assert prompts(inputs) == [f"p{n}" for n in range(300)]
