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
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import (
    Arm,
    Cell,
    Pair,
    Tree,
    add_options,
    finish,
    headline,
    keep_state,
    make_engine,
    make_steady,
    open_pair,
    pick_device,
    pick_pool,
    save,
    shape_now,
    table,
    text_of,
    times_ms,
)

from ddbatch.core import Completion, EngineStats, Key, Sampling, TokenPrompt
from ddbatch.engine.engine import Engine
from ddbatch.engine.programs import GraphPool

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

# Ways of transformers, and their caches.
PEERS = {"transformers": None, "transformers, static cache, compiled on CUDA": "static"}
Outputs = list[tuple[int, ...]]


class Pass(NamedTuple):
    """One timed pass over all prompts. useful: of row-rounds while prompts waited, None where all
    prompts had a slot at once. useful, prefill: in %."""

    tokens_per_second: float
    seconds: float
    acceptance_length: float | None
    ms_per_round: float | None
    useful: float | None
    prefill: float | None
    outputs: Outputs


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
    model = load_transformers(args.target, pair) if args.transformers else None
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
    peers: dict[str, list[Pass]] = {} if model is None else {name: [] for name in PEERS}
    for repeat in range(args.repeats + 1):  # the first one warms up
        for engine, results in zip(engines, passes, strict=True):
            result = run_engine(engine, work, rows if args.calls else len(work))
            results += [result] if repeat else []
        for name, results in peers.items():
            result = run_transformers(model, few, rows, PEERS[name])
            results += [result] if repeat else []
    lines = [
        Line(arm.name, rows, results, time_round(engine, max_len))
        for arm, engine, results in zip(arms, engines, passes, strict=True)
    ]
    return lines + [Line(name, rows, results, None) for name, results in peers.items()]


def run_engine(engine: Engine, work: Sequence[TokenPrompt], call: int) -> Pass:
    """One pass, `call` prompts at a time; its results are read back, so the device is done when the
    clock stops."""
    before = replace(engine.stats)
    at_last: list[EngineStats] = []

    def prompts(first: int) -> Iterator[TokenPrompt]:
        yield from work[first : first + call]
        at_last.append(replace(engine.stats))  # a slot is free, and no prompt is left for it

    started = time.perf_counter()
    done = [
        item
        for first in range(0, len(work), call)
        for item in engine.run(prompts(first))
        if isinstance(item, Completion)
    ]
    seconds = time.perf_counter() - started
    assert len(done) == len(work), (len(done), len(work))
    done.sort(key=lambda completion: completion.key)
    tokens = sum(len(completion.token_ids) for completion in done)
    live = at_last[0].live_row_rounds - before.live_row_rounds
    # On CUDA the record of the last round launched was not read at that moment.
    unread = engine.plan.rows if engine.target.embed.is_cuda else 0
    row_rounds = at_last[0].row_rounds - before.row_rounds - unread
    return Pass(
        tokens / seconds,
        seconds,
        # The prompt's forward gives the first token.
        (tokens - len(done)) / sum(len(completion.accepted) for completion in done),
        1000 * seconds / (engine.stats.rounds - before.rounds),
        100 * live / row_rounds if row_rounds > 0 else None,
        100 * (engine.stats.prefill_seconds - before.prefill_seconds) / seconds,
        [completion.token_ids for completion in done],
    )


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


def load_transformers(folder: Path, pair: Pair) -> Any:
    """The same target in Hugging Face transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=pair.dtype, attn_implementation="sdpa"
    )
    return model.to(pair.device).eval()


@torch.inference_mode()
def run_transformers(model: Any, work: Sequence[TokenPrompt], rows: int, cache: str | None) -> Pass:
    """One pass of `generate` over full batches, padded on the left to one width; cache: which."""
    from transformers import GenerationConfig

    configure: Any = GenerationConfig  # its constructor has no hints
    stop, cap = work[0].sampling.stop_token_ids, work[0].max_new_tokens
    # Given to the model, not to the call: a call's None would mean the model's own stop token.
    model.generation_config = configure(
        do_sample=False,
        max_new_tokens=cap,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
        cache_implementation=cache,
    )
    width = max(len(prompt.token_ids) for prompt in work)
    outputs: Outputs = []
    started = time.perf_counter()
    for first in range(0, len(work), rows):
        batch = [prompt.token_ids for prompt in work[first : first + rows]]
        ids = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in batch])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch])
        made = model.generate(ids.to(model.device), attention_mask=mask.to(model.device))
        outputs += [cut(tuple(line), stop) for line in made[:, width:].tolist()]
    finish(model.device)
    seconds = time.perf_counter() - started
    return Pass(sum(map(len, outputs)) / seconds, seconds, None, None, None, None, outputs)


def cut(token_ids: tuple[int, ...], stop: tuple[int, ...]) -> tuple[int, ...]:
    """What stands up to the first stop token, that one included."""
    end = next((place for place, token in enumerate(token_ids) if token in stop), len(token_ids))
    return token_ids[: end + 1]


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
