"""Faults planted into an engine are stopped by the gate, each by the check that is there for it.

Every fault is one that a kernel, a graph or a refill could have; a sound engine passes
(test_gate.py). One that CUDA itself reports is not here: it ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from decoding import make_engine
from tiny import load_tiny_pair
from torch import Tensor

import ddbatch.engine.build as build_module
import ddbatch.engine.commit as commit_module
import ddbatch.engine.engine as engine_module
import ddbatch.engine.layouts as layouts_module
import ddbatch.engine.verify as verify_module
from ddbatch.core import CachePlan, PrefillPlan, Sampling, ShapePlan
from ddbatch.engine.engine import Engine
from ddbatch.engine.gate import judge
from ddbatch.engine.numerics import FLOAT32_GAP
from ddbatch.engine.prefill import Piece, Placed
from ddbatch.engine.programs import EagerPrograms
from ddbatch.engine.sampling import TokenFlags
from ddbatch.engine.state import RoundState
from ddbatch.engine.transfer import Ring, Ticket
from ddbatch.models import layers as layers_module
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.ancestors import pack_ancestors, unpack_ancestors
from ddbatch_kernels.attention import RowKeys
from ddbatch_kernels.build_tree import TreeNodes
from ddbatch_kernels.facts import ChunkFact

CHECKS = ("captured == eager", "record", "tokens", "accepted", "state", "memory")
VOCAB = 29
FAR = 4096
Pair = tuple[Target, DFlash]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_tiny_pair(
        tmp_path_factory.mktemp("pair"), vocab=VOCAB, block=5, layers=3, tap_layers=(0, 1)
    )


def see_wrongly(patch: Patch, node: int, other: int) -> None:
    original = verify_module.row_keys

    def row_keys(state: RoundState, pos: Tensor, own_BNW: Tensor, *args: Any, **own: Any) -> Any:
        sees_BNN = unpack_ancestors(own_BNW)
        sees_BNN[:, node, other] ^= True
        return original(state, pos, pack_ancestors(sees_BNN), *args, **own)

    patch.setattr(verify_module, "row_keys", row_keys)


def wrong_mask_bit(patch: Patch, engine: Engine) -> None:
    """Node 2 sees node 1, or does not."""
    see_wrongly(patch, 2, 1)


def wrong_mask_bit_in_word_1(patch: Patch, engine: Engine) -> None:
    """Node 33 sees node 32, or does not; what is accepted goes by right words."""
    see_wrongly(patch, 33, 32)


def wrong_ancestor_word_1(patch: Patch, engine: Engine) -> None:
    """Node 32 is taken for an ancestor of node 33, or is not, by whoever reads the tree."""
    original = build_module.build_tree

    def build_tree(*args: Tensor, out: TreeNodes) -> None:
        original(*args, out=out)
        out.ancestor_BNW[:, 33, 1] ^= 1

    patch.setattr(build_module, "build_tree", build_tree)


def page_table_off_by_one(patch: Patch, engine: Engine) -> None:
    """The second page of a slot is the one beside it."""
    original = engine_module.open_slots

    def open_slots(state: RoundState, flags: TokenFlags, placed: list[Placed]) -> None:
        original(state, flags, placed)
        for item in placed:
            page = state.page_table_SP[item.slot, 1]
            state.page_table_SP[item.slot, 1] = (page + 1) % state.cache_plan.pages

    patch.setattr(engine_module, "open_slots", open_slots)


def scratch_row_of_a_neighbour(patch: Patch, engine: Engine) -> None:
    original = commit_module.move_cells

    def move(*args: Any, scratch_cell: int, trash_cell: int) -> Tensor:
        """Features are those of the right nodes."""
        planes, feature_XC, node_T, cell_T = args[:2], *args[2:]
        N, num_nodes = engine.plan.nodes, engine.plan.nodes * engine.plan.rows
        cells = {"scratch_cell": scratch_cell, "trash_cell": trash_cell}
        original(*planes, feature_XC, (node_T - N) % num_nodes, cell_T, **cells)
        return feature_XC[node_T]

    patch.setattr(commit_module, "move_cells", move)


def split_ends_at_4096_keys(patch: Patch, engine: Engine) -> None:
    """Keys beyond are not seen, but for a row's own new ones."""
    original = layers_module.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, keys: RowKeys, *, scale: float) -> Tensor:
        stop_BQ = keys.stop_BQ.clamp(max=FAR)
        return original(q, k, v, replace(keys, stop_BQ=stop_BQ, arrivals=None), scale=scale)

    patch.setattr(layers_module, "attention", attention)


