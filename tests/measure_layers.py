"""Settings of a layer's kernels in the place where they run; no test.

    python tests/measure_layers.py --random smol --arms 8x8 32x3 128x0 [--context 160]

What a launch takes alone (measure_linears.py, measure_attention.py) is not what it adds to a row of
launches that begin while others still run. Here a verify's forward of the target is one graph, one
op's setting is exchanged in all layers, and both graphs are timed in turns. Ops come one after the
other; what wins by more than noise stays for those that follow. An arm is ROWSxBUDGET. First all
kernels are compiled, in several processes; --workers must leave each room for the weights. A CPU,
which has no kernels to set, only tries the program.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from measure_rounds import parse_arm
from measuring import RANDOM_SHAPES, headline, pick_device, random_pair

from ddbatch.core import Sampling
from ddbatch.engine.engine import Engine
from ddbatch.jobs.benching.arms import Arm
from ddbatch.jobs.benching.engines import Pair, make_engine, pick_pool
from ddbatch.jobs.benching.steady import (
    Run,
    captured,
    finish,
    keep_state,
    make_steady,
    run_stages,
    shape_now,
    times_ms,
)
from ddbatch.models.decoder import Target
from ddbatch_kernels.attention import kernel as attention_kernel
from ddbatch_kernels.attention.tiles import Setting
from ddbatch_kernels.product_table import EVER, KB, LARGE, TABLE, Loop, Op, Row, Way, way_of

REPEATS, ROOM = 14, 256
GAIN = 0.996  # of the time before, at most, for a setting to stay
COMPILED_ROWS = 32  # kernels of more rows are the same
ATTENTION = "attention"


def loops(outputs: Sequence[int], depth: Sequence[int], shared: Sequence[int]) -> list[Loop]:
    """All of these; shared: KB."""
    return [
        Loop(own, deep, warps, size * KB)
        for own, deep, warps, size in itertools.product(outputs, depth, (4, 8), shared)
    ]


# Of small weights and of large ones.
LOOPS = {
    Op.ADD: (
        loops((16, 32), (64, 128), (48, 96)) + loops((64,), (64,), (48, 80)),
        loops((16, 32, 64, 128), (64, 128), (96, 192)),
    ),
    Op.GATED: (
        loops((32, 64, 128), (64,), (48, 72, 96)),
        loops((32, 64, 128, 256), (64, 128), (96, 192)),
    ),
    Op.HEADS: (
        loops((16, 32, 64), (64,), (48, 72)),
        loops((16, 32, 64, 128), (64, 128), (96, 192)),
    ),
    Op.NORMED_HEADS: (loops((64,), (64,), (48, 96)), loops((128,), (64, 128), (96, 192))),
}
ORDER = (
    *(ATTENTION, Op.ADD, Op.GATED, Op.NORMED_HEADS, Op.HEADS),
    *(Op.ADD, Op.GATED, ATTENTION),
)
Kind = Op | str


class Tried(NamedTuple):
    """A setting of an op: of a product a row of the table for all tokens, None for cuBLAS."""

    kind: Kind
    value: Row | Setting | None

    @property
    def text(self) -> str:
        if isinstance(self.value, Row):
            loop = self.value.loop
            return (
                f"{self.value.tokens}/{loop.outputs}/{loop.depth}/{loop.warps}/{loop.shared >> 10}"
            )
        return "cuBLAS" if self.value is None else "/".join(map(str, self.value))


def main() -> None:
    args = parse()
    started, device = time.perf_counter(), pick_device()
    pair = random_pair(args.random, device, args.context + ROOM + 64)
    jobs = list(
        dict.fromkeys(
            (arm._replace(rows=min(arm.rows, COMPILED_ROWS)), tried)
            for arm in args.arms
            for tried in tries(pair.target, arm)
        )
    )
    if device.type == "cuda":
        # All of an arm's jobs in few processes: each makes an engine for the arm.
        jobs.sort(key=lambda job: str(job[0]))
        parts = [jobs[first :: args.workers] for first in range(args.workers)]
        compile_own = partial(compile_some, args.random, args.context)
        with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
            list(pool.map(compile_own, parts))
    print(headline(pair))
    print(
        f"Context {args.context}. Compiled {len(jobs)} settings in "
        f"{time.perf_counter() - started:.0f} s.\n"
    )
    for arm in args.arms:
        tune(pair, arm, args.context)


def tries(target: Target, arm: Arm) -> list[Tried]:
    """What is tried for these rows. Without rows of the table an op is cuBLAS's; heads with norms
    are then two launches, whose product is that of heads."""
    nodes = (arm.budget or 0) + 1
    tokens, found = arm.rows * nodes, list[Tried]()
    for op, halves in LOOPS.items():
        if op is Op.NORMED_HEADS and not target.dims.has_qk_norm:
            continue
        found.append(Tried(op, None))
        for size, loop in itertools.product((16, 32, 64, 128), halves[is_large(target, op)]):
            if size <= max(16, 2 * tokens) and tokens <= 40 * size:
                wide = loop._replace(warps=8) if size * loop.outputs > 8192 else loop
                found.append(Tried(op, Row(EVER, size, wide)))
    for lanes, (keys, stages), split, warps in itertools.product(
        (16, 32, 64), ((64, 2), (64, 6), (128, 2), (32, 6)), (128, 256, 1024), (2, 4, 8)
    ):
        if lanes <= max(16, 2 * nodes * target.dims.heads // target.dims.kv_heads):
            found.append(Tried(ATTENTION, Setting(lanes, keys, split, warps, stages)))
    return list(dict.fromkeys(found))


def use(target: Target, tried: Tried) -> None:
    """From now on an op is made like this."""
    value = tried.value
    if isinstance(value, Setting):
        attention_kernel.setting_of = lambda *_, **__: value
    elif isinstance(tried.kind, Op):
        small, large = TABLE[tried.kind]
        rows = () if value is None else (value,)
        TABLE[tried.kind] = (small, rows) if is_large(target, tried.kind) else (rows, large)


def is_large(target: Target, op: Op) -> bool:
    """Which half of the table makes this op of the target."""
    layer: Any = target.layers[0]
    weight = {Op.ADD: layer.out, Op.GATED: layer.mlp.gate_up}.get(op, layer.qkv).weight
    return bool(weight.numel() >= LARGE)


@contextmanager
def undone() -> Iterator[None]:
    """What was used inside is used no more outside."""
    table, setting_of = dict(TABLE), attention_kernel.setting_of
    try:
        yield
    finally:
        TABLE.update(table)
        attention_kernel.setting_of = setting_of


class Forward(NamedTuple):
    """A verify's forward of the target, with the engine whose state it works on."""

    engine: Engine
    run: Run
    keys: Any

    def again(self) -> None:
        """Run it with counters of splits as fresh as its settings."""
        self.keys.full.arrivals = self.keys.sliding.arrivals = None
        self.run()


