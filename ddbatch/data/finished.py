"""What records leave to do: which (row, sample) of a shard is finished, and by one record only.

Knows keys as records hold them. Knows nothing about the disk.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ddbatch.core import Shard
from ddbatch.data.folder import StateError
from ddbatch.data.records import Record


def mark_finished(records: Iterable[Record], shard: Shard, samples: int) -> NDArray[np.bool_]:
    """[rows of the shard, samples]: True where a record has the unit with all of its turns.

    StateError if two records have it, or one has what is not in the shard.
    """
    finished = np.zeros((shard.num_rows, samples), np.bool_)
    for record in records:
        mark_record(finished, record, shard)
    return finished


def mark_record(finished: NDArray[np.bool_], record: Record, shard: Shard) -> None:
    """Mark what one record finishes, as mark_finished does."""
    num_rows, samples = finished.shape
    for first_row, rows_in_block, first_sample, samples_in_block, _ in record.keys:
        row = first_row - shard.first_row
        stop_row, stop_sample = row + rows_in_block, first_sample + samples_in_block
        if row < 0 or stop_row > num_rows or stop_sample > samples:
            raise _broken(
                record,
                f"claims rows {first_row}..{first_row + rows_in_block - 1}, samples "
                f"{first_sample}..{stop_sample - 1}, but the shard has rows "
                f"{shard.first_row}..{shard.stop_row - 1} with {samples} samples each",
            )
        units = finished[row:stop_row, first_sample:stop_sample]
        if units.any():
            twice_row, twice_sample = np.argwhere(units)[0]
            raise _broken(
                record,
                f"claims row {first_row + twice_row}, sample {first_sample + twice_sample}, "
                "which is claimed already",
            )
        units[:] = True


def _broken(record: Record, what: str) -> StateError:
    return StateError(
        f"record {record.number} of shard {record.shard} (attempt {record.attempt}) {what}; "
        "output.resume=repair moves it and the shard's later records aside and redoes their rows"
    )
