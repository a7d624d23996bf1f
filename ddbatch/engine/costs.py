"""What rounds and prefill calls of some plans cost on this device: measured, before the run begins.

All rows of a plan are made live, with sequences of a given length and of tokens that mean nothing,
and its round is run from the same state several times. Knows nothing about what is made of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from ddbatch.core import ShapePlan
from ddbatch.engine.curves import CostCurve
from ddbatch.engine.engine import Engine
from ddbatch.engine.plan import plan_cache
from ddbatch.engine.programs import GraphPool
from ddbatch.engine.sampling import DrawKind
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.engine.transfer import Mark, mark
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.facts import ChunkFact

REPEATS = 7  # of a program; the median counts
CONTEXTS = (128, 1024)  # committed tokens of a row; costs are straight lines between


@torch.inference_mode()
def measure_costs(
    target: Target,
    drafter: DFlash | None,
    plans: Sequence[ShapePlan],
    *,
    max_len: int,
    pool: GraphPool | None,
    draw: DrawKind,
    guard: Callable[[ShapePlan], AbstractContextManager[None]],
) -> CostCurve:
    """Time a round of every plan, for sequences of up to max_len tokens, and a prefill call. draw:
    what draws compute. guard: stands around all that is done with a plan, which may be its first
    use on this device."""
    device = target.embed.device
    deepest = max(plan.draft_depth for plan in plans) + 1
    contexts = sorted({min(context, max_len - deepest) for context in CONTEXTS})
    assert contexts[0] >= 1, (max_len, deepest)
    curve: CostCurve | None = None
    # The pages of many rows are large: one number of rows at a time.
    for rows in sorted({plan.rows for plan in plans}, reverse=True):
        own = sorted((plan for plan in plans if plan.rows == rows), key=lambda plan: -plan.nodes)
        cache_plan = plan_cache(
            rows, max_len=contexts[-1] + deepest, page=None, device=device.type, spare=0
        )
        has_drafts = own[0].nodes > 1
        engine = Engine(
            target, drafter if has_drafts else None, own, cache_plan, pool=pool, least_draw=draw
        )
        for plan in own:
            with guard(plan):
                engine.change(plan)
                curve = curve or CostCurve(*_call(engine, draw))
                for context in contexts:
                    curve.add(plan, context, _round(engine, context, draw))
        del engine  # before the next one takes memory
    assert curve is not None, "no plan"
    return curve


def _round(engine: Engine, context: int, draw: DrawKind) -> float:
    """Seconds of a round whose rows have so many tokens committed."""
    shape, state = RoundShape(engine.cache_plan.num_keys(context), draw), engine.state
    device = state.slot_B.device
    return _seconds(
        lambda: engine.programs.round(shape), lambda: _make_live(state, context), device
    )


def _call(engine: Engine, draw: DrawKind) -> tuple[int, float]:
    """Tokens of a full prefill call, and its seconds."""
    state, size = engine.state, engine.state.prefill_plan
    shape = RoundShape(engine.cache_plan.num_keys(size.chunk), draw)
    seconds = _seconds(
        lambda: engine.programs.prefill(shape, size.chunks),
        lambda: _put_call(state),
        state.slot_B.device,
    )
    return size.chunks * size.chunk, seconds


def _make_live(state: RoundState, context: int) -> None:
    """Every row in the middle of a sequence of its own, with so many tokens committed."""
    rows, per_slot = state.plan.rows, state.page_table_SP.shape[1]
    state.reset()
    page_X = torch.arange(rows * per_slot, device=state.slot_B.device)
    state.page_table_SP[:rows] = page_X.view(rows, per_slot)
    state.slot_B.copy_(page_X[:rows])
    state.active_B.fill_(True)
    state.length_S[:rows] = context
    state.cap_S.fill_(1 << 30)


def _put_call(state: RoundState) -> None:
    """A full call of pieces that begin prompts."""
    state.reset()
    chunk_RX, slots = state.chunk_RX, state.cache_plan.slots
    chunk_RX[:, ChunkFact.SLOT] = torch.arange(len(chunk_RX), device=chunk_RX.device) % slots
    chunk_RX[:, ChunkFact.SIZE] = state.prefill_plan.chunk


def _seconds(
    run: Callable[[], object], before: Callable[[], object], device: torch.device
) -> float:
    """The median of some runs, of the device's time on CUDA; the first two may capture a graph."""
    marks: list[tuple[Mark, Mark]] = []
    for _ in range(2 + REPEATS):
        before()
        started = mark(device)
        run()
        marks.append((started, mark(device)))
    marks[-1][1].wait()
    return statistics.median(stop.seconds_since(start) for start, stop in marks[2:])
