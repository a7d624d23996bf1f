"""The tables of job=bench on stdout, and what must be said of them.

Knows figures. Knows nothing about how they were measured or where they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ddbatch.engine.round import STAGES
from ddbatch.jobs.benching.figures import Figures, Spread, is_synthetic
from ddbatch.jobs.benching.rates import Rates
from ddbatch.jobs.show import aligned

Column = tuple[str, Callable[[Figures], str]]
_TEXTS = 3  # columns at the left that are read, not compared


def tables(found: Sequence[Figures]) -> str:
    """All of them, with a line above each."""
    ours = [item for item in found if item.item.rounds]
    called = [item for item in found if item.item.calls]
    parts = [
        ("Rounds, every row live", _table(_ROUNDS, ours)),
        ("Stages of a round, ms", _table([*_NAMES, *_stage_columns(ours)], ours)),
        ("Rounds against the ceilings", _table(_CEILINGS, ours)),
        ("What bounds a round", _table(_SENTENCES, ours, right=False)),
        ("Whole calls: prefill, rounds, drain, collecting", _table(_CALLS, called)),
    ]
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts)


def ceilings(rates: Rates) -> str:
    """The rates in units that people read, for a CPU too."""
    return (
        f"read {rates.read / 1e9:,.0f} GB/s, copy {rates.copy / 1e9:,.0f} GB/s (read and written), "
        f"matrix product {text_of(rates.matmul / 1e12)} TFLOP/s"
    )


def text_of(value: float | None) -> str:
    """With the digits that its size deserves."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread_of(spread: Spread | None) -> str:
    """ "1.23 (1.20-1.31)"."""
    if spread is None:
        return ""
    middle, low, high = map(text_of, spread)
    return f"{middle} ({low}-{high})"


def acceptance_of(figures: Figures) -> str:
    """With what it is of, where it is not of data."""
    length, item = figures.acceptance_length, figures.item
    if length is None:
        return ""
    text = f"{length.median:.2f}"
    return text if item.acceptance in (None, "data") else f"{text} ({item.acceptance})"


def notes(found: Sequence[Figures], prompts: str, watts: str) -> list[str]:
    """What a reader must know; prompts, watts: where they come from."""
    said = [f"prompts of a call: {prompts}"]
    if any(is_synthetic(item.item) for item in found):
        said.append(
            "synthetic: a coin decides what is accepted; tokens mean nothing, and a round of a "
            "call has some 15 small launches more for it"
        )
    if any(item.item.acceptance == "random ids" for item in found):
        said.append(
            "random ids: their acceptance length means nothing, nor do tokens/s of arms that "
            "draft; data.path=DATA gives real prompts, bench.acceptance=SHARE a synthetic one"
        )
    if not any(item.reading.watts for item in found):
        source = watts if watts.startswith("not") else f"{watts} told nothing"
        said.append(f"watts and clocks: {source}")
    return said


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _equal(figures: Figures) -> str:
    if figures.equal_outputs is None:
        return ""
    return f"{figures.equal_outputs} of {len(figures.item.calls[0].result.outputs)}"


def _giga(value: float | None) -> str:
    return "" if value is None else text_of(value / 1e9)


def _stage_columns(found: Iterable[Figures]) -> list[Column]:
    """Of the stages that an arm has."""

    def column(name: str) -> Column:
        def cell(item: Figures) -> str:
            spread = item.stages_ms.get(name)
            return "" if spread is None else text_of(spread.median)

        return name, cell

    there = {name for item in found for name in item.stages_ms}
    return [column(name) for name in STAGES if name in there]


_NAMES: list[Column] = [
    ("arm", lambda item: item.item.name),
    ("rows", lambda item: str(item.item.rows)),
    ("context", lambda item: str(item.item.context)),
]
_ROUNDS: list[Column] = [
    *_NAMES,
    ("ms (min-max)", lambda item: spread_of(item.round_ms)),
    ("floor ms", lambda item: text_of(item.floor_ms)),
    ("floor share", lambda item: _percent(item.floor_share)),
    ("tokens/s (min-max)", lambda item: spread_of(item.steady_tokens_per_second)),
]
_CEILINGS: list[Column] = [
    *_NAMES,
    ("GB/s", lambda item: _giga(item.bytes_per_second)),
    ("share", lambda item: _percent(item.memory_share)),
    ("GFLOP/s", lambda item: _giga(item.flop_per_second)),
    ("share", lambda item: _percent(item.matmul_share)),
    ("watts", lambda item: text_of(item.reading.watts)),
    ("of", lambda item: text_of(item.reading.limit_watts)),
    ("SM MHz", lambda item: text_of(item.reading.sm_mhz)),
    ("memory MHz", lambda item: text_of(item.reading.memory_mhz)),
]
_SENTENCES: list[Column] = [*_NAMES, ("", lambda item: item.sentence or "")]
_CALLS: list[Column] = [
    *_NAMES,
    ("tokens/s (min-max)", lambda item: spread_of(item.tokens_per_second)),
    ("x plain", lambda item: _ratio(item.against_plain)),
    ("acceptance", acceptance_of),
    ("prefill", lambda item: _percent_of(item.prefill_percent)),
    ("equal", _equal),
]


def _percent_of(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.1f}%"


def _table(columns: Sequence[Column], found: Sequence[Figures], *, right: bool = True) -> str:
    """Lines of a head and the arms; columns of which every cell is empty are left out."""
    cells = [[cell(item) for item in found] for _, cell in columns]
    kept = [
        [name, *column] for (name, _), column in zip(columns, cells, strict=True) if any(column)
    ]
    lines = list(zip(*kept, strict=True))
    return aligned(lines, right=range(1, len(kept) if right else _TEXTS))
