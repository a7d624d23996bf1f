"""What tests of whole runs share: the fake engine behind the real command line, and tables read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fake
import pyarrow.parquet as pq

from ddbatch.__main__ import main
from ddbatch.core import Key

CONTENT = (  # what must not depend on how a run was scheduled
    "row_id",
    "turn",
    "sample",
    "id",
    "messages",
    "completion",
    "prompt_token_ids",
    "output_token_ids",
    "finish_reason",
    "stop_reason",
    "reasoning_end",
    "max_new_tokens",
    "seed",
)


def write_jsonl(file: Path, rows: Sequence[object]) -> Path:
    """A row a line; a string is written as it is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def prompts(count: int, first: int = 0) -> list[dict[str, object]]:
    """Rows of one to seven words with a name."""
    return [
        {"prompt": " ".join(f"w{(n * 7 + k) % 90}" for k in range(1 + n % 7)), "name": f"row {n}"}
        for n in range(first, first + count)
    ]


class Run:
    """A model, an input and an output folder, and the command line that joins them."""

    def __init__(self, place: Path, rows: Sequence[object] | None = None) -> None:
        self.place = place
        self.out = place / "out"
        self.model = fake.write_model(place / "model")
        self.data = place / "p.jsonl"
        if rows is not None:
            write_jsonl(self.data, rows)

    def arguments(self, *more: str) -> list[str]:
        """The command line; an option in `more` replaces the usual one."""
        usual = [
            f"model.path={self.model}",
            f"data.path={self.data}",
            f"output_dir={self.out}",
            "sampling.max_new_tokens=12",
            "shards.rows=7",
            "output.part_rows=5",
            "output.max_error_rate=1",
        ]
        changed = {option.split("=")[0] for option in more}
        return [option for option in usual if option.split("=")[0] not in changed] + list(more)

    def __call__(self, *more: str, engine: fake.FakeOptions | None = None) -> int:
        """Run it here; the exit code."""
        return main(self.arguments(*more), lambda config: fake.run(config, engine))

    def start(self, *more: str, **engine: object) -> subprocess.Popen[str]:
        """Run it in a process of its own."""
        return subprocess.Popen(
            [sys.executable, str(Path(fake.__file__)), *self.arguments(*more)],
            env={**os.environ, "FAKE": json.dumps(engine)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def table(self, name: str = "completions", out: Path | None = None) -> list[dict[str, Any]]:
        """All rows of a table, sorted by key."""
        files = sorted(((out or self.out) / name).glob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        return sorted(rows, key=key_of)

    def content(self, out: Path | None = None) -> list[dict[str, Any]]:
        """The content columns of all completions, sorted by key."""
        return [{name: row[name] for name in CONTENT} for row in self.table(out=out)]

    def all_keys(self) -> list[Key]:
        """Keys of all completions and rejected rows; one that came twice stands there twice."""
        return sorted(
            key_of(row) for name in ("completions", "rejected") for row in self.table(name)
        )


def key_of(row: dict[str, Any]) -> Key:
    """The key of a row of any table."""
    return Key(row["row_id"], row["turn"], row["sample"])


def rows_of(count: int, samples: int = 1) -> list[Key]:
    """The keys of so many rows with one turn."""
    return [Key(row_id, 0, sample) for row_id in range(count) for sample in range(samples)]


def kill(process: subprocess.Popen[str], number: signal.Signals) -> int:
    """Send a signal and wait for the end."""
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


def wait_until(is_so: Callable[[], object]) -> None:
    """Look again and again; a machine with other work may take long."""
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
