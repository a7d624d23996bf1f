"""What a run costs, from the prompts that were measured: tokens and bytes on the disk.

Knows how the rows looked at stand for all rows, and how many bytes a token takes. Knows nothing
about options or printing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ddbatch.data.batching.columns import PromptKind
from ddbatch.jobs.estimating.measuring import Bounds, Measured
from ddbatch.jobs.show import Range

# Bytes a token on the disk, least and most: zstd on English-like text, a vocabulary of 50k to 150k.
TEXT_BYTES = (1.0, 2.0)
ID_BYTES = (1.1, 2.5)
# Acceptance lists, by output token: plain decoding costs next to nothing, short drafts most.
_ACCEPTANCE_BYTES = (0.02, 0.2)
# Of an output token: its own log-probability, and each of the best tokens with its own.
_LOGPROB_BYTES = (3.0, 3.7)
_TOP_BYTES = (2.3, 3.9)
# Key, counts and times of a completion.
_ROW_BYTES = (20.0, 60.0)


@dataclass(frozen=True)
class Totals:
    """What the whole run has, all samples. most_tokens: output with every completion at its cap.
    expected_tokens: with estimate.output_tokens; None where that is not set."""

    completions: int
    prompt_tokens: int  # of the rows, each once
    most_tokens: int
    expected_tokens: int | None


def scale_up(found: Measured, num_rows: int, samples: int, bounds: Bounds) -> Totals:
    """From the rows looked at to all rows."""
    factor = num_rows / max(1, found.rows)
    return Totals(
        completions=round(factor * found.completions) * samples,
        prompt_tokens=round(factor * found.prompt_tokens),
        most_tokens=round(factor * found.most_tokens) * samples,
        expected_tokens=None
        if bounds.output_tokens is None
        else round(factor * found.expected_tokens) * samples,
    )


def disk_bytes(
    totals: Totals,
    samples: int,
    kind: PromptKind,
    store: Collection[str],
    top_logprobs: int | None = None,
) -> Range:
    """What the output takes: least and most. A completion's text is there twice, as completion and
    in messages; samples of one prompt may share its bytes, or repeat them. top_logprobs: how many
    of the best tokens are told beside the emitted one, None without log-probabilities."""
    tokens = totals.most_tokens if totals.expected_tokens is None else totals.expected_tokens
    num_texts = 1 if kind == "token_ids" else 2
    ends = []
    for end, copies in enumerate((1, samples)):
        prompt_tokens = totals.prompt_tokens * copies
        per_output = num_texts * TEXT_BYTES[end] + ID_BYTES[end]
        per_output += _ACCEPTANCE_BYTES[end] * ("acceptance" in store)
        if top_logprobs is not None:
            per_output += _LOGPROB_BYTES[end] + top_logprobs * _TOP_BYTES[end]
        per_prompt = (num_texts - 1) * TEXT_BYTES[end] + ID_BYTES[end] * ("prompt_ids" in store)
        ends.append(
            tokens * per_output + prompt_tokens * per_prompt + totals.completions * _ROW_BYTES[end]
        )
    return Range(*ends)
