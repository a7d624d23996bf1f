"""job=check: read a whole run again; the first thing that is wrong ends it with exit code 4.

Knows the order of the checks. checking.py and invariants.py know what is right.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from ddbatch.config import Config
from ddbatch.core import ExitCode, RunError
from ddbatch.data.checking.parts import check_claims, check_names, check_part, final_files
from ddbatch.data.commits import recover, shards_with_records
from ddbatch.data.distrust import refuse_distrusted
from ddbatch.data.manifest import read_manifest
from ddbatch.data.records import Record
from ddbatch.data.source.log import InputLog, read_log
from ddbatch.jobs.reading import existing_run
from ddbatch.jobs.show import counted, duration, facts, size, tell
from ddbatch.jobs.ticker import Ticker


def run(config: Config) -> int:
    """Check the run in output_dir, after what was committed has been rolled forward.

    StateError with the first finding.
    """
    started = time.monotonic()
    folder = existing_run(config.output_dir)
    refuse_distrusted(folder)
    manifest = read_manifest(folder)
    # The run may go on: what is read first is named by what is read later.
    try:
        files = final_files(folder)
        by_shard = {shard: recover(folder, shard) for shard in shards_with_records(folder)}
    except OSError as error:
        raise RunError(f"output_dir={config.output_dir} cannot be read: {error}") from error
    log = read_log(folder)
    records = [record for of_shard in by_shard.values() for record in of_shard]
    check_names(files, records)
    num_done = check_claims(by_shard, log.shards, log.samples)
    with Ticker(len(records), "parts") as ticker:
        for position, record in enumerate(records):
            check_part(folder, record, manifest)
            ticker.show(position + 1)
    tell(summary(config.output_dir, log, records, num_done, time.monotonic() - started))
    return ExitCode.DONE


def summary(
    output_dir: str, log: InputLog, records: Sequence[Record], num_done: int, seconds: float
) -> str:
    """What was checked, when nothing is wrong."""
    rejected: Counter[str] = Counter()
    for record in records:
        rejected.update(record.counts.rejected)
    files = [file for record in records for file in record.files]
    num_rows = log.num_rows * log.samples
    left = (
        f"{num_rows - num_done:,} are left to do" if num_done < num_rows else "the run is complete"
    )
    completions = sum(record.counts.completions for record in records)
    tokens = sum(record.counts.output_tokens for record in records)
    rounds = sum(record.counts.rounds for record in records)
    num_bytes = size(sum(file.size for file in files))
    lines = [
        ("run", output_dir),
        ("rows", f"{num_done:,} of {num_rows:,}, each once; {left}"),
        ("completions", f"{completions:,} with {tokens:,} tokens in {rounds:,} rounds"),
        ("rejected", f"{rejected.total():,} ({counted(rejected)})" if rejected else "none"),
        (
            "read",
            f"{len(records):,} records, {len(files):,} files, {num_bytes} in {duration(seconds)}",
        ),
    ]
    return facts(lines) + "\nnothing is wrong"
