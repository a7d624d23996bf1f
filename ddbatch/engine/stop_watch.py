"""Looks for stop strings beside the rounds: a worker thread reads the text of flagged rows.

The device flags a row when it emits a token that could complete one of its strings; only then is
its text looked at. A match cuts at the first token that completes a string, whatever was decoded
since, so the lag never shows in a result. Knows nothing about how text is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ddbatch.core import Completion, StopFinder, StopMatch


@dataclass
class Watched:
    """One sequence. num_fed: output tokens whose text is looked at, or will be."""

    watch: Callable[[Sequence[int]], StopMatch | None]
    num_fed: int = 0
    checks: list[Future[StopMatch | None]] = field(default_factory=list)

    @property
    def is_settled(self) -> bool:
        """Whether every look has ended."""
        return all(check.done() for check in self.checks)

    def match(self) -> StopMatch | None:
        """The first match; waits for looks that have not ended."""
        while self.checks:
            found = self.checks[0].result()
            if found is not None:
                return found
            del self.checks[0]
        return None


class StopWatch:
    """One thread for all sequences: looks are taken in the order in which they were asked for."""

    def __init__(self, finder: StopFinder | None) -> None:
        self._finder = finder
        self._thread: ThreadPoolExecutor | None = None

    def open(self, stop: tuple[str, ...]) -> Watched | None:
        """Watch a new sequence; None where it has no stop strings."""
        if not stop:
            return None
        assert self._finder is not None, "stop strings need a finder"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="stop-strings")
        return Watched(self._finder.watch(stop))

    def feed(self, watched: Watched, token_ids: Sequence[int]) -> None:
        """Look at the next tokens, beside what else is going on."""
        assert self._thread is not None
        watched.num_fed += len(token_ids)
        watched.checks.append(self._thread.submit(watched.watch, token_ids))


def cut(done: Completion, match: StopMatch) -> Completion:
    """The completion as if decoding had ended with the token that completed the string."""
    num_emitted = 1  # by the prompt's forward
    accepted: list[int] = []
    for kept in done.accepted:
        left = match.num_tokens - num_emitted
        if left <= 0:
            break
        accepted.append(min(kept, left))
        num_emitted += min(kept + 1, left)
    return replace(
        done,
        token_ids=done.token_ids[: match.num_tokens],
        finish_reason="stop",
        stop_token_id=None,
        stop_string=match.string,
        accepted=tuple(accepted),
        depth=done.depth[: len(accepted)],
        drafted=done.drafted[: len(accepted)],
        logprobs=None if done.logprobs is None else done.logprobs.first(match.num_tokens),
    )
