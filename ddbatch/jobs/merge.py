"""job=merge: the committed rows of one or several runs as one clean data set, in global order.

Rows stream through order, filter, dedup, format and files; each of these is a file of ddbatch.data.
Knows how they follow each other, and what is told about them. Imports no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from ddbatch import __version__
from ddbatch.checks import did_you_mean
from ddbatch.config import Config, MergeConfig
from ddbatch.core import ExitCode
from ddbatch.data.export.digests import Seen
from ddbatch.data.export.exports import REJECTED, Export, Tally, export_rows, plan_export
from ddbatch.data.export.expressions import Filter, parse_filter
from ddbatch.data.export.merging import Places, places_by_column, places_by_key
from ddbatch.data.export.parts import Part, Rows
from ddbatch.data.export.publishing import DataSet, check_place, leftovers
from ddbatch.jobs.merge_runs import Run, open_runs
from ddbatch.jobs.show import aligned, say, size, tell
from ddbatch.jobs.ticker import Ticker

# About so many bytes of rows are worked on at a time.
_CHUNK_BYTES = 8 << 20
_CHUNK_ROWS = 8192


@dataclass
class Figures:
    """What became of the completions. rejected: rows of the runs that are lines of their own."""

    completions: int
    rejected: int = 0
    replaced: int = 0
    filtered: int = 0
    duplicates: int = 0
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class Plan:
    """What is done with each row."""

    parts: tuple[Part, ...]
    by: str
    condition: Filter | None
    dedup: tuple[str, ...]
    export: Export


def run(config: Config) -> int:
    """Merge output_dir and merge.runs into merge.output_dir; returns the exit code."""
    options = config.merge
    assert options.output_dir is not None, "checks.py requires merge.output_dir"
    place = check_place(options.output_dir)
    is_batch = options.format == "openai_batch"
    runs = open_runs(config, ("completions", "rejected") if is_batch else ("completions",))
    _refuse_inside(options.output_dir, place, runs)
    plan = _plan(options, runs)
    for note in _notes(place, runs):
        say(f"note: {note}")
    file_type: Literal["parquet", "jsonl"] = "parquet"
    if is_batch or options.file_type == "jsonl":
        file_type = "jsonl"
    figures = Figures(sum(part.rows for part in plan.parts if part.is_completions))
    data_set = DataSet(place, plan.export.schema, file_type, options.file_mb * 1_000_000)
    with data_set:
        _write(plan, data_set, figures)
        if not data_set.num_rows:
            raise ValueError(
                f"merge.filter={options.filter}: nothing is left of {figures.completions:,} "
                f"completions: {_left_out(figures)}"
            )
        data_set.publish(_facts(options, runs, data_set))
    tell(summary(options.output_dir, runs, figures, data_set))
    return ExitCode.DONE


def _plan(options: MergeConfig, runs: Sequence[Run]) -> Plan:
    """The options, checked against the columns that there are."""
    schema = runs[0].schema
    columns = {
        "merge.by": [options.by] if options.by != "key" else [],
        "merge.dedup": options.dedup,
    }
    for key, names in columns.items():
        for name in names:
            if name not in schema.names:
                also = "key, " if key == "merge.by" else ""
                raise ValueError(
                    f"{key}={name}: no such column{did_you_mean(name, schema.names)}; allowed: "
                    f"{also}{', '.join(schema.names)}"
                )
    model = runs[0].manifest.config.get("model")
    model_name = model.get("path") if isinstance(model, Mapping) else None
    return Plan(
        parts=tuple(part for run in runs for part in run.parts),
        by=options.by,
        condition=None if options.filter is None else parse_filter(options.filter, schema),
        dedup=tuple(options.dedup),
        export=plan_export(
            schema, format=options.format, reasoning=options.reasoning, model=str(model_name or "")
        ),
    )


def _write(plan: Plan, data_set: DataSet, figures: Figures) -> None:
    """All rows from the parts into files."""
    seen = Seen(plan.dedup) if plan.dedup else None
    num_rows = sum(part.rows for part in plan.parts)
    chunk_bytes = sum(part.size for part in plan.parts) // num_rows + 1
    rows, done = Rows(plan.parts, _schemas(plan)), 0
    with Ticker(num_rows, "rows") as ticker:
        for places in _chunks(plan, max(min(_CHUNK_BYTES // chunk_bytes, _CHUNK_ROWS), 1)):
            figures.replaced += places.replaced
            table = _clean(rows.take(places.part, places.position), plan, seen, figures)
            if table.num_rows:
                exported = export_rows(table, plan.export)
                figures.tally = figures.tally.plus(exported.tally)
                data_set.write(exported.table)
            done += len(places.part) + places.replaced
            ticker.show(done)
    data_set.finish()


def _schemas(plan: Plan) -> dict[str, pa.Schema]:
    """The columns that are read of each table."""
    source = plan.export.source
    needed = {*plan.export.columns, *plan.dedup}
    if plan.condition is not None:
        needed.update(plan.condition.columns)
    schemas = {"completions": pa.schema([field for field in source if field.name in needed])}
    if plan.export.format == "openai_batch":
        schemas["rejected"] = pa.schema(
            [
                source.field(name) if name in source.names else (name, pa.string())
                for name in REJECTED
            ]
        )
    return schemas


def _chunks(plan: Plan, chunk_rows: int) -> Iterator[Places]:
    """All places, so many rows at a time."""
    is_by_key = plan.by == "key" or len({part.run for part in plan.parts}) == 1
    order = places_by_key(plan.parts) if is_by_key else places_by_column(plan.parts, plan.by)
    for part, position, replaced in order:
        for start in range(0, len(part), chunk_rows):
            here = slice(start, start + chunk_rows)
            yield Places(part[here], position[here], replaced if start == 0 else 0)


def _clean(table: pa.Table, plan: Plan, seen: Seen | None, figures: Figures) -> pa.Table:
    """The rows that stay: filter, then dedup. Rejected rows, which have a code, all do."""
    if "code" in table.column_names:
        is_rejected = table.column("code").is_valid().to_numpy()
        figures.rejected += int(is_rejected.sum())
    else:
        is_rejected = np.zeros(table.num_rows, np.bool_)
    if plan.condition is not None:
        is_met = plan.condition.mask(table).to_numpy() | is_rejected
        figures.filtered += int((~is_met).sum())
        table, is_rejected = table.filter(pa.array(is_met)), is_rejected[is_met]
    if seen is not None:
        is_new = is_rejected.copy()
        is_new[~is_rejected] = seen.are_new(table.filter(pa.array(~is_rejected)))
        figures.duplicates += int((~is_new).sum())
        table = table.filter(pa.array(is_new))
    return table


def _refuse_inside(output_dir: str, place: Path, runs: Sequence[Run]) -> None:
    for run in runs:
        if place.is_relative_to(run.folder.place.resolve()):
            raise ValueError(
                f"merge.output_dir={output_dir} is inside the run {run.option}, which holds "
                "nothing else; choose a folder outside"
            )


def _notes(place: Path, runs: Sequence[Run]) -> Iterator[str]:
    """What the user should know before anything is written."""
    for folder in leftovers(place):
        yield (
            f"{folder} is left of a merge that was cut off, or another merge writes there now; "
            "it can be deleted if none does"
        )
    for run in runs:
        expected = run.log.num_rows * run.log.samples
        if run.units < expected:
            yield (
                f"{run.option} is not complete: {run.units:,} of {expected:,} rows are committed; "
                "they are merged, the others are not"
            )


def _facts(options: MergeConfig, runs: Sequence[Run], data_set: DataSet) -> dict[str, str]:
    """The card's table: nothing in it tells the host, the user or a path."""
    facts = {
        "rows": f"{data_set.num_rows:,}",
        "runs": ", ".join(run.name for run in runs),
        "format": options.format,
        "reasoning": options.reasoning,
    }
    if len(runs) > 1:
        facts["equal rows"] = f"by {options.by}, the last run's is taken"
    if options.filter is not None:
        facts["filter"] = f"`{options.filter}`"
    if options.dedup:
        facts["dedup"] = ", ".join(options.dedup)
    return {**facts, "ddbatch": __version__}


