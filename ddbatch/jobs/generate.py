"""job=generate: prompts from files through the engine into committed parts.

The order of things is the order of what can go wrong: options, model and tokenizer files, the run's
identity and its input come before a weight is read, and weights before a file is made.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import cast

from ddbatch import __version__
from ddbatch.checks import check_built
from ddbatch.config import Config
from ddbatch.core import ExitCode, RunError, Shard
from ddbatch.data.attempts import end_attempt, new_attempt, start_attempt
from ddbatch.data.batching import OnLong
from ddbatch.data.commits import clean_tmp, recover
from ddbatch.data.files import list_inputs
from ddbatch.data.folder import RunFolder, check_hard_links
from ddbatch.data.formats import Select
from ddbatch.data.growth import Grow
from ddbatch.data.input_log import read_log
from ddbatch.data.inputs import Inputs, open_log, scan
from ddbatch.data.manifest import Manifest, create_manifest
from ddbatch.data.repair import repair
from ddbatch.data.rounds import RoundsLog
from ddbatch.data.sink import Sink
from ddbatch.data.turns import Turns
from ddbatch.jobs import opening
from ddbatch.jobs.decoder import Decoder, Pair
from ddbatch.jobs.feed import Feed, Limits
from ddbatch.jobs.opening import Setting
from ddbatch.jobs.progress import Progress
from ddbatch.jobs.stopping import patient
from ddbatch.jobs.summary import done_text, left_text, print_summary
from ddbatch.jobs.tally import Tally
from ddbatch.jobs.worker import Worker

OpenPair = Callable[[Config, int | None], Pair]


def run(config: Config) -> int:
    """Generate completions for data.path into output_dir; returns the exit code.

    RunError where the engine is broken or the disk refuses.
    """
    check_built(config)
    from ddbatch.jobs.decoding import open_pair  # late: a refusal need not wait for torch

    return generate(config, open_pair)


def generate(config: Config, open_pair: OpenPair) -> int:
    """The job with any engine. open_pair(config, the tokenizer's eos id) reads no weights."""
    folder, manifest = opening.open_folder(config)
    template_date = opening.pin_date(config, manifest)
    encoder = opening.open_encoder(config, template_date)
    pair = open_pair(config, encoder.eos_token_id)
    max_len = _max_len(config, pair)
    attempt = new_attempt()
    # A hub data set stays at the commit that the run began with.
    pinned = None if manifest is None else read_log(folder).revision
    listing = list_inputs(
        config.data.path,
        name=config.data.name,
        revision=pinned or config.data.revision,
        split=config.data.split,
        select=cast(Select, config.data.select),
    )
    decoder: Decoder | None = None
    scanned = scan(
        listing,
        limit=config.data.limit,
        samples=config.sampling.n,
        shard_rows=config.shards.rows,
        grow=cast(Grow, config.data.grow),
        folder=folder,
    )
    columns = opening.look_at_columns(config, scanned, manifest)
    encoder.check_columns(columns)
    setting = Setting(pair, encoder, columns, template_date, max_len)
    identity = opening.identity(config, setting)
    if manifest is None:
        manifest = opening.new_manifest(config, setting, identity)
        # Weights are read before the folder is made: a broken checkpoint leaves nothing behind.
        decoder = pair.load(scanned.log.num_rows * scanned.log.samples)
        check_hard_links(folder, attempt)
        manifest = create_manifest(folder, attempt, manifest)
    opening.refuse_another_run(config, manifest, identity)
    if config.output.resume == "repair":
        _repair(folder, attempt)
    inputs = open_log(
        folder,
        attempt,
        listing,
        limit=config.data.limit,
        samples=config.sampling.n,
        shard_rows=config.shards.rows,
        grow=cast(Grow, config.data.grow),
        scanned=scanned,
    )
    if inputs.growth is not None:
        print(f"note: {inputs.growth}", file=sys.stderr)
    tally = Tally(inputs.log.num_rows * inputs.log.samples)
    for shard in inputs.log.shards:
        tally.see(recover(folder, shard.index))
    if not tally.num_left:
        clean_tmp(folder, attempt)
        print(done_text(config.output_dir, tally))
        return _verdict(config, tally)
    if decoder is None:
        decoder = pair.load(tally.num_left)
    about = {"ddbatch": __version__, **pair.about}
    start_attempt(folder, attempt, about)
    code, reason = ExitCode.BUG, "a bug"
    try:
        code, reason = _work(config, folder, attempt, manifest, inputs, setting, decoder, tally)
    except RunError as failure:
        code, reason = ExitCode.ENGINE, str(failure)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        end_attempt(folder, attempt, code, reason)
    return code


def _work(
    config: Config,
    folder: RunFolder,
    attempt: str,
    manifest: Manifest,
    inputs: Inputs,
    setting: Setting,
    decoder: Decoder,
    tally: Tally,
) -> tuple[int, str]:
    """Decode what is left; the exit code, and the reason in words."""
    limits = Limits(
        max_len=setting.max_len,
        max_new_tokens=config.sampling.max_new_tokens,
        seed=config.sampling.seed,
        on_long=cast(OnLong, config.data.on_long),
        turns=cast(Turns, config.data.turns),
        skip_special_tokens=config.output.skip_special_tokens,
    )
    feed = Feed(inputs, manifest.columns, setting.encoder, setting.pair, limits)
    progress = Progress(tally)
    started = time.monotonic()
    with patient(config.output.grace_seconds) as stop:
        worker = Worker(
            folder,
            _from_start(inputs.log.shards, config.shards.start),
            inputs.log.samples,
            feed,
            decoder,
            Sink(
                folder,
                attempt,
                manifest.schemas,
                part_rows=config.output.part_rows,
                part_seconds=config.output.part_seconds,
            ),
            RoundsLog(folder, attempt),
            tally,
            progress,
            max_len=setting.max_len,
            max_error_rate=config.output.max_error_rate,
        )
        try:
            worker.run(stop)
        finally:
            progress.close()
        seconds = time.monotonic() - started
        if stop.signal_name is not None:
            print(f"ddbatch: stopped by {stop.signal_name}", file=sys.stderr)
            print(left_text(tally, seconds), file=sys.stderr)
            return ExitCode.STOPPED, f"stopped by {stop.signal_name}"
        notes = _notes(setting.pair, feed)
        print_summary(config.output_dir, tally, decoder.plan, decoder.figures, seconds, notes)
        if not tally.num_left:
            clean_tmp(folder, attempt)
        code = _verdict(config, tally)
        return code, "done" if code == ExitCode.DONE else "too many rejected rows"


def _max_len(config: Config, pair: Pair) -> int:
    """Prompt and output tokens that a row may have."""
    limit = config.engine.max_len if isinstance(config.engine.max_len, int) else pair.context
    if not 2 <= limit <= pair.context:
        raise ValueError(
            f"engine.max_len={limit}: allowed: 2..{pair.context}, the context of model.path"
        )
    return limit


def _repair(folder: RunFolder, attempt: str) -> None:
    """Move broken records and what follows them aside, and say so."""
    log = read_log(folder)
    for shard in log.shards:
        for moved in repair(folder, shard, log.samples, attempt):
            print(f"note: moved aside: {moved}", file=sys.stderr)


def _from_start(shards: tuple[Shard, ...], start: int | str) -> tuple[Shard, ...]:
    """The shards from a hint on, wrapped around: workers of an array begin in different places."""
    if isinstance(start, str):
        task, count = (os.environ.get(f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "COUNT"))
        first = os.environ.get("SLURM_ARRAY_TASK_MIN", "0")
        if task is None or count is None:
            return shards
        start = (int(task) - int(first)) * len(shards) // max(1, int(count))
    at = start % max(1, len(shards))
    return shards[at:] + shards[:at]


def _verdict(config: Config, tally: Tally) -> int:
    """3 where more rows are rejected than output.max_error_rate allows."""
    counts = tally.committed
    if counts.rejected.total() <= config.output.max_error_rate * counts.num_rows:
        return ExitCode.DONE
    print(f"ddbatch: error: {_rejected_text(config, tally)}", file=sys.stderr)
    return ExitCode.TOO_MANY_REJECTED


def _rejected_text(config: Config, tally: Tally) -> str:
    counts = tally.committed
    left = f", {tally.num_left:,} rows are left" if tally.num_left else ""
    return (
        f"{counts.rejected.total():,} of {counts.num_rows:,} rows were rejected, more than "
        f"output.max_error_rate={config.output.max_error_rate:g}{left}; reasons are in "
        f"{config.output_dir}/rejected, a larger output.max_error_rate goes on"
    )


def _notes(pair: Pair, feed: Feed) -> list[str]:
    notes = []
    if feed.num_repeated_ids:
        notes.append(
            f"{feed.num_repeated_ids:,} rows repeat a value of data.id_column; rows are told "
            "apart by row_id"
        )
    if pair.recommended:
        notes.append(
            f"the model recommends {', '.join(pair.recommended)}; only the options of this run "
            "count"
        )
    return notes
