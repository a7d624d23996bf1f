"""The two files of job=bench: each is whole or not there.

Knows their columns and form. Knows nothing about what the figures say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ddbatch.data.folder import sync
from ddbatch.engine.round import STAGES
from ddbatch.jobs.benching.figures import Row
from ddbatch.jobs.benching.options import REPORT, TABLE
from ddbatch.jobs.benching.power import Reading

_TEXT, _COUNT, _NUMBER = pa.string(), pa.int64(), pa.float64()
SCHEMA = pa.schema(
    [
        ("arm", _TEXT),
        ("method", _TEXT),
        ("budget", _COUNT),
        ("block", _COUNT),
        ("rows", _COUNT),
        ("context", _COUNT),
        ("repeat", _COUNT),
        ("round_ms", _NUMBER),
        *((f"{name}_ms", _NUMBER) for name in STAGES),
        ("floor_ms", _NUMBER),
        ("bytes_per_second", _NUMBER),
        ("flop_per_second", _NUMBER),
        ("steady_tokens_per_second", _NUMBER),
        *((name, _NUMBER) for name in Reading._fields),
        ("call_prompts", _COUNT),
        ("call_output_tokens", _COUNT),
        ("call_seconds", _NUMBER),
        ("call_tokens_per_second", _NUMBER),
        ("call_ms_per_round", _NUMBER),
        ("call_prefill_percent", _NUMBER),
        ("call_watts", _NUMBER),
        ("acceptance_length", _NUMBER),
        ("acceptance_of", _TEXT),
    ]
)


def write(output_dir: str, rows: Sequence[Row], report: dict[str, object]) -> None:
    """Both files, in the place of those that this process wrote before."""
    place = Path(output_dir)
    place.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, allow_nan=False)
    _replace(place / REPORT, lambda file: file.write_text(text + "\n", encoding="utf-8"))
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
    _replace(place / TABLE, lambda file: pq.write_table(table, file))


def _replace(final: Path, write_to: Callable[[Path], object]) -> None:
    """Make a file under another name, and give it its own when it is whole."""
    made = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        write_to(made)
        sync(made)
        os.replace(made, final)
        sync(final.parent)
    finally:
        made.unlink(missing_ok=True)
