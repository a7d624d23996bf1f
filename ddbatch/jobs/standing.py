"""Where a run stands, from its records and attempts alone: rows, tokens, workers, time left.

Knows nothing about files or printing. Clocks are not trusted: they may jump, and hosts may
disagree. A span of time that cannot be is unknown (None), never a number; only times rest on it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from ddbatch.core import ExitCode, Shard
from ddbatch.data.attempts import Attempt
from ddbatch.data.records import Record
from ddbatch.jobs.show import Range

WorkerState = Literal["running", "silent", "unknown", "ended", "killed"]

RECENT_SECONDS = 1800.0  # the last parts: those of so long before a worker's last one
# A worker that has neither ended nor closed a part for so long may be dead.
_SILENT_SECONDS = 900.0
_MAX_SPAN = 366 * 86400.0
_YEAR_2000, _YEAR_2100 = 946_684_800.0, 4_102_444_800.0  # a clock that tells another is not set
_SLACK_SECONDS = 60.0  # clocks of two hosts may differ by so much


class Part(NamedTuple):
    """A record, and how many rows x samples it finishes."""

    record: Record
    rows: int


@dataclass(frozen=True)
class Worker:
    """One attempt. killed: its process is gone from this machine. silent: it has not ended, and
    nothing was heard of it for long (seconds_since its start or its last part). unknown: the clocks
    do not tell.

    started_at, last_part_at, ended_at: unix times, as its host had them. rate: tokens per second,
    of its last parts and of its whole life.
    """

    name: str
    host: str
    state: WorkerState
    started_at: float | None
    last_part_at: float | None
    ended_at: float | None
    seconds_since: float | None
    rows: int
    output_tokens: int
    rate: Range | None
    exit_code: int | None
    reason: str | None


@dataclass(frozen=True)
class Standing:
    """Where a run stands. A row here is one sample of an input row.

    completions: output rows, a row has several with data.turns=all. rejected: output rows by code.
    rate: tokens per second of the workers that are running; worker_rate: of one, of all that were.
    eta_seconds: with those that are running. worker_seconds: what is left, for one worker.
    """

    input_rows: int
    samples: int
    rows: int
    rows_done: int
    completions: int
    rejected: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    truncated: int
    rounds: int
    parts: int
    shards: int
    shards_done: int
    shards_open: int
    rate: Range | None
    worker_rate: Range | None
    eta_seconds: Range | None
    worker_seconds: Range | None
    workers: tuple[Worker, ...]

    @property
    def rows_left(self) -> int:
        """Rows that no record names yet."""
        return self.rows - self.rows_done

    @property
    def mean_tokens(self) -> float | None:
        """Output tokens of a completion."""
        return self.output_tokens / self.completions if self.completions else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round; a completion's first token comes from its prompt, not from a round."""
        return (self.output_tokens - self.completions) / self.rounds if self.rounds else None

    @property
    def last_error(self) -> Worker | None:
        """The worker that ended last of those that ended with an error."""
        fine = (None, ExitCode.DONE, ExitCode.STOPPED, ExitCode.STOPPED_TWICE)
        failed = [worker for worker in self.workers if worker.exit_code not in fine]
        return max(failed, key=lambda worker: worker.ended_at or 0.0, default=None)


def standing(
    shards: Sequence[Shard],
    samples: int,
    records: Mapping[int, Sequence[Record]],
    attempts: Sequence[Attempt],
    now: float,
) -> Standing:
    """Count what the records name. records: by shard. now: unix time."""
    sizes = {shard.index: shard.num_rows * samples for shard in shards}
    parts = [Part(record, record.num_units) for record in chain.from_iterable(records.values())]
    done: Counter[int] = Counter()
    rejected: Counter[str] = Counter()
    for part in parts:
        done[part.record.shard] += part.rows
        rejected.update(part.record.counts.rejected)
    counts = [part.record.counts for part in parts]
    rows, rows_done = sum(sizes.values()), sum(done.values())
    workers = _workers(parts, attempts, now)
    running = [worker for worker in workers if worker.state == "running"]
    tokens_left = _tokens_left(parts, rows - rows_done)
    rate = _sum([worker.rate for worker in running if worker.rate is not None])
    rates = [worker.rate for worker in workers if worker.rate is not None]
    usual = None if not rates else Range(min(r.low for r in rates), max(r.high for r in rates))
    return Standing(
        input_rows=sum(shard.num_rows for shard in shards),
        samples=samples,
        rows=rows,
        rows_done=rows_done,
        completions=sum(count.completions for count in counts),
        rejected=dict(rejected.most_common()),
        prompt_tokens=sum(count.prompt_tokens for count in counts),
        output_tokens=sum(count.output_tokens for count in counts),
        truncated=sum(count.truncated for count in counts),
        rounds=sum(count.rounds for count in counts),
        parts=len(parts),
        shards=len(sizes),
        shards_done=sum(done[shard] >= size for shard, size in sizes.items()),
        shards_open=sum(0 < done[shard] < size for shard, size in sizes.items()),
        rate=rate,
        worker_rate=usual,
        eta_seconds=_time(tokens_left, rate),
        worker_seconds=_time(tokens_left, usual),
        workers=workers,
    )