def summary(output_dir: str, runs: Sequence[Run], figures: Figures, data_set: DataSet) -> str:
    """What was read, left out and written, and how to load it."""
    names = ", ".join(run.name for run in runs)
    rejected = f" and {figures.rejected:,} rejected rows" if figures.rejected else ""
    tally = figures.tally
    lines = [
        (
            "rows",
            f"{figures.completions:,} completions{rejected} of {_few(len(runs), 'run')}: {names}",
        ),
        ("left out", _left_out(figures)),
        ("answers", f"{tally.unclosed:,} with reasoning that never ends, {tally.empty:,} empty"),
        (
            "written",
            f"{data_set.num_rows:,} rows in {_few(data_set.num_files, 'file')}, "
            f"{size(data_set.num_bytes)}, to {output_dir}",
        ),
    ]
    if tally.closed_only and tally.cut:
        lines.append(
            (
                "note",
                f"{tally.cut:,} answers were cut by their cap before any </think>; where the "
                "prompt opens the reasoning, as it does here, they are nothing else: "
                "merge.filter=\"finish_reason == 'stop'\" leaves them out",
            )
        )
    lines.append(("read it", f'datasets.load_dataset("{output_dir}")'))
    return aligned(lines)


def _few(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _left_out(figures: Figures) -> str:
    reasons = {
        "by the filter": figures.filtered,
        "as duplicates": figures.duplicates,
        "replaced by another run": figures.replaced,
    }
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count) or "none"
