"""What was found about an engine while it was judged, check by check.

Knows what the oracle says of a sequence, and how much of a difference rounding explains. Knows
nothing about how canaries are chosen or run.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.core import Completion, Key
from ddbatch.engine.engine import Engine
from ddbatch.engine.numerics import partings_of
from ddbatch.engine.prefill import Placed
from ddbatch.engine.reread import Followed, Reread, distance, follow, reread

SIGMAS = 3.0


class Decoded(NamedTuple):
    """A canary, its place and what came out. is_held: its cells are as it left them."""

    placed: Placed
    done: Completion
    is_held: bool

    @property
    def length(self) -> int:
        """Tokens of its prompt."""
        return len(self.placed.prompt.token_ids)

    def __str__(self) -> str:
        prompt = self.placed.prompt
        return (
            f"canary {prompt.key.row_id} ({self.length} prompt tokens, temperature "
            f"{prompt.sampling.temperature:g}, slot {self.placed.slot})"
        )


def committed_cells(placed: Placed, done: Completion, page: int, device: torch.device) -> Tensor:
    """Cells [T] of the keys that a sequence left, by the pages that the host gave it: those of all
    its tokens but the last."""
    pos_T = torch.arange(len(placed.prompt.token_ids) + len(done.token_ids) - 1, device=device)
    page_P = torch.tensor(placed.pages, device=device)
    return page_P[pos_T // page] * page + pos_T % page


class Findings:
    """Counts, and the first fault of each check.

    gap: what explains another token, and in float32 another tree. outputs: of the canaries that the
    oracle agrees with.
    """

    def __init__(self, engine: Engine, gap: float) -> None:
        self._engine, self._gap = engine, gap
        self._dtype = engine.target.embed.dtype
        self.faults: dict[str, str] = {}
        self.outputs: dict[Key, tuple[int, ...]] = {}
        self.num_decoded = 0
        self._num_judged = self._num_tokens = self._num_explained = 0
        self._rounds: list[Followed] = []
        self._num_forced = 0
        self._num_held, self._worst_share = 0, 0.0

    def fault(self, check: str, text: str) -> None:
        """A check has failed; what it saw first is kept."""
        self.faults.setdefault(check, text)

    def judge(self, decoded: Decoded, *, is_forced: bool) -> None:
        """Hold a sequence against the oracle; is_forced: its drafts were not the drafter's."""
        engine, (placed, done, is_held) = self._engine, decoded
        target, drafter, prompt = engine.target, engine.drafter, placed.prompt
        exact = reread(target, drafter, prompt, done.token_ids)
        self._num_judged += 1
        self._judge_tokens(decoded, exact.scores_TV)
        if exact.feature_TC is not None and drafter is not None and not is_forced:
            rounds = follow(target, drafter, exact.feature_TC, prompt, done, engine.plan, self._gap)
            self._judge_rounds(decoded, rounds)
        if is_held:
            self._judge_state(decoded, exact)

    def judge_forced(
        self, decoded: Decoded, known: tuple[int, ...], expected: Sequence[int]
    ) -> None:
        """Each round must have kept as many drafted tokens as `expected` says, up to the first
        token that is not the known one."""
        num_out = 1
        for number, (ours, forced) in enumerate(zip(decoded.done.accepted, expected, strict=False)):
            num_out += forced + 1
            if decoded.done.token_ids[:num_out] != known[:num_out]:
                return
            self._num_forced += 1
            if ours != forced:
                self.fault(
                    "accepted",
                    f"{decoded}, its round {number}: {ours} drafted tokens kept, and "
                    f"{forced} were offered that must be",
                )

    def judge_means(self) -> None:
        """In a short dtype trees differ, and as much must be kept on average."""
        if self._dtype == torch.float32 or not self._rounds:
            return
        ours, oracles = ([kept[side] for kept in self._rounds] for side in (0, 1))
        error = ((pvariance(ours) + pvariance(oracles)) / len(ours)) ** 0.5
        if not abs(fmean(ours) - fmean(oracles)) <= SIGMAS * error:
            self.fault(
                "accepted",
                f"{fmean(ours):.3f} drafted tokens kept a round where the oracle's trees keep "
                f"{fmean(oracles):.3f}, {SIGMAS:g} standard errors being {SIGMAS * error:.2g} "
                f"({len(ours)} rounds)",
            )

    def texts(self) -> dict[str, str]:
        """What the oracle's checks looked at."""
        found = {
            "tokens": f"{self._num_judged} of {self.num_decoded} canaries, {self._num_tokens} "
            f"tokens, {self._num_explained} that rounding explains",
            "state": f"{self._num_held} sequences, the worst block off by {self._worst_share:.1%} "
            "of what rounding explains",
        }
        if self._rounds:
            ours, oracles = (fmean(kept[side] for kept in self._rounds) for side in (0, 1))
            num_other = sum(kept.engine != kept.oracle for kept in self._rounds)
            found["accepted"] = (
                f"{len(self._rounds)} rounds, {num_other} unlike the oracle's tree; {ours:.3f} "
                f"drafted tokens kept a round, {oracles:.3f} by the oracle's trees; "
                f"{self._num_forced} forced rounds"
            )
        return found

    def _judge_tokens(self, decoded: Decoded, scores_TV: Tensor) -> None:
        prompt, output = decoded.placed.prompt, decoded.done.token_ids
        self._num_tokens += len(output)
        found = list(partings_of(scores_TV, prompt, output))
        wrong = [parting for parting in found if not parting.slack <= self._gap]
        self._num_explained += len(found) - len(wrong)
        if not wrong:
            self.outputs[prompt.key] = output
            return
        first = wrong[0]
        self.fault(
            "tokens",
            f"{decoded}: output token {first.place} of {len(output)} is {first.token_id}, the "
            f"oracle's is {first.oracle_token_id}; scores would have to be off by "
            f"{first.slack:.2g}, and rounding explains {self._gap:.2g}",
        )

    def _judge_rounds(self, decoded: Decoded, rounds: Sequence[Followed]) -> None:
        self._rounds += rounds
        for number, kept in enumerate(rounds):
            is_possible = min(kept.engine, kept.oracle) >= 0
            if not is_possible or (self._dtype == torch.float32 and not kept.is_explained):
                self.fault(
                    "accepted",
                    f"{decoded}, its round {number}: {kept.engine} drafted tokens kept, by the "
                    f"oracle's tree {kept.oracle} (-1: no such round)",
                )

    def _judge_state(self, decoded: Decoded, exact: Reread) -> None:
        engine, (placed, done, _) = self._engine, decoded
        plain = None
        if self._dtype != torch.float32:
            plain = reread(
                engine.target, engine.drafter, placed.prompt, done.token_ids, self._dtype
            )
        state = engine.state
        cell_T = committed_cells(placed, done, engine.cache_plan.page, state.slot_B.device)
        held = {"target": state.target_cache, "drafter": state.drafter_cache}
        self._num_held += 1
        for name, pairs in exact.caches.items():
            cache = held[name]
            assert cache is not None
            found = distance(cache, cell_T, pairs, None if plain is None else plain.caches[name])
            self._worst_share = max(self._worst_share, found.share)
            if found.share > 1:
                self.fault("state", f"{decoded}: {name} {found.where}")
