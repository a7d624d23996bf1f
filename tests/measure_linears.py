"""Ways and tiles of a layer's products, to fill ddbatch_kernels/product_table.py; no test.

    python tests/measure_linears.py --json linears.json
    python tests/measure_linears.py --models smol --tokens 17 --ops gated

Each op is measured by cuBLAS' way and by the Triton kernels in some tiles, in bfloat16: a graph of
launches one after the other, each with a copy of the weight that no cache holds, as in a forward;
x lies in the cache. cuBLAS' way of heads and gated makes the norm; the kernels find it begun by
those of out and down, whose times hold that. Times are medians of replays, a launch's share. First
all kernels are compiled, in several processes. On a CPU, which tries the program, `tiny` is
interpreted, in float32, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from measuring import Cell, pick_device, save, table
from torch import Tensor

from ddbatch.jobs.benching.engines import pick_pool
from ddbatch.jobs.benching.steady import Run, captured, times_ms
from ddbatch_kernels.gated_linear.kernel import gated_linear_fused, gated_linear_split
from ddbatch_kernels.linear_add.kernel import linear_add_fused
from ddbatch_kernels.normed import Normed
from ddbatch_kernels.product_table import KB, LARGE, Loop, Tile, make_tile, whole_head
from ddbatch_kernels.project_heads.kernel import project_heads_fused
from ddbatch_kernels.project_heads.normed_linear import normed_linear
from ddbatch_kernels.rope_append import Heads
from ddbatch_kernels.rope_append.kernel import rope_append_triton

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
TOKENS = (1, 8, 9, 16, 17, 33, 64, 72, 128, 136, 272)
L2_BYTES = 60 << 20
PEAK = 4.2e12  # bytes a second that an H200 reads
LEAST_LAUNCHES, REPEATS, EPS = 24, 15, 1e-6
MIB = 1 << 20
# What is tried: rows of the weight, block of K, warps, shared memory.
LOOPS = {
    "add": [
        Loop(16, 128, 4, 96 * KB),
        Loop(16, 128, 4, 48 * KB),
        Loop(16, 256, 4, 192 * KB),
        Loop(16, 64, 2, 64 * KB),
        Loop(32, 128, 4, 96 * KB),
        Loop(64, 128, 4, 192 * KB),
    ],
    "gated": [
        Loop(32, 64, 4, 96 * KB),
        Loop(32, 128, 4, 96 * KB),
        Loop(16, 64, 4, 96 * KB),
        Loop(64, 128, 4, 96 * KB),
        Loop(128, 64, 8, 192 * KB),
    ],
    "heads": [
        Loop(16, 64, 4, 96 * KB),
        Loop(32, 64, 4, 96 * KB),
        Loop(32, 128, 4, 96 * KB),
    ],
    "normed heads": [  # a whole head
        Loop(16, 64, 4, 96 * KB),
        Loop(16, 64, 8, 192 * KB),
        Loop(16, 128, 4, 192 * KB),
        Loop(16, 128, 8, 192 * KB),
    ],
    "normed linear": [
        Loop(16, 128, 4, 96 * KB),
        Loop(32, 128, 4, 96 * KB),
        Loop(64, 128, 4, 192 * KB),
    ],
}
# Beside them, for small weights and more tokens than a tile of those has.
MANY = [
    Tile(64, 32, 64, 4, 5),
    Tile(64, 64, 64, 4, 5),
    Tile(128, 32, 64, 4, 5),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 64, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(64, 128, 64, 4, 4),
]


class Model(NamedTuple):
    """Sizes of a layer."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp: int
    has_norms: bool


MODELS = {
    "smol": Model(576, 9, 3, 64, 1536, has_norms=False),  # SmolLM2-135M
    "8b": Model(4096, 32, 8, 128, 12288, has_norms=True),  # Qwen3-8B
    "tiny": Model(64, 2, 1, 16, 96, has_norms=True),
}


