"""What kernels a run launches, and what they are for; no test.

Knows the functions of the engine that launch kernels. Knows nothing about arms or tables.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ddbatch.jobs.benching.steady import Run, finish

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
