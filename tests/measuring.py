"""What the measuring programs share beside job=bench: random pairs, options and tables; no test.

Engines, steady states and clocks are in ddbatch/jobs/benching. Knows nothing about what is
measured, or how it is judged.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from ddbatch.jobs.benching.engines import Pair
from ddbatch.jobs.benching.headline import machine_of, versions
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.dims import DrafterDims, DtypeName, ModelDims, Rope
from ddbatch.models.load import set_numerics

Cell = str | int | float | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that both programs take."""
    parser.add_argument("--dtype", default="auto", choices=["auto", *get_args(DtypeName)])
    parser.add_argument("--capture", action=argparse.BooleanOptionalAction, help="default: on CUDA")
    parser.add_argument("--json", type=Path, help="file for the raw numbers")


def pick_device() -> torch.device:
    """CUDA where there is one, with the numerics that the engine promises."""
    set_numerics()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


RANDOM_SHAPES = ["8b", "smol", "tiny"]


def random_pair(size: str, device: torch.device, length: int) -> Pair:
    """Random weights, made on the device: 8b has the shape of Qwen3-8B and its DFlash drafter, smol
    that of SmolLM2-135M and one of four layers, both in bfloat16; tiny is for a try on a CPU, in
    float32."""
    if size == "8b":
        dims = _dims(4096, layers=36, heads=32, kv_heads=8, mlp=12288, vocab=151936)
        dtype, block, taps = torch.bfloat16, 16, [1, 9, 17, 25, 33]
    elif size == "smol":
        dims = _dims(576, layers=30, heads=9, kv_heads=3, mlp=1536, vocab=49152)
        dims = replace(dims, head_width=64, is_tied=True, has_qk_norm=False)
        dtype, block, taps = torch.bfloat16, 16, [1, 10, 18, 27]
    else:
        dims = _dims(256, layers=4, heads=2, kv_heads=1, mlp=384, vocab=515)
        dtype, block, taps = torch.float32, 8, [0, 2]
    windows = (None,) * len(taps)
    decoder = replace(dims, layers=len(taps), windows=windows, has_qk_norm=True)
    drafter_dims = DrafterDims(decoder, block, dims.vocab - 1, tuple(taps), dims.layers)
    reach = length + block
    target, drafter = Target(dims, dtype, device, reach), DFlash(drafter_dims, dtype, device, reach)
    torch.manual_seed(0)
    for weight in (*target.parameters(), *drafter.parameters()):
        if weight.ndim == 1:
            weight.normal_(1.0, 0.1)  # of a norm
        else:
            weight.normal_(0.0, weight.shape[-1] ** -0.5)  # sums are of the size of their terms
    return Pair(target, drafter, f"random weights in the shape {size}")


def _dims(width: int, *, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> ModelDims:
    return ModelDims(
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=128,
        mlp_width=mlp,
        vocab=vocab,
        norm_eps=1e-6,
        rope=Rope(1e6),
        max_positions=1 << 15,
        is_tied=False,
        stored_dtype=None,
        eos_token_ids=(),
        windows=(None,) * layers,
        has_qk_norm=True,
    )


def headline(pair: Pair) -> str:
    """Hardware, versions, model and command: what every figure must name."""
    named = {name: version for name, version in versions().items() if name != "ddbatch"}
    software = ", ".join(f"{name} {version}" for name, version in named.items())
    dtype = str(pair.dtype).removeprefix("torch.")
    command = shlex.join(["python", *sys.argv])
    return f"{machine_of(pair.device)}, {software}, {pair.name}, {dtype}.\n\n    {command}\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *(map(text_of, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def text_of(cell: Cell) -> str:
    """A float with the digits that its size deserves; None is empty."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.{int(abs(cell) < 1000)}f}"
    return str(cell)


def save(path: Path | None, numbers: object) -> None:
    """Raw numbers as JSON, where a file was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
