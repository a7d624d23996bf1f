"""A row's own sampling options (data.sampling_column), checked by the rules of the run's options.

Knows the fields that a row may set. Knows nothing about what the engine can honour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

from ddbatch.checks import RULES, STOPS, did_you_mean, is_stop, shown
from ddbatch.core import RowSampling
from ddbatch.data.batching.columns import Fault, kind_of, load_json

Item = TypeVar("Item")

_FIELDS = tuple(field.name for field in fields(RowSampling))


def read_row_sampling(value: object, where: str) -> RowSampling | Fault:
    """The options of an object, a JSON string of one, or null; `where` names the column."""
    if isinstance(value, str):
        value = load_json(value)
        if isinstance(value, Fault):
            return Fault("bad_sampling", f"{where} is a string that is {value.reason}")
    if value is None:
        return RowSampling()
    if not isinstance(value, dict):
        expected = f"an object with any of {', '.join(_FIELDS)}"
        return Fault("bad_sampling", f"{where} is {kind_of(value)}; expected {expected}")
    # Parquet fills the fields that a row does not set with null.
    options = {name: option for name, option in value.items() if option is not None}
    for name, option in options.items():
        refusal = _refusal(name, option)
        if refusal is not None:
            return Fault("bad_sampling", f"{where}: {name}={shown(option)}: {refusal}")
    return RowSampling(
        temperature=_float(options.get("temperature")),
        top_p=_float(options.get("top_p")),
        top_k=options.get("top_k"),
        min_p=_float(options.get("min_p")),
        max_new_tokens=options.get("max_new_tokens"),
        seed=options.get("seed"),
        stop=_tuple(options.get("stop")),
        stop_token_ids=_tuple(options.get("stop_token_ids")),
        ignore_eos=options.get("ignore_eos"),
    )


def _refusal(name: str, option: object) -> str | None:
    """Why a row may not say so; None if it may."""
    if name not in _FIELDS:
        why = (
            "the run decides how many samples a row has (sampling.n)" if name == "n" else "unknown"
        )
        return f"{why}; allowed: {', '.join(_FIELDS)}{did_you_mean(name, _FIELDS)}"
    if name == "ignore_eos":
        return None if isinstance(option, bool) else "expected true or false"
    if name == "stop":
        is_list = isinstance(option, list) and all(is_stop(item) for item in option)
        return None if is_list else f"expected a list, each item {STOPS}"
    rule = RULES[f"sampling.{name}"]
    if name == "stop_token_ids":
        if isinstance(option, list) and all(rule.allows(item) for item in option):
            return None
        return f"expected a list, each item {rule}"
    return None if rule.allows(option) else f"expected {rule}"


def _float(value: float | None) -> float | None:
    """A whole number is a float too."""
    return None if value is None else float(value)


def _tuple(value: Sequence[Item] | None) -> tuple[Item, ...] | None:
    return None if value is None else tuple(value)
