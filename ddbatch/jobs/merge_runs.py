"""Open the runs of job=merge: their manifests, input logs and committed parts; refuse a bad match.

Knows which runs can be merged with each other. Knows nothing about what is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ddbatch.config import Config
from ddbatch.data.commits import recover, shards_with_records
from ddbatch.data.distrust import refuse_distrusted
from ddbatch.data.export.parts import Part, describe_part
from ddbatch.data.folder import RunFolder
from ddbatch.data.manifest import Manifest, read_manifest
from ddbatch.data.source.log import InputLog, read_log


@dataclass(frozen=True)
class Run:
    """A run that is read. option: how it was named. units: the (row, sample) it has finished."""

    option: str
    folder: RunFolder
    manifest: Manifest
    log: InputLog
    parts: tuple[Part, ...]
    units: int

    @property
    def name(self) -> str:
        """The folder's own name, without what is above it."""
        return self.folder.place.resolve().name

    @property
    def schema(self) -> pa.Schema:
        """The columns of its completions."""
        return self.manifest.schemas["completions"]


def open_runs(config: Config, tables: Sequence[str]) -> tuple[Run, ...]:
    """output_dir's run and those of merge.runs, with the parts of these tables.

    What was committed is rolled forward. ValueError for a folder that is no run, has no completions
    yet, or does not go with the others.
    """
    places = [("output_dir", config.output_dir), *(("merge.runs", at) for at in config.merge.runs)]
    resolved = [Path(place).resolve() for _, place in places]
    for at, (key, place) in enumerate(places):
        if resolved[at] in resolved[:at]:
            raise ValueError(f"{key}={place}: this run is named twice")
        if not RunFolder(Path(place)).manifest.is_file():
            raise ValueError(
                f"{key}={place} is no run; allowed: the output_dir of a job=generate, a folder "
                "with its manifest.json"
            )
    runs = tuple(
        _open(at, f"{key}={place}", RunFolder(Path(place)), tables)
        for at, (key, place) in enumerate(places)
    )
    for run in runs[1:]:
        _require_equal_columns(runs[0], run)
        if config.merge.by == "key":
            _require_equal_input(runs[0], run)
    return runs


def _open(number: int, option: str, folder: RunFolder, tables: Sequence[str]) -> Run:
    refuse_distrusted(folder)
    manifest, log = read_manifest(folder), read_log(folder)
    parts: list[Part] = []
    units = 0
    # One shard after the other: the keys in a large run's records would fill the memory.
    for shard in shards_with_records(folder):
        for record in recover(folder, shard):
            units += record.num_units
            for file in record.files:
                if file.table in tables:
                    place, schema = folder.place / file.final, manifest.schemas[file.table]
                    parts.append(describe_part(number, file.table, place, file.rows, schema))
    if not any(part.is_completions for part in parts):
        raise ValueError(
            f"{option} has no committed completions yet; job=status tells how far it is"
        )
    return Run(option, folder, manifest, log, tuple(parts), units)


def _require_equal_columns(first: Run, run: Run) -> None:
    """ValueError unless both runs have the same columns, whatever their metadata."""
    if run.schema.equals(first.schema, check_metadata=False):
        return
    difference = next(_differences(first.schema, run.schema), "their order differs")
    raise ValueError(
        f"{run.option}: its columns are not those of {first.option}: {difference}; allowed: runs "
        "with equal output.store, data.keep_columns and kind of prompt"
    )


def _differences(first: pa.Schema, other: pa.Schema) -> Iterator[str]:
    for name in dict.fromkeys([*first.names, *other.names]):
        if name not in first.names:
            yield f"{name} is new"
        elif name not in other.names:
            yield f"{name} is missing"
        elif first.field(name).type != other.field(name).type:
            yield f"{name} is {other.field(name).type}, not {first.field(name).type}"


def _require_equal_input(first: Run, run: Run) -> None:
    """ValueError if equal row_ids of the two runs are known to be different rows."""
    chosen = [one for one in (first, run) if one.log.select != "all"]
    files = zip(first.log.files, run.log.files, strict=False)
    other = next((file.name for mine, file in files if mine.sha256 != file.sha256), None)
    if chosen:
        reason = f"{chosen[0].option} was made with data.select={chosen[0].log.select}"
    elif other is not None:
        reason = f"they read other files ({other} of {run.option} is another one)"
    else:
        return
    raise ValueError(
        f"merge.by=key: row_ids of {first.option} and {run.option} are not the same rows, since "
        f"{reason}; choose a column that tells a row in both, such as merge.by=id"
    )
