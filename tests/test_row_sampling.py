"""A row's own sampling: what it may set, and every refusal by name."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddbatch.checks import RULES
from ddbatch.core import Key, Prompt, Rejected, RowSampling
from ddbatch.data.batching.columns import Columns, Fault, Row
from ddbatch.data.batching.prompts import to_prompt
from ddbatch.data.batching.row_sampling import read_row_sampling

FULL = {
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "max_new_tokens": 7,
    "seed": 2**63 - 1,
    "stop": ["\n\n", "END"],
    "stop_token_ids": [3, 0],
    "ignore_eos": False,
}


def reason_of(value: object) -> str:
    result = read_row_sampling(value, "column 's'")
    assert isinstance(result, Fault), result
    assert result.code == "bad_sampling"
    assert result.reason.startswith("column 's'")
    return result.reason


def test_a_row_may_set_every_field_as_an_object_or_as_json() -> None:
    expected = RowSampling(0.5, 1.0, 0, 0.0, 7, 2**63 - 1, ("\n\n", "END"), (3, 0), False)
    for value in (FULL, json.dumps(FULL)):
        assert read_row_sampling(value, "s") == expected
    assert isinstance(expected.top_p, float)
    assert list(FULL) == list(asdict(RowSampling()))


def test_null_sets_nothing() -> None:
    nulls = dict.fromkeys([*FULL, "n", "unknown"])
    for value in (None, "null", {}, "{}", nulls, json.dumps(nulls)):
        assert read_row_sampling(value, "s") == RowSampling()
    assert read_row_sampling({"stop": [], "seed": None}, "s") == RowSampling(stop=())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: expected 0 or a number >= 1e-06"),
        ({"temperature": "0"}, "temperature=0: expected 0 or a number >= 1e-06"),
        ({"temperature": True}, "temperature=true: expected 0 or a number >= 1e-06"),
        ({"temperature": float("nan")}, "temperature=nan: expected 0 or a number"),
        ({"temperature": float("inf")}, "temperature=inf: expected 0 or a number"),
        ({"temperature": 10**400}, "expected 0 or a number >= 1e-06"),
        ({"top_p": 0}, "top_p=0: expected a number in (0, 1]"),
        ({"top_p": 1.01}, "top_p=1.01: expected a number in (0, 1]"),
        ({"top_k": -1}, "top_k=-1: expected an integer in [0, 2147483647]"),
        ({"top_k": 2.0}, "top_k=2.0: expected an integer in [0, 2147483647]"),
        ({"min_p": 2}, "min_p=2: expected a number in [0, 1]"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected an integer >= 1"),
        ({"max_new_tokens": False}, "max_new_tokens=false: expected an integer >= 1"),
        ({"seed": 2**63}, "seed=9223372036854775808: expected an integer in [0, "),
        ({"stop": "END"}, "stop=END: expected a list, each item text, not empty"),
        ({"stop": ["a", ""]}, 'stop=[a,""]: expected a list, each item text, not empty'),
        ({"stop": ["\ud800"]}, "not empty, without lone surrogates"),
        ({"stop": ["x\ufffd"]}, "and without U+FFFD"),
        ({"stop": [1]}, "stop=[1]: expected a list, each item text"),
        ({"stop_token_ids": 3}, "stop_token_ids=3: expected a list, each item an integer >= 0"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids=[1,-1]: expected a list, each item"),
        ({"stop_token_ids": [True]}, "stop_token_ids=[true]: expected a list, each item"),
        ({"ignore_eos": 1}, "ignore_eos=1: expected true or false"),
        ({"n": 2}, "n=2: the run decides how many samples a row has (sampling.n); allowed: temp"),
        ({"temprature": 1}, "temprature=1: unknown; allowed: temperature, top_p"),
        ({"temprature": 1}, "(did you mean temperature?)"),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_is_allowed(
    options: dict[str, object], words: str
) -> None:
    assert words in reason_of(options)
    assert words in reason_of({**FULL, **options})


def test_what_is_no_object_is_refused() -> None:
    for value in ([], [FULL], 1, True, "1", "[]", '"x"'):
        assert "expected an object with any of temperature, " in reason_of(value)
    assert "is a string that is not JSON" in reason_of("{")
    assert "is a string that is not JSON" in reason_of("")


def test_the_sampling_of_a_row_goes_with_its_prompt() -> None:
    columns = Columns("prompt", "text", id_column="i", sampling_column="s")
    for options, seed in ((FULL, 2**63 - 1), (None, None)):
        row = Row({"prompt": "x", "i": "a", "s": options}, "raw")
        prompt = to_prompt(row, Key(1, 0, 0), columns, turns="last")
        assert isinstance(prompt, Prompt)
        assert prompt.sampling.seed == seed
    absent = to_prompt(Row({"prompt": "x", "i": "a"}, ""), Key(1, 0, 0), columns, turns="last")
    assert isinstance(absent, Prompt)
    assert absent.sampling == RowSampling()
    row = Row({"prompt": "x", "i": "a", "s": {"top_k": "1"}}, "raw")
    rejected = to_prompt(row, Key(1, 0, 0), columns, turns="last")
    reason = "column 's': top_k=1: expected an integer in [0, 2147483647]"
    assert rejected == Rejected(Key(1, 0, 0), "bad_sampling", reason, "a", "raw")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*FULL, "n"]), values, max_size=3) | values)
def test_whatever_a_row_says_is_checked_by_the_rules_of_the_run(value: object) -> None:
    result = read_row_sampling(value, "column 's'")
    if isinstance(result, Fault):
        assert result.code == "bad_sampling"
        return
    for name, option in asdict(result).items():
        if option is not None and f"sampling.{name}" in RULES:
            items = option if isinstance(option, tuple) else [option]
            assert all(RULES[f"sampling.{name}"].allows(item) for item in items)
            assert not isinstance(option, bool)
