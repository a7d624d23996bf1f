"""Look at models, plans and prompts of job=bench, and refuse what cannot be, before a weight is
read.

Knows options, sizes of models and prompts. Makes no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ddbatch.checks import shown
from ddbatch.config import Config
from ddbatch.core import ShapePlan
from ddbatch.engine.plan import AUTO_PAGE_CUDA
from ddbatch.jobs.benching.arms import Arm
from ddbatch.jobs.benching.engines import Limits, plan_arm
from ddbatch.jobs.benching.measuring import steady_room
from ddbatch.jobs.benching.options import check_sizes
from ddbatch.jobs.benching.prompts import read_prompts
from ddbatch.jobs.generating.decoding import asked, check_device_options, choose_device
from ddbatch.jobs.probing.answers import facts_of, limit_of
from ddbatch.jobs.show import plural
from ddbatch.models.dflash import read_drafter_dims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import check_pair, choose_dtype

MIN_PROMPTS, PROMPTS_A_ROW = 8, 4


@dataclass(frozen=True)
class Start:
    """What is known by then. prompts: of data.path, None: random ids. call_len: tokens of the
    longest sequence of a call; reach: of any sequence, in whole pages."""

    device: torch.device
    dtype: torch.dtype
    vocab: int
    limits: Limits
    prompts: list[tuple[int, ...]] | None
    about_prompts: str
    call_len: int
    reach: int


def look(config: Config, arms: Sequence[Arm]) -> Start:
    """ValueError for what this pair, this machine or these prompts do not allow."""
    device, engine = choose_device(config.engine.device), config.engine
    check_device_options(config, device)
    target, drafter = read_target_dims(Path(config.model.path)), None
    if config.drafter.path is not None:
        drafter = read_drafter_dims(Path(config.drafter.path))
        check_pair(target, drafter, config.drafter.block)
    block = 1 if drafter is None else drafter.block
    drafts = block if any(arm.has_drafts for arm in arms) else 1
    room = steady_room(drafts)
    check_sizes(config, arms, positions=target.max_positions, block=block, steady_room=room)
    dtype = choose_dtype(config.model.dtype, target, device)
    facts = facts_of(target, dtype, device, in_order=engine.reproducible)
    limits = Limits(asked(engine.topk), asked(engine.page), limit_of(engine.gemm_limit, facts))
    for rows in config.bench.rows:
        names: dict[ShapePlan, str] = {}
        for arm in arms:
            plan = _plan(arm._replace(rows=rows), block, target.vocab, limits)
            other = names.setdefault(plan, arm.name)
            if other != arm.name:
                raise ValueError(
                    f"bench.arms={shown(config.bench.arms)}: {other} and {arm.name} are one plan "
                    f"at {plural(rows, 'row')}, of {plural(plan.nodes - 1, 'node')}; allowed: one "
                    "of them"
                )
    new_tokens = config.bench.new_tokens
    prompts, about = None, "random ids, as many as the context"
    longest = context = max(config.bench.context)
    if config.data.path:
        most = max(num_prompts(config, rows) for rows in config.bench.rows)
        found = read_prompts(
            config, most, vocab=target.vocab, max_prompt_len=target.max_positions - new_tokens
        )
        prompts, lengths = found.token_ids, [len(ids) for ids in found.token_ids]
        longest = max(lengths)
        about = (
            f"{plural(len(prompts), 'prompt')} of data.path, {min(lengths)} to {max(lengths)} "
            "tokens"
        )
        about += ", repeated" if len(prompts) < most else ""
        about += f"; {found.num_rejected} rows rejected" if found.num_rejected else ""
    return Start(
        device,
        getattr(torch, dtype),
        target.vocab,
        limits,
        prompts,
        f"{about}; {new_tokens} new tokens each, no stop",
        longest + new_tokens,
        max(longest + new_tokens, context + room) + (limits.page or AUTO_PAGE_CUDA),
    )


def num_prompts(config: Config, rows: int) -> int:
    """Of a whole call at so many rows."""
    return config.bench.prompts or max(MIN_PROMPTS, PROMPTS_A_ROW * rows)


def _plan(arm: Arm, block: int, vocab: int, limits: Limits) -> ShapePlan:
    """A plan above engine.gemm_limit is refused in the words of this job."""
    try:
        return plan_arm(arm, block=block, vocab=vocab, limits=limits)
    except ValueError as error:
        raise ValueError(
            f"bench.arms and bench.rows: {arm.name} at {plural(arm.rows, 'row')}: {error}"
        ) from error
