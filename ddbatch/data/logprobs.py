"""Log-probabilities as the tables hold them: arrays, with what must hold of them checked.

Knows what an engine tells of its tokens; a breach is its mistake. Knows nothing about tables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddbatch.core import Completion


class TopTokens(NamedTuple):
    """The most probable tokens at each output token, best first: [output tokens, top]."""

    ids: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float16]


def output_logprobs(done: Completion) -> npt.NDArray[np.float32] | None:
    """Of each emitted token, None where they are off; a copy, since the engine's may be a piece of
    a large buffer."""
    if done.logprobs is None:
        return None
    scores_T = np.array(done.logprobs.token, np.float32)
    assert len(scores_T) == len(done.token_ids), (
        f"{done.key}: {len(scores_T)} log-probabilities of {len(done.token_ids)} tokens"
    )
    # An emitted token has a probability: not -inf either.
    is_sound_T = np.isfinite(scores_T) & (scores_T <= 0)
    assert is_sound_T.all(), f"{done.key}: {scores_T[~is_sound_T][0]} is no token's log-probability"
    return scores_T


def top_tokens(done: Completion, top: int) -> TopTokens:
    """The `top` best tokens at each emitted one, copied."""
    told = done.logprobs
    assert told is not None, f"{done.key}: no log-probabilities"
    for name, part in (("top_ids", told.top_ids), ("top", told.top)):
        widths = sorted({len(of_token) for of_token in part})
        assert (len(part), widths) == (len(done.token_ids), [top]), (
            f"{done.key}: {name} has {len(part)} tokens with {widths} entries; expected "
            f"{len(done.token_ids)} with {top}"
        )
    ids_TM, scores_TM = np.array(told.top_ids, np.int32), np.array(told.top, np.float32)
    assert (ids_TM >= 0).all(), f"{done.key}: a token id below 0"
    assert (scores_TM <= 0).all(), f"{done.key}: a log-probability above 0, or NaN"
    with np.errstate(over="ignore"):  # what a mask has all but excluded becomes -inf
        return TopTokens(ids_TM, scores_TM.astype(np.float16))
