"""Measure the prompts of an input as a run would encode them: lengths, caps, bad rows, repeats.

Knows rows, prompts and the encoder. Knows nothing about options or printing. Memory: a batch of
rows, and 16 bytes a row (two digests a row with ids) to find what comes twice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ddbatch.core import Key, Prompt, Rejected
from ddbatch.data.batching.columns import BadRow, Columns, Row
from ddbatch.data.batching.encoder import Encoded, OnLong, PromptEncoder
from ddbatch.data.batching.prompts import to_prompt
from ddbatch.data.batching.stop_strings import StopStrings
from ddbatch.data.batching.turns import Turns, num_turns, prompt_for_turn
from ddbatch.jobs.estimating.histogram import Lengths
from ddbatch.jobs.generating.sampling_options import row_refusal

_BATCH_ROWS = 512
_ANY_LENGTH = 2**31 - 1
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Bounds:
    """What a prompt must fit. max_len: prompt and output tokens together. output_tokens: what a
    completion is expected to have; None = its cap. samples: of each row."""

    vocab: int
    max_len: int
    max_new_tokens: int
    on_long: OnLong
    turns: Turns
    output_tokens: int | None
    samples: int


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt to show; num_dropped: ids that were cut off at its head."""

    row_id: int
    encoded: Encoded


class Repeats:
    """Counts values that came before, by digests of 16 bytes."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def add(self, content: bytes) -> None:
        """One more value."""
        self._digests += hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()

    def count(self) -> tuple[int, int]:
        """How many values repeat an earlier one, and how often the most frequent one is there."""
        halves = np.frombuffer(bytes(self._digests), np.uint64).reshape(-1, 2)
        if not len(halves):
            return 0, 0
        ordered = halves[np.lexsort((halves[:, 0], halves[:, 1]))]
        is_new = np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1))
        sizes = np.diff(np.append(np.flatnonzero(is_new), len(ordered)))
        return int(len(ordered) - len(sizes)), int(sizes.max())


@dataclass
class Measured:
    """What the rows looked at are. One sample is meant everywhere.

    lengths: of prompts in full, those that are too long included. prompt_tokens: of rows that can
    run, as they would be cut. completions: turns to generate. num_lowered: rows whose cap the
    context lowers. most_tokens: output with every row at its cap. expected_tokens: with
    Bounds.output_tokens a completion.
    """

    rows: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    lengths: Lengths = field(default_factory=Lengths)
    runnable: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    num_long: int = 0
    num_lowered: int = 0
    most_tokens: int = 0
    expected_tokens: int = 0
    prompts: Repeats = field(default_factory=Repeats)
    ids: Repeats = field(default_factory=Repeats)
    first: ShownPrompt | None = None
    longest: ShownPrompt | None = None


def batches(rows: Iterator[tuple[int, Row | BadRow]]) -> Iterator[list[tuple[int, Row | BadRow]]]:
    """Rows as many at a time as are tokenised together."""
    while batch := list(islice(rows, _BATCH_ROWS)):
        yield batch


def measure(
    batch: Sequence[tuple[int, Row | BadRow]],
    columns: Columns,
    encoder: PromptEncoder,
    finder: StopStrings,
    bounds: Bounds,
    found: Measured,
) -> None:
    """Add a batch of rows, with their row_ids, to what was found so far."""
    prompts: list[Prompt] = []
    for row_id, row in batch:
        prompt = to_prompt(row, Key(row_id, 0, 0), columns, turns=bounds.turns)
        found.rows += 1
        if isinstance(prompt, Rejected):
            found.rejected[prompt.code] += 1
        else:
            prompts.append(prompt)
    firsts = [prompt_for_turn(prompt, 0, [], 0, bounds.turns) for prompt in prompts]
    # In full, whatever the limit: how much too long a prompt is is worth knowing.
    encodings = encoder.encode_many(
        firsts, vocab_size=bounds.vocab, max_prompt_len=_ANY_LENGTH, on_long="reject"
    )
    for prompt, encoded in zip(prompts, encodings, strict=True):
        if isinstance(encoded, Rejected):
            found.rejected[encoded.code] += 1
        elif row_refusal(prompt.sampling, bounds.samples, finder) is not None:
            found.rejected["bad_sampling"] += 1
        else:
            _add(prompt, encoded.token_ids, bounds, found)


def _add(prompt: Prompt, token_ids: tuple[int, ...], bounds: Bounds, found: Measured) -> None:
    """Count one prompt that could be encoded."""
    found.lengths.add(len(token_ids))
    found.prompts.add(np.asarray(token_ids, np.int64).tobytes())
    if prompt.user_id is not None:
        found.ids.add(prompt.user_id.encode())
    wanted = prompt.sampling.max_new_tokens or bounds.max_new_tokens
    encoded = Encoded(token_ids)
    if len(token_ids) > bounds.max_len - 1:
        found.num_long += 1
        if bounds.on_long == "reject":
            found.rejected["prompt_too_long"] += 1
            return
        kept = max(1, bounds.max_len - wanted)
        encoded = Encoded(token_ids[-kept:], num_dropped=len(token_ids) - kept)
    length = len(encoded.token_ids)
    cap = min(wanted, bounds.max_len - length)
    turns = num_turns(prompt, bounds.turns)
    found.runnable += 1
    found.completions += turns
    found.prompt_tokens += length
    found.num_lowered += cap < wanted
    found.most_tokens += turns * cap
    found.expected_tokens += turns * min(cap, bounds.output_tokens or cap)
    if found.first is None:
        found.first = ShownPrompt(prompt.key.row_id, encoded)
    if found.longest is None or length > len(found.longest.encoded.token_ids):
        found.longest = ShownPrompt(prompt.key.row_id, encoded)
