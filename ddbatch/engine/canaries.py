"""Canaries: prompts that meet the edges of an engine's shapes before it gets a real row.

They climb the ladder of key counts, so that every shape runs; every row is filled at once; lengths
lie at the edges of pages, pieces and key counts and one beside them; a slot's prompts are long and
short in turn; every canary ends at its cap. Knows nothing about models beyond the vocabulary, nor
how canaries are judged.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ddbatch.core import CachePlan, Key, Sampling, ShapePlan, TokenPrompt
from ddbatch.engine.engine import Engine
from ddbatch.engine.prefill import Placed
from ddbatch.engine.programs import Programs
from ddbatch.engine.state import RoundShape

CAPS = (24, 8, 8, 12, 8, 16)
MOST = max(CAPS)
FAR = 4096  # where attention in several parts goes wrong late
NEAR = 512  # edges up to here are met on all sides; what lies beyond costs time
LONG_PIECES = 4  # pieces of the longest prompt that is at no edge
MIN_USES = 3  # of each slot: two refills


def ladder(counts: Sequence[int]) -> list[int]:
    """The key counts to climb: the first from each power of two on, the first beyond FAR, the last.
    At least two, though it be the same one twice."""
    found = {counts[-1]}
    for least in (*(1 << bit for bit in range(counts[-1].bit_length())), FAR + 1):
        found |= set([count for count in counts if count >= least][:1])
    return sorted(found) if len(found) > 1 else [counts[-1]] * 2


def edge_lengths(cache_plan: CachePlan, chunk: int, rungs: Sequence[int]) -> list[int]:
    """Prompt lengths at edges, rising."""
    marks = {chunk, cache_plan.page, *rungs}
    near = {mark + step for mark in marks if mark <= NEAR for step in (-1, 0, 1)}
    # One token below a count: the prompt fills it, and its rounds cross it.
    crossing = {mark - 1 for mark in marks} | {FAR - 1, FAR, FAR + 1}
    # The cap ends these with the keys of the count used up.
    filling = {rung - MOST for rung in rungs if rung <= NEAR} | {rungs[-1] - MOST}
    return sorted(n for n in {1, 2} | near | crossing | filling if 1 <= n < cache_plan.max_len)


class Canaries:
    """Prompts for each rung of the ladder, each drawn when the engine has a slot for it.

    next_slot: says which. sampling: options of the run; canaries take them at random, without what
    ends a text, and some are greedy. fills_slots: there are as many that every slot is used over
    and over; else every row is.
    """

    def __init__(
        self,
        plan: ShapePlan,
        cache_plan: CachePlan,
        *,
        next_slot: Callable[[], int],
        chunk: int,
        vocab: int,
        sampling: Sequence[Sampling],
        seed: int,
        fills_slots: bool = True,
    ) -> None:
        # Prompts of a rung, and the uses of each slot at its end.
        self._least = plan.rows + (cache_plan.slots if fills_slots else 2 * plan.rows)
        self._min_uses = MIN_USES if fills_slots else 0
        self._max_len, self._chunk, self._vocab = cache_plan.max_len, chunk, vocab
        own = [replace(item, stop=(), stop_token_ids=()) for item in sampling]
        self._own = list(dict.fromkeys(own)) or [Sampling()]
        self._random = random.Random(seed)
        self.rungs = ladder(cache_plan.key_counts)
        self._edges = edge_lengths(cache_plan, chunk, self.rungs)
        self._next_slot = next_slot
        self._next_is_long = [bool(slot % 2) for slot in range(cache_plan.slots)]
        self._num_uses = [0] * cache_plan.slots
        self.num_prompts = 0
        self.edge_keys: set[Key] = set()

    def climb(self, place: int) -> Iterator[TokenPrompt]:
        """Prompts of one rung."""
        rung, is_last = self.rungs[place], place == len(self.rungs) - 1
        below = self.rungs[place - 1] if place else 0
        here = [n for n in self._edges if self._home(n) in range(below + 1, rung + 1)]
        pools = (
            deque(n for n in here if n <= self._chunk),
            deque(n for n in here if n > self._chunk),
        )
        num_drawn = 0
        while (
            any(pools)
            or num_drawn < self._least
            or (is_last and min(self._num_uses) < self._min_uses)
        ):
            slot = self._next_slot()
            is_long = self._next_is_long[slot]
            self._next_is_long[slot] = not is_long
            self._num_uses[slot] += 1
            num_drawn += 1
            is_edge = bool(pools[is_long])
            yield self._prompt(
                pools[is_long].popleft() if is_edge else self._filler(is_long, rung), is_edge
            )

    def _home(self, length: int) -> int:
        """The rung on which a prompt of this length is met: that which holds its output."""
        return min(length + MOST, self._max_len)

    def _filler(self, is_long: bool, rung: int) -> int:
        least, most = 1, self._chunk
        if is_long:
            least, most = self._chunk + 1, LONG_PIECES * self._chunk
        most = max(1, min(most, rung - MOST, self._max_len - 1))
        return self._random.randint(min(least, most), most)

    def _prompt(self, length: int, is_edge: bool) -> TokenPrompt:
        number = self.num_prompts
        is_filling = is_edge and length + MOST in self.rungs
        cap = MOST if is_filling else CAPS[number % len(CAPS)]
        cap = min(cap, self._max_len - length)
        key = Key(number, 0, 0)
        if is_edge:
            self.edge_keys.add(key)
        self.num_prompts += 1
        token_ids = tuple(self._random.randrange(self._vocab) for _ in range(length))
        # At edges always as the run draws: what its rows need is captured here.
        choices = self._own if is_edge else [Sampling(), *self._own]
        return TokenPrompt(key, token_ids, cap, self._random.choice(choices))


class Noted:
    """An engine's programs, which also note who was given which slot and pages."""

    def __init__(self, engine: Engine, programs: Programs) -> None:
        self._engine, self._programs = engine, programs
        self._seen: dict[tuple[int, int], Placed] = {}

    @property
    def placed(self) -> list[Placed]:
        """In order."""
        return list(self._seen.values())

    @property
    def summary(self) -> str:
        """How many there were, and what they took over."""
        lengths: dict[int, list[int]] = {}
        for item in self.placed:
            lengths.setdefault(item.slot, []).append(len(item.prompt.token_ids))
        pairs = [pair for line in lengths.values() for pair in pairwise(line)]
        num_shorter = sum(old > new for old, new in pairs)
        num_longer = sum(old < new for old, new in pairs)
        longest = max((max(line) for line in lengths.values()), default=0)
        return (
            f"{len(self._seen)} prompts of up to {longest} tokens in {len(lengths)} slots, "
            f"{num_shorter} of them after a longer one and {num_longer} after a shorter one"
        )

    def round(self, shape: RoundShape) -> None:
        """One round over all rows."""
        self._programs.round(shape)

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        """One prefill call over so many pieces. Nobody leaves a slot before his."""
        for slot, seat in self._engine.seats.items():
            name = slot, seat.placed.generation
            if name not in self._seen:
                self._seen[name] = seat.placed
        self._programs.prefill(shape, num_chunks)
