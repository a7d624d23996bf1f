"""A column of conversations as one array of turns: what the last turns say, put other words there.

Knows Arrow's lists of structs. Knows nothing about formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


@dataclass(frozen=True)
class Turns:
    """values: all turns, one after the other. lengths: how many each row has; a null row none."""

    values: pa.StructArray
    lengths: NDArray[np.int64]
    is_null: pa.BooleanArray

    @property
    def stops(self) -> NDArray[np.int64]:
        """Per row, one beyond its last turn in `values`."""
        return np.cumsum(self.lengths)

    @property
    def last(self) -> NDArray[np.int64]:
        """Where in `values` the last turns are, of the rows that have turns."""
        return self.stops[self.lengths > 0] - 1

    def field(self, name: str) -> pa.Array:
        """One field of all turns."""
        return pc.struct_field(self.values, name)

    def answers(self) -> list[str]:
        """What the last turns say, all of them the model's."""
        is_ours = pc.equal(self.field("role").take(pa.array(self.last)), "assistant")
        assert pc.sum(is_ours).as_py() in (None, len(is_ours)), "a last turn is not the assistant's"
        said: list[str] = self.field("content").take(pa.array(self.last)).to_pylist()
        return said

    def with_last(self, column: pa.Array, texts: Sequence[str | None]) -> pa.Array:
        """A field of all turns with these texts in the last ones."""
        is_last = np.zeros(len(column), np.bool_)
        is_last[self.last] = True
        return pc.replace_with_mask(column, pa.array(is_last), pa.array(texts, pa.string()))

    def rebuilt(self, fields: dict[str, pa.Array]) -> pa.ListArray:
        """The column again, with turns of these fields."""
        values = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
        offsets = pa.array(np.concatenate([[0], self.stops]), pa.int32())
        return pa.ListArray.from_arrays(offsets, values, mask=self.is_null)


def turns_of(column: pa.ChunkedArray) -> Turns:
    """The turns of a column of message lists."""
    rows = column.combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(rows), 0)
    return Turns(rows.flatten(), lengths.to_numpy().astype(np.int64), pc.is_null(rows))
