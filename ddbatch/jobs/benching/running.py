"""The course of job=bench: look, load, measure group by group, keep and tell what was measured.

Knows the options and the order of things. A group is what is measured side by side: all arms of one
number of rows and one context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ddbatch.config import Config
from ddbatch.core import RunError
from ddbatch.jobs.benching.arms import Arm
from ddbatch.jobs.benching.engines import open_pair, pick_pool
from ddbatch.jobs.benching.figures import figures_of
from ddbatch.jobs.benching.looking import Start, look, num_prompts
from ddbatch.jobs.benching.measuring import Measured, Setting, measure_group
from ddbatch.jobs.benching.peers import Peers
from ddbatch.jobs.benching.power import Watch
from ddbatch.jobs.benching.prompts import random_prompts, work_of
from ddbatch.jobs.benching.rates import measure_rates
from ddbatch.jobs.benching.telling import Report
from ddbatch.jobs.generating.sampling_options import run_sampling
from ddbatch.jobs.generating.trials import is_out_of_memory
from ddbatch.jobs.ticker import Ticker
from ddbatch.models.load import set_numerics


def bench(config: Config, arms: Sequence[Arm]) -> None:
    """The job, of options that were checked by themselves. arms: at no number of rows yet."""
    start = look(config, arms)
    if start.device.index is not None:
        torch.cuda.set_device(start.device)
    set_numerics()
    target, drafter = Path(config.model.path), config.drafter.path
    has_drafts = drafter is not None and any(arm.has_drafts for arm in arms)
    with _memory("the weights; choose a smaller model, or a model.dtype of fewer bits"):
        pair = open_pair(
            target,
            Path(str(drafter)) if has_drafts else None,
            str(start.dtype).removeprefix("torch."),
            start.device,
            start.reach,
            in_order=config.engine.reproducible,
        )
        rates = measure_rates(pair.device, pair.dtype)
        peers = Peers(config.bench.peers, target, pair.dtype, pair.device, start.call_len)
    coin, capture = config.bench.acceptance, config.engine.capture
    acceptance = "random ids" if start.prompts is None else "data"
    with Watch(pair.device) as watch:
        setting = Setting(
            pair,
            pick_pool(capture if isinstance(capture, bool) else None, pair.device),
            start.limits,
            run_sampling(config),
            coin,
            acceptance if coin is None else f"synthetic {coin:g}",
            config.bench.repeats,
            watch,
        )
        report = Report(config, pair, rates, start.about_prompts, watch.source)
        for group in _groups(config, arms, start, setting, peers):
            report.found += [figures_of(item, group, rates) for item in group]
            report.save(is_whole=False)
    report.save(is_whole=True)
    report.tell()


def _groups(
    config: Config, arms: Sequence[Arm], start: Start, setting: Setting, peers: Peers
) -> Iterator[list[Measured]]:
    """What was measured, a group at a time."""
    sizes = [(rows, context) for rows in config.bench.rows for context in config.bench.context]
    others = peers.num_arms
    num_steps = len(sizes) * config.bench.repeats * (2 * len(arms) + others)
    num_done = 0
    with Ticker(num_steps, "measurements") as ticker:

        def step() -> None:
            nonlocal num_done
            num_done += 1
            ticker.show(num_done)

        for rows, context in sizes:
            count = num_prompts(config, rows)
            prompts = start.prompts or random_prompts(count, context, start.vocab)
            work = work_of(prompts, count, config.bench.new_tokens, setting.own)
            asked = (
                f"all arms side by side at bench.rows={rows} and {context} tokens of context; "
                "choose fewer rows or arms, or a smaller bench.context"
            )
            with _memory(asked):
                own = [arm._replace(rows=rows) for arm in arms]
                yield measure_group(setting, own, peers.arms(rows), context, work, step)


@contextmanager
def _memory(what: str) -> Iterator[None]:
    """A lack of memory is no bug. what: there is none for, and what to choose instead."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"no memory for {what} ({str(error).splitlines()[0]})") from error