class Case(NamedTuple):
    """An op of a layer: out and down are both linear_add."""

    model: str
    op: str  # heads, out, gated, down

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width of the weight."""
        own = MODELS[self.model]
        return {
            "heads": ((own.heads + 2 * own.kv_heads) * own.head_width, own.width),
            "out": (own.width, own.heads * own.head_width),
            "gated": (2 * own.mlp, own.width),
            "down": (own.width, own.mlp),
        }[self.op]

    @property
    def num_bytes(self) -> int:
        return 2 * self.shape[0] * self.shape[1]


class Arm(NamedTuple):
    """One way of making an op; tile: of its Triton product."""

    way: str  # one launch, two launches, cublas
    tile: Tile | None

    @property
    def name(self) -> str:
        return self.way if self.tile is None else f"{self.way} {'/'.join(map(str, self.tile))}"


def main() -> None:
    args = parse()
    device, started = pick_device(), time.perf_counter()
    cases = [Case(model, op) for model in args.models for op in args.ops]
    if device.type == "cuda":
        compile_all(cases, args.tokens)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}.", end=" ")
    print(f"Compiled in {time.perf_counter() - started:.0f} s.\n")
    found: list[dict[str, object]] = []
    rows: list[list[Cell]] = []
    for case in cases:
        for tokens in args.tokens:
            times = measure(case, tokens, device)
            found += [
                {**case._asdict(), "tokens": tokens, **arm._asdict(), "us": us}
                for arm, us in times.items()
            ]
            rows.append(row_of(case, tokens, times))
        save(args.json, found)
    print(table(HEADS, rows))
    print(table(("model", "op", "tokens up to", *("tile: mean share of best",) * 3), best(found)))
    print(f"{time.perf_counter() - started:.0f} s in all.")


def arms_of(case: Case, tokens: int) -> Iterator[Arm]:
    """What is measured: cuBLAS first."""
    own = MODELS[case.model]
    yield Arm("cublas", None)
    tile = partial(make_tile, next((t for t in (16, 32) if t >= tokens), 64), case.shape[1], DTYPE)
    if case.op == "heads" and own.has_norms:
        for loop in LOOPS["normed heads"]:
            yield Arm("one launch", tile(whole_head(loop, own.head_width)))
        for loop in LOOPS["normed linear"]:
            yield Arm("two launches", tile(loop))
        return
    kind = "add" if case.op in ("out", "down") else case.op
    made = dict.fromkeys(map(tile, LOOPS[kind]))  # small widths make some the same
    if tokens > 64 and case.num_bytes < 2 * LARGE:
        made |= dict.fromkeys(MANY)
    yield from (Arm("one launch", own_tile) for own_tile in made)


class Inputs(NamedTuple):
    """Tensors of an op; the weight aside."""

    normed: Normed  # x; its norm is of heads and gated
    next_norm_N: Tensor  # of out and down
    residual_TN: Tensor
    heads: Heads


def inputs_of(case: Case, tokens: int, device: torch.device) -> Inputs:
    own, (N, K) = MODELS[case.model], case.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(DTYPE)

    head_norm = normal(1, own.head_width) if own.has_norms else None
    plane = (1, 2 * tokens, own.kv_heads, own.head_width)
    place_T = torch.arange(tokens, device=device)
    # As embed_normed and linear_add make them.
    x, norm = normal(tokens, K), normal(K)
    tiles = max(1, K // 32)
    normed = Normed(x, norm, EPS, x * norm, x.float().unflatten(1, (tiles, -1)).square().sum(dim=2))
    rope = torch.randn((tokens, 2, own.head_width), device=device)
    planes = (normal(*plane), normal(*plane))
    heads = Heads(head_norm, head_norm, EPS, rope, place_T, *planes, place_T)
    return Inputs(normed, normal(N), normal(tokens, N), heads)


def call_of(case: Case, arm: Arm, given: Inputs) -> Callable[[Tensor], Tensor]:
    """The op as a function of its weight."""
    normed, next_norm, residual, heads = given
    tile = arm.tile
    if case.op == "gated":
        if tile is None:
            return lambda weight: gated_linear_split(normed, weight)
        return lambda weight: gated_linear_fused(normed, weight, tile)
    if case.op in ("out", "down"):
        x = normed.x_TD
        if tile is None:
            return lambda weight: torch.addmm(residual, x, weight.t())
        return lambda weight: linear_add_fused(x, weight, residual, next_norm, EPS, tile).x_TD
    if tile is None:
        return lambda weight: rope_append_triton(
            torch.nn.functional.linear(normed.made(), weight)[None], heads
        )[0]
    if arm.way == "one launch":
        return lambda weight: project_heads_fused(normed, weight, None, heads, tile)
    return lambda weight: rope_append_triton(
        normed_linear(normed, weight, None, tile)[None], heads
    )[0]


@torch.inference_mode()
def measure(case: Case, tokens: int, device: torch.device) -> dict[Arm, float]:
    """Microseconds a launch of every arm, whose results agree."""
    torch.manual_seed(0)
    given, (N, K) = inputs_of(case, tokens, device), case.shape
    copies = 2 + 3 * L2_BYTES // case.num_bytes if device.type == "cuda" else 1
    weights = torch.randn((copies, N, K), device=device).mul_(K**-0.5).to(DTYPE)
    launches = max(copies, LEAST_LAUNCHES) if device.type == "cuda" else 1
    pool, runs = pick_pool(None, device), list[Run]()
    arms = list(arms_of(case, tokens))
    expected = None
    for arm in arms:
        call = call_of(case, arm, given)
        out = call(weights[0]).float()
        expected = out if expected is None else expected
        error = float((out - expected).norm() / expected.norm())
        assert error < 1e-2, (case, tokens, arm, error)
        runs.append(captured(partial(run_all, call, weights, launches), pool))
    times = times_ms(runs, device, before=lambda: None, repeats=REPEATS)
    return {
        arm: 1000 * statistics.median(ms) / launches for arm, ms in zip(arms, times, strict=True)
    }


def run_all(call: Callable[[Tensor], Tensor], weights: Tensor, launches: int) -> None:
    for place in range(launches):
        call(weights[place % len(weights)])


def compile_all(cases: list[Case], tokens: list[int]) -> None:
    """Fill Triton's cache; a tile serves several numbers of tokens."""
    jobs: dict[tuple[Case, Arm], int] = {}
    for case in cases:
        for count in tokens:
            for arm in arms_of(case, count):
                jobs.setdefault((case, arm), count)
    workers = min(16, os.cpu_count() or 1)
    listed = [(case, arm, count) for (case, arm), count in jobs.items()]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(compile_some, [listed[first::workers] for first in range(workers)]))


