"""Where the time of a round goes, against what the hardware allows; no test.

    python tests/measure_profile.py --pair TARGET DRAFTER [--dtype bfloat16] [--rows 1 32 128]
    python tests/measure_profile.py --random 8b --rows 1 8 32

All rows are live, with random prompts of --context tokens, in the middle of long sequences. Device
times are medians of replays between events, from the same state each time. A stage is captured
alone; what kernels it has and how long each runs comes from the profiler, which sees them launched
one by one. A floor is the time for the bytes that an op must read once, or for its arithmetic, at
rates measured in the same run. On a CPU, which tries the program, an op stands for a kernel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from kernel_times import Launch, Span, launches_of
from measuring import (
    RANDOM_SHAPES,
    Cell,
    add_options,
    headline,
    pick_device,
    random_pair,
    save,
    table,
)
from torch.profiler import ProfilerActivity, profile

from ddbatch.core import Sampling
from ddbatch.engine.engine import Engine
from ddbatch.engine.programs import EagerPrograms, GraphPool
from ddbatch.jobs.benching.arms import Arm
from ddbatch.jobs.benching.engines import make_engine, open_pair, pick_pool
from ddbatch.jobs.benching.rates import Rates, Work, measure_rates, works_of
from ddbatch.jobs.benching.steady import (
    captured,
    finish,
    keep_state,
    make_steady,
    run_stages,
    shape_now,
    times_ms,
)

REPEATS = 50
STEPS = 20  # rounds of the engine's own loop
WARM_STEPS = 5  # before them; the profiler's first replays are slow
ROUND_HEADS = (
    "rows",
    "context",
    "keys looked at",
    "round ms (min-max)",
    "floor ms",
    "share of floor %",
    "eager ms",
    "loop ms",
    "gap share %",
    "host: launch ms",
    "host: collect ms",
    "kernels busy %",
    "gap us, median",
    "gap us, largest",
)
STAGE_HEADS = (
    "rows",
    "stage",
    "ms",
    "share of round %",
    "launches",
    "launches a layer",
    "kernels ms",
    "floor ms",
    "share of floor %",
)
OP_HEADS = ("rows", "stage", "kind", "ms", "share of round %", "launches", "floor ms", "to win ms")


class Loop(NamedTuple):
    """Rounds of the engine's own loop. Milliseconds a round: wall, and the host's in fill and step,
    and in collect, where it waits for the device. Shares in %; gaps in microseconds."""

    wall_ms: float
    launch_ms: float
    collect_ms: float
    busy: float | None
    gaps: list[float]


def main() -> None:
    args = parse()
    device, own = pick_device(), Sampling(temperature=args.temperature)
    cap = 16 * (WARM_STEPS + 2 * STEPS + 8)  # a round emits no more than a block
    length = args.context + cap
    if args.random is not None:
        pair = random_pair(args.random, device, length)
    else:
        pair = open_pair(args.pair[0], args.pair[1], args.dtype, device, length)
    rates = measure_rates(pair.device, pair.dtype)
    print(headline(pair))
    print(f"Budget {args.budget}, temperature {args.temperature}. Measured: {rates}.\n")
    found = []
    for rows in args.rows:
        arm, pool = Arm("ddtree", args.budget, rows), pick_pool(args.capture, device)
        engine = make_engine(pair, arm, length, pool)
        make_steady(engine, args.context, cap, own)
        found.append(measure(engine, own, pool))
        del engine
        numbers = list(map(numbers_of, found))
        save(args.json, {"headline": headline(pair), "rates": rates._asdict(), "rows": numbers})
    print(table(ROUND_HEADS, (round_row(item, rates) for item in found)))
    print(table(STAGE_HEADS, (row for item in found for row in stage_rows(item, rates))))
    print(table(OP_HEADS, (row for item in found for row in op_rows(item, rates, args.ops))))
    for item in found:
        print(f"Rows {item.rows}, ops of verify that count as other: {others(item)}.")


class Profile(NamedTuple):
    """Of one number of rows; times in milliseconds, one for each repeat."""

    rows: int
    context: int
    num_keys: tuple[int, int]  # at the beginning and after the loop
    replay: list[float]
    eager: list[float]
    stages: dict[str, list[float]]
    launches: dict[str, list[Launch]]
    works: dict[tuple[str, str], Work]
    loop: Loop


@torch.inference_mode()
def measure(engine: Engine, own: Sampling, pool: GraphPool | None) -> Profile:
    """Everything about an engine in its steady state."""
    state, device, shape = engine.state, engine.target.embed.device, shape_now(engine, own)
    context = int(state.length_S[state.slot_B].float().mean())
    restore = keep_state(state)
    (replay,) = times_ms(
        [lambda: engine.programs.round(shape)], device, before=restore, repeats=REPEATS
    )
    eager = EagerPrograms(engine.target, engine.drafter, state)
    (slow,) = times_ms([lambda: eager.round(shape)], device, before=restore, repeats=5)
    restore()
    stages = run_stages(engine, shape)
    graphs = [captured(run, pool) for run in stages.values()]
    times = times_ms(graphs, device, before=restore, repeats=REPEATS)
    restore()
    launches = {name: launches_of(run, device) for name, run in stages.items()}
    restore()
    loop = run_loop(engine, device)
    return Profile(
        engine.plan.rows,
        context,
        (shape.num_keys, shape_now(engine, own).num_keys),
        replay,
        slow,
        dict(zip(stages, times, strict=True)),
        launches,
        works_of(engine, context),
        loop,
    )


def run_loop(engine: Engine, device: torch.device) -> Loop:
    """The engine's own rounds, timed by the host's clock, and then once more under the profiler."""
    launch = collect = 0.0
    finish(device)
    started = time.perf_counter()
    for _ in range(STEPS):
        before = time.perf_counter()
        engine.fill(iter(()))
        engine.step()
        between = time.perf_counter()
        ended = list(engine.collect())
        assert not ended, ended
        launch, collect = launch + between - before, collect + time.perf_counter() - between
    finish(device)
    wall = time.perf_counter() - started
    busy, gaps = judge_spans(watch_loop(engine)) if device.type == "cuda" else (None, [])
    per_round = 1000 / STEPS
    return Loop(wall * per_round, launch * per_round, collect * per_round, busy, gaps)


def watch_loop(engine: Engine) -> list[Span]:
    """What the device did in rounds of the engine's own loop."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(WARM_STEPS + STEPS):
            engine.fill(iter(()))
            engine.step()
            ended = list(engine.collect())
            assert not ended, ended
        torch.cuda.synchronize()
    return [
        Span(event.id, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def judge_spans(spans: Sequence[Span]) -> tuple[float, list[float]]:
    """From the first replay that counts to the end of the last: the share of time in % in which a
    kernel ran, and the gaps from replay to replay, microseconds. The profiler itself stretches the
    gaps inside a replay."""
    by_launch: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_launch[span.launch].append(span)
    replays = sorted(
        (min(span.start for span in group), max(span.stop for span in group))
        for group in by_launch.values()
        if len(group) > 1
    )[WARM_STEPS:]
    if len(replays) < 2:  # nothing was captured
        replays = [(min(span.start for span in spans), max(span.stop for span in spans))]
    first, last = replays[0][0], replays[-1][1]
    busy, done = 0.0, first
    for span in sorted(spans, key=lambda span: span.start):
        if span.start >= first and span.stop <= last:
            busy += max(0.0, span.stop - max(span.start, done))
            done = max(done, span.stop)
    gaps = [later[0] - sooner[1] for sooner, later in pairwise(replays)]
    return 100 * busy / (last - first), gaps


def floor_ms(item: Profile, rates: Rates, stage: str | None = None) -> float:
    """Of a stage, or of the round: each op at its own floor, one after the other."""
    return sum(
        work.floor_ms(rates) for (own, _), work in item.works.items() if stage in (own, None)
    )


def round_row(item: Profile, rates: Rates) -> list[Cell]:
    """The round as a whole."""
    replay, floor, loop = statistics.median(item.replay), floor_ms(item, rates), item.loop
    return [
        item.rows,
        item.context,
        "-".join(map(str, sorted(set(item.num_keys)))),
        f"{replay:.3f} ({min(item.replay):.3f}-{max(item.replay):.3f})",
        floor,
        100 * floor / replay,
        statistics.median(item.eager),
        loop.wall_ms,
        100 * (1 - replay / loop.wall_ms),
        loop.launch_ms,
        loop.collect_ms,
        loop.busy,
        statistics.median(loop.gaps) if loop.gaps else None,
        max(loop.gaps, default=None),
    ]


def stage_rows(item: Profile, rates: Rates) -> Iterator[list[Cell]]:
    """Stage by stage."""
    total = sum(statistics.median(times) for times in item.stages.values())
    for stage, times in item.stages.items():
        ms, launches = statistics.median(times), item.launches[stage]
        floor = floor_ms(item, rates, stage)
        yield [
            item.rows,
            stage,
            ms,
            100 * ms / total,
            len(launches),
            per_layer(launches),
            sum(launch.us for launch in launches) / 1000,
            floor or None,
            100 * floor / ms if floor else None,
        ]


def per_layer(launches: Sequence[Launch]) -> int | None:
    """Launches from one layer's attention to the next one's."""
    places = [
        place
        for place, launch in enumerate(launches)
        if launch.kind == "attention" and launches[place - 1].kind != "attention"
    ]
    return int(statistics.median(b - a for a, b in pairwise(places))) if len(places) > 1 else None


def op_rows(item: Profile, rates: Rates, most: int) -> Iterator[list[Cell]]:
    """What ops of a kind take in a stage, those first that have most to win."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for stage, launches in item.launches.items():
        for launch in launches:
            groups[stage, launch.kind].append(launch.us / 1000)
    total = sum(map(sum, groups.values()))
    floors = {name: work.floor_ms(rates) for name, work in item.works.items()}
    order = sorted(groups, key=lambda name: floors.get(name, 0.0) - sum(groups[name]))
    for name in order[:most]:
        ms, floor = sum(groups[name]), floors.get(name)
        yield [
            item.rows,
            *name,
            ms,
            100 * ms / total,
            len(groups[name]),
            floor,
            ms - (floor or 0.0),
        ]


def others(item: Profile) -> str:
    """Ops of verify that no kind has a name for, the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for launch in item.launches["verify"]:
        if launch.kind == "other":
            times[launch.ops.split(" < ")[0]].append(launch.us)
    order = sorted(times, key=lambda name: -sum(times[name]))
    return ", ".join(
        f"{name} {len(times[name])} ({sum(times[name]):.0f} us)" for name in order[:12]
    )


def numbers_of(item: Profile) -> dict[str, object]:
    """What the tables are made of; kernels summed up by what they are for and called."""
    kernels: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for stage, launches in item.launches.items():
        for launch in launches:
            kernels[stage, launch.kind, launch.ops, launch.kernel].append(launch.us)
    return item._asdict() | {
        "launches": [[*name, len(times), sum(times)] for name, times in kernels.items()],
        "works": [[*name, *work] for name, work in item.works.items()],
        "loop": item.loop._asdict(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    pair = parser.add_mutually_exclusive_group(required=True)
    pair.add_argument("--pair", type=Path, nargs=2, metavar=("TARGET", "DRAFTER"))
    pair.add_argument("--random", choices=RANDOM_SHAPES, help="random weights in this shape")
    add_options(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ops", type=int, default=12, help="lines of the last table for each rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
