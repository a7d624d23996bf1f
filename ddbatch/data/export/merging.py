"""The order of a merge: which rows of many parts it takes, and where each of them is.

Knows keys, and that of several runs the last one wins. Reads keys only, of one stretch of row_ids
at a time, and the column that tells which rows are the same; parts.py fetches the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddbatch.data.export.digests import row_digests
from ddbatch.data.export.parts import Ints, Part, PartKeys, read_column, read_keys
from ddbatch.data.folder import StateError

# The keys of so many row_ids are in memory at once.
STRETCH_ROWS = 20_000


class Places(NamedTuple):
    """Rows in the order of the merge: the number of each one's part, and its position there.

    replaced: how many completions were left out for rows of another run.
    """

    part: Ints
    position: Ints
    replaced: int


def places_by_key(parts: Sequence[Part]) -> Iterator[Places]:
    """All rows by key; of rows with one key the last run's is taken.

    A completion wins over a rejected row of any run: a later run may redo what was rejected.
    """
    return _by_key(parts, range(len(parts)))


def places_by_column(parts: Sequence[Part], column: str) -> Iterator[Places]:
    """Run after run, each by key; of rows with one value of the column the last run's are taken.

    They come where the value came first. Rows of one run never replace each other, and null is
    equal to nothing. In memory: 33 bytes a row, and as much again while it is sorted.
    """
    rows = [
        np.stack([places.part, places.position])
        for run in sorted({part.run for part in parts})
        for places in _by_key(parts, [at for at, part in enumerate(parts) if part.run == run])
    ]
    part, position = np.concatenate(rows, axis=1)
    taken = _last_of_each(parts, part, _digests(parts, column, part, position), column)
    replaced = int(_are_completions(parts)[part].sum())
    replaced -= int(_are_completions(parts)[part[taken]].sum())
    for start in range(0, len(taken), STRETCH_ROWS):
        rows_here = taken[start : start + STRETCH_ROWS]
        yield Places(part[rows_here], position[rows_here], replaced if start == 0 else 0)


@dataclass
class _Unread:
    """A part's keys from `at` on."""

    part: int
    keys: PartKeys
    at: int = 0

    def cut(self, stop_row: int) -> slice:
        """Positions of the next rows below stop_row; they count as read."""
        stop = int(np.searchsorted(self.keys.row_id, stop_row))
        self.at, here = stop, slice(self.at, stop)
        return here

    @property
    def next_row(self) -> int:
        return int(self.keys.row_id[self.at])


def _by_key(parts: Sequence[Part], chosen: Sequence[int]) -> Iterator[Places]:
    """places_by_key of some of the parts, one stretch of row_ids after the other."""
    waiting = sorted(chosen, key=lambda at: parts[at].first_row, reverse=True)
    unread: list[_Unread] = []
    while waiting or unread:
        first = [parts[waiting[-1]].first_row] if waiting else []
        stop_row = min([*first, *(keys.next_row for keys in unread)]) + STRETCH_ROWS
        while waiting and parts[waiting[-1]].first_row < stop_row:
            at = waiting.pop()
            unread.append(_Unread(at, read_keys(parts[at])))
        yield _resolve(parts, unread, stop_row)
        unread = [keys for keys in unread if keys.at < parts[keys.part].rows]


def _resolve(parts: Sequence[Part], unread: Sequence[_Unread], stop_row: int) -> Places:
    """The rows below stop_row in order, one of each key."""
    cuts = [(keys, keys.cut(stop_row)) for keys in unread]
    part = np.concatenate([np.full(cut.stop - cut.start, keys.part) for keys, cut in cuts])
    position = np.concatenate([np.arange(cut.start, cut.stop) for _, cut in cuts])
    row_id = np.concatenate([keys.keys.row_id[cut] for keys, cut in cuts])
    turn = np.concatenate([keys.keys.turn[cut] for keys, cut in cuts])
    sample = np.concatenate([keys.keys.sample[cut] for keys, cut in cuts])
    order = np.lexsort((_ranks(parts)[part], sample, turn, row_id))
    part, position = part[order], position[order]
    key = np.stack([row_id, turn, sample])[:, order]
    is_other = (key[:, 1:] != key[:, :-1]).any(axis=0)
    is_last = np.append(is_other, True)
    if not is_last.all():
        _refuse_twice(parts, part, np.append(0, np.cumsum(is_other)), key)
    dropped = part[~is_last]
    return Places(part[is_last], position[is_last], int(_are_completions(parts)[dropped].sum()))