class StaleTarget:
    """A target as a graph holds it whose positions lie in a buffer that nobody writes again."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._first: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, token_T: Tensor, pos_T: Tensor, *rest: Any) -> Any:
        return self._target(token_T, self._first.setdefault(len(pos_T), pos_T.clone()), *rest)


def positions_stay_as_captured(patch: Patch, engine: Engine) -> None:
    stale: Any = StaleTarget(engine.target)
    engine.programs = EagerPrograms(stale, engine.drafter, engine.state)


def features_by_prefix(patch: Patch, engine: Engine) -> None:
    """The first nodes' features instead of those of the accepted ones."""
    original = commit_module.append_context

    def append(
        drafter: DFlash, state: RoundState, _: Tensor, pos_T: Tensor, cell_T: Tensor
    ) -> None:
        first_BK = torch.arange(state.plan.rows)[:, None] * state.plan.nodes
        first_BK = first_BK + torch.arange(state.path_BK.shape[1])
        original(drafter, state, state.feature_TC[first_BK.flatten()], pos_T, cell_T)

    patch.setattr(commit_module, "append_context", append)


def context_of_row_0_alone(patch: Patch, engine: Engine) -> None:
    """The drafter's context of other rows does not grow."""
    original = commit_module.append_context

    def append(drafter: DFlash, state: RoundState, *rest: Tensor) -> None:
        feature_TC, pos_T, cell_T = rest
        cell_BK = cell_T.unflatten(0, (state.plan.rows, -1)).clone()
        cell_BK[1:] = state.trash_cell
        original(drafter, state, feature_TC, pos_T, cell_BK.flatten())

    patch.setattr(commit_module, "append_context", append)


def stale_generation(patch: Patch, engine: Engine) -> None:
    """A refilled slot says that it still holds its first sequence."""
    original = engine_module.open_slots

    def open_slots(state: RoundState, flags: TokenFlags, placed: list[Placed]) -> None:
        original(state, flags, placed)
        state.generation_S.clamp_(max=1)

    patch.setattr(engine_module, "open_slots", open_slots)


class HastyRing(Ring):
    """One place, taken again before it was read."""

    is_full = False

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__(tensors, size=1)

    def push(self) -> Ticket:
        self._unread = [False]
        return super().push()


def record_overwritten_before_it_is_read(patch: Patch, engine: Engine) -> None:
    for module in (engine_module, layouts_module):
        patch.setattr(module, "Ring", HastyRing)
    engine._lag = 1  # as on a GPU
    engine.reset()


def prefill_input_of_another_call(patch: Patch, engine: Engine) -> None:
    """The staging buffer holds what an earlier call was sent."""
    original, sent = engine_module.put_pieces, list[Tensor]()

    def put_pieces(state: RoundState, pieces: list[Piece]) -> None:
        original(state, pieces)
        sent.append(state.chunk_RX[:, len(ChunkFact) :].clone())
        state.chunk_RX[:, len(ChunkFact) :] = sent[-2:][0]

    patch.setattr(engine_module, "put_pieces", put_pieces)


