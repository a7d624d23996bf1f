"""Measure autoregressive, chain and DDTree decoding of one pair side by side; no test.

    python tests/measure_methods.py TARGET DRAFTER PROMPTS.jsonl [--dtype bfloat16] [--rows 1 8]

PROMPTS has one {"token_ids": [...]} or {"prompt": "..."} a line, the latter a chat's first turn in
the target's template; they are repeated up to --num-prompts. All arms of a number of rows share a
process; each has one engine, which is warmed by a pass, and then timed passes of the arms take
turns. A line gives the median of an arm's passes and their spread. Time is the whole of Engine.run:
prefill, rounds, drain and the collection of results. With --calls a call has as many prompts as
rows, and the next one waits for its last token. --transformers adds `generate` of Hugging Face
transformers on the same target, in full batches of as many rows, with its usual cache and with a
static one, for which it compiles the model on CUDA.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from measuring import Cell, add_options, headline, pick_device, save, table, text_of

from ddbatch.core import Key, Sampling, TokenPrompt
from ddbatch.engine.engine import Engine
from ddbatch.engine.programs import GraphPool
from ddbatch.jobs.benching.arms import Arm, Tree
from ddbatch.jobs.benching.calls import Pass, run_engine
from ddbatch.jobs.benching.engines import Pair, make_engine, open_pair, pick_pool
from ddbatch.jobs.benching.peers import load_transformers, run_transformers, transformers_ways
from ddbatch.jobs.benching.steady import keep_state, make_steady, shape_now, times_ms

HEADS = (
    "method",
    "rows",
    "prompts",
    "tokens/s (min-max)",
    "against autoregressive",
    "acceptance length",
    "ms a round",
    "device ms a round",
    "useful row-rounds % while prompts wait",
    "prefill, % of the time",
    "outputs equal to autoregressive",
)


class Line(NamedTuple):
    """All passes of a method at a number of rows."""

    method: str
    rows: int
    passes: list[Pass]
    device_ms: float | None

    @property
    def rates(self) -> list[float]:
        return [item.tokens_per_second for item in self.passes]


def main() -> None:
    args = parse()
    device = pick_device()
    prompts = read_prompts(args.prompts, args.target)
    max_len = max(map(len, prompts)) + args.max_new_tokens
    pair = open_pair(args.target, args.drafter, args.dtype, device, max_len)
    model = load_transformers(args.target, pair.dtype, device) if args.transformers else None
    pool = pick_pool(args.capture, device)
    print(headline(pair))
    print(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, "
        f"repeated; {args.max_new_tokens} new tokens, stop {args.stop or 'nowhere'}, greedy; "
        f"median of {args.repeats} passes\n"
    )
    lines: list[Line] = []
    for rows in args.rows:
        count = args.num_prompts or max(8, rows if args.calls else 4 * rows)
        work = [
            TokenPrompt(
                Key(place, 0, 0),
                ids,
                args.max_new_tokens,
                Sampling(stop_token_ids=tuple(args.stop)),
            )
            for place, ids in enumerate(islice(cycle(prompts), count))
        ]
        lines += measure_rows(args, pair, model, pool, work, rows, max_len)
        numbers = [numbers_of(line) for line in lines]
        save(args.json, {"headline": headline(pair), "lines": numbers})
    print(table(HEADS, rows_of(lines)))


def read_prompts(path: Path, target: Path) -> list[tuple[int, ...]]:
    """Token ids of the prompts of a file."""
    lines = [json.loads(line) for line in path.open(encoding="utf-8")]
    if all("token_ids" in line for line in lines):
        return [tuple(line["token_ids"]) for line in lines]
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    chats = [[{"role": "user", "content": line["prompt"]}] for line in lines]
    made = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return [tuple(ids) for ids in made["input_ids"]]


def measure_rows(
    args: argparse.Namespace,
    pair: Pair,
    model: Any,
    pool: GraphPool | None,
    work: Sequence[TokenPrompt],
    rows: int,
    max_len: int,
) -> list[Line]:
    """Passes of every method, in turns; autoregressive comes first."""
    arms = [Arm("autoregressive", None, rows), Arm("chain", None, rows)]
    arms += [Arm("ddtree", tree.budget, rows, tree.block) for tree in args.budgets]
    engines = [make_engine(pair, arm, max_len, pool) for arm in arms]
    few = work[: rows * args.transformers_batches]
    passes: list[list[Pass]] = [[] for _ in arms]
    ways = {} if model is None else transformers_ways(pair.device)
    peers: dict[str, list[Pass]] = {name: [] for name in ways}
    for repeat in range(args.repeats + 1):  # the first one warms up
        for engine, results in zip(engines, passes, strict=True):
            result = run_engine(engine, work, rows if args.calls else len(work))
            results += [result] if repeat else []
        for name, results in peers.items():
            result = run_transformers(model, few, rows, ways[name])
            results += [result] if repeat else []
    lines = [
        Line(arm.name, rows, results, time_round(engine, max_len))
        for arm, engine, results in zip(arms, engines, passes, strict=True)
    ]
    return lines + [Line(name, rows, results, None) for name, results in peers.items()]


def time_round(engine: Engine, max_len: int) -> float:
    """Milliseconds of a round alone, all rows live in the middle of their sequences, on CUDA of the
    device: the median of some repeats. The engine is of no use afterwards."""
    own = Sampling()
    make_steady(engine, max_len // 2, max_len - max_len // 2, own)
    program, shape = engine.programs, shape_now(engine, own)
    restore = keep_state(engine.state)
    (times,) = times_ms(
        [lambda: program.round(shape)],
        engine.target.embed.device,
        before=restore,
        repeats=20,
    )
    return statistics.median(times)


def same_outputs(line: Line, lines: Sequence[Line]) -> int:
    """Outputs that are autoregressive decoding's at the same rows."""
    plain = next(other for other in lines if other.rows == line.rows)
    pairs = zip(line.passes[0].outputs, plain.passes[0].outputs, strict=False)
    return sum(ours == theirs for ours, theirs in pairs)


