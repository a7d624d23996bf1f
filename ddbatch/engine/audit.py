"""The audit: a share of the finished rows is scored again by the oracle while the run goes on.

At every position the emitted token must be the keyed draw of the oracle's scores, or be explained
by rounding (engine/numerics.py). The longest rows are taken: what breaks late breaks there. Knows
nothing about how the engine works, about text or files.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from ddbatch.core import AuditError, Completion, TokenPrompt
from ddbatch.engine.numerics import Parting, each_parting
from ddbatch.models.decoder import Target


class AuditFigures(NamedTuple):
    """Rows that were audited, their output tokens, how many of these rounding explains, and what it
    took."""

    rows: int = 0
    tokens: int = 0
    explained: int = 0
    seconds: float = 0.0


class _Finished(NamedTuple):
    prompt: TokenPrompt
    done: Completion

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.done.token_ids)


class Auditor:
    """Audits the longest of every round(1 / rate) finished rows, and of the rows after these.

    rate: 0 = none is audited, 1 = all are. gap: by how much two scores may be off against each
    other.
    """

    def __init__(self, target: Target, *, rate: float, gap: float) -> None:
        assert 0 <= rate <= 1, rate
        self._target, self._gap = target, gap
        self._window = round(1 / rate) if rate else 0
        self._num_seen = 0  # in the window
        self._longest: _Finished | None = None
        self.figures = AuditFigures()

    def see(self, prompt: TokenPrompt, done: Completion) -> None:
        """A row has finished. AuditError where a token of the audited row is not explained."""
        assert prompt.key == done.key, (prompt.key, done.key)
        if not self._window:
            return
        row = _Finished(prompt, done)
        if self._longest is None or row.length > self._longest.length:
            self._longest = row
        self._num_seen += 1
        if self._num_seen == self._window:
            self.finish()

    def finish(self) -> None:
        """Audit the longest row since the last audit, if there is one; AuditError as above."""
        row, self._longest, self._num_seen = self._longest, None, 0
        if row is None:
            return
        started, num_explained = time.monotonic(), 0
        for parting in each_parting(self._target, row.prompt, row.done.token_ids):
            if not parting.slack <= self._gap:
                raise AuditError(_text(row.done, parting, self._gap))
            num_explained += 1
        rows, tokens, explained, seconds = self.figures
        self.figures = AuditFigures(
            rows + 1,
            tokens + len(row.done.token_ids),
            explained + num_explained,
            seconds + time.monotonic() - started,
        )


def _text(done: Completion, parting: Parting, gap: float) -> str:
    key = done.key
    return (
        f"audit of row_id={key.row_id} turn={key.turn} sample={key.sample}: output token "
        f"{parting.place} of {len(done.token_ids)} is {parting.token_id}, where the target alone "
        f"draws {parting.oracle_token_id}; scores would have to be off by {parting.slack:.2g}, "
        f"and rounding explains {gap:.2g}. The engine's output cannot be trusted, nor can the rows "
        "that this run has committed. Try engine.capture=false, then a smaller engine.budget, each "
        "with another output_dir, and report which of them helps"
    )
