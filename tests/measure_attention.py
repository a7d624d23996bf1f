"""Settings of the attention kernel, to fill `setting_of` in its kernel.py; no test.

    python tests/measure_attention.py [--shapes smol 8b] [--context 512] [--json attention.json]

Each shape is measured at some numbers of rows and of own tokens, in bfloat16: a graph of launches
one after the other, each over planes that no cache holds, as in a forward. Times are medians of
replays, a launch's share. The floor is the time to read the keys and values once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from measuring import Cell, pick_device, save, table
from torch import Tensor

from ddbatch.jobs.benching.engines import pick_pool
from ddbatch.jobs.benching.steady import captured, times_ms
from ddbatch_kernels.ancestors import pack_ancestors
from ddbatch_kernels.attention import RowKeys, attention_ref
from ddbatch_kernels.attention.kernel import attention_triton, setting_of
from ddbatch_kernels.attention.tiles import Setting

PEAK = 4.2e12  # bytes a second that an H200 reads
LAUNCHES, REPEATS, PAGE = 20, 15, 64
L2_BYTES = 60 << 20
LARGEST_ERROR = 2**-7
HEADS = ("shape", "rows", "own", "floor us", "setting_of us", "best us", "best", "others")


class Shape(NamedTuple):
    """Heads of a model, and the (rows, own tokens) that are measured."""

    heads: int
    kv_heads: int
    width: int
    points: list[tuple[int, int]]


SHAPES = {
    "smol": Shape(9, 3, 64, [(1, 1), (1, 17), (8, 9), (32, 9), (128, 1), (128, 9), (512, 1)]),
    "8b": Shape(32, 8, 128, [(1, 1), (1, 16), (8, 16), (64, 1), (16, 65), (128, 9)]),
}


class Line(NamedTuple):
    """Microseconds a launch of each setting that is right; plain: of what setting_of says."""

    shape: str
    rows: int
    own: int
    floor: float
    plain: float
    times: dict[Setting, float]


class Inputs(NamedTuple):
    """Of a launch; planes are [C, X, G, E], one for each launch."""

    q_BQHE: Tensor
    k_CXGE: Tensor
    v_CXGE: Tensor
    keys: RowKeys


class Point(NamedTuple):
    """What is measured."""

    shape: str
    rows: int
    own: int
    context: int

    def plain(self) -> Setting:
        """What the kernel takes for it."""
        _, kv_heads, width, _ = SHAPES[self.shape]
        group = SHAPES[self.shape].heads // kv_heads
        return setting_of(self.rows, kv_heads, group * self.own, width, torch.bfloat16)


def main() -> None:
    args = parse()
    device = pick_device()
    points = [
        Point(name, rows, own, args.context)
        for name in args.shapes
        for rows, own in SHAPES[name].points
    ]
    tried = {
        point: list(dict.fromkeys([point.plain(), *others(point.plain())])) for point in points
    }
    jobs = [(point, setting) for point, settings in tried.items() for setting in settings]
    with ProcessPoolExecutor(14, get_context("spawn")) as compilers:
        fits = dict(zip(jobs, compilers.map(compiles, *zip(*jobs, strict=True)), strict=True))
    lines = []
    for point, settings in tried.items():
        own = [setting for setting in settings if fits[point, setting]]
        lines.append(measure(point, own, device))
        save(args.json, {"lines": [_numbers(line) for line in lines]})
    print(table(HEADS, map(cells, lines)))


@torch.inference_mode()
def measure(point: Point, settings: list[Setting], device: torch.device) -> Line:
    """All settings, one after the other."""
    name, rows, own, context = point
    inputs = make_inputs(point, device)
    size = 2 * rows * (context + own) * SHAPES[name].kv_heads * SHAPES[name].width * 2
    q, k, v, keys = inputs
    expected = attention_ref(q, k[0], v[0], keys, scale=0.1).float()
    times = {}
    for setting in settings:
        keys.arrivals = None
        found = attention_triton(q, k[0], v[0], keys, scale=0.1, setting=setting).float()
        error = float((found - expected).norm() / expected.norm())
        if error < LARGEST_ERROR:
            times[setting] = time_us(inputs, setting, device)
        else:  # NaN too
            print(f"{name}, {rows} rows, {own} own: {tuple(setting)} is wrong by {error:.1e}")
    return Line(name, rows, own, 1e6 * size / PEAK, times[point.plain()], times)


def make_inputs(point: Point, device: torch.device) -> Inputs:
    """Random values, every row as long as the context."""
    _, rows, own, context = point
    shape = SHAPES[point.shape]
    pages = -(-(context + own) // PAGE)
    cells = rows * pages * PAGE + 2 + rows * own
    copies = max(1, min(LAUNCHES, L2_BYTES // (cells * shape.kv_heads * shape.width * 4) + 1))
    planes = (copies, cells, shape.kv_heads, shape.width)
    k, v = (torch.empty(planes, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    q = torch.empty(rows, own, shape.heads, shape.width, dtype=torch.bfloat16, device=device)
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(0))
    num_keys = 1024 * -(-context // 1024)
    table = torch.zeros(rows, max(pages, num_keys // PAGE), dtype=torch.long)
    table[:, :pages] = order.view(rows, pages)
    sees = torch.ones(1, own, own, dtype=torch.bool).tril()
    keys = RowKeys(
        table.to(device),
        torch.arange(rows, device=device),
        PAGE,
        num_keys,
        None,
        torch.full((rows, own), context, device=device),
        pack_ancestors(sees).expand(rows, -1, -1).contiguous().to(device),
        rows * pages * PAGE + 2,
        rows * pages * PAGE,
    )
    return Inputs(q.normal_(), k, v, keys)


def others(plain: Setting) -> Iterator[Setting]:
    """What is tried beside what setting_of says."""
    for warps in (2, 4, 8):
        for keys in (32, 64, 128):
            yield plain._replace(warps=warps, keys=keys)
    for stages in (2, 3, 5):
        yield plain._replace(stages=stages)
    for split in (128, 256, 512, 1024):
        yield plain._replace(split=split)
    yield plain._replace(two_loops=not plain.two_loops)
    if plain.lanes > 16:
        yield plain._replace(lanes=plain.lanes // 2)


def compiles(point: Point, setting: Setting) -> bool:
    """Compile it into the cache of all processes; False where it does not fit the GPU."""
    from triton.runtime.errors import OutOfResources

    q, k, v, keys = make_inputs(point._replace(rows=1), pick_device())
    try:
        attention_triton(q, k[0], v[0], keys, scale=0.1, setting=setting)
    except OutOfResources:
        return False
    return True


def time_us(inputs: Inputs, setting: Setting, device: torch.device) -> float:
    """A launch's share of a graph of many."""
    copies = len(inputs.k_CXGE)
    q, k, v, keys = inputs

    def run() -> None:
        keys.arrivals = None
        for number in range(LAUNCHES):
            copy = number % copies
            attention_triton(q, k[copy], v[copy], keys, scale=0.1, setting=setting)

    replay = captured(run, pick_pool(None, device))
    (times,) = times_ms([replay], device, before=lambda: None, repeats=REPEATS)
    return 1000 * statistics.median(times) / LAUNCHES


def cells(line: Line) -> list[Cell]:
    ranked = sorted((time, setting) for setting, time in line.times.items())
    text = [f"{time:.2f} {tuple(setting)}" for time, setting in ranked[1:4]]
    best, setting = ranked[0]
    return [
        line.shape,
        line.rows,
        line.own,
        line.floor,
        line.plain,
        best,
        str(tuple(setting)),
        "; ".join(text),
    ]


def _numbers(line: Line) -> dict[str, object]:
    return line._asdict() | {"times": [[*setting, time] for setting, time in line.times.items()]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", type=Path, help="file for all times")
    return parser.parse_args()


if __name__ == "__main__":
    main()