@torch.inference_mode()
def compile_some(jobs: list[tuple[Case, Arm, int]]) -> None:
    device = pick_device()
    for case, arm, tokens in jobs:
        weight = torch.zeros(case.shape, dtype=DTYPE, device=device)
        call_of(case, arm, inputs_of(case, tokens, device))(weight)
    torch.cuda.synchronize()


HEADS = (
    "model",
    "op",
    "tokens",
    "MiB",
    "floor us",
    "cublas us",
    "two launches us",
    "one launch us",
    "GB/s",
    "gain us",
    "tile: tokens/rows/depth/warps/stages",
)


def row_of(case: Case, tokens: int, times: dict[Arm, float]) -> list[Cell]:
    """The best tile of each way; gain: over cuBLAS' way."""

    def least(way: str) -> tuple[float | None, str]:
        own = {arm: us for arm, us in times.items() if arm.way == way}
        arm = min(own, key=own.__getitem__, default=None)
        return (None, "") if arm is None else (own[arm], arm.name)

    cublas, two, one = (least(way) for way in ("cublas", "two launches", "one launch"))
    best_us, name = min((one, two), key=lambda found: found[0] or 1e9)
    assert best_us is not None
    assert cublas[0] is not None
    return [
        case.model,
        case.op,
        tokens,
        case.num_bytes / MIB,
        1e6 * case.num_bytes / PEAK,
        cublas[0],
        two[0],
        one[0],
        case.num_bytes / best_us / 1000,
        cublas[0] - best_us,
        name,
    ]


def best(found: list[dict[str, object]]) -> Iterator[list[Cell]]:
    """For each op and tile of tokens the three best tiles over all numbers of tokens that it is
    for, with their mean time in shares of the best at each."""

    def group(item: dict[str, object]) -> tuple[str, str, int]:
        tile = item["tile"]
        assert isinstance(tile, Tile)
        return str(item["model"]), str(item["op"]), tile.tokens

    tiled = sorted((item for item in found if item["tile"] is not None), key=group)
    for (model, op, tokens), items in groupby(tiled, key=group):
        shares: dict[str, list[float]] = {}
        for _, same in groupby(items, key=lambda item: item["tokens"]):
            times = {f"{item['way']} {item['tile'][1:]}": float(str(item["us"])) for item in same}  # type: ignore[index]
            for name, us in times.items():
                shares.setdefault(name, []).append(us / min(times.values()))
        means = sorted((statistics.mean(own), name) for name, own in shares.items())
        yield [model, op, tokens, *(f"{name}: {mean:.2f}" for mean, name in means[:3])]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["smol", "8b"])
    ops = ["heads", "out", "gated", "down"]
    parser.add_argument("--ops", nargs="+", choices=ops, default=ops)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--json", type=Path, help="file for all times")
    return parser.parse_args()


if __name__ == "__main__":
    main()
