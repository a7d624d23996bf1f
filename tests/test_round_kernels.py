"""Kernels of the round's books leave what their references leave, to the last integer."""

from __future__ import annotations

import pytest
import torch
from conftest import KERNEL_DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rounds import GARBAGE, MAX_LEN, VOCAB, Round, assert_same, made_round, random_trees

from ddbatch_kernels.accept_tree import accept_tree_ref
from ddbatch_kernels.accept_tree.kernel import accept_tree_triton
from ddbatch_kernels.admit import Ready, admit_ref
from ddbatch_kernels.admit.kernel import admit_triton
from ddbatch_kernels.commit_rows import commit_rows_ref
from ddbatch_kernels.commit_rows.kernel import commit_rows_triton
from ddbatch_kernels.facts import Fact, Finish
from ddbatch_kernels.rows import Rows

IS_NATIVE = KERNEL_DEVICE == "cuda"
BUDGETS = range(1, 65) if IS_NATIVE else (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64)
ROWS = (1, 3, 130) if IS_NATIVE else (1, 3)


def twin_of(made: Round) -> Round:
    """What the kernels work on, where the references work on the original."""
    return made.on(KERNEL_DEVICE)


def accept_both(made: Round, twin: Round) -> None:
    accept_tree_ref(made.nodes, made.rows, made.slots, made.accepted)
    accept_tree_triton(twin.nodes, twin.rows, twin.slots, twin.accepted)


def commit_both(made: Round, twin: Round) -> None:
    parts = [(one.nodes, one.accepted, one.rows, one.slots, one.record) for one in (made, twin)]
    expected = commit_rows_ref(*parts[0], **made.commit_options())
    found = commit_rows_triton(*parts[1], **made.commit_options())
    assert_same(found, expected, "kept")


def assert_twins(made: Round, twin: Round) -> None:
    for name in ("nodes", "accepted", "rows", "slots", "ready", "record"):
        assert_same(getattr(twin, name), getattr(made, name), name)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_round_is_accepted_and_committed_as_by_the_references(budget: int, rows: int) -> None:
    max_depth = min(budget, (15, 4, 7)[budget % 3])
    num_top = (None, 0, 1, 5)[budget % 4]
    made = made_round(100 * budget + rows, rows, budget + 1, max_depth, num_top=num_top)
    twin = twin_of(made)
    accept_both(made, twin)
    assert_twins(made, twin)
    commit_both(made, twin)
    assert_twins(made, twin)


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_plain_decoding_is_the_tree_of_one_node(num_top: int | None) -> None:
    made = made_round(5, 3, 1, 0, num_top=num_top)
    twin = twin_of(made)
    accept_both(made, twin)
    commit_both(made, twin)
    assert_twins(made, twin)


@settings(max_examples=200 if IS_NATIVE else 25)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 4),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 6),
    luck=st.floats(0.0, 1.0),
    stops=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_every_end_is_the_references(
    seed: int, rows: int, nodes: int, depth: int, luck: float, stops: float
) -> None:
    made = made_round(seed, rows, nodes, depth, luck=luck, stops=stops)
    twin = twin_of(made)
    accept_both(made, twin)
    assert_twins(made, twin)


def test_the_examples_hold_every_way_to_end() -> None:
    """Guards the tests above."""
    found: set[tuple[int, bool]] = set()
    for seed in range(20):
        made = made_round(seed, 8, 17, 6)
        accept_tree_ref(made.nodes, made.rows, made.slots, made.accepted)
        counts = (made.accepted.num_emitted_B > 1).tolist()
        found |= set(zip(made.accepted.finish_B.tolist(), counts, strict=True))
    ends = (Finish.LIVE, Finish.STOP, Finish.LENGTH, Finish.NAN_LOGITS)
    assert found >= {(int(end), many) for end in ends for many in (False, True)}
    assert (int(Finish.CANCELLED), False) in found
    assert (int(Finish.CANCELLED), True) not in found


@pytest.mark.parametrize("budget", [1, 7, 33])
def test_rounds_in_sequence_end_and_seat_as_by_the_references(budget: int) -> None:
    B, N, max_depth = 3, budget + 1, min(budget, 4)
    made = made_round(budget, B, N, max_depth, num_top=2)
    made.slots.length_S.clamp_(max=4)
    twin = twin_of(made)
    generator = torch.Generator().manual_seed(budget)
    num_seated = 0
    for _ in range(8):
        length_B = made.slots.length_S[made.rows.slot_B]
        for new, old in zip(
            random_trees(generator, B, N, max_depth, 0.6, length_B), made.nodes, strict=True
        ):
            old.copy_(new)
        for own, other in zip(twin.nodes, made.nodes, strict=True):
            own.copy_(other)
        accept_both(made, twin)
        commit_both(made, twin)
        waiting = made.ready.tail - made.ready.head
        admit_ref(made.rows, made.ready)
        admit_triton(twin.rows, twin.ready)
        num_seated += int(waiting - (made.ready.tail - made.ready.head))
        assert_twins(made, twin)
    assert num_seated == 2


