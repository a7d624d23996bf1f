"""How Parquet files are written here: compression, dictionaries and the size of row groups.

Knows nothing about which tables there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# A reader holds one row group at a time, and 2 GiB of text would overflow the offsets of `string`.
GROUP_ROWS = 50_000
GROUP_BYTES = 64 << 20

# Column paths whose values repeat; text, ids and scores would only fill a dictionary to no use.
_REPEATING = (
    "turn",
    "sample",
    "messages.list.element.role",
    "conversations.list.element.from",
    "finish_reason",
    "stop_reason",
    "max_new_tokens",
    "seed",
    "slot",
    "accepted.list.element",
    "depth.list.element",
    "drafted.list.element.drafted",
    "histogram.list.element",
    "code",
)

# Columns of numbers whose bytes are alike by place, not from number to number: a fifth smaller.
_SPLIT = ("output_logprobs", "top_token_ids", "top_logprobs")

TableRow = Mapping[str, object]


def open_writer(file: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer with the settings of this project."""
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=list(_REPEATING),
        use_byte_stream_split=list(_split_paths(schema)),
        write_page_index=True,
    )


def _split_paths(schema: pa.Schema) -> Iterator[str]:
    """Paths of the columns named in _SPLIT; a kept column of that name may hold something else."""
    for field in schema:
        path, kind = field.name, field.type
        while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
        if field.name in _SPLIT and is_number:
            yield path


def write_table(rows: Sequence[TableRow], schema: pa.Schema, file: Path) -> None:
    """Write one Parquet file; each row has exactly the schema's columns.

    A value may be an array; one of two dimensions is a list of lists of one length.
    """
    assert rows, f"{file.name}: a file without rows cannot be loaded with datasets"
    for row in rows:
        assert list(row) == schema.names, f"{file.name}: {list(row)} is not {schema.names}"
    columns = [_column([row[field.name] for row in rows], field.type) for field in schema]
    table = pa.Table.from_arrays(columns, schema=schema)
    with open_writer(file, schema) as writer:
        for group in row_groups(table, GROUP_BYTES):
            writer.write_table(group, row_group_size=group.num_rows)


def _column(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """The values of all rows as one column; arrays of two dimensions go without a Python object
    per token."""
    matrices = [value for value in values if isinstance(value, np.ndarray) and value.ndim == 2]
    if not matrices:
        return pa.array(values, kind)
    assert len(matrices) == len(values), f"{len(matrices)} of {len(values)} values are matrices"
    numbers = pa.array(np.concatenate(matrices).ravel(), kind.value_type.value_type)
    inner = pa.FixedSizeListArray.from_arrays(numbers, type=kind.value_type)
    stops = np.cumsum([0, *map(len, matrices)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(stops), inner, type=kind)


def row_groups(table: pa.Table, max_bytes: int) -> Iterator[pa.Table]:
    """The table in row groups within both bounds, halved until they fit."""
    if table.num_rows == 1 or (table.num_rows <= GROUP_ROWS and table.nbytes <= max_bytes):
        yield table
        return
    half = table.num_rows // 2
    yield from row_groups(table.slice(0, half), max_bytes)
    yield from row_groups(table.slice(half), max_bytes)
