"""What a start adds to the input log: new files, more rows, more samples, or a refusal.

Knows the rules by which a run's input begins and grows. Writes nothing, prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddbatch.data.folder import RunFolder
from ddbatch.data.source.cache import load_verified
from ddbatch.data.source.files import ALLOWED, Listing
from ddbatch.data.source.log import Entry, InputLog
from ddbatch.data.source.looks import Looks
from ddbatch.data.source.shards import cut_shards

Grow = Literal["append", "refuse"]


@dataclass(frozen=True)
class Wanted:
    """What the options ask of the input."""

    limit: int | None
    samples: int
    shard_rows: int
    grow: Grow


def next_entry(
    log: InputLog, looks: Looks, wanted: Wanted, folder: RunFolder | None
) -> Entry | None:
    """What has to be appended to the log, None if nothing is new."""
    _refuse_contradictions(log, looks.listing, wanted)
    if folder is not None:
        _refuse_own_output(looks.listing, folder)
    looks.verify(log.files, {} if folder is None else load_verified(folder))
    listed = {file.name for file in log.files}
    names = [name for name in looks.paths if name not in listed]
    if log.entries and names:
        _refuse_growth(wanted, f"{_counted(len(names), 'file')} ({', '.join(names[:3])})")
    files = looks.scan(names)
    all_files = log.files + files
    rows = sum(file.rows for file in all_files)
    if not rows:
        raise ValueError(_no_rows(looks.listing))
    num_rows = rows if wanted.limit is None else min(rows, wanted.limit)
    if log.entries and num_rows > log.num_rows:
        _refuse_growth(wanted, f"{_counted(num_rows - log.num_rows, 'row')} by data.limit")
    if not files and (num_rows, wanted.samples) == (log.num_rows, log.samples):
        return None
    shards = cut_shards(
        all_files,
        log.num_rows,
        num_rows,
        shard_rows=wanted.shard_rows,
        first_index=len(log.shards),
    )
    select, revision = looks.listing.select, looks.listing.revision
    return Entry(files, num_rows, wanted.samples, shards, select, revision)


def describe_growth(before: InputLog, after: InputLog) -> str | None:
    """What a restart has added, in words; None at a first start or if nothing is new."""
    if not before.entries or before.entries == after.entries:
        return None
    num_files, num_rows = len(after.files) - len(before.files), after.num_rows - before.num_rows
    words = []
    if num_files or num_rows:
        files = [_counted(num_files, "file")] if num_files else []
        words.append("input grew by " + ", ".join([*files, _counted(num_rows, "row")]))
    if after.samples > before.samples:
        words.append(f"sampling.n grew from {before.samples} to {after.samples}")
    return "; ".join(words)


def _refuse_contradictions(log: InputLog, listing: Listing, wanted: Wanted) -> None:
    """A run may grow, but neither shrink nor read its files in another way."""
    if not log.entries:
        return
    if listing.select != log.select:
        raise ValueError(
            f"data.select={listing.select}: this run began with {log.select}; "
            f"allowed: {log.select}, or another output_dir"
        )
    if wanted.limit is not None and wanted.limit < log.num_rows:
        raise ValueError(
            f"data.limit={wanted.limit}: this run has taken {log.num_rows} rows already; "
            f"allowed: null or an integer >= {log.num_rows}"
        )
    if wanted.samples < log.samples:
        raise ValueError(
            f"sampling.n={wanted.samples}: this run has {log.samples} samples a row already; "
            f"allowed: an integer >= {log.samples}"
        )


def _refuse_own_output(listing: Listing, folder: RunFolder) -> None:
    """A run that reads what it writes would never end."""
    root, place = listing.root.resolve(), folder.place.resolve()
    for file in listing.files:
        if (root / listing.name_of(file)).is_relative_to(place):
            raise ValueError(
                f"data.path={listing.path}: {file.name} lies in output_dir={folder.place}; "
                "allowed: input outside of it"
            )


def _refuse_growth(wanted: Wanted, what: str) -> None:
    if wanted.grow == "refuse":
        raise ValueError(
            f"data.grow=refuse: the input has grown by {what}; allowed: append, or the input as "
            "it was"
        )


def _no_rows(listing: Listing) -> str:
    reasons = {
        "all": "no rows in it",
        "truncated": "no row of this run was cut off by its cap (finish_reason length)",
        "rejected": "no row of this run was rejected",
    }
    return (
        f"data.path={listing.path}, data.select={listing.select}: {reasons[listing.select]}; "
        f"allowed: {ALLOWED}, with rows"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
