"""What kernels a run launches, what they are for, and the least that its stages must do; no test.

Knows the stages of a round and the functions of the engine that launch kernels. Knows nothing about
arms or tables.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from measuring import Pair, Run, finish, times_ms
from torch.profiler import ProfilerActivity, profile, record_function

from ddbatch.engine import round as round_file
from ddbatch.engine.engine import Engine
from ddbatch.engine.programs import GraphPool
from ddbatch.engine.state import RoundShape

STAGES = ("admit", "draft", "build", "verify", "accept", "commit")
# What a kernel is for: the innermost of these functions that launched it, ...
PLACES = {
    "ddbatch.models.decoder.project_heads": "matmul",
    "ddbatch.models.decoder.linear_add": "matmul",
    "ddbatch.models.decoder.gated_linear": "matmul",
    "ddbatch.models.layers.attention": "attention",
    "ddbatch.models.decoder.embed_normed": "embedding",
    "ddbatch.models.dflash.embed_normed": "embedding",
    "ddbatch.models.decoder.linear_float32": "head",
    "ddbatch.engine.verify.row_keys": "addresses",
    "ddbatch.engine.draft.row_keys": "addresses",
    "ddbatch.engine.verify.choose": "draw",
    "ddbatch.engine.draft.top_candidates": "candidates",
}
# ... or, of a kernel of ours, which the profiler ties to no op, this, else its own name; ...
KERNELS = {
    "_project_heads_kernel": "matmul",
    "_normed_linear_kernel": "matmul",
    "_linear_add_kernel": "matmul",
    "_gated_linear_kernel": "matmul",
    "_attention_kernel": "attention",
    "_split_kernel": "attention",
    "_end_kernel": "attention",
}
# ... else the first of these that is part of the name of an op around it.
OPS = {"rms_norm": "norms", "aten::linear": "matmul", "aten::copy_": "casts and copies"}


class Rates(NamedTuple):
    """Measured, a second: bytes read, bytes moved by a copy, operations of a matrix product."""

    read: float
    copy: float
    matmul: float


class Work(NamedTuple):
    """What an op cannot do without."""

    num_bytes: float
    operations: float

    def floor_ms(self, rates: Rates) -> float:
        return 1000 * max(
            self.num_bytes / max(rates.read, rates.copy), self.operations / rates.matmul
        )


class Launch(NamedTuple):
    """A kernel: what it is for, the ops around it (innermost first), its name, its microseconds."""

    kind: str
    ops: str
    kernel: str
    us: float


class Span(NamedTuple):
    """A kernel's time on the device, in microseconds, and the launch that it belongs to: all of a
    graph's kernels share one."""

    launch: int
    start: float
    stop: float


def measure_rates(pair: Pair) -> Rates:
    """On fresh random data that no cache holds."""
    is_cuda = pair.device.type == "cuda"
    count, side = (1 << 31, 8192) if is_cuda else (1 << 24, 1024)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=pair.dtype, device=pair.device).normal_()

    source, a, b = random(count), random(side, side), random(side, side)
    target = torch.empty_like(source)
    runs: list[Run] = [source.sum, lambda: target.copy_(source), lambda: a @ b]
    read, copy, matmul = (
        statistics.median(times) / 1000
        for times in times_ms(runs, pair.device, before=lambda: None, repeats=10)
    )
    size = source.nbytes
    return Rates(size / read, 2 * size / copy, 2 * side**3 / matmul)


def stages_of(engine: Engine, shape: RoundShape) -> dict[str, Run]:
    """The calls that run_round makes for a round, in order, to be made one by one."""
    calls: dict[str, Run] = {}

    def noting(name: str, stage: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            calls[name] = partial(stage, *args)
            stage(*args)

        return call

    with ExitStack() as patches:
        for name in STAGES:
            stage = getattr(round_file, name)
            patches.enter_context(patch.object(round_file, name, noting(name, stage)))
        round_file.run_round(engine.target, engine.drafter, engine.state, shape)
    return calls


def captured(run: Run, pool: GraphPool | None) -> Run:
    """A replay of this, where graphs are captured."""
    if pool is None:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.handle):
        run()
    return graph.replay


def launches_of(run: Run, device: torch.device) -> list[Launch]:
    """Kernels of one run, in order."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with ExitStack() as patches, profile(activities=activities) as found:
        for place, kind in PLACES.items():
            module, name = place.rsplit(".", 1)
            function = getattr(__import__(module, fromlist=[name]), name)
            patches.enter_context(patch(place, _named(kind, function)))
        with record_function("stage"):
            run()
            finish(device)
    events = sorted(found.events(), key=lambda event: event.time_range.start)
    on_host = [event for event in events if event.device_type.name == "CPU"]
    if device.type != "cuda":
        own = [event for event in on_host if event.name.startswith("aten::")]
        return [
            Launch(_kind(ops := _ops(event)), ops[0], ops[0], event.self_cpu_time_total)
            for event in own
        ]
    # Who launched a kernel is told of kernels of PyTorch alone, and without its time. One stream
    # runs them in the order of their launches, so the next of a name is the next of that name.
    launchers: dict[str, deque[list[str]]] = defaultdict(deque)
    for event in on_host:
        for kernel in event.kernels:
            launchers[kernel.name].append(_ops(event))
    return [
        _launch(event.name, event.time_range.elapsed_us(), launchers[event.name])
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


def _ops(event: Any) -> list[str]:
    """Names of an event on the host and of those around it, innermost first."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


def _kind(ops: Sequence[str]) -> str:
    """What something that was launched inside these is for."""
    text = " < ".join(ops)
    kind = next((name for name in ops if name in PLACES.values()), None)
    return kind or next((kind for part, kind in OPS.items() if part in text), "other")


def _launch(name: str, us: float, launchers: deque[list[str]]) -> Launch:
    """A kernel that ran; launchers: of the next ones of its name."""
    if name.startswith("_") and name.endswith("_kernel"):
        own = KERNELS.get(name, name.strip("_").removesuffix("_kernel"))
        return Launch(own, name, name, us)
    ops = launchers.popleft() if launchers else []
    return Launch(_kind(ops), " < ".join(ops), name, us)


def works_of(engine: Engine, context: int) -> dict[tuple[str, str], Work]:
    """What a round must do, by stage and kind: weights once, keys of the context once."""
    plan, target, drafter = engine.plan, engine.target, engine.drafter
    size, head = target.embed.element_size(), target.head.numel()
    found: dict[tuple[str, str], Work] = {}
    forwards = [("verify", target.layers, target.dims, plan.nodes, plan.nodes)]
    if drafter is not None:
        own = drafter.dims.decoder
        forwards.append(("draft", drafter.layers, own, plan.block, plan.draft_depth))
        pair_width = 2 * own.kv_heads * own.head_width  # of a key and a value
        append = drafter.fuse.weight.numel() + own.layers * own.width * pair_width
        tokens = plan.rows * (plan.draft_depth + 1)
        found["commit", "matmul"] = Work(append * size, 2 * append * tokens)
    for stage, layers, dims, queries, scored in forwards:
        weights = sum(weight.numel() for weight in layers.parameters())
        keys = plan.rows * (context + queries) * dims.layers
        found[stage, "matmul"] = Work(weights * size, 2 * weights * plan.rows * queries)
        found[stage, "attention"] = Work(
            keys * 2 * dims.kv_heads * dims.head_width * size,
            keys * queries * 4 * dims.heads * dims.head_width,
        )
        found[stage, "head"] = Work(head * size, 2 * head * plan.rows * scored)
    return found
