"""Repair: whatever is broken, wherever it is cut off, its rows are redone and the rest stays."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from interrupts import Process, cut_off, hooks, quickly, run_hooked
from made_run import SHARD_ROWS, make_run
from small_run import SAMPLES, SHARDS, check, check_complete, generate, visible_keys, write_part

from ddbatch.core import RunError, Shard
from ddbatch.data.commits import commit, mark_finished, recover, roll_forward
from ddbatch.data.folder import TABLES, RunFolder, StateError
from ddbatch.data.repair import repair

SHARD = SHARDS[0]
PARTS = [[(0, 0), (2, 1)], [(0, 1), (1, 1)], [(2, 0), (3, 1)], [(3, 0)], [(4, 0), (4, 1)]]
BROKEN = 2  # the number that is damaged


def start(place: Path) -> RunFolder:
    """Five parts, the last of which has its tmp names still; one unit is left to do."""
    folder = RunFolder(place)
    for number, units in enumerate(PARTS):
        record = write_part(folder, SHARD.index, number, f"attempt{number % 2}", units)
        assert commit(folder, record)
        if number < len(PARTS) - 1:
            roll_forward(folder, record)
    return folder


def change_record(folder: RunFolder, change: Callable[[dict[str, object]], object]) -> None:
    file = folder.record(SHARD.index, BROKEN)
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def final_of(folder: RunFolder) -> Path:
    return folder.part("completions", SHARD.index, BROKEN)


def cut_record(folder: RunFolder) -> None:
    file = folder.record(SHARD.index, BROKEN)
    file.write_bytes(file.read_bytes()[:100])


def empty_record(folder: RunFolder) -> None:
    folder.record(SHARD.index, BROKEN).write_bytes(b"")


def delete_record(folder: RunFolder) -> None:
    folder.record(SHARD.index, BROKEN).unlink()


def copy_of_another_record(folder: RunFolder) -> None:
    shutil.copy(folder.record(SHARD.index, 1), folder.record(SHARD.index, BROKEN))


def record_of_another_shard(folder: RunFolder) -> None:
    change_record(folder, lambda record: record.update(shard=1))


def record_of_other_rows(folder: RunFolder) -> None:
    change_record(folder, lambda record: record.update(keys=[[70, 1, 0, 1, 1]]))


def record_of_too_many_samples(folder: RunFolder) -> None:
    change_record(folder, lambda record: record.update(keys=[[3, 1, 0, 9, 2]]))


def record_of_keys_of_another(folder: RunFolder) -> None:
    change_record(folder, lambda record: record.update(keys=[[0, 3, 0, 1, 1]]))


def delete_file(folder: RunFolder) -> None:
    final_of(folder).unlink()


def cut_file(folder: RunFolder) -> None:
    final_of(folder).write_text("{")


DAMAGES = [
    cut_record,
    empty_record,
    delete_record,
    copy_of_another_record,
    record_of_another_shard,
    record_of_other_rows,
    record_of_too_many_samples,
    record_of_keys_of_another,
    delete_file,
    cut_file,
]


def contents(folder: RunFolder) -> Counter[bytes]:
    return Counter(file.read_bytes() for file in folder.place.rglob("*") if file.is_file())


def see_no_row_without_a_record(folder: RunFolder, but: int | None = None) -> None:
    """but: a number whose files had lost their record before."""
    for table in ("completions", "acceptance", "rejected"):
        for file in (folder.place / table).glob("*"):
            number = int(file.stem[-6:])
            assert number == but or folder.record(SHARD.index, number).exists(), file


def mend(folder: RunFolder, attempt: str) -> list[str]:
    return repair(folder, SHARD, SAMPLES, attempt)


def finish(folder: RunFolder) -> None:
    with hooks():
        run_hooked(lambda: generate(folder, "last"), quickly)
    check_complete(folder)


def refuses(folder: RunFolder) -> None:
    with pytest.raises(StateError, match="repair"):
        mark_finished(recover(folder, SHARD.index), SHARD, SAMPLES)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_broken_goes_aside_with_all_that_follows(
    tmp_path: Path, damage: Callable[[RunFolder], None]
) -> None:
    folder = start(tmp_path / "run")
    damage(folder)
    refuses(folder)
    before = contents(folder)
    moved = mend(folder, "mender")
    assert contents(folder) == before, "a file is lost"
    for name in moved:
        assert (folder.state("aside") / "mender" / name).exists()
        assert not (folder.place / name).exists()
    records = [folder.record(SHARD.index, number) for number in range(len(PARTS))]
    assert [file.exists() for file in records] == [True, True, False, False, False]
    assert set(map(folder.relative, records[BROKEN + 1 :])) < set(moved)
    check(folder)
    assert mend(folder, "mender") == []
    finish(folder)


@pytest.mark.parametrize("damage", [cut_record, delete_record, record_of_keys_of_another, cut_file])
def test_a_repair_that_is_cut_off_is_ended_by_the_next(
    tmp_path: Path, damage: Callable[[RunFolder], None]
) -> None:
    damaged = start(tmp_path / "damaged")
    damage(damaged)
    before = contents(damaged)
    for after in count():
        folder = RunFolder(tmp_path / f"after-{after}")
        shutil.copytree(damaged.place, folder.place)
        is_cut = cut_off(partial(mend, folder, "mender"), after)
        assert contents(folder) == before
        see_no_row_without_a_record(folder, but=BROKEN if damage is delete_record else None)
        with hooks():
            run_hooked(partial(mend, folder, "mender"), quickly)
        assert contents(folder) == before
        check(folder)
        finish(folder)
        if not is_cut:
            break
    assert after > 30, after


@pytest.mark.parametrize("damage", [cut_record, delete_record, cut_file])
def test_two_repairs_at_once_do_one_repair(
    tmp_path: Path, damage: Callable[[RunFolder], None]
) -> None:
    for folder, slow in repairs_that_are_halted(tmp_path, damage):
        before = contents(folder)
        run_hooked(partial(mend, folder, "fast"), quickly)
        while slow.step():
            see_no_row_without_a_record(folder)
        assert contents(folder) == before
        check(folder)
        finish(folder)


@pytest.mark.parametrize("damage", [cut_record, delete_record, cut_file])
def test_a_repair_that_comes_late_leaves_nothing_that_cannot_be_mended(
    tmp_path: Path, damage: Callable[[RunFolder], None]
) -> None:
    """It must not be; but where a worker has gone on already, no row is there twice in the end."""
    num_intact = num_halted = 0
    for folder, slow in repairs_that_are_halted(tmp_path, damage):
        run_hooked(partial(mend, folder, "fast"), quickly)
        run_hooked(partial(generate, folder, "between"), quickly)
        before = sorted(visible_keys(folder))
        while slow.step():
            pass
        num_halted += 1
        num_intact += sorted(visible_keys(folder)) == before
        run_hooked(partial(mend, folder, "last"), quickly)
        check(folder)
        finish(folder)
    assert num_intact > 0.8 * num_halted


def repairs_that_are_halted(
    tmp_path: Path, damage: Callable[[RunFolder], None]
) -> Iterator[tuple[RunFolder, Process]]:
    """A repair of a damaged run that halts after so many calls, for each number of calls."""
    damaged = start(tmp_path / "damaged")
    damage(damaged)
    for num_calls in range(0, 1000, 5):
        folder = RunFolder(tmp_path / f"after-{num_calls}")
        shutil.copytree(damaged.place, folder.place)
        with hooks():
            slow = Process(partial(mend, folder, "slow"))
            for _ in range(num_calls):
                slow.step()
            if slow.next_call is None:
                break
            yield folder, slow
    assert num_calls > 100, num_calls


def test_files_without_a_record_are_not_made_part_of_the_run(tmp_path: Path) -> None:
    folder = start(tmp_path / "run")
    recover(folder, SHARD.index)
    folder.record(SHARD.index, 4).unlink()
    folder.record(SHARD.index, 3).unlink()
    with pytest.raises(StateError, match=r"part-000003\.parquet has no record; .*repair"):
        generate(folder, "worker")
    finals = [folder.part("completions", SHARD.index, number) for number in (4, 3)]
    assert set(map(folder.relative, finals)) < set(mend(folder, "mender"))
    assert not any(file.exists() for file in finals)
    finish(folder)


def test_a_reader_that_rolls_forward_meanwhile_shows_nothing_without_a_record(
    tmp_path: Path,
) -> None:
    """It has read the records while all were whole, and is about to rename the last one's files."""
    whole = start(tmp_path / "whole")
    is_ended = False
    for num_calls in range(0, 1000, 2):
        folder = RunFolder(tmp_path / f"after-{num_calls}")
        shutil.copytree(whole.place, folder.place)
        with hooks():
            reader = Process(partial(recover, folder, SHARD.index))
            while reader.next_call not in ("rename", None):
                reader.step()
            assert reader.next_call == "rename"
            cut_record(folder)
            mender = Process(partial(mend, folder, "mender"))
            for _ in range(num_calls):
                mender.step()
            is_ended = mender.next_call is None
            with suppress(StateError):
                while reader.step():
                    pass
            while mender.step():
                pass
        check(folder)
        if is_ended:
            break
    assert is_ended


