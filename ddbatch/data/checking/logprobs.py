"""What must hold of log-probabilities: of the emitted tokens, and of the best tokens beside them.

Knows the columns that hold them. Knows nothing about records, folders or the model's vocabulary. A
breach is a StateError that names file, row, rule and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddbatch.data.checking.rules import (
    Bools,
    Ints,
    Rows,
    Rule,
    bools,
    check_order,
    check_same_keys,
    filled,
    lengths,
    read_batches,
    sums,
)

# How far two tellings of one log-probability may lie apart: half precision has 11 bits, and beside
# that the engine's own scores are promised to 1e-4.
_RELATIVE, _ABSOLUTE = 2.0**-10, 1e-4


@dataclass(frozen=True)
class Emitted:
    """The output tokens of a completions file, row after row. num: how many each row has."""

    key: Ints
    num: Ints
    token_id: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]


def read_emitted(file: Path, where: str) -> Emitted:
    """The output tokens of a completions file whose rows hold their rules."""
    found = [
        (
            rows.key,
            lengths(batch.column("output_token_ids")),
            _ids(batch.column("output_token_ids")),
            _scores(batch.column("output_logprobs")),
        )
        for batch, rows in read_batches(file, where, ["output_token_ids", "output_logprobs"])
    ]
    return Emitted(*map(np.concatenate, zip(*found, strict=True)))


def output_rules(
    batch: pa.RecordBatch, rows: Rows, output_tokens: Ints, has_logprobs: bool
) -> Iterator[Rule]:
    """The rules of output_logprobs, beginning with those that the later ones rest on."""
    column = batch.column("output_logprobs")
    if not has_logprobs:
        text = "output_logprobs is null in a run with sampling.logprobs=false"
        yield Rule(text, bools(column.is_null()), {})
        return
    filled(batch, rows, "output_logprobs")
    length = lengths(column)
    yield Rule(
        "output_logprobs has an entry per output token",
        length == output_tokens,
        {"entries": length, "output_tokens": output_tokens},
    )
    scores_T = _scores(column)
    bad = sums(column, ~(np.isfinite(scores_T) & (scores_T <= 0)))
    yield Rule("output_logprobs are finite and at most 0", bad == 0, {"places against it": bad})


def check_logprobs(file: Path, where: str, said: Emitted) -> None:
    """A logprobs file tells of the same rows in the same order, and of every token of theirs."""
    key = np.concatenate([rows.key for _, rows in read_batches(file, where, [])])
    check_order(key, where)
    check_same_keys(said.key, key, where)
    stops = np.append(0, np.cumsum(said.num))
    for batch, rows in read_batches(file, where, ["top_token_ids", "top_logprobs"]):
        here = slice(rows.first, rows.first + batch.num_rows)
        tokens = slice(stops[here.start], stops[here.stop])
        for name in ("top_token_ids", "top_logprobs"):
            length = lengths(filled(batch, rows, name))
            shown = {"entries": length, "output_tokens": said.num[here]}
            text = f"{name} has an entry per output token"
            rows.require([Rule(text, length == said.num[here], shown)])
        faults = _faults(batch, said.token_id[tokens], said.logprob[tokens])
        for text, is_bad_T in faults:
            bad = sums(batch.column("top_token_ids"), is_bad_T)
            rows.require([Rule(text, bad == 0, {"tokens against it": bad})])


def _faults(
    batch: pa.RecordBatch, token_id_T: npt.NDArray[np.int32], logprob_T: npt.NDArray[np.float32]
) -> Iterator[tuple[str, Bools]]:
    """Each rule of a token with its best ones, and which tokens break it. The emitted token and its
    log-probability are given."""
    ids, scores = (batch.column(name) for name in ("top_token_ids", "top_logprobs"))
    top = ids.type.value_type.list_size
    ids_TM, scores_TM = _ids(ids).reshape(-1, top), _scores(scores).reshape(-1, top)
    yield "top_token_ids are not negative", _any(ids_TM < 0)
    yield "top_logprobs are at most 0", _any(~(scores_TM <= 0))
    yield "top_logprobs descend", _any(scores_TM[:, 1:] > scores_TM[:, :-1])
    sorted_TM = np.sort(ids_TM, axis=1)
    yield "top_token_ids of a token are distinct", _any(sorted_TM[:, 1:] == sorted_TM[:, :-1])
    # The emitted token is among the best with the same score, or has no better one than they.
    is_same_TM = ids_TM == token_id_T[:, None]
    is_among_T = _any(is_same_TM)
    told_T = np.where(is_among_T, scores_TM[np.arange(len(ids_TM)), is_same_TM.argmax(axis=1)], 0)
    room_T = _ABSOLUTE + _RELATIVE * np.abs(logprob_T)
    yield (
        "the emitted token has its log-probability of output_logprobs among top_logprobs",
        is_among_T & ~(np.abs(told_T - logprob_T) <= room_T),
    )
    yield (
        "an emitted token that is none of top_token_ids is no more probable than they are",
        ~is_among_T & ~(logprob_T <= scores_TM[:, -1] + room_T),
    )


def _any(is_bad_TM: Bools) -> Bools:
    return np.asarray(is_bad_TM.any(axis=1))


def _ids(lists: pa.Array) -> npt.NDArray[np.int32]:
    return np.asarray(_flat(lists).to_numpy(zero_copy_only=False), np.int32)


def _scores(lists: pa.Array) -> npt.NDArray[np.float32]:
    return np.asarray(_flat(lists).to_numpy(zero_copy_only=False), np.float32)


def _flat(lists: pa.Array) -> pa.Array:
    """The numbers in lists, or in lists of lists, one after the other."""
    while pa.types.is_list(lists.type) or pa.types.is_fixed_size_list(lists.type):
        lists = lists.flatten()
    return lists
