"""What must hold in the rows of one part, whoever wrote them; a file is read batch by batch.

Knows the tables' columns and how their numbers hang together. Knows nothing about records, folders
or the input. A breach is a StateError that names file, row, rule and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ddbatch.core import FinishReason, RejectCode
from ddbatch.data.checking.logprobs import output_rules
from ddbatch.data.checking.rules import (
    Bools,
    Ints,
    Rows,
    Rule,
    bools,
    check_order,
    check_same_keys,
    filled,
    ints,
    is_among,
    lengths,
    read_batches,
    row_of,
    sums,
)

_MAX_ACCEPTED = 255  # the table's uint8
_COUNTS = (
    "prompt_tokens",
    "output_tokens",
    "max_new_tokens",
    "num_steps",
    "draft_tokens",
    "accepted_tokens",
)


@dataclass(frozen=True)
class CompletionFigures:
    """A completions file, a number per row. key: packed, see pack_keys."""

    key: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    num_steps: Ints
    draft_tokens: Ints
    accepted_tokens: Ints
    is_truncated: Bools


@dataclass(frozen=True)
class AcceptanceFigures:
    """An acceptance file: what its lists add up to in each row."""

    key: Ints
    num_steps: Ints
    draft_tokens: Ints
    accepted_tokens: Ints


@dataclass(frozen=True)
class RejectedFigures:
    """A rejected file: its keys, and how many rows have which code."""

    key: Ints
    codes: Counter[str]


def read_completions(file: Path, where: str, *, has_logprobs: bool) -> CompletionFigures:
    """The figures of a completions file whose rows all hold their rules; `where` names the file.

    has_logprobs: whether the run tells the log-probabilities of its tokens.
    """
    names = pq.read_schema(file).names
    has_prompts = "prompt_token_ids" in names
    columns = [*_COUNTS, "output_token_ids", "finish_reason", "stop_reason"]
    columns += ["reasoning_end", "output_logprobs", "mean_acceptance_length"]
    columns += ["prompt_token_ids"] if has_prompts else []
    found = [
        _completions_of(batch, rows, has_prompts, has_logprobs)
        for batch, rows in read_batches(file, where, columns)
    ]
    figures = CompletionFigures(*map(np.concatenate, zip(*found, strict=True)))
    check_order(figures.key, where)
    return figures


def read_acceptance(file: Path, where: str) -> AcceptanceFigures:
    """The figures of an acceptance file whose rows all hold their rules."""
    columns = ["accepted", "drafted", "depth", "histogram"]
    found = [_acceptance_of(batch, rows) for batch, rows in read_batches(file, where, columns)]
    figures = AcceptanceFigures(*map(np.concatenate, zip(*found, strict=True)))
    check_order(figures.key, where)
    return figures


def read_rejected(file: Path, where: str) -> RejectedFigures:
    """Keys and codes of a rejected file."""
    keys: list[Ints] = []
    codes: Counter[str] = Counter()
    for batch, rows in read_batches(file, where, ["code", "reason"]):
        code = filled(batch, rows, "code")
        filled(batch, rows, "reason")
        rows.require([is_among("code", code, get_args(RejectCode))])
        keys.append(rows.key)
        codes.update(code.to_pylist())
    key = np.concatenate(keys)
    check_order(key, where)
    return RejectedFigures(key, codes)


def check_pair(done: CompletionFigures, stats: AcceptanceFigures, where: str) -> None:
    """The acceptance file tells of the same rows in the same order, and adds up to the same."""
    check_same_keys(done.key, stats.key, where)
    Rows(where, 0, stats.key).require(
        Rule(
            f"{name} of the completion is what the lists add up to",
            getattr(done, name) == getattr(stats, name),
            {name: getattr(done, name), "lists": getattr(stats, name)},
        )
        for name in ("num_steps", "draft_tokens", "accepted_tokens")
    )


def _completions_of(
    batch: pa.RecordBatch, rows: Rows, has_prompts: bool, has_logprobs: bool
) -> tuple[npt.NDArray[np.generic], ...]:
    """The columns of CompletionFigures, of rows that hold all their rules."""
    counts = {name: ints(filled(batch, rows, name)) for name in _COUNTS}
    lists = {"output_tokens": "output_token_ids"}
    if has_prompts:
        lists["prompt_tokens"] = "prompt_token_ids"
    for name, ids in lists.items():
        length = lengths(filled(batch, rows, ids))
        holds = counts[name] == length
        shown = {name: counts[name], "length": length}
        rows.require([Rule(f"{name} is the length of {ids}", holds, shown)])
    reason = filled(batch, rows, "finish_reason")
    rows.require([is_among("finish_reason", reason, get_args(FinishReason))])
    is_truncated = bools(pc.equal(reason, "length"))
    rows.require(_rules_of_an_end(batch, counts, is_truncated))
    rows.require(_rules_of_rounds(batch, counts))
    rows.require([_rule_of_reasoning(batch, counts["output_tokens"])])
    rows.require(output_rules(batch, rows, counts["output_tokens"], has_logprobs))
    wanted = ("prompt_tokens", "output_tokens", "num_steps", "draft_tokens", "accepted_tokens")
    return (rows.key, *(counts[name] for name in wanted), is_truncated)


def _rules_of_an_end(
    batch: pa.RecordBatch, counts: Mapping[str, Ints], is_truncated: Bools
) -> list[Rule]:
    """How a completion ends: a stop has a reason, a cut is at the cap."""
    output, cap = counts["output_tokens"], counts["max_new_tokens"]
    column = batch.column("stop_reason")
    why = np.asarray(column.to_numpy(zero_copy_only=False))
    has_reason = bools(column.is_valid())
    is_context = bools(pc.equal(column, "context").fill_null(False))
    shown = {"output_tokens": output, "max_new_tokens": cap}
    return [
        Rule("a completion has at least 1 token", output >= 1, {"output_tokens": output}),
        Rule("output_tokens is at most max_new_tokens", output <= cap, shown),
        Rule("finish_reason length is at max_new_tokens", ~is_truncated | (output == cap), shown),
        Rule(
            "stop_reason tells a stop's cause; with finish_reason length it is null or context",
            np.where(is_truncated, ~has_reason | is_context, has_reason),
            {"finish_reason": np.where(is_truncated, "length", "stop"), "stop_reason": why},
        ),
    ]


def _rule_of_reasoning(batch: pa.RecordBatch, output_tokens: Ints) -> Rule:
    """Reasoning has its end inside the output, where it has one."""
    column = batch.column("reasoning_end")
    end = ints(column.fill_null(0))
    holds = bools(column.is_null()) | ((end >= 1) & (end <= output_tokens))
    shown = {"reasoning_end": end, "output_tokens": output_tokens}
    return Rule("reasoning_end is null or in 1..output_tokens", holds, shown)


def _rules_of_rounds(batch: pa.RecordBatch, counts: Mapping[str, Ints]) -> list[Rule]:
    """What the rounds emitted is the output without its first token, which prefill gives."""
    steps, accepted = counts["num_steps"], counts["accepted_tokens"]
    emitted = counts["output_tokens"] - 1
    cut = accepted + steps - emitted  # the last round's bonus may fall behind a stop or the cap
    said = batch.column("mean_acceptance_length")
    mean = np.asarray(said.fill_null(np.nan).to_numpy(zero_copy_only=False))
    wanted = np.full(len(steps), np.nan, np.float32)
    np.divide(emitted, steps, out=wanted, where=steps > 0, casting="unsafe")
    is_mean = np.where(np.isnan(wanted), np.asarray(said.is_null()), np.isclose(mean, wanted))
    shown = {"num_steps": steps, "accepted_tokens": accepted, "output_tokens": emitted + 1}
    drafted = counts["draft_tokens"]
    return [
        Rule("num_steps is not negative", steps >= 0, shown),
        Rule(
            "accepted_tokens + num_steps - (output_tokens - 1) is 0 or 1, and 0 without rounds",
            (cut == 0) | ((cut == 1) & (steps > 0)),
            shown,
        ),
        Rule(
            "accepted_tokens is between 0 and draft_tokens",
            (accepted >= 0) & (accepted <= drafted),
            {"accepted_tokens": accepted, "draft_tokens": drafted},
        ),
        Rule(
            "mean_acceptance_length is (output_tokens - 1) / num_steps, null without rounds",
            is_mean,
            {"mean_acceptance_length": mean, "expected": wanted},
        ),
    ]


def _acceptance_of(batch: pa.RecordBatch, rows: Rows) -> tuple[npt.NDArray[np.generic], ...]:
    """The columns of AcceptanceFigures, of rows that hold all their rules."""
    accepted, depth, drafted, histogram = (
        filled(batch, rows, name) for name in ("accepted", "depth", "drafted", "histogram")
    )
    runs = drafted.flatten()
    run_rounds, run_nodes = (ints(runs.field(at).fill_null(-1)) for at in ("rounds", "drafted"))
    bad_runs = sums(drafted, (run_rounds < 1) | (run_nodes < 0))
    runs_rule = "runs of drafted have rounds and no negative count"
    rows.require([Rule(runs_rule, bad_runs == 0, {"runs against it": bad_runs})])
    steps, depths, rounds = lengths(accepted), lengths(depth), sums(drafted, run_rounds)
    bars = lengths(histogram)
    rows.require(
        [
            Rule(
                "depth is as long as accepted",
                depths == steps,
                {"depth": depths, "accepted": steps},
            ),
            Rule(
                "drafted runs over all rounds",
                rounds == steps,
                {"drafted": rounds, "accepted": steps},
            ),
            Rule(f"histogram ends at {_MAX_ACCEPTED}", bars <= _MAX_ACCEPTED + 1, {"bars": bars}),
        ]
    )
    # Now that they are as long as each other, round by round.
    kept, offered, nodes = (
        ints(accepted.flatten()),
        ints(depth.flatten()),
        np.repeat(run_nodes, run_rounds),
    )
    faults = {
        "accepted is at most depth": sums(accepted, kept > offered),
        "depth is at most drafted": sums(accepted, offered > nodes),
        "histogram[j] is the number of rounds that accepted j": _histogram_faults(
            accepted, histogram
        ),
    }
    rows.require(Rule(text, num == 0, {"places against it": num}) for text, num in faults.items())
    return rows.key, steps, sums(drafted, run_rounds * run_nodes), sums(accepted, kept)


def _histogram_faults(accepted: pa.Array, histogram: pa.Array) -> Ints:
    """In each row, how many entries of the histogram differ from what `accepted` gives."""
    width = _MAX_ACCEPTED + 1
    size = len(accepted) * width
    place = row_of(accepted) * width + ints(accepted.flatten())
    counted = np.bincount(place, minlength=size)
    row, length = row_of(histogram), lengths(histogram)
    first = np.cumsum(length) - length
    said = np.zeros(size, np.int64)
    said[row * width + np.arange(len(row)) - first[row]] = ints(histogram.flatten())
    return np.asarray((counted != said).reshape(len(accepted), width).sum(axis=1))
