"""Synthetic acceptance, for a pair or prompts whose own acceptance means nothing.

A keyed coin per position decides whether the target agrees with the drafter's best continuation, so
acceptance lengths are those of a real pair while tokens mean nothing. Knows rounds and trees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddbatch.engine.engine import Engine
from ddbatch.engine.prefill import prefill
from ddbatch.engine.round import stages_of
from ddbatch.engine.state import RoundShape, RoundState


class CoinPrograms:
    """Rounds in which the target agrees with the best child of a node at this share of positions,
    and else with none of its children (the protocol Programs, eager)."""

    def __init__(self, engine: Engine, share: float) -> None:
        self._target, self._drafter = engine.target, engine.drafter
        self._state, self._share = engine.state, share

    def round(self, shape: RoundShape) -> None:
        """One round over all rows; the coin costs a few launches of its own."""
        stages = stages_of(self._target, self._drafter, self._state, shape)
        for name, stage in stages.items():
            if name == "accept":
                self._state.choice_BN.copy_(toss(self._state, self._share))
            stage()

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        """One prefill call over so many pieces."""
        prefill(self._target, self._drafter, self._state, shape, num_chunks)


def toss(state: RoundState, share: float) -> Tensor:
    """int64 [B, N]: the token of each node's best child, or one that no node of the row holds."""
    tree, slot_B = state.tree, state.slot_B
    B, N = tree.token_BN.shape
    place_BN = torch.arange(N, device=slot_B.device).expand(B, N)
    # Children of a node stand in the order of their scores.
    child_BN = torch.full_like(place_BN, N).scatter_reduce(
        1, tree.parent_BN[:, 1:].long().clamp(min=0), place_BN[:, 1:], "amin"
    )
    has_child_BN = child_BN < N
    best_BN = tree.token_BN.gather(1, child_BN.clamp(max=N - 1))
    vocab = state.sampling.token_flag_SV.shape[1]
    none_B1 = (tree.token_BN.amax(dim=1, keepdim=True) + 1) % vocab
    return torch.where(has_child_BN & _is_heads(state.pos_BN, slot_B, share), best_BN, none_B1)


def _is_heads(pos_BN: Tensor, slot_B: Tensor, share: float) -> Tensor:
    """Bool [B, N], by position and slot (two rounds of splitmix64's mixer, which wraps around)."""
    mixed_BN = pos_BN * 0x1E3779B97F4A7C15 + slot_B[:, None] * 0x3F58476D1CE4E5B9
    for _ in range(2):
        mixed_BN = (mixed_BN ^ (mixed_BN >> 29)) * 0x14D049BB133111EB
    return (mixed_BN >> 20) & 0xFFFF < int(share * 0x10000)
