"""Times of the head and of what works on its scores: best tokens, candidates, draws; no test.

    python tests/measure_scores.py [--models smol 8b] [--nodes 1 72 128 288 1152]

Each op is measured as a graph of launches one after the other, over scores that no cache holds
where they are many. Times are medians of replays, a launch's share, in microseconds. Floor: the
bytes of the scores, read once (of the head: its weight read and the scores written, or the
arithmetic), at 4.2 TB/s and 790 TFLOP/s. Draws: temperature 1 alone, and with top_k and top_p.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measuring import Cell, pick_device, save, table
from torch import Tensor

from ddbatch.jobs.benching.engines import pick_pool
from ddbatch.jobs.benching.steady import Run, captured, times_ms
from ddbatch_kernels.best_token import best_token
from ddbatch_kernels.keyed_draw import DrawParams, keyed_draw
from ddbatch_kernels.linear_float32 import linear_float32
from ddbatch_kernels.top_candidates import top_candidates

PEAK_BYTES, PEAK_FLOPS = 4.2e12, 790e12  # a second, of an H200
L2_BYTES = 60 << 20
LAUNCHES, REPEATS, CANDIDATES = 8, 15, 8
MODELS = {"smol": (49152, 576), "8b": (151936, 4096), "tiny": (515, 64)}  # vocabulary, width
Op = Callable[[Tensor], object]


def main() -> None:
    args = parse()
    device = pick_device()
    rows: list[list[Cell]] = []
    for model in args.models:
        for nodes in args.nodes:
            rows.append([model, nodes, *measure(*MODELS[model], nodes, device)])
            save(args.json, rows)
    print(table(HEADS, rows))


HEADS = (
    "model",
    "nodes",
    "head us",
    "floor us",
    "floor of the rest us",
    "best_token us",
    f"top_candidates {CANDIDATES} us",
    "keyed_draw us",
    "with filters us",
)


@torch.inference_mode()
def measure(vocab: int, width: int, nodes: int, device: torch.device) -> list[float]:
    """Of one number of nodes, each in a row of its own."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x_TD = torch.randn(nodes, width, device=device).to(dtype)
    weight_VD = (torch.randn(vocab, width, device=device) * width**-0.5).to(dtype)
    num_bytes = 4 * nodes * vocab
    copies = min(LAUNCHES, 1 + L2_BYTES // num_bytes) if device.type == "cuda" else 1
    scores = torch.randn(copies, nodes, 1, vocab, device=device)
    depth_BN = torch.zeros(nodes, 1, dtype=torch.long, device=device)
    draw = partial(keyed_draw, depth_BN=depth_BN, index_S=depth_BN[:, 0], num_depths=1)
    plain, filtered = params_of(nodes, 0, 1.0, device), params_of(nodes, 50, 0.9, device)
    ops: list[Op] = [
        lambda logits_BNV: linear_float32(x_TD, weight_VD),
        best_token,
        partial(top_candidates, num_candidates=CANDIDATES),
        partial(draw, params=plain, has_top_k=False, has_top_p=False),
        partial(draw, params=filtered),
    ]
    pool, runs = pick_pool(None, device), list[Run]()
    for op in ops:
        run_all(op, scores)  # compiles
        runs.append(captured(partial(run_all, op, scores), pool))
    times = times_ms(runs, device, before=lambda: None, repeats=REPEATS)
    head, *rest = (1000 * statistics.median(ms) / LAUNCHES for ms in times)
    moved = 2 * vocab * width + num_bytes
    floor = 1e6 * max(moved / PEAK_BYTES, 2 * nodes * vocab * width / PEAK_FLOPS)
    return [head, floor, 1e6 * num_bytes / PEAK_BYTES, *rest]


def params_of(nodes: int, top_k: int, top_p: float, device: torch.device) -> DrawParams:
    """The same for all nodes, with words of their own."""
    word_B2 = torch.arange(2 * nodes, device=device).view(nodes, 2)
    return DrawParams(
        torch.ones(nodes, device=device),
        torch.full((nodes,), top_k, device=device),
        torch.full((nodes,), top_p, dtype=torch.float64, device=device),
        torch.zeros(nodes, device=device),
        word_B2,
        word_B2 + 7,
    )


def run_all(op: Op, scores: Tensor) -> None:
    for place in range(LAUNCHES):
        op(scores[place % len(scores)])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["smol", "8b"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 72, 128, 288, 512, 1152])
    parser.add_argument("--json", type=Path, help="file for all times")
    return parser.parse_args()


if __name__ == "__main__":
    main()
