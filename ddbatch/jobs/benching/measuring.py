"""Measure all arms of one number of rows and one context side by side, repeat by repeat.

In: a pair, arms, prompts of a call. Out: what was timed, an entry an arm and repeat. Knows nothing
about options, files or tables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ddbatch.core import Sampling, ShapePlan, TokenPrompt
from ddbatch.engine.engine import Engine
from ddbatch.engine.programs import GraphPool
from ddbatch.jobs.benching.arms import Arm
from ddbatch.jobs.benching.calls import Pass, run_engine
from ddbatch.jobs.benching.engines import Limits, Pair, make_engine, plain_programs
from ddbatch.jobs.benching.peers import PeerRun
from ddbatch.jobs.benching.power import MEAN_SECONDS, Reading, Watch
from ddbatch.jobs.benching.rates import Works, works_of
from ddbatch.jobs.benching.steady import (
    Run,
    captured,
    keep_state,
    make_steady,
    run_stages,
    shape_now,
    times_ms,
)

# Rounds of a repeat last about so long; a GPU's watts are known after MEAN_SECONDS of them.
ROUND_SECONDS = {"cpu": 0.2, "cuda": MEAN_SECONDS + 0.5}
STAGE_SECONDS = 0.1
MIN_RUNS, MAX_RUNS = 3, 5000
STEADY_ROUNDS = 8  # no sequence ends before its rows are all live


class Rounds(NamedTuple):
    """One repeat: milliseconds of a round and of its stages, medians of replays from one state."""

    ms: float
    stages: Mapping[str, float]
    reading: Reading


class Call(NamedTuple):
    """One repeat: a whole call."""

    result: Pass
    reading: Reading


@dataclass(frozen=True)
class Measured:
    """All repeats of an arm, or of a peer (arm, plan: None; works, rounds: empty). acceptance: what
    its acceptance length is of: data, random ids or synthetic; None: it drafts nothing."""

    name: str
    rows: int
    context: int
    arm: Arm | None
    plan: ShapePlan | None
    works: Works
    acceptance: str | None
    rounds: list[Rounds] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    """What all groups share. coin: share of a synthetic acceptance; acceptance: its name."""

    pair: Pair
    pool: GraphPool | None
    limits: Limits
    own: Sampling
    coin: float | None
    acceptance: str
    repeats: int
    watch: Watch


class _Bed(NamedTuple):
    """An arm in its steady state: what is replayed, and what undoes it."""

    engine: Engine
    round: Run
    stages: dict[str, Run]
    restore: Run


def steady_room(block: int) -> int:
    """Tokens beyond its context that a sequence may need in a steady state; block: the drafter's,
    which no round emits more than."""
    return STEADY_ROUNDS * block


def measure_group(
    setting: Setting,
    arms: Sequence[Arm],
    peers: Mapping[str, PeerRun],
    context: int,
    work: Sequence[TokenPrompt],
    step: Callable[[], None],
) -> list[Measured]:
    """Arms of one number of rows, and peers. step is called after each measurement."""
    rows, pair = arms[0].rows, setting.pair
    longest = max(len(prompt.token_ids) + prompt.max_new_tokens for prompt in work)
    block = 1 if pair.drafter is None else pair.drafter.dims.block
    max_len = max(longest, context + steady_room(block))
    engines = [
        make_engine(pair, arm, max_len, setting.pool, coin=setting.coin, limits=setting.limits)
        for arm in arms
    ]
    found = [
        Measured(
            arm.name,
            rows,
            context,
            arm,
            engine.plan,
            works_of(engine, context),
            setting.acceptance if arm.has_drafts else None,
        )
        for arm, engine in zip(arms, engines, strict=True)
    ]
    for item, rounds in _time_rounds(setting, engines, context):
        found[item].rounds.append(rounds)
        step()
    others = [Measured(name, rows, context, None, None, {}, None) for name in peers]
    runs = [_caller(engine, work) for engine in engines]
    runs += [_peer_caller(peer, work) for peer in peers.values()]
    for item, call in _time_calls(setting, runs):
        (found + others)[item].calls.append(call)
        step()
    return found + others


def _time_rounds(
    setting: Setting, engines: Sequence[Engine], context: int
) -> Iterator[tuple[int, Rounds]]:
    """Rounds of the engines in turn, with the number of the engine; they are reset afterwards."""
    beds = [_make_bed(setting, engine, context) for engine in engines]
    device = setting.pair.device
    counts = []
    for bed in beds:  # after two runs each: graphs are captured, memory is there
        (once,) = times_ms([bed.round], device, before=bed.restore, repeats=MIN_RUNS)
        counts.append(_count(statistics.median(once), ROUND_SECONDS[device.type]))
    for _ in range(setting.repeats):
        for at, (bed, count) in enumerate(zip(beds, counts, strict=True)):
            started = time.monotonic()
            (times,) = times_ms([bed.round], device, before=bed.restore, repeats=count)
            reading = setting.watch.during(started, time.monotonic())
            ms = statistics.median(times)
            parts = times_ms(
                list(bed.stages.values()),
                device,
                before=bed.restore,
                repeats=_count(ms, STAGE_SECONDS),
            )
            stages = dict(zip(bed.stages, map(statistics.median, parts), strict=True))
            yield at, Rounds(ms, stages, reading)
    for engine in engines:
        engine.reset()


@torch.inference_mode()
def _make_bed(setting: Setting, engine: Engine, context: int) -> _Bed:
    """Fill all rows, and capture a round and its stages."""
    room = engine.cache_plan.max_len - context
    make_steady(engine, context, room, setting.own)
    shape, programs = shape_now(engine, setting.own), plain_programs(engine, setting.pool)
    restore = keep_state(engine.state)
    programs.round(shape)
    restore()
    stages = run_stages(engine, shape)
    parts = {name: captured(stage, setting.pool) for name, stage in stages.items()}
    return _Bed(engine, lambda: programs.round(shape), parts, restore)


def _count(ms: float, seconds: float) -> int:
    """Runs of so many milliseconds that last about so long."""
    return max(MIN_RUNS, min(MAX_RUNS, round(1000 * seconds / max(ms, 1e-3))))


def _time_calls(setting: Setting, runs: Sequence[Callable[[], Pass]]) -> Iterator[tuple[int, Call]]:
    """Calls in turn, with the number of the one that was called; the first of each warms up."""
    for repeat in range(setting.repeats + 1):
        for at, run in enumerate(runs):
            started = time.monotonic()
            result = run()
            if repeat:
                yield at, Call(result, setting.watch.during(started, time.monotonic()))


def _caller(engine: Engine, work: Sequence[TokenPrompt]) -> Callable[[], Pass]:
    return lambda: run_engine(engine, work, len(work))


def _peer_caller(peer: PeerRun, work: Sequence[TokenPrompt]) -> Callable[[], Pass]:
    return lambda: peer(work)
