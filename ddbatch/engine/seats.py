"""What the host knows of the sequences in flight, and what becomes of them at their ends.

Knows nothing about tensors or programs.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from ddbatch.core import CachePlan, Completion, Rejected, RunError, TokenPrompt
from ddbatch.engine.histories import Said
from ddbatch.engine.prefill import Placed
from ddbatch.engine.sampling import DrawKind
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

    @property
    def next_slot(self) -> int:
        """The slot that the next prompt takes."""
        return self._slots[0]

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
    """A slot in flight. draw: what its draws compute."""

    placed: Placed
    watched: Watched | None  # where the prompt has stop strings
    started: float
    draw: DrawKind
    is_cancelled: bool = False


class Load(NamedTuple):
    """What an engine has to do. num_live: sequences that are on a row or could be. mean_length:
    committed tokens of these, on average. is_dry: no prompt was there when slots were last to be
    filled. num_untold: committed tokens that the drafter knows nothing of."""

    num_live: int
    mean_length: float
    is_dry: bool
    num_untold: int


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


def closing(seat: Seat, said: Said, finish: Finish) -> Closing:
    """The end of a sequence."""
    is_stop = finish is Finish.STOP
    done = Completion(
        key=seat.placed.prompt.key,
        token_ids=tuple(said.token_ids),
        finish_reason="stop" if is_stop else "length",
        stop_token_id=said.token_ids[-1] if is_stop else None,
        accepted=tuple(said.accepted),
        depth=tuple(said.depth),
        drafted=tuple(said.drafted),
        seconds=time.monotonic() - seat.started,
        slot=seat.placed.slot,
        logprobs=said.logprobs,
    )
    return Closing(done, finish is Finish.NAN_LOGITS, seat.watched)
