"""How Parquet files are written here: compression, dictionaries and the size of row groups.

Knows nothing about which tables there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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

TableRow = Mapping[str, object]


def open_writer(file: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer with the settings of this project."""
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=list(_REPEATING),
        write_page_index=True,
    )


def write_table(rows: Sequence[TableRow], schema: pa.Schema, file: Path) -> None:
    """Write one Parquet file; each row has exactly the schema's columns."""
    assert rows, f"{file.name}: a file without rows cannot be loaded with datasets"
    for row in rows:
        assert list(row) == schema.names, f"{file.name}: {list(row)} is not {schema.names}"
    table = pa.Table.from_pylist(rows, schema=schema)
    with open_writer(file, schema) as writer:
        for group in row_groups(table, GROUP_BYTES):
            writer.write_table(group, row_group_size=group.num_rows)


def row_groups(table: pa.Table, max_bytes: int) -> Iterator[pa.Table]:
    """The table in row groups within both bounds, halved until they fit."""
    if table.num_rows == 1 or (table.num_rows <= GROUP_ROWS and table.nbytes <= max_bytes):
        yield table
        return
    half = table.num_rows // 2
    yield from row_groups(table.slice(0, half), max_bytes)
    yield from row_groups(table.slice(half), max_bytes)
