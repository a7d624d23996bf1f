"""What the host knows of the sequences in flight, and what becomes of them at their ends.

Knows nothing about tensors or programs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddbatch.core import CachePlan, Completion, Rejected, RunError, TokenLogprobs, TokenPrompt
from ddbatch.engine.prefill import Placed
from ddbatch.engine.record import RowFacts
from ddbatch.engine.stop_watch import Watched, cut
from ddbatch_kernels.facts import Finish

# The first rounds after a prefill call may be without a live row: the host reads late.
MAX_IDLE_ROUNDS = 4


class Homes:
    """Free slots and pages of the cache, and how many sequences each slot has had.

    Both are queues: what was freed last is reused last.
    """

    def __init__(self, plan: CachePlan) -> None:
        self._plan = plan
        self._slots, self._pages = deque(range(plan.slots)), deque(range(plan.pages))
        self._generations = [0] * plan.slots

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._slots)

    def take(self, prompt: TokenPrompt) -> Placed | None:
        """A free slot, and pages for all that the prompt may become; None while pages are short."""
        length = len(prompt.token_ids) + prompt.max_new_tokens
        num_pages = -(-length // self._plan.page)
        assert min(len(prompt.token_ids), prompt.max_new_tokens) >= 1, prompt.key
        assert length <= self._plan.max_len, (prompt.key, length, self._plan)
        if num_pages > len(self._pages):
            return None
        slot = self._slots.popleft()
        pages = [self._pages.popleft() for _ in range(num_pages)]
        self._generations[slot] += 1
        return Placed(slot, pages, self._generations[slot], prompt)

    def give_back(self, placed: Placed) -> None:
        """The sequence has ended, and no launched program works on it."""
        self._slots.append(placed.slot)
        self._pages.extend(placed.pages)


@dataclass
class Seat:
    """A slot in flight. accepted, depth: per round. may_end: output tokens up to the last one that
    may end a stop string. is_loaded: its last piece is launched."""

    placed: Placed
    watched: Watched | None  # where the prompt has stop strings
    started: float
    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    told: list[TokenLogprobs] = field(default_factory=list)  # by round
    may_end: int = 0
    is_loaded: bool = False
    is_cancelled: bool = False
    length: int = field(init=False)  # committed tokens: all but the last emitted one

    def __post_init__(self) -> None:
        self.length = len(self.placed.prompt.token_ids)

    @property
    def most(self) -> int:
        """Tokens that it may ever commit."""
        prompt = self.placed.prompt
        return len(prompt.token_ids) + prompt.max_new_tokens

    def take(self, facts: RowFacts) -> None:
        """Append what a program emitted."""
        if facts.may_end:
            self.may_end = len(self.token_ids) + facts.may_end
        if facts.token_ids:
            self.length += len(facts.token_ids) - (not self.token_ids)
            self.token_ids += facts.token_ids
        if facts.logprobs is not None:
            self.told.append(facts.logprobs)

    def take_round(self, facts: RowFacts) -> None:
        """Append a round. RunError where the device has the sequence at another place."""
        if facts.check != self.length:
            raise RunError(
                f"engine: slot {facts.slot} had {facts.check} tokens committed on the device where "
                f"the host has {self.length}; nothing of this sequence can be trusted"
            )
        self.take(facts)
        if facts.finish is not Finish.CANCELLED:
            self.accepted.append(facts.accepted)
            self.depth.append(facts.depth)


class IdleWatch:
    """Counts rounds without a live row while sequences are seated: then nothing would ever end."""

    def __init__(self) -> None:
        self._num_rounds = 0

    def see(self, has_live: bool, num_seated: int) -> None:
        """A round has been read; RunError where rows stand still."""
        self._num_rounds = 0 if has_live or not num_seated else self._num_rounds + 1
        if self._num_rounds > MAX_IDLE_ROUNDS:
            raise RunError(
                f"engine: {num_seated} sequences are seated and {self._num_rounds} rounds had no "
                "live row: the device has lost them"
            )


def check_generation(seat: Seat | None, facts: RowFacts) -> Seat:
    """The seat that the facts are of. RunError where the slot has another sequence by now."""
    if seat is None or seat.placed.generation != facts.generation:
        expected = None if seat is None else seat.placed.generation
        raise RunError(
            f"engine: row {facts.row} worked on sequence {facts.generation} of slot {facts.slot} "
            f"where {expected} is seated; a stale row cannot be trusted"
        )
    return seat


@dataclass
class Closing:
    """A sequence that has ended; its text may still be looked at."""

    result: Completion
    is_nan: bool  # without a match it is to be rejected
    watched: Watched | None

    @property
    def is_settled(self) -> bool:
        """Whether its text is known."""
        return self.watched is None or self.watched.is_settled

    def outcome(self) -> Completion | Rejected:
        """What became of the sequence; waits for looks at its text."""
        done, match = self.result, None if self.watched is None else self.watched.match()
        if match is not None:
            return cut(done, match)
        if self.is_nan:
            return Rejected(
                done.key,
                "nan_logits",
                f"a score is not finite after {len(done.token_ids)} output tokens",
            )
        return done


def closing(seat: Seat, finish: Finish, drafted: int) -> Closing:
    """The end of a sequence. drafted: nodes offered in every round."""
    is_stop = finish is Finish.STOP
    done = Completion(
        key=seat.placed.prompt.key,
        token_ids=tuple(seat.token_ids),
        finish_reason="stop" if is_stop else "length",
        stop_token_id=seat.token_ids[-1] if is_stop else None,
        accepted=tuple(seat.accepted),
        depth=tuple(seat.depth),
        drafted=drafted,
        seconds=time.monotonic() - seat.started,
        slot=seat.placed.slot,
        logprobs=_joined(seat.told),
    )
    return Closing(done, finish is Finish.NAN_LOGITS, seat.watched)


def _joined(told: Sequence[TokenLogprobs]) -> TokenLogprobs | None:
    if not told:
        return None
    return TokenLogprobs(
        [item for part in told for item in part.token],
        [item for part in told for item in part.top_ids],
        [item for part in told for item in part.top],
    )
