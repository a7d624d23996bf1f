"""Write a run's folder: finished and rejected rows in, Parquet parts out, never half a file.

Knows the folder's layout and how a file becomes visible. Knows nothing about prompts being made or
decoded; columns are told by schema.py.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from ddbatch.core import Key, Rejected, RunError
from ddbatch.data.schema import (
    FinishedRow,
    TableRow,
    acceptance_row,
    acceptance_schema,
    completions_row,
    completions_schema,
    rejected_row,
    rejected_schema,
    write_table,
)

_CARD = """---
configs:
{configs}
---

# Completions

Generated offline by ddbatch. `load_dataset(<this folder>)` reads the completions; the other tables
are configs of their own. `manifest.json` tells how they were made.

{tables}

`row_id` (the row's place in the input, from 0), `turn` and `sample` identify a row in every table.
Rows are sorted by that key inside a file; files are in the order in which rows finished.
"""

_ADVICE = "choose another output_dir"
_TAKEN = f"already holds a run; resume is not built yet, {_ADVICE}"
_LINK_REFUSED = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

_ABOUT = {
    "completions": "one row per finished prompt: the conversation, the completion and its ids",
    "acceptance": "the same rows: drafted tokens accepted in each round",
    "rejected": "input rows that could not run, each with a code and the reason",
}


class Sink:
    """A run's output folder. Made: it is checked. Entered with `with`: it is created and open.

    Rows are kept until part_rows of them make a part. Leaving the `with` block writes the rest,
    also when an exception is on its way: what is finished is not lost.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        keep_columns: Sequence[str],
        store: Collection[str],
        part_rows: int,
        manifest: str,
    ) -> None:
        """A new run there, refused where one is; manifest is the JSON text of manifest.json."""
        if part_rows < 1:
            raise ValueError(f"output.part_rows={part_rows}: allowed: a positive number of rows")
        assert isinstance(json.loads(manifest), dict), "the manifest is no JSON object"
        schemas = {"completions": completions_schema(keep_columns=keep_columns, store=store)}
        if "acceptance" in store:
            schemas["acceptance"] = acceptance_schema()
        schemas["rejected"] = rejected_schema()
        self._output_dir = output_dir
        self._schemas: dict[str, pa.Schema] = schemas
        self._part_rows = part_rows
        self._part = 0
        self._is_open = True
        self._rows: dict[str, dict[Key, TableRow]] = {table: {} for table in schemas}
        # A name of its own, so that two starts at once do not write into each other's files.
        self._tmp = output_dir / ".ddbatch" / "tmp" / uuid.uuid4().hex
        self._manifest = manifest
        self._refuse_taken()

    def __enter__(self) -> Sink:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, row: FinishedRow) -> None:
        """Take a finished row; it is on disk once its part is written."""
        key = row.completion.key
        self._add("completions", key, completions_row(row, self._schemas["completions"]))
        if "acceptance" in self._schemas:
            self._add("acceptance", key, acceptance_row(row))
        self._write_full_part()

    def reject(self, row: Rejected) -> None:
        """Take a row that could not run."""
        self._add("rejected", row.key, rejected_row(row))
        self._write_full_part()

    def close(self) -> None:
        """Write what is left as a last part; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._write_part()
            # Files of a part that failed stay for whoever looks into it.
            if not any(self._tmp.iterdir()):
                self._tmp.rmdir()

    def _add(self, table: str, key: Key, row: TableRow) -> None:
        assert self._is_open, f"{key} came after close"
        assert key not in self._rows[table], f"{key} came twice"
        self._rows[table][key] = row

    def _write_full_part(self) -> None:
        if max(len(rows) for rows in self._rows.values()) >= self._part_rows:
            self._write_part()

    def _write_part(self) -> None:
        """Write the part's files, check them, then make them visible: completions last."""
        # Taken out first: a part that fails is not tried again under other circumstances.
        part, taken = self._part, self._rows
        self._part, self._rows = part + 1, {table: {} for table in self._schemas}
        name = f"shard-00000-part-{part:06d}.parquet"
        tables = [table for table in reversed(list(taken)) if taken[table]]
        try:
            for table in tables:
                rows = [taken[table][key] for key in sorted(taken[table])]
                _write_checked(rows, self._schemas[table], self._tmp / f"{table}-{name}")
            _sync(self._tmp)
            for table in tables:
                _publish(self._tmp / f"{table}-{name}", self._output_dir / table / name)
        except OSError as error:
            raise RunError(
                f"output_dir={self._output_dir}: {name} cannot be written: {error}; "
                "parts before it are whole"
            ) from error

    def _refuse_taken(self) -> None:
        """ValueError where the folder is no place for a new run; nothing is made."""
        place = self._output_dir
        refused = f"output_dir={place}"
        if place.exists() and not place.is_dir():
            raise ValueError(f"{refused} is no folder; {_ADVICE}")
        base = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
            raise ValueError(f"{refused}: {base} is no folder that can be written to; {_ADVICE}")
        held = [place / table for table in _ABOUT if (place / table).exists()]
        if (place / "manifest.json").exists() or any(any(folder.iterdir()) for folder in held):
            raise ValueError(f"{refused} {_TAKEN}")
        # Our own card without a manifest is a start that was cut off: it may go on.
        readme = place / "README.md"
        if readme.exists() and readme.read_bytes() != self._card().encode():
            raise ValueError(f"{refused} holds a README.md of something else; {_ADVICE}")
        own = {*_ABOUT, "README.md", "manifest.json", ".ddbatch"}
        if place.exists():
            foreign = sorted(file.name for file in place.iterdir() if file.name not in own)
            if foreign:
                raise ValueError(
                    f"{refused} holds {foreign[0]}, which is no part of a run; {_ADVICE}"
                )

    def _start(self) -> None:
        """Make the folders, the card and, last, the manifest, which makes the folder a run."""
        place = self._output_dir
        try:
            for folder in (self._tmp, *(place / table for table in self._schemas)):
                folder.mkdir(parents=True, exist_ok=True)
            if not (place / "README.md").exists():
                self._publish_text(self._card(), place / "README.md")
            self._publish_text(self._manifest, place / "manifest.json")
        except FileExistsError as error:
            raise ValueError(f"output_dir={place} {_TAKEN}") from error
        except OSError as error:
            if error.errno not in _LINK_REFUSED:
                raise ValueError(
                    f"output_dir={place} cannot be made: {error}; {_ADVICE}"
                ) from error
            raise ValueError(
                f"output_dir={place}: its file system has no hard links, which keep a file from "
                f"being overwritten; {_ADVICE}"
            ) from error

    def _publish_text(self, text: str, final: Path) -> None:
        tmp = self._tmp / final.name
        tmp.write_text(text, encoding="utf-8")
        _sync(tmp)
        _publish(tmp, final)

    def _card(self) -> str:
        # Without named configs a folder of several tables and JSON files does not load.
        configs = (
            f"- config_name: {'default' if table == 'completions' else table}\n"
            f"  data_files: {table}/*.parquet"
            for table in self._schemas
        )
        tables = (f"- `{table}`: {_ABOUT[table]}" for table in self._schemas)
        return _CARD.format(configs="\n".join(configs), tables="\n".join(tables))


def _write_checked(rows: Sequence[TableRow], schema: pa.Schema, file: Path) -> None:
    write_table(rows, schema, file)
    _sync(file)
    with pq.ParquetFile(file) as written:
        if written.metadata.num_rows != len(rows):
            raise OSError(f"{file.name}: {written.metadata.num_rows} of {len(rows)} rows on disk")


def _publish(tmp: Path, final: Path) -> None:
    """Give a whole file its final name; a link, unlike a rename, never replaces a file."""
    os.link(tmp, final)
    tmp.unlink()
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Have the disk keep a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