def test_a_number_is_free_again_only_when_no_later_record_is_left(tmp_path: Path) -> None:
    """Or a worker with a view from before them would take it, for rows that they have."""
    damaged = start(tmp_path / "damaged")
    stale = write_part(damaged, SHARD.index, BROKEN, "stale", [*PARTS[2], *PARTS[4]])
    cut_record(damaged)
    num_taken = 0
    for after in count():
        folder = RunFolder(tmp_path / f"after-{after}")
        shutil.copytree(damaged.place, folder.place)
        is_cut = cut_off(partial(mend, folder, "mender"), after)
        is_taken = commit(folder, stale)
        num_taken += is_taken
        if is_taken:
            check(folder)
        mend(folder, "mender")
        finish(folder)
        if not is_cut:
            break
    assert num_taken


def test_a_second_repair_overwrites_nothing_that_the_first_moved(tmp_path: Path) -> None:
    folder = start(tmp_path / "run")
    for number in range(3):
        cut_record(folder)
        before = contents(folder)
        assert folder.relative(folder.record(SHARD.index, BROKEN)) in mend(folder, "mender")
        assert contents(folder) == before
        names = (folder.state("aside") / "mender" / ".ddbatch/commits/shard-00000").glob("000002*")
        assert sorted(file.name for file in names) == [
            "000002.json" + "~" * times for times in range(number + 1)
        ]
        finish(folder)


