"""Shards: every row in exactly one, gzip files alone, whatever the steps of growth."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddbatch.core import Shard
from ddbatch.data.source.log import InputFile
from ddbatch.data.source.shards import cut_shards


@settings(max_examples=60)
@example(files=[(1, False), (0, True), (1, False)], stops=[], shard_rows=2)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6),
    st.lists(st.integers(0, 60), max_size=4),
    st.integers(1, 7),
)
def test_shards_cover_each_row_once_however_the_input_grows(
    files: list[tuple[int, bool]], stops: list[int], shard_rows: int
) -> None:
    listed = [
        InputFile(f"{at}.jsonl{'.gz' if is_packed else ''}", 0, rows, "", ())
        for at, (rows, is_packed) in enumerate(files)
    ]
    total, start = sum(rows for rows, _ in files), 0
    shards: list[Shard] = []
    for stop in sorted(min(stop, total) for stop in [*stops, total]):
        shards += cut_shards(listed, start, stop, shard_rows=shard_rows, first_index=len(shards))
        start = stop
    assert [n for shard in shards for n in range(shard.first_row, shard.stop_row)] == list(
        range(total)
    )
    first_rows = [sum(rows for rows, _ in files[:at]) for at in range(len(files))]
    for shard in shards:
        inside = [
            at
            for at, first_row in enumerate(first_rows)
            if files[at][0]  # an empty file is in no shard
            and first_row < shard.stop_row
            and shard.first_row < first_row + files[at][0]
        ]
        if any(files[at][1] for at in inside):
            assert len(inside) == 1, shard
        else:
            assert shard.num_rows <= shard_rows