def rejected_nodes_are_committed_too(patch: Patch, engine: Engine) -> None:
    """A round's other keys are written behind the accepted ones, where the next round's belong."""
    original, state = commit_module.move_cells, engine.state

    def move(*args: Any, **cells: int) -> Tensor:
        cell_BK = args[-1].unflatten(0, (state.plan.rows, -1))
        first_B1, place_K = cell_BK[:, :1], torch.arange(cell_BK.shape[1])
        page = state.cache_plan.page
        is_near_BK = (first_B1 + place_K) // page == first_B1 // page
        is_live_B1 = first_B1 < state.null_cell
        cell_T = torch.where(is_near_BK & is_live_B1, first_B1 + place_K, cell_BK).flatten()
        return original(*args[:-1], cell_T, **cells)

    patch.setattr(commit_module, "move_cells", move)


def writes_of_nothing_go_to_the_null_cell(patch: Patch, engine: Engine) -> None:
    patch.setattr(RoundState, "trash_cell", property(lambda state: state.null_cell))


def length_counts_one_too_many(patch: Patch, engine: Engine) -> None:
    original = commit_module.commit

    def commit(drafter: DFlash | None, state: RoundState) -> None:
        original(drafter, state)
        state.length_S[state.slot_B[-1]] += 1

    patch.setattr("ddbatch.engine.round.commit", commit)


class Fault(NamedTuple):
    """checks: one of them must say so."""

    plant: Callable[[Patch, Engine], None]
    checks: set[str]
    budget: int = 7
    page: int | None = None


FAULTS = [
    Fault(wrong_mask_bit, {"tokens", "state"}),
    Fault(wrong_mask_bit_in_word_1, {"tokens", "state"}, budget=33),
    Fault(wrong_ancestor_word_1, {"accepted"}, budget=33),
    Fault(page_table_off_by_one, {"state"}, page=8),
    Fault(scratch_row_of_a_neighbour, {"tokens", "state"}),
    Fault(positions_stay_as_captured, {"captured == eager"}),
    Fault(features_by_prefix, {"state"}),
    Fault(context_of_row_0_alone, {"accepted", "state", "record"}),
    Fault(stale_generation, {"record"}),
    Fault(record_overwritten_before_it_is_read, {"record"}),
    Fault(prefill_input_of_another_call, {"record"}),
    Fault(rejected_nodes_are_committed_too, {"memory"}),
    Fault(writes_of_nothing_go_to_the_null_cell, {"memory"}),
    Fault(length_counts_one_too_many, {"record"}),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_planted_fault_is_stopped_and_named(pair: Pair, monkeypatch: Patch, fault: Fault) -> None:
    engine = make_engine(*pair, budget=fault.budget, page=fault.page)
    fault.plant(monkeypatch, engine)
    verdict = judge(engine, sampling=[Sampling(temperature=0.8)], gap=FLOAT32_GAP)
    assert not verdict.is_sound
    assert "\n" not in verdict.reason
    assert {check for check in CHECKS if f"{check}: " in verdict.reason} & fault.checks


def test_a_split_that_is_wrong_beyond_4096_keys_alone_is_stopped(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    target, drafter = load_tiny_pair(
        tmp_path,
        vocab=VOCAB,
        layers=2,
        heads=2,
        kv_heads=1,
        tap_layers=(0,),
        drafter_layers=1,
        block=3,
        max_positions=5000,
        drafter_max_positions=5000,
    )
    plan = ShapePlan(rows=1, nodes=4, block=3, draft_depth=2, topk=3)
    cache_plan = CachePlan(2, 2, FAR + 448, FAR + 448, key_counts=(64, FAR, FAR + 448))
    prefill_plan = PrefillPlan(chunks=8, chunk=64, is_fixed=False)
    engine = Engine(target, drafter, plan, cache_plan, prefill_plan=prefill_plan)
    split_ends_at_4096_keys(monkeypatch, engine)
    verdict = judge(engine, sampling=[], gap=FLOAT32_GAP)
    assert "state: " in verdict.reason
    assert re.search(f"of layer 1, positions ({FAR}|{FAR + 256})..", verdict.reason)
