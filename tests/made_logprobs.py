"""Log-probabilities for completions that no model made: what must hold of any holds of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ddbatch.core import TokenLogprobs


def made_logprobs(token_ids: Sequence[int], top: int, vocab: int, seed: int = 0) -> TokenLogprobs:
    """A function of the ids. The emitted token is among the best of its place, or below them."""
    scores: list[float] = []
    best_ids: list[list[int]] = []
    best: list[list[float]] = []
    for at, token_id in enumerate(token_ids):
        chance = random.Random(repr((seed, at, tuple(token_ids[: at + 1]))))
        ids = chance.sample(range(vocab), top)
        if top and token_id not in ids and chance.random() < 0.8:
            ids[chance.randrange(top)] = token_id
        falling = sorted((-chance.expovariate(0.5) for _ in range(top + 1)), reverse=True)
        scores.append(falling[ids.index(token_id)] if token_id in ids else falling[top])
        best_ids.append(ids)
        best.append(falling[:top])
    return TokenLogprobs(scores, best_ids, best)
