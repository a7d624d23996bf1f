"""Measure the numerics rule on a pair: score errors, and partings of every method with what
explains them. Prints two Markdown tables.

    python tests/measure_numerics.py TARGET DRAFTER --dtype bfloat16 --prompts 500 --rows 128

Prompts are made from templates, the same ones each time. Every output token is held against the
draw of the float32 oracle's scores after the same tokens, not only the first that parts.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import get_args

import torch

from ddbatch.core import Completion, Key, Prompt, Sampling, ShapePlan, TokenPrompt
from ddbatch.data.batching.encoder import Encoded, PromptEncoder
from ddbatch.engine.engine import Engine
from ddbatch.engine.numerics import Parting, find_partings, measure_numerics
from ddbatch.engine.plan import Method, plan_cache, plan_shapes
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash, read_drafter_dims
from ddbatch.models.dims import DtypeName
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import load_drafter, load_target, set_numerics

TASKS = (
    "Explain {} to a child of ten.",
    "Write a short story about {}.",
    "List five facts about {} and say why each matters.",
    "What are common misconceptions about {}?",
    "Write a Python function that prints a table about {}.",
    "Summarise the history of {} in one paragraph.",
    "Give step by step instructions for a beginner who wants to learn about {}.",
    "Compare {} with something similar, in two paragraphs.",
    "Write a polite e-mail that asks an expert three questions about {}.",
    "Translate into French: I would like to know more about {}.",
    "Make a quiz of four questions about {}, with answers.",
    "Write a poem of eight lines about {}.",
    "Argue for and against spending public money on {}.",
    "Describe {} as JSON with the keys name, origin and uses.",
    "What would the world be like without {}?",
    "A train to a town known for {} leaves at 9:40 and takes 95 minutes. When does it arrive?",
    "Name three books or films about {} and what they get wrong.",
    "Write the opening scene of a play in which two friends disagree about {}.",
    "Which tools does one need for {}? Answer as a bulleted list.",
    "Write a product description that mentions {}.",
)
TOPICS = (
    "volcanoes", "sourdough bread", "prime numbers", "the Roman roads", "bees", "sailing ships",
    "black holes", "chess openings", "desert plants", "the printing press", "jazz", "glaciers",
    "vaccines", "bridges", "tea", "whales", "knitting", "compilers", "the metric system",
    "coral reefs", "steam engines", "origami", "solar panels", "medieval castles", "earthquakes",
)  # fmt: skip
ARMS: tuple[tuple[Method, int | None], ...] = (
    ("autoregressive", 0),
    ("chain", None),
    ("ddtree", 8),
    ("ddtree", 16),
    ("ddtree", 32),
    ("ddtree", 64),
)


@dataclass(frozen=True)
class Judged:
    """Completions of one arm, and for each of them its partings."""

    plan: ShapePlan
    done: list[Completion]
    partings: list[list[Parting]]
    seconds: float


def main() -> None:
    args = parse()
    set_numerics()
    device = torch.device(args.device)
    target, drafter = load_pair(args, device)
    sampling = Sampling(args.temperature, args.top_p, args.top_k, args.min_p, args.seed)
    prompts = made_prompts(args, sampling)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    print(
        f"{name}, torch {torch.__version__}, {args.dtype}, {len(prompts)} prompts, "
        f"{args.max_new_tokens} new tokens, rows {args.rows}, {sampling}\n"
    )
    gap = score_table(args, target, drafter)
    print(
        "\n| method | budget | tokens | acceptance length | completions equal to plain decoding | "
        f"partings from the oracle | explained | unexplained | largest slack (gap {gap:.3g}) |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    plain: list[tuple[int, ...]] = []
    for method, budget in ARMS[: args.arms]:
        judged = judge(args, target, drafter, prompts, method, budget)
        outputs = [completion.token_ids for completion in judged.done]
        plain = plain or outputs
        slacks = [parting.slack for found in judged.partings for parting in found]
        rounds = sum(len(completion.accepted) for completion in judged.done)
        tokens = sum(map(len, outputs))
        same = sum(ours == theirs for ours, theirs in zip(outputs, plain, strict=True))
        explained = sum(slack <= gap for slack in slacks)
        print(
            f"| {method} | {judged.plan.nodes - 1} | {tokens} | "
            f"{(tokens - len(outputs)) / rounds:.3f} | {same} of {len(outputs)} | {len(slacks)} | "
            f"{explained} | {len(slacks) - explained} | {max(slacks, default=0.0):.3g} |",
            flush=True,
        )


def score_table(args: argparse.Namespace, target: Target, drafter: DFlash) -> float:
    """Print the score errors of every method; the gap is the first one's (plain PyTorch has no
    method; the canaries are the method's own)."""
    print("| method | budget | plain PyTorch | engine | ratio | gap |\n" + "| --- " * 6 + "|")
    gap = 0.0
    for method, budget in ARMS[: args.arms]:
        plan = plan_of(args, target, drafter, method, budget)
        found = measure_numerics(target, drafter if plan.nodes > 1 else None, plan)
        gap = gap or found.gap
        ratio = found.engine / found.plain if found.plain else float("nan")
        print(
            f"| {method} | {plan.nodes - 1} | {found.plain:.2e} | {found.engine:.2e} | "
            f"{ratio:.2f} | {found.gap:.4f} |",
            flush=True,
        )
    return gap


