"""What follows from what was measured: medians, spreads, rates, the sentence; and rows for files.

Knows no file and no table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from ddbatch.engine.round import STAGES
from ddbatch.jobs.benching.measuring import Call, Measured, Rounds
from ddbatch.jobs.benching.power import Reading, medians
from ddbatch.jobs.benching.rates import Rates, total
from ddbatch.jobs.benching.verdict import sentence

Row = dict[str, str | int | float | None]


class Spread(NamedTuple):
    """Of the repeats; low, high: the least and the most."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None where nothing was measured."""
        there = [value for value in values if value is not None]
        return cls(statistics.median(there), min(there), max(there)) if there else None


class Figures(NamedTuple):
    """Of one arm. floor_share: of the round that its floor is; memory_share, matmul_share: of what
    the ceilings allow; equal_outputs: of a call that are plain decoding's, None: no comparison."""

    item: Measured
    round_ms: Spread | None
    steady_tokens_per_second: Spread | None
    floor_ms: float | None
    floor_share: float | None
    bytes_per_second: float | None
    flop_per_second: float | None
    memory_share: float | None
    matmul_share: float | None
    stages_ms: dict[str, Spread]
    reading: Reading
    call_reading: Reading
    tokens_per_second: Spread | None
    against_plain: float | None
    acceptance_length: Spread | None
    prefill_percent: Spread | None
    equal_outputs: int | None
    sentence: str | None


def figures_of(item: Measured, group: Sequence[Measured], rates: Rates) -> Figures:
    """Of one of the arms that were measured together."""
    work = total(item.works.values())
    round_ms = Spread.of(rounds.ms for rounds in item.rounds)
    floor = sum(work.floor_ms(rates) for work in item.works.values()) or None
    speed = Spread.of(call.result.tokens_per_second for call in item.calls)
    plain = _plain(group)
    reading = medians([rounds.reading for rounds in item.rounds])
    moved = computed = memory = matmul = said = share = None
    if round_ms is not None and floor is not None:
        moved = 1000 * work.num_bytes / round_ms.median
        computed = 1000 * work.operations / round_ms.median
        memory, matmul = moved / rates.memory, computed / rates.matmul
        share, said = floor / round_ms.median, sentence(memory, matmul, _power(reading))
    against = None
    if plain is not None and speed is not None:
        against = speed.median / statistics.median(
            call.result.tokens_per_second for call in plain.calls
        )
    return Figures(
        item,
        round_ms,
        Spread.of(_steady(item, *pair) for pair in zip(item.rounds, item.calls, strict=False)),
        floor,
        share,
        moved,
        computed,
        memory,
        matmul,
        _stages(item),
        reading,
        medians([call.reading for call in item.calls]),
        speed,
        against,
        Spread.of(call.result.acceptance_length for call in item.calls),
        Spread.of(call.result.prefill for call in item.calls),
        _equal_outputs(item, plain),
        said,
    )


def _plain(group: Sequence[Measured]) -> Measured | None:
    return next(
        (item for item in group if item.arm is not None and not item.arm.has_drafts and item.calls),
        None,
    )


def _power(reading: Reading) -> float | None:
    if reading.watts is None or not reading.limit_watts:
        return None
    return reading.watts / reading.limit_watts


def _steady(item: Measured, rounds: Rounds, call: Call) -> float | None:
    """Tokens a second while every row is live: a round emits as many as the call's did."""
    length = call.result.acceptance_length
    return None if length is None else item.rows * length * 1000 / rounds.ms


def _stages(item: Measured) -> dict[str, Spread]:
    spreads = {
        name: Spread.of(rounds.stages.get(name) for rounds in item.rounds) for name in STAGES
    }
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _equal_outputs(item: Measured, plain: Measured | None) -> int | None:
    """Completions of the first call that are plain decoding's, where tokens mean something."""
    if plain is None or plain is item or not item.calls or is_synthetic(item):
        return None
    pairs = zip(item.calls[0].result.outputs, plain.calls[0].result.outputs, strict=True)
    return sum(ours == theirs for ours, theirs in pairs)


def is_synthetic(item: Measured) -> bool:
    """Whether a coin decided what was accepted."""
    return item.acceptance is not None and item.acceptance.startswith("synthetic")


def repeat_rows(figures: Figures) -> Iterator[Row]:
    """An arm's repeats, one a row."""
    item = figures.item
    plan, arm = item.plan, item.arm
    work = total(item.works.values())
    for repeat in range(max(len(item.rounds), len(item.calls))):
        rounds = item.rounds[repeat] if repeat < len(item.rounds) else None
        call = item.calls[repeat] if repeat < len(item.calls) else None
        row: Row = {
            "arm": item.name,
            "method": None if arm is None else arm.method,
            "budget": None if plan is None else plan.nodes - 1,
            "block": None if plan is None or plan.nodes == 1 else plan.block,
            "rows": item.rows,
            "context": item.context,
            "repeat": repeat,
            "round_ms": None if rounds is None else rounds.ms,
        }
        for name in STAGES:
            row[f"{name}_ms"] = None if rounds is None else rounds.stages.get(name)
        row["floor_ms"] = figures.floor_ms
        row["bytes_per_second"] = row["flop_per_second"] = row["steady_tokens_per_second"] = None
        if rounds is not None:
            row["bytes_per_second"] = 1000 * work.num_bytes / rounds.ms
            row["flop_per_second"] = 1000 * work.operations / rounds.ms
            if call is not None:
                row["steady_tokens_per_second"] = _steady(item, rounds, call)
        row |= (rounds.reading if rounds is not None else Reading())._asdict()
        row |= _call_row(item, call)
        yield row


def _call_row(item: Measured, call: Call | None) -> Row:
    if call is None:
        return {"acceptance_of": item.acceptance}
    result = call.result
    return {
        "call_prompts": len(result.outputs),
        "call_output_tokens": sum(map(len, result.outputs)),
        "call_seconds": result.seconds,
        "call_tokens_per_second": result.tokens_per_second,
        "call_ms_per_round": result.ms_per_round,
        "call_prefill_percent": result.prefill,
        "call_watts": call.reading.watts,
        "acceptance_length": result.acceptance_length,
        "acceptance_of": item.acceptance,
    }


def as_json(figures: Figures) -> dict[str, object]:
    """One arm, without its repeats."""
    item = figures.item
    found: dict[str, object] = {
        "arm": item.name,
        "rows": item.rows,
        "context": item.context,
        "plan": None if item.plan is None else asdict(item.plan),
        "acceptance_of": item.acceptance,
    }
    for name, value in figures._asdict().items():
        if name != "item":
            found[name] = _plain_value(value)
    found["floor_by_stage_and_op"] = [[*name, *work] for name, work in item.works.items()]
    return found


def _plain_value(value: object) -> object:
    if isinstance(value, Spread | Reading):
        return value._asdict()
    if isinstance(value, dict):
        return {name: _plain_value(part) for name, part in value.items()}
    return value
