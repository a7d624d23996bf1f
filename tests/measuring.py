"""What the measuring programs share: pairs, engines, a steady state, clocks and tables; no test.

Knows nothing about what is measured with them, or how it is judged.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import torch

from ddbatch.core import Key, Sampling, TokenPrompt
from ddbatch.engine.engine import Engine
from ddbatch.engine.plan import Method, plan_cache, plan_prefill, plan_shapes
from ddbatch.engine.programs import GraphPool
from ddbatch.engine.sampling import draw_kind
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.engine.transfer import mark
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash, read_drafter_dims
from ddbatch.models.dims import DrafterDims, DtypeName, ModelDims, Rope
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import check_pair, choose_dtype, load_drafter, load_target, set_numerics

Run = Callable[[], object]
Cell = str | int | float | None
# Of every state tensor that a round changes and the next one reads, or the host holds on to.
NOT_KEPT = ("target_cache", "drafter_cache", "sampling", "page_table_SP")


class Pair(NamedTuple):
    """A target, its drafter and what they are called."""

    target: Target
    drafter: DFlash
    name: str

    @property
    def device(self) -> torch.device:
        return self.target.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target.embed.dtype


class Arm(NamedTuple):
    """One way of decoding; budget: None where the method has none of its own; block: of a draft,
    None for the drafter's own."""

    method: Method
    budget: int | None
    rows: int
    block: int | None = None

    @property
    def name(self) -> str:
        name = self.method if self.budget is None else f"{self.method} {self.budget}"
        return name if self.block is None else f"{name}, block {self.block}"


class Tree(NamedTuple):
    """Budget and block of a draft, as text BUDGET or BUDGET/BLOCK."""

    budget: int
    block: int | None = None

    @classmethod
    def parse(cls, text: str) -> Tree:
        budget, _, block = text.partition("/")
        return cls(int(budget), int(block) if block else None)


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


def open_pair(target: Path, drafter: Path, dtype: str, device: torch.device, length: int) -> Pair:
    """A pair of checkpoint folders, for sequences of up to `length` tokens."""
    target_dims, drafter_dims = read_target_dims(target), read_drafter_dims(drafter)
    check_pair(target_dims, drafter_dims, None)
    name = choose_dtype(dtype, target_dims, device)
    reach = length + drafter_dims.block
    return Pair(
        load_target(target, target_dims, name, device, reach),
        load_drafter(drafter, drafter_dims, name, device, reach),
        f"{target.name} with {drafter.name}",
    )


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


def pick_pool(option: bool | None, device: torch.device) -> GraphPool | None:
    """What engines capture into; None where they do not. option: --capture."""
    is_captured = device.type == "cuda" if option is None else option
    return GraphPool() if is_captured else None


def make_engine(
    pair: Pair, arm: Arm, max_len: int, pool: GraphPool | None, chunks: int | None = None
) -> Engine:
    """An engine of this arm for sequences of up to max_len tokens; with a pool it is captured.
    chunks: of a prefill call, None: as many as the plan says."""
    device = pair.device.type
    plan = plan_shapes(
        arm.method,
        budget=arm.budget,
        topk=None,
        rows=arm.rows,
        block=arm.block or pair.drafter.dims.block,
        vocab=pair.target.dims.vocab,
        gemm_limit=None,
    )
    prefill = plan_prefill(arm.rows, device)
    return Engine(
        pair.target,
        pair.drafter if plan.nodes > 1 else None,
        plan,
        plan_cache(arm.rows, max_len=max_len, page=None, device=device),
        prefill_plan=prefill if chunks is None else replace(prefill, chunks=chunks),
        pool=pool,
    )


@torch.inference_mode()
def make_steady(engine: Engine, context: int, max_new_tokens: int, own: Sampling) -> None:
    """Fill every row with a random prompt of `context` tokens and decode until all are live."""
    generator = torch.Generator().manual_seed(0)
    shape = (engine.plan.rows, context)
    ids = torch.randint(engine.target.dims.vocab, shape, generator=generator).tolist()
    prompts = iter(
        [
            TokenPrompt(Key(row, 0, 0), tuple(ids[row]), max_new_tokens, own)
            for row in range(len(ids))
        ]
    )
    for _ in range(3 + engine.plan.rows):
        engine.fill(prompts)
        engine.step()
        ended = list(engine.collect())
        assert not ended, ended
        if bool(engine.state.active_B.all()):
            return
    raise AssertionError(f"{int(engine.state.active_B.sum())} of {engine.plan.rows} rows are live")


def shape_now(engine: Engine, own: Sampling) -> RoundShape:
    """The shape of a round of the sequences in flight, which all draw like this."""
    longest = int(engine.state.length_S.max())
    return RoundShape(engine.cache_plan.num_keys(longest), draw_kind([own]))


def keep_state(state: RoundState) -> Run:
    """A function that undoes rounds made since now; what they wrote beyond lengths stays unread."""
    kept = [
        (tensor, tensor.clone())
        for name, tensor in state.tensors()
        if not name.startswith(NOT_KEPT) and not tensor.is_floating_point()
    ]

    def restore() -> None:
        for tensor, value in kept:
            tensor.copy_(value)

    return restore


@torch.inference_mode()
def times_ms(
    runs: Sequence[Run], device: torch.device, *, before: Run, repeats: int
) -> list[list[float]]:
    """Milliseconds of each of the runs, made one after the other, `repeats` times. What `before`
    does ahead of every repeat is not counted. On CUDA these are times of the device."""
    before()
    for run in runs:
        run()
    rows = []
    for _ in range(repeats):
        before()
        marks = [mark(device)]
        for run in runs:
            run()
            marks.append(mark(device))
        rows.append(marks)
    finish(device)
    return [
        [1000 * marks[place + 1].seconds_since(marks[place]) for marks in rows]
        for place in range(len(runs))
    ]


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def headline(pair: Pair) -> str:
    """Hardware, versions, model and command: what every figure must name."""
    if pair.device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        machine = f"{torch.cuda.get_device_name()}, driver {driver[0] if driver else 'unknown'}"
    else:
        name = platform.processor() or platform.machine()
        machine = f"{name}, {torch.get_num_threads()} threads"
    try:
        import triton

        machine += f", triton {triton.__version__}"
    except ImportError:
        pass
    dtype = str(pair.dtype).removeprefix("torch.")
    command = shlex.join(["python", *sys.argv])
    return f"{machine}, torch {torch.__version__}, {pair.name}, {dtype}.\n\n    {command}\n"


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