def _workers(parts: Sequence[Part], attempts: Sequence[Attempt], now: float) -> tuple[Worker, ...]:
    """All attempts in the order of their start."""
    own: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        own[part.record.attempt].append(part)
    known = sorted(attempts, key=lambda attempt: (attempt.started_at, attempt.name))
    return tuple(_worker(attempt, own.get(attempt.name, []), now) for attempt in known)


def _worker(attempt: Attempt, parts: Sequence[Part], now: float) -> Worker:
    records = sorted((part.record for part in parts), key=lambda record: record.closed_at)
    started_at = _believed(attempt.started_at)
    last_part = _believed(records[-1].closed_at) if records else None
    seen = [seconds for seconds in (started_at, last_part) if seconds is not None]
    since = _span(max(seen, default=None), now)
    longest = max((record.seconds for record in records), default=0.0)
    state: WorkerState = "running"
    if attempt.ended_at is not None or attempt.exit_code is not None:
        state = "ended"
    elif attempt.is_gone:
        state = "killed"
    elif since is None:
        state = "unknown"
    elif since > max(_SILENT_SECONDS, 3 * longest):
        state = "silent"
    return Worker(
        name=attempt.name,
        host=attempt.host,
        state=state,
        started_at=started_at,
        last_part_at=last_part,
        ended_at=_believed(attempt.ended_at),
        seconds_since=since,
        rows=sum(part.rows for part in parts),
        output_tokens=sum(record.counts.output_tokens for record in records),
        rate=_rate(started_at, records),
        exit_code=attempt.exit_code,
        reason=attempt.reason,
    )


def _rate(started_at: float | None, records: Sequence[Record]) -> Range | None:
    """Tokens per second of one worker, by its own clock: lately, and since its start. records:
    in the order in which they were closed."""
    if not records or any(_believed(record.closed_at) is None for record in records):
        return None
    last = records[-1].closed_at
    recent = [record for record in records if record.closed_at > last - RECENT_SECONDS]
    before = records[: len(records) - len(recent)]
    begun = before[-1].closed_at if before else started_at
    rates = []
    for since, made in ((started_at, records), (begun, recent)):
        span = _span(since, last)
        # A part cannot have been open for longer than the worker lived: then its clock was set.
        if span is None or span + 1 < max(record.seconds for record in made):
            continue
        rates.append(sum(record.counts.output_tokens for record in made) / max(span, 1e-3))
    return Range(min(rates), max(rates)) if rates else None


def _believed(seconds: float | None) -> float | None:
    """A clock time, unless it cannot be one; a NaN cannot."""
    return seconds if seconds is not None and _YEAR_2000 <= seconds < _YEAR_2100 else None


def _span(start: float | None, stop: float) -> float | None:
    """Seconds between two clock times; None if that cannot be."""
    if start is None or not -_SLACK_SECONDS <= stop - start <= _MAX_SPAN:
        return None
    return max(stop - start, 0.0)


def _tokens_left(parts: Sequence[Part], rows_left: int) -> Range | None:
    """Output tokens of the rows left: their mean so far, two standard errors to either side.

    Parts are the sample, as rows of one part are alike. One part says nothing about the error: then
    half and twice its mean.
    """
    rows = [part.rows for part in parts]
    tokens = [part.record.counts.output_tokens for part in parts]
    if not sum(rows):
        return None
    mean, num = sum(tokens) / sum(rows), len(parts)
    if num == 1:
        return Range(rows_left * mean / 2, rows_left * mean * 2)
    squares = sum((t - mean * r) ** 2 for t, r in zip(tokens, rows, strict=True))
    error = math.sqrt(squares * num / (num - 1)) / sum(rows)
    return Range(rows_left * max(0.0, mean - 2 * error), rows_left * (mean + 2 * error))


def _sum(ranges: Sequence[Range]) -> Range | None:
    if not ranges:
        return None
    return Range(sum(r.low for r in ranges), sum(r.high for r in ranges))


def _time(tokens: Range | None, rate: Range | None) -> Range | None:
    """Seconds for so many tokens; None where a rate or the tokens are not known."""
    if tokens is None or rate is None or rate.low <= 0:
        return None
    return Range(tokens.low / rate.high, tokens.high / rate.low)
