"""RoundState: every tensor of the engine, allocated once, written in place, never re-bound.

A slot is a sequence's home on the device (pages, length, how it draws); a row is a lane of the
round that works on one slot. The address of (slot, position) is page_table[slot, position // page]
* page + position % page. Outputs and histories are the host's: a round's record tells them. Knows
nothing about models beyond their sizes.

Further cells follow the pages of a cache plane: the null cell stays zero and stands for every key
that is not there, the trash cell takes the writes of lanes that have nothing to keep, and the
scratch cells hold the keys of one forward's own tokens. One slot follows the slots: nobody's, the
home of inert rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor

from ddbatch.core import CachePlan, PrefillPlan, ShapePlan
from ddbatch.engine.sampling import DrawKind, SlotSampling
from ddbatch.models.layers import Planes
from ddbatch_kernels.admit import Ready
from ddbatch_kernels.build_tree import TreeNodes
from ddbatch_kernels.commit_rows import Record
from ddbatch_kernels.rows import Accepted, Nodes, Rows, Slots


class RoundShape(NamedTuple):
    """What the host chooses before a round or a prefill call. num_keys: cached keys that attention
    looks at; no live sequence is longer. draw: what a draw must compute."""

    num_keys: int
    draw: DrawKind


class Logprobs(NamedTuple):
    """Of the token drawn at each node (round) or emitted at each place (record), under the target's
    raw softmax. token: float32. top_id: int32, top: float16, M most probable tokens, best first.
    """

    token: Tensor
    top_id: Tensor
    top: Tensor


class Told(NamedTuple):
    """What a program tells the host: int32 columns (Fact) of each row and one row of
    the program's own below; log-probs of the emitted tokens where they are asked for."""

    row_BX: Tensor
    logprobs_BK: Logprobs | None

    def tensors(self) -> list[Tensor]:
        """All of it."""
        return [self.row_BX, *(self.logprobs_BK or ())]


@dataclass
class RoundState:
    """Static tensors of the engine; int64 unless stated. S slots incl. nobody's (the last)."""

    plan: ShapePlan
    cache_plan: CachePlan
    prefill_plan: PrefillPlan
    # Caches: pages, null cell, trash cell, scratch.
    target_cache: Planes
    drafter_cache: Planes | None
    page_table_SP: Tensor
    # Per slot.
    length_S: Tensor  # committed tokens, those whose keys are in the cache
    anchor_S: Tensor  # last emitted token
    cap_S: Tensor  # tokens the slot may emit
    num_out_S: Tensor
    generation_S: Tensor  # which of the slot's sequences this is
    is_cancelled_S: Tensor  # bool: the host wants no more of it
    sampling: SlotSampling
    # Slots that are prefilled and wait for a row: a ring with one spare place for what is not
    # pushed.
    ready_S: Tensor
    ready_head: Tensor
    ready_tail: Tensor
    # Per row.
    slot_B: Tensor
    active_B: Tensor  # bool
    # The round.
    round_number: Tensor
    candidate_BDM: Tensor
    edge_BDM: Tensor  # float32 log-probs
    tree: TreeNodes
    pos_BN: Tensor  # positions of the verified nodes
    choice_BN: Tensor
    is_finite_BN: Tensor  # bool: is the best score of a node a number
    logprobs_BN: Logprobs | None  # [B, N], [B, N, M]
    scores_BNV: Tensor | None  # float32, kept only to be measured
    feature_TC: Tensor  # tapped states of the verified nodes, model dtype
    path_BK: Tensor
    num_accepted_B: Tensor
    emitted_BK: Tensor
    num_emitted_B: Tensor
    finish_B: Tensor
    told: Told
    # A prefill call.
    call_number: Tensor
    chunk_RX: Tensor  # pieces of prompts: slot, start, size, is it the last; then tokens
    chunk_told: Told

    @property
    def nobody(self) -> int:
        """The slot of inert rows."""
        return self.cache_plan.slots

    @property
    def null_cell(self) -> int:
        """The cell that stays zero."""
        return self.cache_plan.pages * self.cache_plan.page

    @property
    def trash_cell(self) -> int:
        """The cell that takes writes of nothing."""
        return self.null_cell + 1

    @property
    def scratch_cell(self) -> int:
        """The first of the cells for a forward's own tokens."""
        return self.null_cell + 2

    @property
    def rows(self) -> Rows:
        """The lanes."""
        return Rows(self.slot_B, self.active_B)

    @property
    def slots(self) -> Slots:
        """What is known of sequences."""
        return Slots(
            self.length_S,
            self.anchor_S,
            self.cap_S,
            self.num_out_S,
            self.generation_S,
            self.is_cancelled_S,
            self.page_table_SP,
            self.sampling.token_flag_SV,
        )

    @property
    def ready(self) -> Ready:
        """Slots that wait for a row."""
        return Ready(self.ready_S, self.ready_head, self.ready_tail)

    @property
    def nodes(self) -> Nodes:
        """The trees and what the target says of them."""
        return Nodes(*self.tree, self.pos_BN, self.choice_BN, self.is_finite_BN)

    @property
    def accepted(self) -> Accepted:
        """What the round keeps of them."""
        return Accepted(
            self.path_BK,
            self.num_accepted_B,
            self.emitted_BK,
            self.num_emitted_B,
            self.finish_B,
        )

    @property
    def record(self) -> Record:
        """What the round tells."""
        drawn, told = self.logprobs_BN or (), self.told.logprobs_BK or ()
        return Record(self.told.row_BX, self.round_number, drawn, told)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with their names, the caches' planes first."""
        for f in fields(self):
            yield from _tensors_in(f.name, getattr(self, f.name))

    def reset(self) -> None:
        """Make every row inert and every slot empty; caches stay as they are, and so does how slots
        draw: both are written before they are read."""
        for name, tensor in self.tensors():
            if not name.startswith(("target_cache", "drafter_cache", "sampling")):
                tensor.zero_()
        self.slot_B.fill_(self.nobody)
        self.tree.parent_BN.fill_(-1)
        self.tree.ancestor_BNW[:, 0, 0] = 1  # all that a plan without drafts has


def _tensors_in(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for part in value._fields:
            yield from _tensors_in(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, SlotSampling):
        for f in fields(value):
            yield f"{name}.{f.name}", getattr(value, f.name)


def cell_of(state: RoundState, slot: Tensor, pos: Tensor) -> Tensor:
    """Cells of (slot, position) pairs, two int64 tensors of one shape."""
    page = state.cache_plan.page
    return state.page_table_SP[slot, pos // page] * page + pos % page
