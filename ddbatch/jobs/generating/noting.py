"""What job=generate notes of its attempts, and what it sweeps up after those that were killed.

Best effort: nothing that keeps the run right depends on it, and a failure must not hide another.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ddbatch import __version__
from ddbatch.config import Config
from ddbatch.core import RunError
from ddbatch.data.attempts import end_attempt, killed_early, read_attempts
from ddbatch.data.commits import clean_tmp
from ddbatch.data.distrust import mark_distrust
from ddbatch.data.fingerprint import hash_weights
from ddbatch.data.folder import RunFolder
from ddbatch.jobs.generating.decoder import Pair
from ddbatch.jobs.show import say


def about_attempt(config: Config, pair: Pair) -> dict[str, object]:
    """What may change from attempt to attempt."""
    drafter = config.drafter.path
    return {
        "ddbatch": __version__,
        "drafter": None if drafter is None else Path(drafter).name,
        "drafter_weights": None if drafter is None else hash_weights(Path(drafter), "fast"),
        "part_rows": config.output.part_rows,
        "part_seconds": config.output.part_seconds,
        "shard_rows": config.shards.rows,
        **pair.about,
    }


def note_changes(folder: RunFolder, about: Mapping[str, object]) -> None:
    """Say once a start that another plan goes on with the run, where rounding makes it matter."""
    if about.get("dtype") == "float32":
        return
    try:
        attempts = read_attempts(folder)
    except RunError as error:  # nothing that keeps the run right depends on them
        say(f"note: {error}")
        return
    harmless = {"part_rows", "part_seconds", "shard_rows"}
    if about.get("reproducible"):  # what these decide changes no bit
        harmless |= {"plan", "method", "drafter", "drafter_weights"}
    names = [name for name in about if name not in harmless]
    changed = [name for name in names if attempts and attempts[-1].about.get(name) != about[name]]
    if changed:
        say(
            f"note: {', '.join(changed)} changed since the last start; in {about.get('dtype')} "
            "completions of both are equal up to the numerics rule (near-ties may part)"
        )


def sweep(folder: RunFolder) -> None:
    """Remove what killed attempts have left; best effort."""
    try:
        over = {attempt.name for attempt in read_attempts(folder) if attempt.is_over}
        clean_tmp(folder, over | killed_early(folder))
    except (OSError, RunError) as error:
        say(f"note: tmp folders are not swept: {error}")


def note_distrust(folder: RunFolder, attempt: str, reason: str) -> None:
    """Have later starts refuse the run; best effort, the error itself is told in any case."""
    try:
        mark_distrust(folder, attempt, reason)
    except OSError as error:
        say(f"note: that the audit failed is not noted in the folder: {error}")


def note_end(
    folder: RunFolder, attempt: str, code: int, reason: str, found: Mapping[str, object]
) -> None:
    """Best effort: a full disk must not hide why the run ends."""
    try:
        end_attempt(folder, attempt, code, reason, found)
    except OSError as error:
        say(f"note: the end of attempt {attempt} is not noted: {error}")
    with suppress(OSError):  # what is not committed stays for the next start to sweep
        folder.tmp(attempt).rmdir()
