"""How a run of job=generate ends: its exit code, and what a user should know of it."""

from __future__ import annotations

from ddbatch.config import Config
from ddbatch.core import ExitCode
from ddbatch.jobs.generating.decoder import Pair
from ddbatch.jobs.generating.feed import Feed
from ddbatch.jobs.generating.tally import Tally
from ddbatch.jobs.show import plural, say


def verdict(config: Config, tally: Tally) -> int:
    """3 where more rows are rejected than output.max_error_rate allows."""
    counts = tally.committed
    if counts.rejected.total() <= config.output.max_error_rate * counts.num_rows:
        return ExitCode.DONE
    say(f"ddbatch: error: {_rejected_text(config, tally)}")
    return ExitCode.TOO_MANY_REJECTED


def _rejected_text(config: Config, tally: Tally) -> str:
    counts = tally.committed
    left = f", {tally.num_left:,} rows are left" if tally.num_left else ""
    return (
        f"{counts.rejected.total():,} of {counts.num_rows:,} rows were rejected, more than "
        f"output.max_error_rate={config.output.max_error_rate:g}{left}; reasons are in "
        f"{config.output_dir}/rejected, a larger output.max_error_rate goes on"
    )


def end_notes(pair: Pair, feed: Feed) -> list[str]:
    """What the summary says beside its counts."""
    notes = []
    if feed.num_repeated_ids:
        notes.append(
            f"{plural(feed.num_repeated_ids, 'row')} with an id (data.id_column) that came before; "
            "rows are told apart by row_id"
        )
    if pair.recommended:
        notes.append(
            f"the model recommends {', '.join(pair.recommended)}; only the options of this run "
            "count"
        )
    return notes
