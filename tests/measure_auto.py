"""Measure engine.budget=auto against every fixed plan, and a whole run with its drain; no test.

    python tests/measure_auto.py --pair TARGET DRAFTER --prompts PROMPTS.jsonl --rows 1 8 64
    python tests/measure_auto.py --random 8b --coin 0.66 --rows 1 8 32 128
    python tests/measure_auto.py --pair TARGET DRAFTER --prompts PROMPTS.jsonl --rows 64 --run 2000

For each number of rows, arms are plain decoding, chains and trees of the node counts --nodes, each
with one engine of one plan, and auto: planned, measured and piloted as job=generate does it,
without the gate and audits. A pass is --num-prompts prompts a row with refill, prefill and drain.
Short passes warm arms up; those that are slower than --least of the best then are named and left
out. Auto explores in --warm passes; then passes of the arms take turns. With --run it is one pass
over so many prompts whose lengths are skewed (log-normal caps, stops ignored): tokens/s of the
whole against the rate while prompts wait. With --coin acceptance is synthetic, and drafts are
paths: trees of random weights are flat.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
from decoding import NoStops
from measure_methods import read_prompts
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

from ddbatch.core import Completion, EngineStats, Key, Sampling, TokenPrompt
from ddbatch.data.folder import RunFolder
from ddbatch.engine.engine import Engine
from ddbatch.engine.plan import Method
from ddbatch.engine.programs import GraphPool
from ddbatch.engine.sampling import DrawKind
from ddbatch.jobs.benching.arms import Arm
from ddbatch.jobs.benching.engines import Pair, make_engine, open_pair, pick_pool, toss_coins
from ddbatch.jobs.generating.making import ServeOptions
from ddbatch.jobs.generating.planning import Wish
from ddbatch.jobs.generating.serving import EngineDecoder
from ddbatch.jobs.generating.trials import Trials

SHORT = 48  # new tokens of the passes that leave arms out
NODES = (2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65)
ALL: tuple[Method, ...] = ("ddtree", "chain", "autoregressive")
PATHS: tuple[Method, ...] = ("chain", "autoregressive")
HEADS = ("rows", "arm", "tokens/s (min-max)", "against plain", "auto against it", "acceptance")
RUN_HEADS = (
    "rows",
    "arm",
    "tokens/s (min-max)",
    "while prompts wait",
    "whole / waiting",
    "seconds",
    "of them after the last was seated",
    "plans used",
)


class Pass(NamedTuple):
    """Tokens a second of all and while prompts waited; seconds; those of the drain."""

    rate: float
    waiting_rate: float
    seconds: float
    drain: float
    acceptance: float


class Server(NamedTuple):
    """What is measured."""

    name: str
    driver: Engine | EngineDecoder

    @property
    def stats(self) -> EngineStats:
        driver = self.driver
        return replace(driver.figures if isinstance(driver, EngineDecoder) else driver.stats)


def main() -> None:
    args = parse()
    device = pick_device()
    prompts = None if args.prompts is None else read_prompts(args.prompts, args.pair[0])
    longest = args.context if prompts is None else max(map(len, prompts))
    max_len = longest + args.max_new_tokens
    if args.random is not None:
        pair = random_pair(args.random, device, max_len + 64)
    else:
        pair = open_pair(args.pair[0], args.pair[1], args.dtype, device, max_len + 64)
    if prompts is None:
        generator = torch.Generator().manual_seed(0)
        shape = (64, args.context)
        ids = torch.randint(pair.target.dims.vocab, shape, generator=generator).tolist()
        prompts = [tuple(line) for line in ids]
    pool = pick_pool(args.capture, device)
    print(headline(pair))
    coin = "" if args.coin is None else f"; synthetic acceptance, coin {args.coin}"
    print(f"Prompts of {min(map(len, prompts))} to {longest} tokens, greedy{coin}.\n")
    rows_of_table: list[list[Cell]] = []
    for rows in args.rows:
        measure = measure_run if args.run else measure_rows
        rows_of_table += measure(args, pair, pool, prompts, rows, max_len)
        print(table(RUN_HEADS if args.run else HEADS, rows_of_table), flush=True)
        save(args.json, rows_of_table)


def auto_server(
    pair: Pair,
    rows: int,
    max_len: int,
    pool: GraphPool | None,
    count: int,
    folder: Path,
    coin: float | None,
) -> Server:
    """Auto as job=generate has it, without gate and audits."""
    assert pair.drafter is not None
    wish = Wish(
        methods=ALL if coin is None else PATHS,
        budget=None,
        topk=None,
        rows=rows,
        block=pair.drafter.dims.block,
        vocab=pair.target.dims.vocab,
        limit=None,
        device=pair.device.type,
        has_ladder=True,
    )
    options = ServeOptions(
        page=None,
        is_captured=pool is not None,
        is_gated=False,
        may_fall_back=False,
        audit_rate=0.0,
        top_logprobs=None,
        sampling=Sampling(),
        least_draw=DrawKind.GREEDY,
    )
    trials = Trials(RunFolder(folder), f"rows{rows}")
    decoder = EngineDecoder(
        pair.target, pair.drafter, wish, count, None, NoStops(), trials, options, {}
    )
    started = time.perf_counter()
    decoder.grow(max_len)
    assert decoder.engine is not None
    if coin is not None:
        toss_coins(decoder.engine, coin, pool)
    print(f"rows {rows}: planned and measured in {time.perf_counter() - started:.1f} s", flush=True)
    return Server("auto", decoder)


def fixed_servers(
    args: argparse.Namespace, pair: Pair, rows: int, max_len: int, pool: GraphPool | None
) -> Iterator[Server]:
    """Engines of one plan, plain decoding first."""
    arms = [Arm("autoregressive", None, rows)]
    if not args.run:
        arms += [Arm("chain", budget, rows) for budget in args.chains]
        method: Method = "ddtree" if args.coin is None else "chain"
        arms += [Arm(method, nodes - 1, rows) for nodes in args.nodes]
    for arm in arms:
        yield Server(arm.name, make_engine(pair, arm, max_len, pool, coin=args.coin))


def measure_rows(
    args: argparse.Namespace,
    pair: Pair,
    pool: GraphPool | None,
    prompts: Sequence[tuple[int, ...]],
    rows: int,
    max_len: int,
) -> list[list[Cell]]:
    """Passes of every arm, in turns."""
    count = max(args.least_prompts, args.num_prompts * rows)
    own = Sampling(stop_token_ids=tuple(args.stop))
    work = [
        TokenPrompt(Key(place, 0, 0), ids, args.max_new_tokens, own)
        for place, ids in enumerate(islice(cycle(prompts), count))
    ]
    found: dict[str, list[Pass]] = {}
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:
        auto = auto_server(
            pair, rows, max_len, pool, (args.warm + args.repeats) * count, Path(folder), args.coin
        )
        for _ in range(args.warm):
            run(auto, work)
        best = 0.0
        for server in fixed_servers(args, pair, rows, max_len, pool):
            run(server, [replace(prompt, max_new_tokens=8) for prompt in work[:rows]])
            rate = run(
                server,
                [replace(p, max_new_tokens=min(SHORT, p.max_new_tokens)) for p in work[:rows]],
            ).rate
            best = max(best, rate)
            if server.name == "autoregressive" or rate >= args.least * best:
                servers.append(server)
            else:
                print(f"  {server.name}: {rate / best:.2f} of the best, left out", flush=True)
        servers.insert(0, auto)
        for _ in range(args.repeats):
            for server in servers:
                found.setdefault(server.name, []).append(run(server, work))
    assert isinstance(auto.driver, EngineDecoder)
    print(f"  auto: {auto.driver.choice}", flush=True)
    for plan, rounds in sorted(auto.driver.rounds.items(), key=lambda item: -item[1]):
        print(f"    {rounds} rounds of {plan}", flush=True)
    middle = {name: statistics.median(p.rate for p in passes) for name, passes in found.items()}
    return [
        [
            rows,
            name,
            spread([p.rate for p in passes]),
            middle[name] / middle["autoregressive"],
            middle["auto"] / middle[name],
            statistics.median(p.acceptance for p in passes),
        ]
        for name, passes in found.items()
    ]


def measure_run(
    args: argparse.Namespace,
    pair: Pair,
    pool: GraphPool | None,
    prompts: Sequence[tuple[int, ...]],
    rows: int,
    max_len: int,
) -> list[list[Cell]]:
    """Whole runs over prompts of skewed lengths, with and without a ladder."""
    chance = random.Random(0)
    caps = [
        min(args.max_new_tokens, max(8, int(chance.lognormvariate(5.0, 0.9))))
        for _ in range(args.run)
    ]
    work = [
        TokenPrompt(Key(place, 0, 0), ids, cap, Sampling())
        for place, (ids, cap) in enumerate(zip(cycle(prompts), caps, strict=False))
    ]
    print(
        f"caps: mean {statistics.mean(caps):.0f}, median {statistics.median(caps):.0f}", flush=True
    )
    found: dict[str, list[Pass]] = {}
    with tempfile.TemporaryDirectory() as folder:
        auto = auto_server(
            pair, rows, max_len, pool, (1 + args.repeats) * len(work), Path(folder), args.coin
        )
        run(auto, work[: max(64, rows)])  # what it explores is measured below too
        (plain,) = fixed_servers(args, pair, rows, max_len, pool)
        assert isinstance(auto.driver, EngineDecoder)
        assert isinstance(plain.driver, Engine)
        engine = auto.driver.engine
        assert engine is not None
        servers = [auto]
        for plan in [plan for plan in engine.plans if plan.rows == rows]:
            arm = Arm("ddtree", plan.nodes - 1, rows, plan.block)
            if plan.nodes == 1:
                servers.append(plain)
            elif plan.topk > 1 or plan.nodes == 2:
                servers.append(Server(f"fixed {arm.name}", make_engine(pair, arm, max_len, pool)))
        for server in servers[1:]:
            run(server, work[: max(64, rows)])
        for _ in range(args.repeats):
            for server in servers:
                found.setdefault(server.name, []).append(run(server, work))
        used = {plan: count for plan, count in auto.driver.rounds.items() if count}
    text = ", ".join(f"{p.rows}x{p.nodes}/{p.block}: {n}" for p, n in used.items())
    return [
        [
            rows,
            name,
            spread([p.rate for p in passes]),
            statistics.median(p.waiting_rate for p in passes),
            statistics.median(p.rate / p.waiting_rate for p in passes),
            statistics.median(p.seconds for p in passes),
            statistics.median(p.drain for p in passes),
            text if name == "auto" else None,
        ]
        for name, passes in found.items()
    ]


def run(server: Server, work: Sequence[TokenPrompt]) -> Pass:
    """One pass."""
    driver, before = server.driver, server.stats
    at_last: list[tuple[float, int]] = []

    def prompts() -> Iterator[TokenPrompt]:
        yield from work
        at_last.append((time.perf_counter(), server.stats.output_tokens))

    waiting, done = prompts(), list[Completion]()
    started = time.perf_counter()
    while True:
        driver.fill(waiting)
        if not driver.is_busy:
            break
        driver.step()
        done += [item for item in driver.collect() if isinstance(item, Completion)]
    seconds = time.perf_counter() - started
    assert len(done) == len(work), (len(done), len(work))
    tokens = sum(len(item.token_ids) for item in done)
    last, at = at_last[0]
    rounds = sum(len(item.accepted) for item in done)
    return Pass(
        tokens / seconds,
        (at - before.output_tokens) / (last - started),
        seconds,
        seconds - (last - started),
        (tokens - len(done)) / max(1, rounds),
    )


def spread(rates: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    pair = parser.add_mutually_exclusive_group(required=True)
    pair.add_argument("--pair", type=Path, nargs=2, metavar=("TARGET", "DRAFTER"))
    pair.add_argument("--random", choices=RANDOM_SHAPES, help="random weights in this shape")
    add_options(parser)
    parser.add_argument("--prompts", type=Path, help="as of measure_methods.py; needs --pair")
    parser.add_argument("--context", type=int, default=512, help="tokens of random prompts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--nodes", type=int, nargs="*", default=list(NODES), help="trees' nodes")
    parser.add_argument("--chains", type=int, nargs="*", default=[2, 4, 8, 15], help="budgets")
    parser.add_argument("--num-prompts", type=int, default=3, help="a row")
    parser.add_argument("--least-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--stop", type=int, nargs="*", default=[2], help="none: to the cap")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="passes of auto before it counts")
    parser.add_argument("--least", type=float, default=0.8)
    parser.add_argument("--coin", type=float, help="share of positions whose draft is accepted")
    parser.add_argument("--run", type=int, help="prompts of whole runs with skewed lengths")
    return parser.parse_args()


if __name__ == "__main__":
    main()