def _refuse_twice(parts: Sequence[Part], part: Ints, group: Ints, key: Ints) -> None:
    """A run has each key once: StateError if not. group: a number for each key."""
    run = np.array([item.run for item in parts])[part]
    order = np.lexsort((run, group))
    is_same = (np.diff(group[order]) == 0) & (np.diff(run[order]) == 0)
    if is_same.any():
        first = int(is_same.argmax())
        one, other = (parts[part[at]].file for at in order[first : first + 2])
        row_id, turn, sample = key[:, order[first]]
        raise StateError(
            f"row_id {row_id}, turn {turn}, sample {sample} is in {one} and in {other}; a run has "
            "every key once: job=check tells what else is wrong"
        )


def _last_of_each(
    parts: Sequence[Part], part: Ints, digest: NDArray[np.uint64], column: str
) -> Ints:
    """Which rows are taken, in the order in which they come. digest: all zero for null."""
    num_runs = 1 + max(item.run for item in parts)
    run = np.array([item.run for item in parts])[part]
    valued = np.flatnonzero(digest.any(axis=1))
    # Stable: rows of one value stay in their order, so runs ascend in it.
    rows = valued[np.lexsort((digest[valued, 1], digest[valued, 0]))]
    taken = np.ones(len(part), np.bool_)
    place = np.arange(len(part))
    if len(rows):
        is_first = np.append(True, (digest[rows][1:] != digest[rows][:-1]).any(axis=1))
        starts, group = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        best_run = np.maximum.reduceat(_ranks(parts)[part[rows]], starts) % num_runs
        taken[rows] = run[rows] == best_run[group]
        is_shared = np.maximum.reduceat(run[rows], starts) > np.minimum.reduceat(run[rows], starts)
        place[rows] = np.where(is_shared[group], rows[starts][group], rows)
        counts = np.bincount(group * num_runs + run[rows], minlength=len(starts) * num_runs)
        counts = counts.reshape(-1, num_runs)
        is_less = counts.max(axis=1) > counts[np.arange(len(starts)), best_run]
        if is_less.any():
            raise ValueError(
                f"merge.by={column}: {int(is_less.sum()):,} values stand in more rows of a run "
                "than of the run that would replace them, and rows would be lost; allowed: key, or "
                "a column whose values name one row each"
            )
    kept = np.flatnonzero(taken)
    return kept[np.argsort(place[kept], kind="stable")]


def _digests(parts: Sequence[Part], column: str, part: Ints, position: Ints) -> NDArray[np.uint64]:
    """16 bytes for the column's value in each row; zero where it is null."""
    nothing = bytes(16)
    by_part = []
    for item in parts:
        digests = row_digests(read_column(item, column), [column])
        joined = b"".join(digest or nothing for digest in digests)
        by_part.append(np.frombuffer(joined, np.uint64).reshape(-1, 2))
    first = np.cumsum([0, *(item.rows for item in parts)])
    return np.concatenate(by_part)[first[part] + position]


def _are_completions(parts: Sequence[Part]) -> NDArray[np.bool_]:
    return np.array([part.is_completions for part in parts])


def _ranks(parts: Sequence[Part]) -> Ints:
    """Of two rows that are the same the one whose part has the higher rank is taken."""
    num_runs = 1 + max(part.run for part in parts)
    return np.array([part.run + num_runs * part.is_completions for part in parts])