def test_inert_rows_leave_their_slots_and_nobodys_as_they_are() -> None:
    twin = twin_of(made_round(3, 5, 9, 4))
    twin.rows.is_active_B.zero_()
    twin.rows.slot_B.fill_(len(twin.slots.length_S) - 1)
    before = [tensor.clone() for tensor in twin.slots]
    accept_tree_triton(twin.nodes, twin.rows, twin.slots, twin.accepted)
    assert not twin.accepted.num_emitted_B.any()
    parts = (twin.nodes, twin.accepted, twin.rows, twin.slots, twin.record)
    kept = commit_rows_triton(*parts, **twin.commit_options())
    assert (kept.cell_BK == twin.commit_options()["trash_cell"]).all()
    assert all(torch.equal(*pair) for pair in zip(before, twin.slots, strict=True))
    assert not twin.record.row_BX[:-1, Fact.ERROR].any()


WILD = {
    "token": (0, VOCAB),
    "token below": (0, -1),
    "token far away": (0, 1 << 30),
    "parent is itself": (1, 2),
    "parent later": (1, 5),
    "parent far away": (1, 1 << 40),
    "no parent": (1, -1),
    "parent below -1": (1, -(1 << 40)),
    "depth": (2, 1),
    "depth far away": (2, 1 << 40),
    "depth below": (2, -3),
    "choice": (5, VOCAB),
    "choice below": (5, -(1 << 30)),
}


@pytest.mark.parametrize("what", WILD)
@pytest.mark.parametrize("node", [0, 2, 6])
def test_wild_trees_end_with_the_references_error_word(what: str, node: int) -> None:
    made = made_round(node, 3, 7, 4, luck=0.9)
    accept_tree_ref(made.nodes, made.rows, made.slots, made.accepted)
    made.rows.is_active_B[:] = True
    made.rows.slot_B.copy_(torch.arange(3))
    field, value = WILD[what]
    made.nodes[field][1, node] = value
    twin = twin_of(made)
    commit_both(made, twin)
    assert_twins(made, twin)
    # Whatever the walk makes of it, it ends inside the tree.
    again = twin_of(made_round(node, 3, 7, 4, luck=0.9))
    again.nodes[field][1, node] = value
    accept_tree_triton(again.nodes, again.rows, again.slots, again.accepted)
    path_BK, num_accepted_B = again.accepted.path_BK, again.accepted.num_accepted_B
    assert ((path_BK >= 0) & (path_BK < 7)).all()
    assert ((num_accepted_B >= 0) & (num_accepted_B < path_BK.shape[1])).all()


def test_a_tree_deeper_than_its_plan_ends_the_walk_after_the_longest_path() -> None:
    """And a node that stands below itself is not reached from the root."""
    twin = twin_of(made_round(1, 1, 6, 2, stops=0.0))
    twin.rows.is_active_B[:], twin.rows.slot_B[:] = True, 0
    twin.slots.is_cancelled_S[:], twin.slots.cap_S[:] = False, 99
    twin.nodes.is_finite_BN[:] = True
    twin.nodes.token_BN[0] = torch.tensor([1, 2, 3, 4, 5, 2])
    twin.nodes.choice_BN[0] = torch.tensor([2, 3, 4, 5, 6, 2])
    twin.nodes.parent_BN[0] = torch.tensor([-1, 0, 1, 2, 3, 5])
    accept_tree_triton(twin.nodes, twin.rows, twin.slots, twin.accepted)
    assert twin.accepted.path_BK.tolist() == [[0, 1, 2]]
    assert twin.accepted.emitted_BK.tolist() == [[2, 3, 4]]
    assert twin.accepted.num_accepted_B.tolist() == [2]


@pytest.mark.parametrize("count", [-5, -1, 0, 6, 1 << 40])
@pytest.mark.parametrize("length", [-3, 0, MAX_LEN - 2, MAX_LEN, 1 << 40])
def test_wild_counts_and_lengths_end_with_the_references_error_word(
    count: int, length: int
) -> None:
    made = made_round(11, 3, 7, 4)
    accept_tree_ref(made.nodes, made.rows, made.slots, made.accepted)
    made.rows.is_active_B[1], made.rows.slot_B[1] = True, 3
    made.accepted.num_emitted_B[1] = count
    made.nodes.pos_BN[1, 0] = length
    twin = twin_of(made)
    commit_both(made, twin)
    assert_twins(made, twin)


@pytest.mark.parametrize(
    "rows", (1, 2, 31, 33, 1023, 1024, 1025, 2500) if IS_NATIVE else (1, 5, 33)
)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_ready_slots_are_seated_as_by_the_reference(rows: int, share: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    for ring in (1, rows + 3):
        for num_waiting in {0, 1, ring // 2, ring}:
            head = int(torch.randint(0, 3 * ring + 1, (), generator=generator))
            is_active_B = torch.rand(rows, generator=generator) >= share
            slot_B = torch.where(is_active_B, torch.arange(rows) + 500, GARBAGE)
            ready_Y = torch.arange(ring + 1) + 7000
            made = (
                Rows(slot_B, is_active_B),
                Ready(ready_Y, torch.tensor([head]), torch.tensor([head + num_waiting])),
            )
            twin_rows = Rows(*(part.to(KERNEL_DEVICE, copy=True) for part in made[0]))
            twin_ready = Ready(*(part.to(KERNEL_DEVICE, copy=True) for part in made[1]))
            admit_ref(*made)
            admit_triton(twin_rows, twin_ready)
            assert_same((twin_rows, twin_ready), made)
