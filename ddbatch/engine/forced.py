"""Forced accepts: rounds whose drafts offer the known next tokens along a path of a random tree.

Every node of a tree is accepted in turn, so that nodes that a drafter seldom gets right are tried
too: late ones, siblings of every rank, and those deep under them. Everything but the draft stage is
the engine's own. Knows nothing about how outputs came to be known.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ddbatch.core import Key, ShapePlan
from ddbatch.engine.admit import admit
from ddbatch.engine.engine import Engine
from ddbatch.engine.oracle_ddtree import best_first
from ddbatch.engine.prefill import prefill
from ddbatch.engine.round import finish_round
from ddbatch.engine.state import RoundShape
from ddbatch.engine.transfer import upload

# Mean cost of a depth and of a rank in random drafts: deep trees, bushy ones, and between.
COSTS = ((0.02, 2.0), (2.0, 0.05), (0.5, 0.5))


class _Draft(NamedTuple):
    """Of one row: candidates and their log-probs [D][M], and the ranks of the nodes that will be
    accepted, with the number of the last."""

    candidates: list[list[int]]
    edges: list[list[float]]
    ranks: tuple[int, ...]
    node: int


class ForcedPrograms:
    """Eager programs with drafts made from `outputs`, what each canary is known to emit.

    accepted: for each canary, how many drafted tokens each round must keep. kinds: (depth, rank) of
    nodes that were accepted.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._vocab = engine.target.dims.vocab
        self._outputs: Mapping[Key, tuple[int, ...]] = {}
        self.accepted: dict[Key, list[int]] = {}
        self.kinds: set[tuple[int, int]] = set()
        self._turn = deque(range(engine.plan.nodes - 1, 0, -1))
        self._left = set(self._turn)

    @property
    def num_left(self) -> int:
        """Nodes of the tree that were not accepted yet."""
        return len(self._left)

    def begin(self, outputs: Mapping[Key, tuple[int, ...]]) -> None:
        """Canaries that follow emit these tokens."""
        self._outputs = outputs
        self.accepted = {key: [] for key in outputs}

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        """One prefill call over so many pieces."""
        engine = self._engine
        prefill(engine.target, engine.drafter, engine.state, shape, num_chunks)

    def round(self, shape: RoundShape) -> None:
        """One round over all rows."""
        target, drafter, state = self._engine.target, self._engine.drafter, self._engine.state
        assert drafter is not None
        admit(state)
        self._draft()
        finish_round(target, drafter, state, shape)

    def _draft(self) -> None:
        state, plan = self._engine.state, self._engine.plan
        slots, active = state.slot_B.tolist(), state.active_B.tolist()
        num_out = state.num_out_S.tolist()
        candidates = [[[0] * plan.topk] * plan.draft_depth for _ in slots]
        edges = [[[0.0] * plan.topk] * plan.draft_depth for _ in slots]
        for row, slot in enumerate(slots):
            if not active[row]:
                continue
            key = self._engine.seats[slot].placed.prompt.key
            made = self._offer(self._outputs[key][num_out[slot] :])
            candidates[row], edges[row] = made.candidates, made.edges
            self.accepted[key].append(len(made.ranks))
            self.kinds |= set(enumerate(made.ranks, start=1))
            self._left.discard(made.node)
        device = state.slot_B.device
        state.candidate_BDM.copy_(upload(candidates, torch.long, device))
        state.edge_BDM.copy_(upload(edges, torch.float32, device))

    def _offer(self, next_ids: tuple[int, ...]) -> _Draft:
        """A draft whose tree holds the next tokens as far as a node whose turn it is."""
        plan = self._engine.plan
        edges = _random_edges(self._random, plan)
        nodes = best_first(torch.tensor(edges)[:, None], plan.nodes - 1)
        number = {ranks: place for place, ranks in enumerate(nodes, start=1)}
        # The first in turn that the rest of the output can reach.
        chosen = next(node for node in self._turn if len(nodes[node - 1]) <= len(next_ids))
        self._turn.remove(chosen)
        self._turn.append(chosen)
        path = nodes[chosen - 1]
        candidates = []
        for depth in range(plan.draft_depth):
            right = next_ids[depth] if depth < len(next_ids) else 0
            line = [(right + step) % self._vocab for step in range(1, plan.topk + 1)]
            if depth < len(path):
                line.pop()
                line.insert(path[depth], right)
            candidates.append(line)
        ranks: tuple[int, ...] = ()
        # A vocabulary of no more than the candidates offers the token beyond the path as well.
        for line, token_id in zip(candidates, next_ids, strict=False):
            if token_id not in line or (*ranks, line.index(token_id)) not in number:
                break
            ranks = (*ranks, line.index(token_id))
        return _Draft(candidates, edges, ranks, number.get(ranks, 0))


def _random_edges(source: random.Random, plan: ShapePlan) -> list[list[float]]:
    """Log-probs [D][M], falling in every depth."""
    mean_depth_cost, mean_rank_cost = source.choice(COSTS)
    edges = []
    for _ in range(plan.draft_depth):
        line = [-source.expovariate(1 / mean_depth_cost)]
        while len(line) < plan.topk:
            line.append(line[-1] - source.expovariate(1 / mean_rank_cost))
        edges.append(line)
    return edges
