"""Measure autoregressive, chain and DDTree decoding of one pair side by side; no test.

    python tests/measure_methods.py TARGET DRAFTER PROMPTS.jsonl [--dtype bfloat16] [--rows 1 8]

PROMPTS has one {"token_ids": [...]} a line. All arms run in one process, interleaved, after a
warm-up of each; a line gives the median of the repeats and their spread. Time is the whole of
Engine.run: prefill, rounds, drain and the collection of results.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import NamedTuple, get_args

import torch

from ddbatch.core import Completion, Key, Sampling, TokenPrompt
from ddbatch.engine.engine import Engine
from ddbatch.engine.plan import Method, plan_cache, plan_shapes
from ddbatch.models.dflash import read_drafter_dims
from ddbatch.models.dims import DtypeName
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import check_pair, choose_dtype, load_drafter, load_target, set_numerics


class Arm(NamedTuple):
    """One column of the comparison."""

    method: Method
    budget: int | None
    rows: int


class Pass(NamedTuple):
    """One timed pass of an arm over all prompts."""

    tokens_per_second: float
    acceptance_length: float
    ms_per_round: float
    outputs: list[tuple[int, ...]]


def main() -> None:
    args = parse()
    set_numerics()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target_dims, drafter_dims = read_target_dims(args.target), read_drafter_dims(args.drafter)
    check_pair(target_dims, drafter_dims, None)
    dtype = choose_dtype(args.dtype, target_dims, device)
    prompts = [tuple(json.loads(line)["token_ids"]) for line in args.prompts.open()]
    max_len = max(map(len, prompts)) + args.max_new_tokens
    target = load_target(args.target, target_dims, dtype, device, max_len + drafter_dims.block)
    drafter = load_drafter(args.drafter, drafter_dims, dtype, device, max_len + drafter_dims.block)
    methods: list[tuple[Method, int | None]] = [("autoregressive", None), ("chain", None)]
    methods += [("ddtree", budget) for budget in args.budgets]
    arms = [Arm(method, budget, rows) for rows in args.rows for method, budget in methods]

    def run(arm: Arm) -> Pass:
        plan = plan_shapes(
            arm.method,
            budget=arm.budget,
            topk=None,
            rows=arm.rows,
            block=drafter_dims.block,
            vocab=target_dims.vocab,
            gemm_limit=None,
            device=device.type,
        )
        cache_plan = plan_cache(arm.rows, max_len=max_len, page=None, device=device.type)
        engine = Engine(
            target,
            drafter if plan.nodes > 1 else None,
            plan,
            cache_plan,
            max_new_tokens=args.max_new_tokens,
        )
        return timed(
            engine, prompts, args.max_new_tokens, Sampling(stop_token_ids=tuple(args.stop))
        )

    passes: dict[Arm, list[Pass]] = {arm: [] for arm in arms}
    for repeat in range(args.repeats + 1):  # the first round is the warm-up
        for arm in arms:
            result = run(arm)
            if repeat:
                passes[arm].append(result)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    print(
        f"{gpu or device}, torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}, "
        f"{len(prompts)} prompts, {args.max_new_tokens} new tokens, stop {args.stop}, "
        f"median of {args.repeats}"
    )
    print(
        "| method | budget | rows | tokens/s (min-max) | acceptance length | ms a round | "
        "outputs equal to autoregressive |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    plain = passes[arms[0]][0].outputs
    for arm, results in passes.items():
        rates = [result.tokens_per_second for result in results]
        same = sum(ours == theirs for ours, theirs in zip(results[0].outputs, plain, strict=True))
        print(
            f"| {arm.method} | {'' if arm.budget is None else arm.budget} | {arm.rows} | "
            f"{statistics.median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f}) | "
            f"{results[0].acceptance_length:.3f} | "
            f"{statistics.median(result.ms_per_round for result in results):.2f} | "
            f"{same} of {len(plain)} |"
        )


def timed(
    engine: Engine, prompts: list[tuple[int, ...]], max_new_tokens: int, own: Sampling
) -> Pass:
    work = [
        TokenPrompt(Key(place, 0, 0), ids, max_new_tokens, own) for place, ids in enumerate(prompts)
    ]
    started = time.perf_counter()
    done = [item for item in engine.run(iter(work)) if isinstance(item, Completion)]
    seconds = time.perf_counter() - started  # results were read back, so the device is done
    done.sort(key=lambda completion: completion.key)
    tokens = sum(len(completion.token_ids) for completion in done)
    rounds = sum(len(completion.accepted) for completion in done)
    return Pass(
        tokens / seconds,
        (tokens - len(done)) / rounds,
        1000 * seconds / engine.stats.rounds,
        [completion.token_ids for completion in done],
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--dtype", default="auto", choices=["auto", *get_args(DtypeName)])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--stop", type=int, nargs="*", default=[2])
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
