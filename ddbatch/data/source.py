"""Read prompts: files -> rows -> Prompt or Rejected, streaming, in input order.

Knows where the rows are and numbers them; what a row means is told by columns.py. Knows nothing
about templates, tokenizers or what becomes of a prompt.
"""

from __future__ import annotations

import glob
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ddbatch.core import Key, Prompt, Rejected
from ddbatch.data.columns import (
    BadRow,
    Columns,
    Fault,
    Row,
    choose_columns,
    dump_json,
    parse_line,
    to_prompt,
)

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_ALLOWED = "a .jsonl, .jsonl.gz or .parquet file, a folder of such files, or a glob"
_BATCH_ROWS = 256
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class _Look:
    """What a first look into the files shows: one set of columns per table, and any rows at all."""

    tables: tuple[tuple[str, ...], ...]
    has_rows: bool


def read_prompts(
    path: str | Path,
    *,
    prompt_column: str | None,
    messages_column: str | None,
    token_ids_column: str | None,
    id_column: str | None,
    keep_columns: Sequence[str],
    limit: int | None,
) -> Iterator[Prompt | Rejected]:
    """Every row of the input as a Prompt or a Rejected; row_id is its place in the whole input.

    What the user can get wrong about the input as a whole is refused here, before the first row.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"data.limit={limit}: allowed: null or a positive number of rows")
    files = list_files(path)
    look = _look(path, files)
    if not look.has_rows:
        raise ValueError(f"data.path={path}: no rows in it; allowed: {_ALLOWED} with rows")
    if not look.tables:
        # No line could be parsed: every row will be rejected, whatever the columns.
        columns = Columns(prompt_column or "prompt", "text", id_column, tuple(keep_columns))
        return _prompts(path, files, columns, limit)
    present = tuple(dict.fromkeys(chain.from_iterable(look.tables)))
    # The first choice sees all columns, so that two known names in two files are not overlooked.
    for names in (present, *look.tables):
        columns = choose_columns(
            names,
            prompt_column=prompt_column,
            messages_column=messages_column,
            token_ids_column=token_ids_column,
            id_column=id_column,
            keep_columns=keep_columns,
        )
    return _prompts(path, files, columns, limit)


def list_files(path: str | Path) -> list[Path]:
    """The input files behind data.path, in natural order of their names (2 before 10)."""
    place, text = Path(path), str(path)
    refused = f"data.path={text}"
    if place.is_file():
        files = [place]
    elif place.is_dir():
        # By name alone: a broken link must fail when it is opened, not be passed over.
        visible = [file for file in place.iterdir() if not file.name.startswith(".")]
        if any(file.suffix == ".arrow" for file in visible):
            raise ValueError(
                f"{refused}: Arrow and save_to_disk are not built yet; allowed: {_ALLOWED}"
            )
        files = [file for file in visible if file.name.endswith(SUFFIXES)]
    elif any(sign in text for sign in "*?["):
        files = [Path(file) for file in glob.glob(text, recursive=True) if not Path(file).is_dir()]
    else:
        raise ValueError(
            f"{refused}: no such file or folder (hub ids are not built yet); allowed: {_ALLOWED}"
        )
    if not files:
        raise ValueError(
            f"{refused}: no input file found (subfolders are not searched); allowed: {_ALLOWED}"
        )
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise ValueError(f"{refused}: {file.name} is not built yet; allowed: {_ALLOWED}")
    return sorted(files, key=_natural)


def _natural(file: Path) -> tuple[tuple[str | int, ...], str]:
    # Text and digits alternate after the split, so equal places hold equal types.
    parts = re.split("([0-9]+)", file.as_posix())
    return tuple(int(part) if at % 2 else part for at, part in enumerate(parts)), file.as_posix()


def _look(path: str | Path, files: Sequence[Path]) -> _Look:
    """Open every file once: Parquet by its metadata, JSONL up to the first row that parses."""
    tables: list[tuple[str, ...]] = []
    has_rows, has_jsonl_row = False, False
    for file in files:
        with _readable(path, file):
            if file.suffix == ".parquet":
                with pq.ParquetFile(file) as table:
                    tables.append(tuple(table.schema_arrow.names))
                    has_rows |= table.metadata.num_rows > 0
                continue
            with _open(file) as lines:
                lines.read(1)  # an unreadable file fails now, not in the middle of the run
            for row in () if has_jsonl_row else _jsonl_rows(file):
                has_rows = True
                if isinstance(row, Row):
                    tables.append(tuple(row.values))
                    has_jsonl_row = True
                    break
    return _Look(tuple(tables), has_rows)


def _prompts(
    path: str | Path, files: Sequence[Path], columns: Columns, limit: int | None
) -> Iterator[Prompt | Rejected]:
    rows = chain.from_iterable(_rows(path, file) for file in files)
    for row_id, row in enumerate(islice(rows, limit)):
        yield to_prompt(row, Key(row_id, 0, 0), columns)


def _rows(path: str | Path, file: Path) -> Iterator[Row | BadRow]:
    with _readable(path, file):
        yield from _parquet_rows(file) if file.suffix == ".parquet" else _jsonl_rows(file)


@contextmanager
def _readable(path: str | Path, file: Path) -> Iterator[None]:
    """Name the file that cannot be read; a row's own faults never come this way."""
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise ValueError(
            f"data.path={path}: {file.name} cannot be read ({error}); allowed: {_ALLOWED}"
        ) from error


def _open(file: Path) -> BufferedIOBase:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _jsonl_rows(file: Path) -> Iterator[Row | BadRow]:
    """Every non-blank line; lines end at a newline byte only, as JSON strings may hold U+2028."""
    with _open(file) as lines:
        for number, line in enumerate(lines):
            body = line.removeprefix(_BYTE_ORDER_MARK) if number == 0 else line
            if body.strip():
                yield parse_line(body)


def _parquet_rows(file: Path) -> Iterator[Row | BadRow]:
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS):
            yield from _batch_rows(batch)


def _batch_rows(batch: pa.RecordBatch) -> Iterator[Row | BadRow]:
    """The rows of a batch; Parquet does not check its strings, so one may be no UTF-8."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            fault = Fault("bad_text", f"not UTF-8: {error.reason} at byte {error.start}")
            yield BadRow(fault, dump_json(_readable_values(batch)))
            return
        for at in range(batch.num_rows):
            yield from _batch_rows(batch.slice(at, 1))
        return
    for values in rows:
        yield Row(values, dump_json(values))


def _readable_values(batch: pa.RecordBatch) -> dict[str, object]:
    """The one row of a batch with replacement characters for what is no UTF-8."""
    values: dict[str, object] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = column[0].as_py()
        except UnicodeDecodeError:
            is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
            values[name] = (
                column[0].as_buffer().to_pybytes().decode("utf-8", "replace") if is_text else None
            )
    return values
