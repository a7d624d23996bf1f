"""Records as text, keys as blocks, and what records leave to do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddbatch.core import Key, Shard
from ddbatch.data.finished import mark_finished
from ddbatch.data.folder import StateError
from ddbatch.data.records import (
    KeyBlock,
    NewerRecordError,
    PartCounts,
    PartFile,
    Record,
    blocks_of,
    from_json,
    to_json,
)

FILES = tuple(
    PartFile(
        table,
        f".ddbatch/tmp/ab12/{table}-x.parquet",
        f"{table}/shard-00007-part-000003.parquet",
        "0f" * 32,
        size,
        rows,
    )
    for table, size, rows in (("completions", 901, 7), ("rejected", 33, 1))
)
RECORD = Record(
    shard=7,
    number=3,
    attempt="ab12",
    files=FILES,
    keys=(KeyBlock(40, 3, 0, 2, 1), KeyBlock(44, 1, 1, 1, 2)),
    counts=PartCounts(7, {"bad_json": 1}, 50, 60, 20, 33, 2),
    closed_at=1.75e9,
    seconds=12.5,
)
UNITS = st.dictionaries(
    st.tuples(st.integers(0, 9), st.integers(0, 3)), st.integers(1, 3), max_size=40
)


def keys_of(units: dict[tuple[int, int], int]) -> list[Key]:
    return [
        Key(row_id, turn, sample)
        for (row_id, sample), num_turns in units.items()
        for turn in range(num_turns)
    ]


def keys_in(blocks: tuple[KeyBlock, ...]) -> list[Key]:
    return [key for block in blocks for key in block.keys()]  # noqa: SIM118


@settings(max_examples=300)
@given(units=UNITS, seed=st.randoms(use_true_random=False))
@example(units={}, seed=None)
def test_blocks_hold_the_keys_exactly(units: dict[tuple[int, int], int], seed: Any) -> None:
    keys = keys_of(units)
    if seed is not None:
        seed.shuffle(keys)
    blocks = blocks_of(keys)
    assert sorted(keys_in(blocks)) == sorted(keys)
    assert len(blocks) <= len(units)
    assert all(list(block.keys()) == sorted(block.keys()) for block in blocks)


def test_rows_without_a_gap_are_one_block() -> None:
    assert blocks_of([Key(row_id, 0, 0) for row_id in range(20_000)]) == (
        KeyBlock(0, 20_000, 0, 1, 1),
    )
    samples = [Key(row_id, turn, s) for row_id in range(5, 9) for turn in (0, 1) for s in (2, 3, 4)]
    assert blocks_of(samples) == (KeyBlock(5, 4, 2, 3, 2),)


def test_blocks_split_where_the_number_of_turns_changes() -> None:
    turns = {(0, 0): 1, (1, 0): 1, (2, 0): 2, (3, 0): 1, (3, 1): 3, (4, 1): 3}
    assert blocks_of(keys_of(turns)) == (
        KeyBlock(0, 2, 0, 1, 1),
        KeyBlock(2, 1, 0, 1, 2),
        KeyBlock(3, 1, 0, 1, 1),
        KeyBlock(3, 2, 1, 1, 3),
    )


@pytest.mark.parametrize(
    "keys", [[Key(0, 1, 0)], [Key(0, 0, 0), Key(0, 2, 0)], [Key(0, 0, 0), Key(0, 0, 0)]]
)
def test_keys_with_a_gap_or_twice_are_our_mistake(keys: list[Key]) -> None:
    with pytest.raises(AssertionError):
        blocks_of(keys)


@settings(max_examples=100)
@given(
    units=UNITS.filter(bool),
    sizes=st.lists(st.integers(1, 2**62), min_size=1, max_size=1),
    rejected=st.dictionaries(st.sampled_from(["bad_json", "wrong_type"]), st.integers(1, 99)),
    seconds=st.floats(0, allow_infinity=False),
    closed_at=st.floats(allow_nan=False, allow_infinity=False),
)
def test_a_record_comes_back_as_it_was_written(
    units: dict[tuple[int, int], int],
    sizes: list[int],
    rejected: dict[str, int],
    seconds: float,
    closed_at: float,
) -> None:
    record = replace(
        RECORD,
        files=(replace(FILES[0], size=sizes[0]),),
        keys=blocks_of(keys_of(units)),
        counts=replace(RECORD.counts, rejected=rejected),
        seconds=seconds,
        closed_at=closed_at,
    )
    assert from_json(to_json(record).encode()) == record


def test_a_person_can_read_a_record() -> None:
    lines = to_json(RECORD).splitlines()
    assert ' "shard": 7,' in lines
    assert "  [40, 3, 0, 2, 1]," in lines
    assert max(map(len, lines)) < 260


def test_a_record_that_is_cut_off_is_refused_wherever_that_is() -> None:
    content = to_json(RECORD).encode()
    for length in range(len(content) - 1):  # without the last line's end it is whole still
        with pytest.raises(ValueError, match="cut off"):
            from_json(content[:length])


def test_a_record_that_is_no_text_is_refused() -> None:
    for content in (b"\xff\xfe{}", b"\0" * 500, b"[" * 100_000, b"[]", b"null", b"{}"):
        with pytest.raises(ValueError, match=r"(record|cut off)"):
            from_json(content)


Path = tuple[str | int, ...]


def paths(value: object, path: Path = ()) -> list[Path]:
    """The way to every value of a JSON text."""
    found = [path] if path else []
    if isinstance(value, dict):
        for name, item in value.items():
            found += paths(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += paths(item, (*path, index))
    return found


def changed(path: Path, change: Callable[[Any, Any], None]) -> bytes:
    values = json.loads(to_json(RECORD))
    place = values
    for name in path[:-1]:
        place = place[name]
    change(place, path[-1])
    return json.dumps(values).encode()


PATHS = paths(json.loads(to_json(RECORD)))


ODD = (None, True, -1, 1.5, "", [], {}, "\u00e9/..", [[]], math.nan, math.inf, 1 << 70)


def is_allowed(path: Path, odd: object) -> bool:
    match path:
        case ("closed_at",) | ("seconds",):
            return odd == 1.5
        case ("counts", "rejected"):
            return odd == {}
        case ("files", int(), "tmp" | "final"):
            return odd == "\u00e9/.."  # names are compared with the record's place by its reader
        case ("version",):
            return odd == 1 << 70  # a test of its own
    return False


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_value_of_another_kind_is_refused(path: Path) -> None:
    for odd in ODD:
        content = changed(path, lambda place, name, odd=odd: place.__setitem__(name, odd))  # type: ignore[misc]
        if is_allowed(path, odd):
            continue
        with pytest.raises(ValueError, match=r"(is|has|comes) "):
            from_json(content)


@pytest.mark.parametrize("path", [path for path in PATHS if isinstance(path[-1], str)], ids=str)
def test_a_field_that_is_missing_is_refused(path: Path) -> None:
    if path != ("counts", "rejected", "bad_json"):
        with pytest.raises(ValueError, match=f"no field '{path[-1]}'"):
            from_json(changed(path, lambda place, name: place.pop(name)))


@pytest.mark.parametrize("path", [(), ("counts",), ("files", 0)], ids=str)
def test_a_field_that_is_unknown_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="unknown field 'extra'"):
        from_json(changed((*path, "extra"), lambda place, name: place.__setitem__(name, 1)))


def test_two_files_of_one_table_are_refused() -> None:
    with pytest.raises(ValueError, match="comes twice"):
        from_json(to_json(replace(RECORD, files=(FILES[0], FILES[0]))).encode())


def test_a_record_of_a_later_version_is_not_called_broken() -> None:
    later = changed(("version",), lambda place, name: place.__setitem__(name, 2))
    with pytest.raises(NewerRecordError, match="version 2"):
        from_json(later)


SHARD = Shard(2, 30, 10)


def records_of(*parts: tuple[KeyBlock, ...]) -> list[Record]:
    return [replace(RECORD, number=number, keys=keys) for number, keys in enumerate(parts)]


@settings(max_examples=200)
@given(units=UNITS, owners=st.lists(st.integers(0, 2), min_size=40, max_size=40))
def test_what_is_finished_is_the_union_of_the_records(
    units: dict[tuple[int, int], int], owners: list[int]
) -> None:
    shifted = {(row + 30, sample): turns for (row, sample), turns in units.items()}
    parts: list[dict[tuple[int, int], int]] = [{}, {}, {}]
    for owner, (unit, turns) in zip(owners, shifted.items(), strict=False):
        parts[owner][unit] = turns
    records = records_of(*(blocks_of(keys_of(part)) for part in parts))
    finished = mark_finished(records, SHARD, 4)
    assert finished.shape == (10, 4)
    marked = {
        (30 + row, sample) for row in range(10) for sample in range(4) if finished[row, sample]
    }
    assert marked == set(shifted)


def test_a_unit_in_two_records_is_refused_by_name() -> None:
    records = records_of((KeyBlock(30, 4, 0, 1, 1),), (KeyBlock(33, 2, 0, 2, 3),))
    with pytest.raises(StateError, match=r"record 1 of shard 7 .* row 33, sample 0, .*repair"):
        mark_finished(records, SHARD, 2)
    with pytest.raises(StateError, match="record 0"):
        mark_finished(records_of((KeyBlock(30, 4, 0, 1, 1),) * 2), SHARD, 2)


@pytest.mark.parametrize(
    "block",
    [(29, 1, 0, 1, 1), (40, 1, 0, 1, 1), (38, 3, 0, 1, 1), (30, 1, 2, 1, 1), (1 << 62, 1, 0, 1, 1)],
)
def test_a_unit_outside_the_shard_is_refused(block: tuple[int, ...]) -> None:
    with pytest.raises(StateError, match=r"record 0 .*shard has rows 30\.\.39 with 2 samples"):
        mark_finished(records_of((KeyBlock(*block),)), SHARD, 2)
    assert mark_finished(records_of((KeyBlock(39, 1, 1, 1, 9),)), SHARD, 2)[9, 1]