def judge(
    args: argparse.Namespace,
    target: Target,
    drafter: DFlash,
    prompts: list[TokenPrompt],
    method: Method,
    budget: int | None,
) -> Judged:
    """Decode all prompts and hold every token against the oracle."""
    plan = plan_of(args, target, drafter, method, budget)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    engine = Engine(
        target,
        drafter if plan.nodes > 1 else None,
        plan,
        plan_cache(
            plan.rows,
            max_len=longest + args.max_new_tokens,
            page=None,
            device=target.embed.device.type,
        ),
    )
    started = time.perf_counter()
    done = [item for item in engine.run(iter(prompts)) if isinstance(item, Completion)]
    seconds = time.perf_counter() - started
    assert len(done) == len(prompts), "a row was rejected"
    done.sort(key=lambda completion: completion.key)
    partings = [
        find_partings(target, prompt, completion.token_ids)
        for prompt, completion in zip(prompts, done, strict=True)
    ]
    return Judged(plan, done, partings, seconds)


def plan_of(
    args: argparse.Namespace, target: Target, drafter: DFlash, method: Method, budget: int | None
) -> ShapePlan:
    return plan_shapes(
        method,
        budget=budget,
        topk=None,
        rows=args.rows,
        block=drafter.dims.block,
        vocab=target.dims.vocab,
        gemm_limit=None,
    )


def made_prompts(args: argparse.Namespace, sampling: Sampling) -> list[TokenPrompt]:
    """Prompts of every task about every topic, templated; the eos ids of the tokenizer stop."""
    encoder = PromptEncoder.from_folder(args.target, chat_template_kwargs=None, system_prompt=None)
    config = json.loads((args.target / "config.json").read_text())
    eos = config.get("eos_token_id")
    stops = () if args.ignore_eos or eos is None else (eos if isinstance(eos, list) else [eos])
    prompts = []
    for place, (topic, task) in enumerate(islice(product(TOPICS, TASKS), args.prompts)):
        prompt = Prompt(Key(place, 0, 0), text=task.format(topic))
        encoded = encoder.encode(
            prompt, vocab_size=config["vocab_size"], max_prompt_len=512, on_long="reject"
        )
        assert isinstance(encoded, Encoded), encoded
        own = Sampling(
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed,
            stop_token_ids=tuple(stops),
        )  # fmt: skip
        prompts.append(TokenPrompt(prompt.key, encoded.token_ids, args.max_new_tokens, own))
    return prompts


def load_pair(args: argparse.Namespace, device: torch.device) -> tuple[Target, DFlash]:
    target_dims, drafter_dims = read_target_dims(args.target), read_drafter_dims(args.drafter)
    positions = 512 + args.max_new_tokens + 128
    target = load_target(args.target, target_dims, args.dtype, device, positions)
    return target, load_drafter(args.drafter, drafter_dims, args.dtype, device, positions)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=get_args(DtypeName))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--arms", type=int, default=len(ARMS), help="only the first so many")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