def test_a_file_of_the_same_size_and_other_content_goes_aside(tmp_path: Path) -> None:
    folder = start(tmp_path / "run")
    final = final_of(folder)
    final.write_text("x" * final.stat().st_size)
    recover(folder, SHARD.index)
    assert folder.relative(final) in mend(folder, "mender")
    assert len(recover(folder, SHARD.index)) == BROKEN
    finish(folder)


def test_where_nothing_is_broken_repair_moves_nothing(tmp_path: Path) -> None:
    folder = start(tmp_path / "run")
    assert mend(folder, "mender") == []
    assert len(visible_keys(folder)) == 12, "good records are rolled forward"
    assert not folder.state("aside").exists()
    assert repair(folder, SHARDS[1], SAMPLES, "mender") == []


def test_what_is_no_record_goes_aside_alone(tmp_path: Path) -> None:
    folder = start(tmp_path / "run")
    (folder.records(SHARD.index) / "000002 (copy).json").write_text("{}")
    refuses(folder)
    assert mend(folder, "mender") == [".ddbatch/commits/shard-00000/000002 (copy).json"]
    assert len(recover(folder, SHARD.index)) == len(PARTS)


def test_repair_leaves_a_record_of_a_later_version_where_it_is(tmp_path: Path) -> None:
    folder = start(tmp_path / "run")
    change_record(folder, lambda record: record.update(version=2))
    before = sorted(folder.place.rglob("*"))
    with pytest.raises(RunError, match="version 2"):
        mend(folder, "mender")
    assert len(list(folder.records(SHARD.index).iterdir())) == len(PARTS)
    assert sorted(folder.place.rglob("*")) == before


def test_all_tables_of_a_broken_part_go_aside(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", top_logprobs=2, seed=5)
    shard, last = Shard(0, 0, SHARD_ROWS), len(list(folder.records(0).iterdir())) - 1
    folder.record(0, last).write_text("{")
    had = {table for table in TABLES if folder.part(table, 0, last).exists()}
    assert "logprobs" in had
    moved = repair(folder, shard, 2, "later")
    assert {name.split("/")[0] for name in moved} == {*had, ".ddbatch"}
    assert not any(folder.part(table, 0, last).exists() for table in TABLES)
