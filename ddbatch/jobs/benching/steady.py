"""A steady state that can be entered again and again, and a clock for what runs in it.

Knows engines. Knows nothing about arms, options or what times mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ddbatch.core import Key, Sampling, TokenPrompt
from ddbatch.engine.engine import Engine
from ddbatch.engine.programs import GraphPool
from ddbatch.engine.round import stages_of
from ddbatch.engine.sampling import draw_kind
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.engine.transfer import mark

Run = Callable[[], object]
# Of every state tensor that a round changes and the next one reads, or the host holds on to.
NOT_KEPT = ("target_cache", "drafter_cache", "sampling", "page_table_SP")


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
    num_keys = next(count for count in engine.cache_plan.key_counts if count >= longest)
    return RoundShape(num_keys, draw_kind([own]))


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


def run_stages(engine: Engine, shape: RoundShape) -> dict[str, Run]:
    """The stages of a round by name, in order, to be made again one by one. They have been made
    once, so that they can be captured."""
    stages = stages_of(engine.target, engine.drafter, engine.state, shape)
    for stage in stages.values():
        stage()
    return dict(stages)


def captured(run: Run, pool: GraphPool | None) -> Run:
    """A replay of this, where graphs are captured; it has run before."""
    if pool is None:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.handle):
        run()
    return graph.replay


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
