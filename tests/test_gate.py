"""The gate lets sound engines pass, whatever their shapes, and says what it looked at. What it
stops stands in test_planted_faults.py."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import decode, make_engine, random_prompts
from tiny import read_drafter, read_target, write_drafter, write_target
from torch import Tensor

from ddbatch.core import Key, Sampling
from ddbatch.engine.canaries import FAR, MIN_USES, Canaries, edge_lengths, ladder
from ddbatch.engine.engine import Engine
from ddbatch.engine.findings import Findings
from ddbatch.engine.gate import judge
from ddbatch.engine.numerics import FLOAT32_GAP, measure_numerics
from ddbatch.engine.oracle_ddtree import could_accept, oracle_round
from ddbatch.engine.plan import plan_cache, plan_shapes
from ddbatch.engine.programs import EagerPrograms
from ddbatch.engine.reread import BLOCK_POSITIONS, FLOORS, Followed, distance
from ddbatch.engine.state import RoundShape
from ddbatch.engine.twin import Twin
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.dims import DtypeName
from ddbatch.models.layers import Planes

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
    assert "did not end the canaries" in reason


@pytest.mark.parametrize(("device", "chunk"), [("cpu", 16), ("cuda", 64)])
@pytest.mark.parametrize("max_len", [2, 65, 96, 128, 1000, 2048, FAR, 8192])
def test_the_ladder_and_the_edges_leave_out_no_shape_and_few_are_long(
    device: str, chunk: int, max_len: int
) -> None:
    plan = plan_cache(3, max_len=max_len, page=None, device=device)
    rungs = ladder(plan.key_counts)
    edges = edge_lengths(plan, chunk, rungs)
    assert len(rungs) >= 2
    if device == "cuda":
        assert set(rungs) == set(plan.key_counts)
    for below, count in pairwise(rungs):
        assert count <= max(2 * below, 64, below + 64)
    assert max(edges) == plan.max_len - 1
    for edge in (1, chunk - 1, chunk, chunk + 1, FAR - 1, FAR, FAR + 1):
        assert (edge in edges) == (1 <= edge < plan.max_len)
    assert sum(edges) <= 5 * plan.max_len + 3 * FAR * (max_len > FAR) + 5000


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_canaries_refill_every_slot_twice_with_longer_and_shorter_prompts(rows: int) -> None:
    plan = plan_shapes(
        "autoregressive", budget=0, topk=None, rows=rows, block=1, vocab=VOCAB, gemm_limit=None,
        device="cuda",
    )  # fmt: skip
    cache_plan = plan_cache(rows, max_len=300, page=None, device="cuda")
    canaries = Canaries(plan, cache_plan, chunk=64, vocab=VOCAB, sampling=HOT, seed=1)
    free, lengths = deque(range(cache_plan.slots)), [list[int]() for _ in range(cache_plan.slots)]
    keys = set[Key]()
    for place in range(len(canaries.rungs)):
        in_flight = deque[int]()
        for prompt in canaries.climb(place):
            lengths[free[0]].append(len(prompt.token_ids))
            in_flight.append(free.popleft())
            keys.add(prompt.key)
            assert len(prompt.token_ids) + prompt.max_new_tokens <= cache_plan.max_len
            assert not prompt.sampling.stop
            if not free:  # one ends
                free.append(in_flight.popleft())
                canaries.freed(free[-1])
        for slot in in_flight:
            free.append(slot)
            canaries.freed(slot)
    assert len(keys) == canaries.num_prompts == sum(map(len, lengths))
    assert min(map(len, lengths)) >= MIN_USES
    steps = [new - old for line in lengths for old, new in pairwise(line)]
    assert min(sum(step > 0 for step in steps), sum(step < 0 for step in steps)) >= rows


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


def test_a_tree_is_explained_by_near_ties_alone() -> None:
    """Depth 1 has candidates 3 and 8, all but equal and next to the end of the tree."""
    scores_DV = torch.full((2, 10), -20.0)
    scores_DV[0, [1, 3, 8]] = torch.tensor([2.0, 1.0, 1.0 - 1e-5])
    scores_DV[1, [4, 5]] = torch.tensor([3.0, -3.0])
    budget = 3  # 1; 1 4; 3
    taken = oracle_round(scores_DV, (8,), budget=budget, topk=3)
    assert sorted(taken.token_ids) == [1, 3, 4]

    def explained(next_ids: tuple[int, ...], num_accepted: int, error: float) -> bool:
        return could_accept(scores_DV, next_ids, num_accepted, budget=budget, topk=3, error=error)

    assert explained((8,), 0, 1e-4)
    assert explained((8,), 1, 1e-4)
    assert not explained((8,), 1, 1e-7)
    assert explained((3,), 0, 1e-4)
    assert not explained((3,), 0, 1e-7)
    assert explained((1, 4), 2, 1e-7)
    assert not explained((1, 4), 1, 1e-4)
    assert not explained((9,), 1, 1e-4)


def test_cells_are_compared_in_blocks_and_the_worst_is_named() -> None:
    length = BLOCK_POSITIONS + 3
    exact = torch.randn(2, 2, length, 2, 4, generator=torch.Generator().manual_seed(0))
    pairs = [(exact[0, layer], exact[1, layer]) for layer in range(2)]
    held, cell_T = Planes(*exact.flip(2)), torch.arange(length).flip(0)
    assert distance(held, cell_T, pairs, None).share == 0
    held.v_LXGE[1, 0] *= 1 + FLOORS[torch.float32]
    near = distance(held, cell_T, pairs, None)
    assert 0 < near.share < 1
    held.v_LXGE[1, 0] *= 1.01
    far = distance(held, cell_T, pairs, None)
    assert far.share > 1
    assert far.where.startswith(f"values of layer 1, positions {BLOCK_POSITIONS}..{length - 1}:")
    held.k_LXGE[0, -7, 1, 2] = torch.nan
    lost = distance(held, cell_T, pairs, None)
    assert lost.share == torch.inf
    assert lost.where.startswith(f"keys of layer 0, positions 0..{BLOCK_POSITIONS - 1}: off by nan")


def test_in_a_short_dtype_a_cell_may_be_off_as_plain_pytorch_is() -> None:
    generator = torch.Generator().manual_seed(0)
    exact, noise = torch.randn(2, 2, 40, 2, 8, generator=generator)
    pairs, plain = (
        [(part[0], part[1])] for part in (exact, (exact + 0.05 * noise.roll(1)).bfloat16())
    )
    for factor, is_near in ((0.05, True), (0.08, True), (0.2, False)):
        held = Planes(*(exact + factor * noise).bfloat16()[:, None])
        assert (distance(held, torch.arange(40), pairs, plain).share <= 1) == is_near


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
