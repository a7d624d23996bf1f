"""Rows as input files of every format, for the tests that read them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FORMATS = ("x.jsonl", "x.jsonl.gz", "x.parquet", "x.arrow", "x.ipc.arrow")


def write(file: Path, rows: Sequence[dict[str, object]], *, group: int = 100) -> Path:
    """Rows as a file of the format that its suffix says; groups or batches of so many rows."""
    if ".jsonl" not in file.name:
        table = pa.Table.from_pylist(list(rows))
    if file.name.endswith(".parquet"):
        pq.write_table(table, file, row_group_size=group)
    elif file.name.endswith(".arrow"):
        opener = pa.ipc.new_file if file.name.endswith(".ipc.arrow") else pa.ipc.new_stream
        with opener(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
    else:
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file