def forward_of(pair: Pair, arm: Arm, context: int, pool: Any) -> Forward:
    """Of an engine in its steady state."""
    own, calls = Sampling(), list[tuple[Any, Any]]()
    engine = make_engine(pair, arm, context + ROOM, pool)
    make_steady(engine, context, ROOM, own)
    shape, restore = shape_now(engine, own), keep_state(engine.state)
    stages, forward = run_stages(engine, shape), Target.forward

    def noting(self: Target, *values: Any, **options: Any) -> Any:
        calls.append((values, options))
        return forward(self, *values, **options)

    restore()
    with patch.object(Target, "forward", noting):
        stages["verify"]()
    values, options = calls[-1]
    return Forward(engine, partial(engine.target, *values, **options), values[4])


@torch.inference_mode()
def compile_some(random: str, context: int, jobs: list[tuple[Arm, Tried]]) -> None:
    """Fill Triton's cache; what does not fit the GPU is left out again when it is timed."""
    from triton.runtime.errors import OutOfResources

    device = pick_device()
    pair = random_pair(random, device, context + ROOM + 64)
    for arm, own in itertools.groupby(jobs, key=lambda job: job[0]):
        forward = forward_of(pair, arm, context, None)
        for _, tried in own:
            with undone(), suppress(OutOfResources):
                use(pair.target, tried)
                forward.again()
        finish(device)


def heads_are_one_launch(target: Target, arm: Arm) -> bool:
    """Whether heads with norms are made whole, at the settings of now."""
    layer: Any = target.layers[0]
    sizes = (arm.rows * ((arm.budget or 0) + 1), *layer.qkv.weight.shape, layer.qkv.weight.dtype)
    return target.dims.has_qk_norm and way_of(Op.NORMED_HEADS, *sizes) is Way.ONE_LAUNCH


@undone()
@torch.inference_mode()
def tune(pair: Pair, arm: Arm, context: int) -> None:
    """Try all ops in turn, and print what each could win."""
    from triton.runtime.errors import OutOfResources

    device, pool = pair.device, pick_pool(None, pair.device)
    forward = forward_of(pair, arm, context, pool)

    def graph() -> Run:
        forward.again()
        return captured(forward.again, pool)

    def compare(before: Run, after: Run) -> tuple[float, float]:
        own = times_ms([before, after], device, before=lambda: None, repeats=REPEATS)
        return statistics.median(own[0]), statistics.median(own[1])

    def ratio(before: Run, after: Run) -> float:
        old, new = compare(before, after)
        return new / old

    first = now = graph()
    print(f"## {arm.rows} rows, {arm.name}")
    for kind in ORDER:
        if kind is Op.HEADS and heads_are_one_launch(pair.target, arm):
            continue  # it makes their product where they take two
        found: list[tuple[float, Tried]] = []
        for tried in tries(pair.target, arm):
            if tried.kind != kind:
                continue
            with undone(), suppress(OutOfResources):
                use(pair.target, tried)
                found.append((ratio(now, graph()), tried))
        if not found:
            continue
        found.sort(key=lambda item: item[0])
        best = "; ".join(f"{share:.3f} {tried.text}" for share, tried in found[:4])
        print(f"{kind.name.lower() if isinstance(kind, Op) else kind}: {best}", flush=True)
        if found[0][0] < GAIN:
            use(pair.target, found[0][1])
            now = graph()
    old, new = compare(first, now)
    print(f"all layers: {old:.3f} ms before, {new:.3f} ms with the best of each\n", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--random", choices=RANDOM_SHAPES, default="smol")
    parser.add_argument("--arms", type=parse_arm, nargs="+", metavar="ROWSxBUDGET", required=True)
    parser.add_argument("--context", type=int, default=160)
    parser.add_argument("--workers", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
