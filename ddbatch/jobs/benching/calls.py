"""A whole call: prompts in, completions out, timed from its start to its last token.

Knows engines. Knows nothing about where prompts come from, or who else is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ddbatch.core import Completion, EngineStats, TokenPrompt
from ddbatch.engine.engine import Engine

Outputs = list[tuple[int, ...]]


class Pass(NamedTuple):
    """One timed pass over all prompts. useful: of row-rounds while prompts waited, None where all
    prompts had a slot at once. useful, prefill: in %."""

    tokens_per_second: float
    seconds: float
    acceptance_length: float | None
    ms_per_round: float | None
    useful: float | None
    prefill: float | None
    outputs: Outputs


def run_engine(engine: Engine, work: Sequence[TokenPrompt], call: int) -> Pass:
    """One pass, `call` prompts at a time; its results are read back, so the device is done when the
    clock stops."""
    before = replace(engine.stats)
    at_last: list[EngineStats] = []

    def prompts(first: int) -> Iterator[TokenPrompt]:
        yield from work[first : first + call]
        at_last.append(replace(engine.stats))  # a slot is free, and no prompt is left for it

    started = time.perf_counter()
    done = [
        item
        for first in range(0, len(work), call)
        for item in engine.run(prompts(first))
        if isinstance(item, Completion)
    ]
    seconds = time.perf_counter() - started
    assert len(done) == len(work), (len(done), len(work))
    done.sort(key=lambda completion: completion.key)
    tokens = sum(len(completion.token_ids) for completion in done)
    live = at_last[0].live_row_rounds - before.live_row_rounds
    # On CUDA the record of the last round launched was not read at that moment.
    unread = engine.plan.rows if engine.target.embed.is_cuda else 0
    row_rounds = at_last[0].row_rounds - before.row_rounds - unread
    return Pass(
        tokens / seconds,
        seconds,
        # The prompt's forward gives the first token.
        (tokens - len(done)) / sum(len(completion.accepted) for completion in done),
        1000 * seconds / (engine.stats.rounds - before.rounds),
        100 * live / row_rounds if row_rounds > 0 else None,
        100 * (engine.stats.prefill_seconds - before.prefill_seconds) / seconds,
        [completion.token_ids for completion in done],
    )
