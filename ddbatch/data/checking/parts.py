"""Re-read a run: records against the input, names, files, schemas and each other's keys.

Knows what records promise about files. Knows nothing about printing, and leaves the rules about
rows to invariants.py. A finding is a StateError: one line that names file, record or row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ddbatch.core import Shard
from ddbatch.data.checking.invariants import (
    CompletionFigures,
    RejectedFigures,
    check_pair,
    read_acceptance,
    read_completions,
    read_rejected,
)
from ddbatch.data.checking.logprobs import check_logprobs, read_emitted
from ddbatch.data.checking.rules import Ints, key_words, pack_keys
from ddbatch.data.commits import REPAIR
from ddbatch.data.finished import mark_finished
from ddbatch.data.folder import TABLES, RunFolder, StateError, hash_file
from ddbatch.data.manifest import Manifest
from ddbatch.data.records import KeyBlock, PartCounts, PartFile, Record


def final_files(folder: RunFolder) -> list[str]:
    """What lies in the folders that readers look into, by name below output_dir.

    To be taken before the records are read: a part gets its record first and its final names then,
    so that in a run that goes on every file seen here has a record by then. Dot-files are left out,
    as readers do; a network file system makes some of its own.
    """
    return sorted(
        folder.relative(file)
        for table in TABLES
        if (folder.place / table).is_dir()
        for file in (folder.place / table).iterdir()
        if not file.name.startswith(".")
    )


def check_names(files: Collection[str], records: Iterable[Record]) -> None:
    """Every file under a final name must be named by a record."""
    named = {file.final for record in records for file in record.files}
    for file in files:
        if file not in named:
            raise StateError(
                f"{file} is named by no record: it is not part of the run and is read as if it "
                "were; move it away"
            )


def check_claims(
    records: Mapping[int, Sequence[Record]], shards: Sequence[Shard], samples: int
) -> int:
    """No key is in two records, and all are keys of the input; returns how many rows x samples are
    done. records: those of a shard, by its index."""
    by_index = {shard.index: shard for shard in shards}
    num_done = 0
    for index, of_shard in records.items():
        if index not in by_index:
            raise StateError(
                f"there are records of shard {index}, and the input has {len(shards)} shards"
            )
        num_done += int(mark_finished(of_shard, by_index[index], samples).sum())
    return num_done


def check_part(folder: RunFolder, record: Record, manifest: Manifest) -> None:
    """Files, rows, keys and counts of one committed part."""
    where, schemas = _record_name(folder, record), manifest.schemas
    final = {file.table: file.final for file in record.files}
    told = set(schemas) - {"rejected"}
    if not set(final) <= set(schemas) or set(final) - {"rejected"} not in (told, set()):
        raise StateError(
            f"{where}: it names files of {', '.join(final)}; a part has "
            f"{' and '.join(sorted(told))}, or rejected, or all of them"
        )
    for file in record.files:
        _check_file(folder, where, file, schemas[file.table])
    done = refused = None
    if "completions" in final:
        name = final["completions"]
        done = read_completions(folder.place / name, name, has_logprobs=manifest.has_logprobs)
    if "acceptance" in final:
        assert done is not None, final
        stats = read_acceptance(folder.place / final["acceptance"], final["acceptance"])
        check_pair(done, stats, final["acceptance"])
    if "logprobs" in final:
        emitted = read_emitted(folder.place / final["completions"], final["completions"])
        check_logprobs(folder.place / final["logprobs"], final["logprobs"], emitted)
    if "rejected" in final:
        refused = read_rejected(folder.place / final["rejected"], final["rejected"])
    _check_keys(where, record, done, refused)
    _check_counts(where, record.counts, done, refused)


def _record_name(folder: RunFolder, record: Record) -> str:
    return folder.relative(folder.record(record.shard, record.number))


def _check_file(folder: RunFolder, where: str, file: PartFile, schema: pa.Schema) -> None:
    """One file, which has its size, against its record and the run's schema."""
    place = folder.place / file.final
    try:
        digest = hash_file(place)
        if digest != file.sha256:
            raise StateError(
                f"{file.final} was changed after it was committed: sha256 {digest}; {where} says "
                f"{file.sha256}; {REPAIR}"
            )
        with pq.ParquetFile(place) as parquet:
            rows, found = parquet.metadata.num_rows, parquet.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise StateError(f"{file.final} cannot be read: {error}") from error
    if rows != file.rows:
        raise StateError(f"{file.final} has {rows} rows; {where} says {file.rows}")
    if not found.equals(schema):
        raise StateError(
            f"{file.final}: its schema is not that of the manifest: {_difference(found, schema)}"
        )


def _difference(found: pa.Schema, schema: pa.Schema) -> str:
    """The first column in which two schemas differ."""
    for has, wanted in zip_longest(found, schema):
        if has is None or wanted is None or not has.equals(wanted):
            return f"{_column(has)} where the manifest has {_column(wanted)}"
    raise AssertionError("equal schemas differ")


def _column(field: pa.Field | None) -> str:
    return "no column" if field is None else f"column {field.name} of type {field.type}"


def _check_keys(
    where: str, record: Record, done: CompletionFigures | None, refused: RejectedFigures | None
) -> None:
    """The keys in the part's files are those of its record, each once."""
    found = np.concatenate([figures.key for figures in (done, refused) if figures is not None])
    found.sort()
    twice = found[1:][found[1:] == found[:-1]]
    if len(twice):
        raise StateError(
            f"{where}: {key_words(int(twice[0]))} is both completed and rejected in its files"
        )
    told = np.concatenate([_keys_of(block) for block in record.keys])
    for keys, others, text in (
        (told, found, "is one of its keys and in none of its files"),
        (found, told, "is in its files and none of its keys"),
    ):
        lacking = np.setdiff1d(keys, others)
        if len(lacking):
            raise StateError(f"{where}: {key_words(int(lacking[0]))} {text}")


def _keys_of(block: KeyBlock) -> Ints:
    """All keys of a block, packed."""
    row_id = np.arange(block.first_row, block.first_row + block.num_rows, dtype=np.int64)
    turn = np.arange(block.num_turns, dtype=np.int64)
    sample = np.arange(block.first_sample, block.first_sample + block.num_samples, dtype=np.int64)
    return pack_keys(row_id[:, None, None], turn[:, None], sample).ravel()


def _check_counts(
    where: str, told: PartCounts, done: CompletionFigures | None, refused: RejectedFigures | None
) -> None:
    """The counts of a record are those of its rows."""
    found = {"completions": 0, "prompt_tokens": 0, "output_tokens": 0}
    found |= {"rounds": 0, "accepted_tokens": 0, "truncated": 0}
    if done is not None:
        found = {
            "completions": len(done.key),
            "prompt_tokens": int(done.prompt_tokens.sum()),
            "output_tokens": int(done.output_tokens.sum()),
            "rounds": int(done.num_steps.sum()),
            "accepted_tokens": int(done.accepted_tokens.sum()),
            "truncated": int(done.is_truncated.sum()),
        }
    for name, count in found.items():
        if getattr(told, name) != count:
            raise StateError(f"{where}: {name}={getattr(told, name)}, its rows give {count}")
    codes = {} if refused is None else dict(refused.codes)
    if dict(told.rejected) != codes:
        raise StateError(f"{where}: rejected={dict(told.rejected)}, its rows give {codes}")