def rows_of(lines: Sequence[Line]) -> Iterator[list[Cell]]:
    """The table."""
    for line in lines:
        plain = next(other for other in lines if other.rows == line.rows)
        rate, count = statistics.median(line.rates), len(line.passes[0].outputs)
        low, middle, high = map(text_of, (min(line.rates), rate, max(line.rates)))
        spread = f"{middle} ({low}-{high})"
        gain = f"{rate / statistics.median(plain.rates):.2f}"
        yield [
            line.method,
            line.rows,
            count,
            spread,
            gain,
            median(item.acceptance_length for item in line.passes),
            median(item.ms_per_round for item in line.passes),
            line.device_ms,
            median(item.useful for item in line.passes),
            median(item.prefill for item in line.passes),
            f"{same_outputs(line, lines)} of {count}",
        ]


def median(values: Iterator[float | None]) -> float | None:
    """None where there is nothing."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def numbers_of(line: Line) -> dict[str, object]:
    """What the table is made of."""
    passes = [item._asdict() | {"outputs": len(item.outputs)} for item in line.passes]
    return line._asdict() | {"passes": passes}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    add_options(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    usual = [Tree(8), Tree(16), Tree(32)]
    own = "a tree, its draft over the first BLOCK positions alone"
    parser.add_argument(
        "--budgets", type=Tree.parse, nargs="*", default=usual, metavar="BUDGET[/BLOCK]", help=own
    )
    parser.add_argument("--num-prompts", type=int, help="default: 4 a row, at least 8")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--stop", type=int, nargs="*", default=[2], help="none: to the cap")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--calls", action="store_true", help="as many prompts a call as rows")
    parser.add_argument("--transformers", action="store_true", help="add its generate")
    parser.add_argument("--transformers-batches", type=int, default=2, help="a pass")
    return parser.parse_args()


if __name__ == "__main__":
    main()
