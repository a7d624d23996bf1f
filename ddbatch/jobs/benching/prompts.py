"""Prompts of whole calls: those of data.path, read as a run would read them, or random ids.

Knows the options of the input and the encoder. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple, cast

import numpy as np

from ddbatch.config import Config
from ddbatch.core import Key, Rejected, Sampling, TokenPrompt
from ddbatch.data.batching.encoder import OnLong
from ddbatch.data.batching.prompts import to_prompt
from ddbatch.data.batching.turns import Turns, prompt_for_turn
from ddbatch.jobs.generating.opening import look_at_columns, open_encoder, pin_date
from ddbatch.jobs.scanning import scan_input

_BATCH_ROWS = 256


class Found(NamedTuple):
    """Prompts of data.path, and how many of the rows looked at could not be one."""

    token_ids: list[tuple[int, ...]]
    num_rejected: int


def read_prompts(config: Config, count: int, *, vocab: int, max_prompt_len: int) -> Found:
    """The first `count` prompts of data.path that can run; ValueError where there is none."""
    turns = cast(Turns, config.data.turns)
    encoder = open_encoder(config, pin_date(config, None))
    inputs = scan_input(config)
    columns = look_at_columns(config, inputs)
    encoder.check_columns(columns)
    rows = inputs.rows(0, inputs.log.num_rows)
    found: list[tuple[int, ...]] = []
    rejected: list[Rejected] = []
    while len(found) < count and (batch := list(islice(rows, min(count, _BATCH_ROWS)))):
        made = [to_prompt(row, Key(at, 0, 0), columns, turns=turns) for at, row in batch]
        rejected += [prompt for prompt in made if isinstance(prompt, Rejected)]
        encoded = encoder.encode_many(
            [
                prompt_for_turn(prompt, 0, [], 0, turns)
                for prompt in made
                if not isinstance(prompt, Rejected)
            ],
            vocab_size=vocab,
            max_prompt_len=max_prompt_len,
            on_long=cast(OnLong, config.data.on_long),
        )
        rejected += [item for item in encoded if isinstance(item, Rejected)]
        found += [item.token_ids for item in encoded if not isinstance(item, Rejected)]
    if not found:
        reason = f"the first is rejected: {rejected[0].reason}" if rejected else "it has no rows"
        raise ValueError(
            f"data.path={config.data.path}: no prompt can run with bench.new_tokens="
            f"{config.bench.new_tokens} ({reason}); allowed: data with a prompt of 1 to "
            f"{max_prompt_len} tokens"
        )
    return Found(found[:count], len(rejected))


def random_prompts(count: int, context: int, vocab: int) -> list[tuple[int, ...]]:
    """So many of so many ids, the same each time."""
    ids = np.random.default_rng(0).integers(vocab, size=(count, context))
    return [tuple(line) for line in ids.tolist()]


def work_of(
    prompts: Sequence[tuple[int, ...]], count: int, new_tokens: int, own: Sampling
) -> list[TokenPrompt]:
    """So many prompts of a call, repeated where there are fewer."""
    return [
        TokenPrompt(Key(at, 0, 0), ids, new_tokens, own)
        for at, ids in enumerate(islice(cycle(prompts), count))
    ]
