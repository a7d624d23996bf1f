"""A pair with its weights, and the engine that measures an arm of it.

Knows checkpoints, plans and engines; `make_engine` is the only place that makes one here. Knows
nothing about options or what is measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from ddbatch.core import ShapePlan
from ddbatch.engine.engine import Engine
from ddbatch.engine.limits import GemmLimit
from ddbatch.engine.plan import plan_cache, plan_prefill, plan_shapes
from ddbatch.engine.programs import CapturedPrograms, EagerPrograms, GraphPool, Programs
from ddbatch.jobs.benching.arms import Arm
from ddbatch.jobs.benching.coin import CoinPrograms
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash, read_drafter_dims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import check_pair, choose_dtype, load_drafter, load_target


class Pair(NamedTuple):
    """A target, its drafter (None: there is none) and what they are called."""

    target: Target
    drafter: DFlash | None
    name: str

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.target.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.target.embed.dtype


class Limits(NamedTuple):
    """What holds for the plans of all arms; None: as the planner has it."""

    topk: int | None = None
    page: int | None = None
    gemm_limit: GemmLimit | None = None


NO_LIMITS = Limits()


def open_pair(
    target: Path,
    drafter: Path | None,
    dtype: str,
    device: torch.device,
    length: int,
    *,
    in_order: bool = False,
) -> Pair:
    """A pair of checkpoint folders, for sequences of up to `length` tokens. in_order: see
    Target."""
    target_dims = read_target_dims(target)
    name = choose_dtype(dtype, target_dims, device)
    if drafter is None:
        loaded = load_target(target, target_dims, name, device, length + 1, in_order=in_order)
        return Pair(loaded, None, target.name)
    drafter_dims = read_drafter_dims(drafter)
    check_pair(target_dims, drafter_dims, None)
    reach = length + drafter_dims.block
    return Pair(
        load_target(target, target_dims, name, device, reach, in_order=in_order),
        load_drafter(drafter, drafter_dims, name, device, reach),
        f"{target.name} with {drafter.name}",
    )


def pick_pool(option: bool | None, device: torch.device) -> GraphPool | None:
    """What engines capture into; None where they do not. option None: on CUDA."""
    is_captured = device.type == "cuda" if option is None else option
    return GraphPool() if is_captured else None


def plan_arm(arm: Arm, *, block: int, vocab: int, limits: Limits = NO_LIMITS) -> ShapePlan:
    """Shapes of its round. block: the drafter's. ValueError above limits.gemm_limit."""
    return plan_shapes(
        arm.method,
        budget=arm.budget,
        topk=limits.topk if arm.method == "ddtree" else None,
        rows=arm.rows,
        block=arm.block or block,
        vocab=vocab,
        gemm_limit=limits.gemm_limit,
    )


def make_engine(
    pair: Pair,
    arm: Arm,
    max_len: int,
    pool: GraphPool | None,
    *,
    chunks: int | None = None,
    coin: float | None = None,
    limits: Limits = NO_LIMITS,
) -> Engine:
    """An engine of this arm for sequences of up to max_len tokens; with a pool it is captured.
    chunks: of a prefill call, None: as many as the plan says. coin: acceptance is synthetic."""
    device = pair.device.type
    block = 1 if pair.drafter is None else pair.drafter.dims.block
    plan = plan_arm(arm, block=block, vocab=pair.target.dims.vocab, limits=limits)
    prefill = plan_prefill(arm.rows, device)
    engine = Engine(
        pair.target,
        pair.drafter if plan.nodes > 1 else None,
        plan,
        plan_cache(arm.rows, max_len=max_len, page=limits.page, device=device),
        prefill_plan=prefill if chunks is None else replace(prefill, chunks=chunks),
        pool=pool,
    )
    if coin is not None:
        toss_coins(engine, coin, pool)
    return engine


def toss_coins(engine: Engine, share: float, pool: GraphPool | None) -> None:
    """Make the acceptance of all drafted plans of an idle engine synthetic."""
    first = engine.plan
    for plan in engine.plans:
        engine.change(plan)
        if plan.nodes > 1:
            engine.programs = _captured(CoinPrograms(engine, share), pool)
    engine.change(first)


def plain_programs(engine: Engine, pool: GraphPool | None) -> Programs:
    """Programs of this engine that toss no coin."""
    return _captured(EagerPrograms(engine.target, engine.drafter, engine.state), pool)


def _captured(eager: Programs, pool: GraphPool | None) -> Programs:
    return eager if pool is None else CapturedPrograms(eager, pool)
