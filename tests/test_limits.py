"""The gemm limit: where it comes from, what a run does with it, and which files are believed."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_cli_pair

from ddbatch.config import Config
from ddbatch.core import RunError, ShapePlan
from ddbatch.engine.limits import GemmLimit, ProbeAnswer, known_limit, resolve_limit
from ddbatch.engine.plan import Method
from ddbatch.jobs.generating.decoding import EnginePair, open_pair
from ddbatch.jobs.generating.planning import Wish
from ddbatch.jobs.probing.answers import Facts, facts_of, keep_answer, read_answer
from ddbatch.models.families import read_target_dims

B300, H200 = (10, 3), (9, 0)
ANSWER = ProbeAnswer(20, 64, "NVIDIA H200", "2026-12-01")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_cli_pair(tmp_path)


def facts_here(pair: Path) -> Facts:
    dims = read_target_dims(pair / "target")
    return facts_of(dims, "float32", torch.device("cpu"), in_order=False)


def opened(pair: Path, **engine: int | str | None) -> EnginePair:
    config = Config()
    config.model.path, config.drafter.path = str(pair / "target"), str(pair / "drafter")
    config.engine.device = "cpu"
    for name, value in engine.items():
        setattr(config.engine, name, value)
    return open_pair(config, None)


def plan_of(pair: EnginePair) -> ShapePlan:
    """What serves where nothing is measured."""
    wished = pair.wish(None)
    return wished.shape(wished.rows)


def test_the_table_knows_the_absorb_step_of_mla_on_a_b300_and_nothing_else() -> None:
    found = known_limit(B300, has_mla=True)
    assert found == GemmLimit(1152, "the table of known limits: MLA absorb on sm_103")
    for capability in (B300, H200, (10, 0), None):
        assert known_limit(capability, has_mla=False) is None
        assert capability == B300 or known_limit(capability, has_mla=True) is None


@pytest.mark.parametrize(
    ("option", "answer", "has_mla", "expected"),
    [
        (40, ANSWER, True, "engine.gemm_limit=40"),
        (None, ANSWER, True, None),
        (
            "auto",
            ANSWER,
            True,
            "engine.gemm_limit=auto, which is 20 here (job=probe on NVIDIA H200, 2026-12-01)",
        ),
        ("auto", replace(ANSWER, tokens=None), True, None),  # a probe knows more than the table
        (
            "auto",
            None,
            True,
            "engine.gemm_limit=auto, which is 1152 here (the table of known limits: MLA absorb on "
            "sm_103)",
        ),
        ("auto", None, False, None),
    ],
)
def test_an_option_comes_before_a_probe_and_a_probe_before_the_table(
    option: int | str | None, answer: ProbeAnswer | None, has_mla: bool, expected: str | None
) -> None:
    found = resolve_limit(option, answer, B300, has_mla=has_mla)
    assert (None if found is None else str(found)) == expected


def test_a_kept_answer_is_read_again_and_replaced_by_a_later_one(pair: Path, cache: Path) -> None:
    facts = facts_here(pair)
    assert read_answer(facts) is None
    file = keep_answer(facts, ANSWER)
    assert read_answer(facts) == replace(ANSWER, device=facts.device)
    later = replace(ANSWER, tokens=None, tried=128, date="2026-12-02")
    assert keep_answer(facts, later) == file
    assert read_answer(facts) == replace(later, device=facts.device)
    assert [found.name for found in file.parent.iterdir()] == [file.name]
    assert file.is_relative_to(cache / "ddbatch" / "limits")


@pytest.mark.parametrize(
    ("earlier", "later", "stays"),
    [
        ((64, 64), (None, 32), True),  # a narrower probe lifts no limit
        ((64, 64), (None, 64), True),
        ((64, 64), (None, 128), False),
        ((64, 64), (32, 32), False),
        ((None, 4096), (None, 8), True),
        ((None, 8), (None, 8), False),
        ((None, 4096), (64, 64), False),
    ],
)
def test_a_probe_that_tried_less_and_saw_nothing_fail_replaces_no_answer(
    earlier: tuple[int | None, int], later: tuple[int | None, int], stays: bool
) -> None:
    first, second = (ProbeAnswer(*found, "GPU", "2026-12-01") for found in (earlier, later))
    assert first.stands_beside(second) == stays


def test_an_answer_holds_for_nothing_that_differs(pair: Path) -> None:
    facts = facts_here(pair)
    keep_answer(facts, ANSWER)
    others = [
        replace(facts, device="another"),
        replace(facts, capability=H200),
        replace(facts, dtype="bfloat16"),
        replace(facts, in_order=True),
        replace(facts, dims=replace(facts.dims, width=facts.dims.width + 2)),
        replace(facts, torch="2.8.0"),
        replace(facts, triton="3.4.0"),
        replace(facts, ddbatch="0.0.9"),
    ]
    assert all(read_answer(other) is None for other in others)


def edited(**changes: object) -> Callable[[bytes], bytes]:
    """The file's JSON with these values."""
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"\xff\xfe" + content,
        lambda content: b"[1, 2]",
        lambda content: b"[" * 100_000,
        lambda content: content.replace(b'"torch"', b'"touch"'),
        edited(tokens="20"),
        edited(tokens=0),
        edited(tokens=65),
        edited(tried=-1),
        edited(tried=None),
        edited(date="today; rm -rf"),
        edited(date=20261201),
        edited(facts={}),
        edited(facts=None),
    ],
)
def test_a_damaged_or_foreign_file_is_not_believed(
    pair: Path, damage: Callable[[bytes], bytes]
) -> None:
    facts = facts_here(pair)
    file = keep_answer(facts, ANSWER)
    file.write_bytes(damage(file.read_bytes()))
    assert read_answer(facts) is None
    assert opened(pair).limit is None
    keep_answer(facts, ANSWER)
    assert read_answer(facts) is not None


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_tells_nothing_is_noted(
    pair: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = keep_answer(facts_here(pair), ANSWER)
    file.write_text(text)
    assert read_answer(facts_here(pair)) is None
    assert f"note: {file} tells of no limit" in capsys.readouterr().err


def test_an_answer_of_other_facts_under_our_name_is_not_believed(pair: Path) -> None:
    facts = facts_here(pair)
    other = replace(facts, dtype="float16")
    keep_answer(other, ANSWER).rename(keep_answer(facts, ANSWER))
    assert read_answer(facts) is None
    assert read_answer(other) is None


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(pair: Path, cache: Path) -> None:
    cache.write_text("no folder")
    with pytest.raises(RunError, match="cannot be kept in"):
        keep_answer(facts_here(pair), ANSWER)
    assert read_answer(facts_here(pair)) is None


def test_a_cache_home_that_is_no_whole_path_is_not_used(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for place in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        file = keep_answer(facts_here(pair), ANSWER)
        assert file.is_relative_to(tmp_path / "home" / ".cache" / "ddbatch")
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0


def test_a_run_keeps_to_what_was_found_and_says_where_it_comes_from(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_of(opened(pair)).rows == 8
    assert "lowered" not in capsys.readouterr().err
    keep_answer(facts_here(pair), ANSWER)
    found = plan_of(opened(pair))
    assert "note: the plan is lowered to engine.gemm_limit=auto" in capsys.readouterr().err
    assert found.rows * found.nodes <= 20
    assert found.nodes == plan_of(opened(pair, gemm_limit=None)).nodes
    with pytest.raises(ValueError, match="28 tokens exceed") as caught:
        opened(pair, rows=4, budget=6)
    assert "which is 20 here (job=probe on a CPU" in str(caught.value)
    assert "2026-12-01); allowed: at most 2 rows" in str(caught.value)
    assert plan_of(opened(pair, rows=4, budget=6, gemm_limit=None)).rows == 4
    assert plan_of(opened(pair, rows=4, budget=6, gemm_limit=28)).rows == 4


METHODS: list[tuple[Method, ...]] = [
    ("ddtree", "chain", "autoregressive"),
    ("ddtree",),
    ("chain",),
    ("autoregressive",),
]


def wish(methods: tuple[Method, ...], budget: int | None, limit: int, **changes: Any) -> Wish:
    options = {"block": 16, "vocab": 200, "rows": 512, "has_ladder": True, "topk": None}
    source = GemmLimit(limit, "test")
    return Wish(methods, budget, limit=source, device="cuda", **(options | changes))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((METHODS[0], 8, 100, {}), 11),
        ((METHODS[1], None, 100, {"has_ladder": False}), 5),  # rows before the budget
        ((METHODS[1], None, 10, {"has_ladder": False}), 1),
        ((METHODS[2], None, 100, {"has_ladder": False}), 6),
        ((METHODS[3], None, 20, {}), 20),
        ((METHODS[0], None, 100, {}), 100),  # plain decoding may serve
        ((METHODS[1], None, 100, {}), 33),  # the smallest tree that is measured has 3 nodes
        ((METHODS[1], 8, 100, {"rows": 3}), 3),
        ((METHODS[1], None, 9999, {"rows": 32}), 32),
    ],
)
def test_rows_that_are_left_to_the_planner_are_lowered_to_the_limit(
    options: tuple[tuple[Method, ...], int | None, int, dict[str, Any]], expected: int
) -> None:
    *given_, changes = options
    assert wish(*given_, **changes).fitted().rows == expected


def test_rows_that_even_the_smallest_tree_takes_beyond_the_limit_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 50 rows for this budget"):
        wish(METHODS[1], None, 150, rows=64).check()
    wish(METHODS[1], None, 192, rows=64).check()
    wish(METHODS[0], None, 64, rows=64).check()


@given(
    methods=st.sampled_from(METHODS),
    budget=st.none() | st.integers(1, 300),
    limit=st.integers(1, 3000),
    rows=st.integers(1, 600),
    memory=st.floats(0, 1),
    block=st.integers(2, 32),
    vocab=st.integers(1, 200),
    topk=st.none() | st.integers(1, 100),
    has_ladder=st.booleans(),
)
def test_no_plan_of_a_run_exceeds_its_limit(
    methods: tuple[Method, ...], budget: int | None, limit: int, memory: float, **options: Any
) -> None:
    """Rows are the planner's, and memory leaves any number of them."""
    wished = wish(methods, None if methods == ("autoregressive",) else budget, limit, **options)
    try:
        fitted = wished.fitted()
    except ValueError as error:
        assert "engine.rows=1 x" in str(error)  # noqa: PT017 - a budget beyond the limit alone
        return
    assert fitted.rows <= wished.rows
    for plan in fitted.plans(max(1, round(memory * fitted.rows))):
        assert plan.rows * plan.nodes <= limit
