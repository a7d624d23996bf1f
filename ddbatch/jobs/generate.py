"""job=generate: prompts from files through the engine into committed parts.

The order of things is the order of what can go wrong: options, model and tokenizer files, the run's
identity and its input come before a weight is read, and weights before a file is made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ddbatch.checks import check_built
from ddbatch.config import Config
from ddbatch.core import AuditError, ExitCode, RunError, Shard
from ddbatch.data.attempts import new_attempt, start_attempt
from ddbatch.data.batching.encoder import OnLong
from ddbatch.data.batching.stop_strings import StopStrings
from ddbatch.data.batching.turns import Turns
from ddbatch.data.commits import recover
from ddbatch.data.distrust import refuse_distrusted
from ddbatch.data.folder import RunFolder, check_hard_links
from ddbatch.data.manifest import Manifest, create_card, create_manifest
from ddbatch.data.reload_mark import renew_mark
from ddbatch.data.repair import repair
from ddbatch.data.rounds import RoundsLog
from ddbatch.data.sink import Sink
from ddbatch.data.source.files import Listing, list_inputs
from ddbatch.data.source.formats import Select
from ddbatch.data.source.growth import Grow
from ddbatch.data.source.inputs import Inputs, open_log, scan
from ddbatch.data.source.log import read_log
from ddbatch.demo import check_demo, demo_paths, is_demo
from ddbatch.jobs.generating import closing, opening
from ddbatch.jobs.generating.decoder import Decoder, Pair
from ddbatch.jobs.generating.ending import end_notes, verdict
from ddbatch.jobs.generating.feed import Feed
from ddbatch.jobs.generating.noting import (
    about_attempt,
    note_changes,
    note_distrust,
    note_end,
    sweep,
)
from ddbatch.jobs.generating.opening import Setting
from ddbatch.jobs.generating.progress import Progress
from ddbatch.jobs.generating.sampling_options import check_stops, escape_note, run_sampling
from ddbatch.jobs.generating.summary import done_text, left_text, print_summary
from ddbatch.jobs.generating.tally import Tally
from ddbatch.jobs.generating.trials import Trials, failure_of_device
from ddbatch.jobs.generating.units import Limits
from ddbatch.jobs.generating.worker import Worker, units_done
from ddbatch.jobs.reading import check_model_folder
from ddbatch.jobs.show import say, size, tell
from ddbatch.jobs.stopping import patient

OpenPair = Callable[[Config, int | None], Pair]


def run(config: Config) -> int:
    """Generate completions for data.path into output_dir; returns the exit code.

    RunError where the engine is broken or the disk refuses.
    """
    check_built(config)
    if is_demo(config):
        check_demo()
        weights = Path(demo_paths().model, "model.safetensors").stat().st_size
        say(
            f"ddbatch: the embedded demo: a tiny model ({size(weights)}) and its drafter; "
            f"writes to {config.output_dir}"
        )
    # Late: a refusal need not wait for torch.
    from ddbatch.jobs.generating.decoding import open_pair

    return generate(config, open_pair)


def generate(config: Config, open_pair: OpenPair) -> int:
    """The job with any engine. open_pair(config, the tokenizer's eos id) reads no weights."""
    folder, manifest = opening.open_folder(config)
    note = escape_note(config)
    if note is not None:
        say(f"note: {note}")
    refuse_distrusted(folder)
    start = _look(config, open_pair, folder, manifest)
    attempt, decoder = new_attempt(), None
    trials = Trials(folder, attempt)
    if manifest is None:
        # Weights are read before the folder is made: a broken checkpoint leaves nothing behind.
        log = start.scanned.log
        decoder = start.setting.pair.load(log.num_rows * log.samples, start.setting.finder, trials)
        manifest = _create(config, folder, attempt, start)
        if manifest.template_date != start.setting.template_date:
            # Another worker started a moment before: its moment is the run's.
            start = _look(config, open_pair, folder, manifest)
    opening.refuse_another_run(config, manifest, start.identity)
    with _disk(config):
        create_card(folder, attempt, manifest)  # a start may have been cut off before it
        inputs, tally = _open_state(config, folder, attempt, start)
    if not tally.num_left:
        sweep(folder)
        tell(done_text(config.output_dir, tally))
        if is_demo(config):
            tell("\n" + closing.after_demo_text())
        return verdict(config, tally)
    decoder = decoder or start.setting.pair.load(tally.num_left, start.setting.finder, trials)
    about = about_attempt(config, start.setting.pair)
    note_changes(folder, about)
    with _disk(config):
        start_attempt(folder, attempt, {**about, **decoder.about})
    code, reason = ExitCode.BUG, "a bug"
    try:
        code, reason = _work(
            config, folder, attempt, manifest, inputs, start.setting, decoder, tally
        )
    except RunError as failure:
        code, reason = ExitCode.ENGINE, str(failure)
        if isinstance(failure, AuditError):
            note_distrust(folder, attempt, reason)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        what = failure_of_device(error)
        if what is None:
            raise
        code = ExitCode.ENGINE
        raise RunError(f"{what}: {str(error).splitlines()[0]}") from error
    finally:
        note_end(folder, attempt, code, reason, decoder.found)
        trials.restart(reason)
    return code


@contextmanager
def _disk(config: Config) -> Iterator[None]:
    """What the disk refuses is no bug."""
    try:
        yield
    except OSError as error:
        raise RunError(f"output_dir={config.output_dir}: {error}") from error


@dataclass(frozen=True)
class _Start:
    """What a start has found before it writes anything."""

    listing: Listing
    scanned: Inputs
    setting: Setting
    identity: dict[str, object]


def _look(
    config: Config, open_pair: OpenPair, folder: RunFolder, manifest: Manifest | None
) -> _Start:
    """Everything that can be refused is looked at; nothing is written."""
    # Before the tokenizer is missed in a folder that is not there.
    check_model_folder("model.path", config.model.path)
    template_date = opening.pin_date(config, manifest)
    sampling = run_sampling(config)
    encoder = opening.open_encoder(config, template_date)
    finder = StopStrings(encoder.tokenizer, skip_special_tokens=config.output.skip_special_tokens)
    check_stops(config, sampling.stop, finder)
    pair = open_pair(config, encoder.eos_token_id)
    max_len = _max_len(config, pair)
    # A hub data set stays at the commit that the run began with.
    pinned = None if manifest is None else read_log(folder).revision
    listing = list_inputs(
        config.data.path,
        name=config.data.name,
        revision=pinned or config.data.revision,
        split=config.data.split,
        select=cast(Select, config.data.select),
    )
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
    setting = Setting(pair, encoder, columns, template_date, max_len, sampling, finder)
    return _Start(listing, scanned, setting, opening.identity(config, setting))


def _create(config: Config, folder: RunFolder, attempt: str, start: _Start) -> Manifest:
    """Make the folder a run; the manifest that holds is another's if it started a moment before."""
    try:
        check_hard_links(folder, attempt)
        manifest = opening.new_manifest(config, start.setting, start.scanned, start.identity)
        return create_manifest(folder, attempt, manifest)
    except OSError as error:
        raise ValueError(
            f"output_dir={config.output_dir} cannot be made: {error}; choose another output_dir"
        ) from error


def _open_state(
    config: Config, folder: RunFolder, attempt: str, start: _Start
) -> tuple[Inputs, Tally]:
    """The run's input, grown if it has grown, and how much of it is committed."""
    if config.output.resume == "repair":
        log = read_log(folder)
        for shard in log.shards:
            for moved in repair(folder, shard, log.samples, attempt):
                say(f"note: moved aside: {moved}")
    inputs = open_log(
        folder,
        attempt,
        start.listing,
        limit=config.data.limit,
        samples=config.sampling.n,
        shard_rows=config.shards.rows,
        grow=cast(Grow, config.data.grow),
        scanned=start.scanned,
    )
    if inputs.growth is not None:
        say(f"note: {inputs.growth}")
    tally = Tally(inputs.log.num_rows * inputs.log.samples)
    for shard in inputs.log.shards:
        records = recover(folder, shard.index)
        units_done(folder, records, shard, inputs.log.samples)  # no key is in two records
        tally.see(records)
    renew_mark(folder)  # a worker that was killed may not have come to it
    return inputs, tally


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
        sampling=setting.sampling,
        ignore_eos=config.sampling.ignore_eos,
        on_long=cast(OnLong, config.data.on_long),
        turns=cast(Turns, config.data.turns),
        skip_special_tokens=config.output.skip_special_tokens,
    )
    feed = Feed(inputs, manifest.columns, setting.encoder, setting.pair, limits, setting.finder)
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
            say(f"ddbatch: stopped by {stop.signal_name}")
            say(left_text(tally, seconds))
            return ExitCode.STOPPED, f"stopped by {stop.signal_name}"
        seconds -= decoder.seconds_judged
        notes = [*end_notes(setting.pair, feed), *decoder.notes]
        print_summary(config.output_dir, tally, decoder, seconds, notes)
        if not tally.num_left:
            if tally.committed.completions:
                tell("\n" + closing.closing_text(config.output_dir, is_demo=is_demo(config)))
            sweep(folder)
        code = verdict(config, tally)
        return code, "done" if code == ExitCode.DONE else "too many rejected rows"


def _max_len(config: Config, pair: Pair) -> int:
    """Prompt and output tokens that a row may have."""
    limit = config.engine.max_len if isinstance(config.engine.max_len, int) else pair.context
    if not 2 <= limit <= pair.context:
        raise ValueError(
            f"engine.max_len={limit}: allowed: 2..{pair.context}, the context of model.path"
        )
    return limit


def _from_start(shards: tuple[Shard, ...], start: int | str) -> tuple[Shard, ...]:
    """The shards from a hint on, wrapped around: workers of an array begin in different places."""
    if isinstance(start, str):
        task, count = (os.environ.get(f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "COUNT"))
        first = os.environ.get("SLURM_ARRAY_TASK_MIN", "0")
        if task is None or count is None:
            return shards
        if not (task.isdecimal() and count.isdecimal() and first.isdecimal()):
            raise ValueError(
                f"shards.start=auto: SLURM_ARRAY_TASK_ID={task}, _COUNT={count}, _MIN={first} are "
                "no numbers; allowed: a task of an array, or shards.start as a number"
            )
        start = (int(task) - int(first)) * len(shards) // max(1, int(count))
    at = start % max(1, len(shards))
    return shards[at:] + shards[:at]
