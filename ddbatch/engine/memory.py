"""How much memory an engine takes on a device, before anything is allocated.

What tensors take is told by allocating them on PyTorch's device without memory; what programs take
while they run is an upper bound. Knows nothing about what is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ddbatch.core import CachePlan, PrefillPlan, ShapePlan
from ddbatch.engine.allocate import allocate_states
from ddbatch.engine.numerics import ORACLE_PIECE
from ddbatch.models.dims import DrafterDims, ModelDims

# Of intermediate values in floats: kept states and norms, queries and keys, gate and up.
_STATES, _HEADS, _MLPS = 8, 6, 3
# Attention keeps what its parts found, and libraries their own room: cuBLAS 32 MiB a stream.
_FIXED = 1 << 29
# What an allocator cannot use between blocks, graphs' own memory, and others' on the same device.
_SHARE = 0.02


class Sizes(NamedTuple):
    """A pair as far as memory goes. top_logprobs: of Engine. is_audited: the oracle reads rows."""

    target: ModelDims
    drafter: DrafterDims | None
    dtype: torch.dtype
    top_logprobs: int | None = None
    is_audited: bool = True


class Need(NamedTuple):
    """Bytes. caches: of pages, with scratch. tables: all other tensors of the state. working: of
    programs while they run, captured and eager. judging: of the oracle while it reads a row."""

    caches: int
    tables: int
    working: int
    judging: int

    @property
    def total(self) -> int:
        """All of it, at the same time."""
        used = self.caches + self.tables + self.working + self.judging + _FIXED
        return int(used * (1 + _SHARE))


def memory_need(
    plans: Sequence[ShapePlan], cache_plan: CachePlan, prefill_plan: PrefillPlan, sizes: Sizes
) -> Need:
    """Bytes of an engine with these plans, without its weights."""
    drafter = sizes.drafter if any(plan.nodes > 1 for plan in plans) else None
    states = allocate_states(
        plans,
        cache_plan,
        prefill_plan,
        target=sizes.target,
        drafter=None if drafter is None else drafter.decoder,
        num_taps=0 if drafter is None else len(drafter.tap_layers),
        top_logprobs=sizes.top_logprobs,
        dtype=sizes.dtype,
        device=torch.device("meta"),
    )
    tensors = {id(tensor): (name, tensor) for state in states for name, tensor in state.tensors()}
    is_cache = ("target_cache", "drafter_cache")
    found = [(name.startswith(is_cache), tensor.nbytes) for name, tensor in tensors.values()]
    caches = sum(size for is_plane, size in found if is_plane)
    return Need(
        caches,
        sum(size for _, size in found) - caches,
        # A graph's memory and that of the same program run as it is are two.
        2 * max(_working(plan, prefill_plan, sizes.target) for plan in plans),
        _judging(sizes.target, cache_plan.max_len) if sizes.is_audited else 0,
    )


def _working(plan: ShapePlan, prefill_plan: PrefillPlan, dims: ModelDims) -> int:
    """Values between the layers of the largest forward, and scores of all that are drawn from."""
    pieces = prefill_plan.chunks * prefill_plan.chunk
    tokens = max(plan.rows * plan.nodes, plan.rows * plan.block, pieces)
    heads = (dims.heads + 2 * dims.kv_heads) * dims.head_width
    floats = tokens * (_STATES * dims.width + _HEADS * heads + _MLPS * dims.mlp_width)
    scored = max(plan.rows * plan.nodes, plan.rows * plan.draft_depth, prefill_plan.chunks)
    return 4 * (floats + scored * dims.vocab)


def _judging(dims: ModelDims, max_len: int) -> int:
    """Of the oracle: its cache, the attention and the scores of a piece, the head in float32."""
    keys = max_len * dims.kv_heads * dims.head_width
    piece = min(ORACLE_PIECE, max_len)
    attention = max_len * dims.heads * (2 * dims.head_width + 4 * piece)
    scores = 4 * piece * dims.vocab
    weights = dims.width * max(dims.vocab, 2 * dims.mlp_width)
    return 4 * (2 * dims.layers * keys + attention + scores + weights)
