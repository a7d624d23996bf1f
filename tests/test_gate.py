"""The gate lets sound engines pass, whatever their shapes, and says what it looked at. What it
stops stands in test_planted_faults.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import decode, make_engine, random_prompts
from tiny import read_drafter, read_target, write_drafter, write_target
from torch import Tensor

from ddbatch.core import PrefillPlan, Sampling
from ddbatch.engine.engine import Engine
from ddbatch.engine.findings import Findings
from ddbatch.engine.gate import judge
from ddbatch.engine.numerics import FLOAT32_GAP, measure_numerics
from ddbatch.engine.programs import EagerPrograms
from ddbatch.engine.reread import Followed
from ddbatch.engine.state import RoundShape
from ddbatch.engine.twin import Twin
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.dims import DtypeName

VOCAB = 29
HOT = [Sampling(temperature=0.8, stop=("x",)), Sampling(temperature=1.0, top_k=7, seed=3)]
Pair = tuple[Target, DFlash]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_target(folder / "target", vocab=VOCAB, layers=3, scale=1.0)
    write_drafter(
        folder / "drafter", target_folder=folder / "target", block=5, tap_layers=(0, 1), layers=1
    )
    return folder


def load(folder: Path, dtype: DtypeName = "float32") -> Pair:
    target = folder / "target"
    return read_target(target, dtype), read_drafter(folder / "drafter", target, dtype)


@pytest.mark.parametrize(
    ("dtype", "method", "budget", "rows", "page", "own"),
    [
        ("float32", "autoregressive", 0, 3, None, []),
        ("float32", "autoregressive", 0, 1, 3, HOT),
        ("float32", "chain", None, 3, 3, HOT),
        ("float32", "ddtree", 7, 3, 64, []),
        ("float32", "ddtree", 7, 1, None, HOT),
        ("float32", "ddtree", 33, 3, None, HOT),
        ("float32", "ddtree", 33, 1, 3, []),
        ("bfloat16", "autoregressive", 0, 3, 64, []),
        ("bfloat16", "ddtree", 7, 1, 3, []),
        ("bfloat16", "ddtree", 33, 3, None, HOT),
        ("float16", "chain", None, 3, 3, HOT),
    ],
)
def test_a_sound_engine_passes(
    folder: Path,
    dtype: DtypeName,
    method: str,
    budget: int | None,
    rows: int,
    page: int | None,
    own: list[Sampling],
) -> None:
    engine = make_engine(*load(folder, dtype), method=method, budget=budget, rows=rows, page=page)
    gap = FLOAT32_GAP
    if dtype != "float32":
        gap = measure_numerics(engine.target, engine.drafter, engine.plan).gap
    verdict = judge(engine, sampling=own, gap=gap)
    assert (verdict.is_sound, verdict.reason) == (True, "")
    judged, _, decoded = verdict.checks["tokens"].split()[:3]
    assert judged == decoded
    num_nodes = engine.plan.nodes - 1
    if num_nodes:
        assert verdict.checks["forced accepts"].startswith(f"{num_nodes} of {num_nodes} nodes,")
    assert verdict.seconds > 0


@pytest.mark.parametrize(
    "options",
    [{"top_logprobs": 3}, {"max_len": 17}, {"max_len": 2}, {"page": 4, "pages": 40}],
    ids=str,
)
def test_log_probs_and_little_room_are_no_fault(folder: Path, options: dict[str, Any]) -> None:
    verdict = judge(make_engine(*load(folder), **options), sampling=HOT, gap=FLOAT32_GAP)
    assert verdict.reason == ""


def test_slots_that_become_free_while_prompts_are_seated_are_no_fault(folder: Path) -> None:
    # Many prefill calls in a row: the records of the first are read, and their prompts of one token
    # end, before the last is launched.
    engine = make_engine(*load(folder), rows=5, prefill_plan=PrefillPlan(1, 16, is_fixed=True))
    verdict = judge(engine, sampling=HOT, gap=FLOAT32_GAP)
    assert (verdict.is_sound, verdict.reason) == (True, "")


def test_records_that_are_read_one_round_late_are_no_fault(folder: Path) -> None:
    engine = make_engine(*load(folder))
    engine._lag = 1
    assert judge(engine, sampling=HOT, gap=FLOAT32_GAP).reason == ""


def test_a_judged_engine_is_as_good_as_a_fresh_one(folder: Path) -> None:
    pair, prompts = load(folder), random_prompts([1, 9, 40, 2, 17, 5, 8], VOCAB)
    engine, fresh = make_engine(*pair), make_engine(*pair)
    programs = engine.programs
    assert judge(engine, sampling=HOT, gap=FLOAT32_GAP).is_sound
    assert engine.programs is programs
    for name, tensor in engine.state.tensors():
        if name.startswith(("target_cache", "drafter_cache")):
            assert tensor[:, engine.state.null_cell].eq(0).all()
    ours, theirs = (decode(item, prompts, sampling=HOT[1]) for item in (engine, fresh))
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [(c.accepted, c.slot) for c in ours] == [(c.accepted, c.slot) for c in theirs]
    assert engine.stats == fresh.stats


def test_without_time_one_of_each_kind_is_judged_and_all_are_decoded(folder: Path) -> None:
    verdict = judge(make_engine(*load(folder)), sampling=[], gap=FLOAT32_GAP, seconds=0.0)
    assert verdict.is_sound
    judged, _, decoded = verdict.checks["tokens"].split()[:3]
    assert int(judged) == 3  # two rungs and a forced accept
    assert int(decoded) > 20


def test_canaries_that_do_not_end_are_a_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(*load(folder))
    monkeypatch.setattr("ddbatch.engine.round.admit", lambda state: None)
    reason = judge(engine, sampling=[], gap=FLOAT32_GAP).reason
    assert reason.startswith("record: ")
    assert "had no live row: the device has lost them" in reason


class Wrong:
    """Programs that change one number after each run but the first of a kind."""

    def __init__(self, engine: Engine, name: str, place: int) -> None:
        self._right = EagerPrograms(engine.target, engine.drafter, engine.state)
        self._tensor: Tensor = dict(engine.state.tensors())[name]
        self._place = place

    def round(self, shape: RoundShape) -> None:
        self._right.round(shape)
        self._spoil()

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        self._right.prefill(shape, num_chunks)
        self._spoil()

    def _spoil(self) -> None:
        flat = self._tensor.view(-1)
        flat[self._place] = (
            not flat[self._place] if flat.dtype == torch.bool else 1 - flat[self._place]
        )


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("pos_BN", 5),
        ("tree.ancestor_BNW", 3),
        ("is_finite_BN", 1),
        ("feature_TC", -1),
        ("told.row_BX", 12),
        ("chunk_told.row_BX", 0),
        ("length_S", 2),
        ("ready_tail", 0),
        ("target_cache.k_LXGE", -1),  # scratch
        ("drafter_cache.v_LXGE", 0),  # the first cell of a page
    ],
)
def test_one_number_that_is_not_the_eager_programs_is_found_and_named(
    folder: Path, name: str, place: int
) -> None:
    engine = make_engine(*load(folder))
    engine.programs = Wrong(engine, name, place)
    verdict = judge(engine, sampling=[], gap=FLOAT32_GAP)
    assert verdict.reason.startswith("captured == eager: a ")
    assert f", {name}: 1 of " in verdict.reason


def test_a_twin_leaves_what_the_programs_alone_would_leave(folder: Path) -> None:
    prompts = random_prompts([3, 30, 8, 1], VOCAB)
    alone, twinned = (make_engine(*load(folder)) for _ in range(2))
    eager = EagerPrograms(twinned.target, twinned.drafter, twinned.state)
    twin = Twin(twinned.state, eager=eager, captured=twinned.programs)
    twinned.programs = twin
    ours, theirs = (decode(item, prompts, sampling=HOT[1]) for item in (twinned, alone))
    assert [(c.token_ids, c.accepted) for c in ours] == [(c.token_ids, c.accepted) for c in theirs]
    assert twin.fault is None
    for (name, tensor), (_, other) in zip(
        twinned.state.tensors(), alone.state.tensors(), strict=True
    ):
        # Of rows that a call does not fill, no more is told than that.
        if not name.startswith(("target_cache", "drafter_cache", "chunk_told")):
            assert torch.equal(tensor, other), name


@pytest.mark.parametrize(("lost", "is_sound"), [(0, True), (3, True), (60, False)])
def test_in_a_short_dtype_as_much_must_be_accepted_on_average(
    folder: Path, lost: int, is_sound: bool
) -> None:
    """lost: of 200 rounds, those that keep nothing where the oracle's keep two tokens."""
    findings = Findings(make_engine(*load(folder, "bfloat16")), gap=1.0)
    expected = [place % 4 for place in range(200)]
    findings._rounds = [
        Followed(0 if place < lost else kept, kept, True) for place, kept in enumerate(expected)
    ]
    findings.judge_means()
    assert (not findings.faults) == is_sound
