"""job=status: where a run stands, as one screen of text or one JSON object.

Reads commit records and attempts, no Parquet, and changes nothing. Knows how figures are shown;
standing.py says what they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from ddbatch.config import Config
from ddbatch.core import ExitCode
from ddbatch.data.attempts import read_attempts
from ddbatch.data.commits import read_shard, shards_with_records
from ddbatch.data.source.log import read_log
from ddbatch.jobs.reading import existing_run
from ddbatch.jobs.show import (
    aligned,
    counted,
    duration,
    facts,
    number,
    one_line,
    plural,
    ranged,
    share,
    tell,
)
from ddbatch.jobs.standing import RECENT_SECONDS, Standing, Worker, standing

_MAX_WORKERS = 12  # one screen
_MAX_REASON = 40
_MAX_ERROR = 400


def run(config: Config) -> int:
    """Print where the run in output_dir stands; returns the exit code."""
    folder = existing_run(config.output_dir)
    records = {shard: read_shard(folder, shard) for shard in shards_with_records(folder)}
    log = read_log(folder)  # after the records: the input of each of them is listed by then
    found = standing(log.shards, log.samples, records, read_attempts(folder), time.time())
    tell(
        _as_json(config.output_dir, found)
        if config.status.json
        else as_text(config.output_dir, found)
    )
    return ExitCode.DONE


def _as_json(output_dir: str, found: Standing) -> str:
    more = {
        "rows_left": found.rows_left,
        "mean_tokens": found.mean_tokens,
        "acceptance_length": found.acceptance_length,
        "last_error": None if found.last_error is None else found.last_error.reason,
    }
    return json.dumps({"output_dir": output_dir, **asdict(found), **more}, allow_nan=False)


def as_text(output_dir: str, found: Standing) -> str:
    """One screen: a line per figure, then the workers."""
    rows = f"{found.rows_done:,} of {found.rows:,} done, {found.rows_left:,} left"
    if found.samples > 1:
        rows += f" ({found.input_rows:,} input rows x {found.samples} samples)"
    num_rejected = sum(found.rejected.values())
    untouched = found.shards - found.shards_done - found.shards_open
    lines = [
        ("run", output_dir),
        ("state", _state(found)),
        ("rows", rows),
        ("rejected", f"{num_rejected:,} ({counted(found.rejected)})" if num_rejected else "none"),
        (
            "shards",
            f"{found.shards_done:,} done, {found.shards_open:,} open, {untouched:,} not begun; "
            f"{found.parts:,} parts",
        ),
        ("tokens", _tokens(found)),
        ("acceptance", _acceptance(found)),
        ("rate", _rate(found)),
        ("time left", _time_left(found)),
    ]
    failed = found.last_error
    if failed is not None:
        reason = one_line(failed.reason or "no reason given", _MAX_ERROR)
        where = f"{_clock(failed.ended_at)}, {failed.name}, exit code {failed.exit_code}"
        lines.append(("last error", f"{where}: {reason}"))
    text = facts(lines)
    return f"{text}\n\n{_worker_table(found.workers)}" if found.workers else text


def _state(found: Standing) -> str:
    running = sum(worker.state == "running" for worker in found.workers)
    done = share(found.rows_done, found.rows)
    if not found.rows:
        return "its input is not listed yet"
    if not found.rows_left:
        return "complete"
    if running:
        return f"{done} done, {plural(running, 'worker')} running"
    unclear = sum(worker.state in ("silent", "unknown") for worker in found.workers)
    doubt = f"; {unclear} did not say that they ended" if unclear else ""
    return f"{done} done, no worker is running as far as known{doubt}"


def _tokens(found: Standing) -> str:
    if not found.completions:
        return "none yet"
    cut = share(found.truncated, found.completions)
    return (
        f"{found.output_tokens:,} output tokens in {found.completions:,} completions, mean "
        f"{found.mean_tokens:,.1f}; {cut} of them cut by their cap"
    )


def _acceptance(found: Standing) -> str:
    length = found.acceptance_length
    return "no rounds yet" if length is None else f"{length:.2f} tokens a round"


def _rate(found: Standing) -> str:
    if found.rate is not None:
        span = ranged(number(found.rate.low), number(found.rate.high))
        minutes = RECENT_SECONDS / 60
        return (
            f"{span} tokens/s (over the last {minutes:.0f} minutes, and since the workers' start)"
        )
    if found.worker_rate is not None:
        span = ranged(number(found.worker_rate.low), number(found.worker_rate.high))
        return f"none is running; one worker made {span} tokens/s"
    return "unknown"


def _time_left(found: Standing) -> str:
    if not found.rows_left:
        return "none"
    eta, alone = found.eta_seconds, found.worker_seconds
    if eta is not None:
        return ranged(duration(eta.low), duration(eta.high)) + " with the workers that are running"
    if alone is not None:
        span = ranged(duration(alone.low), duration(alone.high))
        return f"unknown; one worker like those before would take {span}"
    return "unknown"


def _worker_table(workers: Sequence[Worker]) -> str:
    """Those that are running first, then the latest."""
    order = {"running": 0, "unknown": 1, "silent": 2, "killed": 3, "ended": 4}
    latest = list(workers)
    latest.reverse()
    shown = sorted(latest, key=lambda worker: order[worker.state])[:_MAX_WORKERS]
    head = (
        "worker",
        "host",
        "state",
        "started",
        "last part",
        "rows",
        "tokens",
        "tokens/s",
        "exit",
        "reason",
    )
    table = [head, *(_worker_line(worker) for worker in shown)]
    text = aligned(table, right=(5, 6, 7, 8))
    hidden = len(workers) - len(shown)
    if hidden:
        text += f"\n... and {hidden:,} more (status.json=true has them all)"
    return text


def _worker_line(worker: Worker) -> tuple[str, ...]:
    age = "-"
    if worker.last_part_at is not None:
        age = _clock(worker.last_part_at)
        if worker.state == "running" and worker.seconds_since is not None:
            age = f"{duration(worker.seconds_since)} ago"
    rate = worker.rate
    return (
        worker.name,
        worker.host,
        worker.state,
        _clock(worker.started_at),
        age,
        f"{worker.rows:,}",
        f"{worker.output_tokens:,}",
        "-" if rate is None else ranged(number(rate.low), number(rate.high)),
        "-" if worker.exit_code is None else str(worker.exit_code),
        one_line(worker.reason or "", _MAX_REASON),
    )


def _clock(seconds: float | None) -> str:
    """Local time."""
    return "unknown" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
