"""Device times of rounds, their verify stage and prefill against what hardware allows; no test.

Sums in any order and in order (engine.reproducible) stand side by side; on a CPU they are one.

    python tests/measure_rounds.py --random 8b --context 1024 --arms 1x0 8x0 64x0 128x8 16x64 8x15
    python tests/measure_rounds.py --pair TARGET DRAFTER --prefill 64x50 64x300
    python tests/measure_rounds.py --random 8b --calls 1x0 1x15 8x0 8x15 --coin 0.68

An arm is ROWSxBUDGET or ROWSxBUDGET/BLOCK, the latter with drafts of BLOCK positions; budget 0 is
plain decoding. All rows are live, with random prompts of --context tokens. A round is a replay of
one graph from the same state each time. A prefill is COUNTxTOKENS prompts into an empty engine, in
calls that take all of them or are as large as calls get: from the first upload to the end of the
device's work, and what the host takes of that. A floor is the time of the bytes that must be read
once, or of the arithmetic, at rates measured in the same run. A call is whole: ROWS prompts, 256
new tokens each; with --coin acceptance is synthetic
(ddbatch/jobs/benching/coin.py), and a draft is a path.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
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

from ddbatch.core import Key, Sampling, TokenPrompt
from ddbatch.engine.plan import CHUNK, MAX_CHUNKS
from ddbatch.engine.programs import GraphPool
from ddbatch.jobs.benching.arms import Arm, Tree
from ddbatch.jobs.benching.calls import run_engine
from ddbatch.jobs.benching.engines import Pair, make_engine, open_pair, pick_pool
from ddbatch.jobs.benching.rates import Rates, measure_rates, works_of
from ddbatch.jobs.benching.steady import (
    captured,
    finish,
    keep_state,
    make_steady,
    run_stages,
    shape_now,
    times_ms,
)
from ddbatch.models.decoder import DecoderLayer, Target

REPEATS = 20
NEW = 256  # tokens of a sequence in a call
ROUND_HEADS = (
    "rows",
    "method",
    "tokens",
    "round ms",
    "floor ms",
    "of the floor",
    "verify ms",
    "floor ms",
    "of the floor",
    "in order: round ms",
    "cost %",
)
CALL_HEADS = ("rows", "method", "tokens/s (min-max)", "against plain", "acceptance length", "coin")
PREFILL_HEADS = (
    "prompts",
    "tokens each",
    "ms",
    "ms a prompt",
    "host ms",
    "floor ms",
    "of the floor",
)


class Prompts(NamedTuple):
    """So many prompts of so many tokens."""

    count: int
    tokens: int


class Times(NamedTuple):
    """Medians, milliseconds."""

    round: float
    verify: float
    floor: float
    verify_floor: float


def main() -> None:
    args = parse()
    device = pick_device()
    most = max((size.tokens for size in args.prefill), default=0)
    length = max(args.context, most) + 600
    if args.random is not None:
        pair = random_pair(args.random, device, length)
    else:
        pair = open_pair(args.pair[0], args.pair[1], args.dtype, device, length)
    rates, pool = measure_rates(pair.device, pair.dtype), pick_pool(args.capture, device)
    print(headline(pair))
    print(f"Context {args.context}. Measured: {rates}.\n")
    rounds, prefills, calls = [], [], []
    for arm in args.arms:
        orders = [False, True] if args.in_order else [False]
        rounds.append((arm, [time_arm(args, pair, arm, pool, rates, o) for o in orders]))
        save(args.json, {"rounds": rounds, "prefills": prefills})
    for size in args.prefill:
        prefills.append((size, time_prefill(pair, size, length, pool)))
        save(args.json, {"rounds": rounds, "prefills": prefills})
    for arm in args.calls:
        calls.append((arm, run_calls(args, pair, arm, pool)))
        save(args.json, {"rounds": rounds, "prefills": prefills, "calls": calls})
    print(table(ROUND_HEADS, (round_row(*item) for item in rounds)))
    print(table(PREFILL_HEADS, prefill_rows(pair, rates, prefills)))
    print(table(CALL_HEADS, call_rows(calls, args.coin)))


def sum_in_order(target: Target, *, in_order: bool) -> None:
    """From now on, of graphs that are captured from now on."""
    target.in_order = in_order
    for layer in target.layers:
        assert isinstance(layer, DecoderLayer)
        layer.in_order = in_order


@torch.inference_mode()
def time_arm(
    args: argparse.Namespace,
    pair: Pair,
    arm: Arm,
    pool: GraphPool | None,
    rates: Rates,
    in_order: bool,
) -> Times:
    """A round and its verify stage."""
    sum_in_order(pair.target, in_order=in_order)
    cap, own = 512, Sampling()
    engine = make_engine(pair, arm, args.context + cap, pool)
    make_steady(engine, args.context, cap, own)
    shape, restore = shape_now(engine, own), keep_state(engine.state)
    verify = captured(run_stages(engine, shape)["verify"], pool)
    restore()
    runs = [lambda: engine.programs.round(shape), verify]
    found = times_ms(runs, pair.device, before=restore, repeats=REPEATS)
    works = works_of(engine, args.context)
    return Times(
        statistics.median(found[0]),
        statistics.median(found[1]),
        sum(work.floor_ms(rates) for work in works.values()),
        sum(work.floor_ms(rates) for (stage, _), work in works.items() if stage == "verify"),
    )


def time_prefill(
    pair: Pair, size: Prompts, length: int, pool: GraphPool | None
) -> tuple[float, float]:
    """Milliseconds of prompts into an empty engine, and of the host's work in it."""
    count, tokens = size
    sum_in_order(pair.target, in_order=False)
    # Calls that take all of it, if one can.
    chunks = min(MAX_CHUNKS["cuda"], count * -(-tokens // CHUNK["cuda"]))
    engine = make_engine(pair, Arm("ddtree", 15, max(8, count)), length, pool, chunks=chunks)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(pair.target.dims.vocab, (count, tokens), generator=generator).tolist()
    prompts = [
        TokenPrompt(Key(row, 0, 0), tuple(line), 9, Sampling()) for row, line in enumerate(ids)
    ]
    found = []
    for repeat in range(6):
        engine.reset()
        finish(pair.device)
        started = time.perf_counter()
        engine.fill(iter(prompts))
        launched = time.perf_counter()
        finish(pair.device)
        if repeat:  # the first one captures
            found.append((1000 * (time.perf_counter() - started), 1000 * (launched - started)))
    return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


def run_calls(
    args: argparse.Namespace, pair: Pair, arm: Arm, pool: GraphPool | None
) -> list[tuple[float, float]]:
    """Tokens a second and acceptance length of a few calls."""
    rows = arm.rows
    sum_in_order(pair.target, in_order=False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(pair.target.dims.vocab, (rows, args.context), generator=generator).tolist()
    work = [TokenPrompt(Key(n, 0, 0), tuple(line), NEW, Sampling()) for n, line in enumerate(ids)]
    # Scores of random weights make flat trees; a path of as many nodes costs as much, and is deep.
    has_coin = args.coin and arm.budget
    arm = arm._replace(method="chain") if has_coin else arm
    coin = args.coin if has_coin else None
    engine = make_engine(pair, arm, args.context + NEW, pool, coin=coin)
    passes = [run_engine(engine, work, rows) for _ in range(4)]
    return [(item.tokens_per_second, item.acceptance_length or 0.0) for item in passes[1:]]


def call_rows(
    calls: list[tuple[Arm, list[tuple[float, float]]]], coin: float | None
) -> Iterator[list[Cell]]:
    """Against plain decoding at the same rows, where that was asked for."""
    middle = {arm: statistics.median(rate for rate, _ in found) for arm, found in calls}
    for arm, found in calls:
        rates = [rate for rate, _ in found]
        plain = middle.get(parse_arm(f"{arm.rows}x0"))
        yield [
            arm.rows,
            arm.name,
            f"{middle[arm]:.0f} ({min(rates):.0f}-{max(rates):.0f})",
            None if plain is None else middle[arm] / plain,
            statistics.median(length for _, length in found),
            f"synthetic, {coin}" if coin and arm.budget else None,
        ]


def round_row(arm: Arm, found: list[Times]) -> list[Cell]:
    """A line of the table."""
    usual, ordered = found[0], found[-1].round if len(found) > 1 else None
    return [
        arm.rows,
        arm.name,
        arm.rows * ((arm.budget or 0) + 1),
        usual.round,
        usual.floor,
        usual.round / usual.floor,
        usual.verify,
        usual.verify_floor,
        usual.verify / usual.verify_floor,
        ordered,
        None if ordered is None else 100 * (ordered / usual.round - 1),
    ]


def prefill_rows(
    pair: Pair, rates: Rates, prefills: list[tuple[Prompts, tuple[float, float]]]
) -> Iterator[list[Cell]]:
    """The floor is that of the products of target and drafter with as many tokens."""
    weights = sum(weight.numel() for weight in pair.target.layers.parameters())
    weights += pair.drafter.fuse.weight.numel()
    for (count, tokens), (ms, host) in prefills:
        floor = 1000 * 2 * weights * count * tokens / rates.matmul
        yield [count, tokens, ms, ms / count, host, floor, ms / floor]


def parse_arm(text: str) -> Arm:
    """ROWSxBUDGET or ROWSxBUDGET/BLOCK."""
    rows, _, tree = text.partition("x")
    if not rows.isdecimal() or not int(rows) or not tree.replace("/", "").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: ROWSxBUDGET[/BLOCK] with a row or more")
    budget, block = Tree.parse(tree)
    return Arm("ddtree" if budget else "autoregressive", budget or None, int(rows), block)


def parse_prompts(text: str) -> Prompts:
    """COUNTxTOKENS."""
    return Prompts(*map(int, text.split("x")))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    pair = parser.add_mutually_exclusive_group(required=True)
    pair.add_argument("--pair", type=Path, nargs=2, metavar=("TARGET", "DRAFTER"))
    pair.add_argument("--random", choices=RANDOM_SHAPES, help="random weights in this shape")
    add_options(parser)
    parser.add_argument("--context", type=int, default=1024)
    arms = {"type": parse_arm, "nargs": "*", "default": [], "metavar": "ROWSxBUDGET[/BLOCK]"}
    parser.add_argument("--arms", **arms)
    parser.add_argument("--calls", **arms)
    parser.add_argument(
        "--in-order", action=argparse.BooleanOptionalAction, default=True, help="the last columns"
    )
    parser.add_argument("--coin", type=float, help="share of positions whose draft is accepted")
    parser.add_argument(
        "--prefill", type=parse_prompts, nargs="*", default=[], metavar="COUNTxTOKENS"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
