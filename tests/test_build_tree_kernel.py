"""The kernel of build_tree writes exactly what the reference writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_rounds import assert_same, copied
from torch import Tensor
from trees import poisoned_tree

from ddbatch_kernels.build_tree import build_tree_ref, tree_capacity
from ddbatch_kernels.build_tree.kernel import build_tree_triton

IS_NATIVE = torch.cuda.is_available()
INTERPRETED = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64)
BUDGETS = (*range(1, 65), 128) if IS_NATIVE else INTERPRETED
KINDS = ("normal", "few_values", "equal", "impossible", "tiny", "not_numbers")


def edges(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """float32 log-probs, descending in the last dim; tie-heavy but for "normal" and "tiny"."""
    below = -torch.rand(shape, generator=generator)
    match kind:
        case "normal":
            return (below * 6).sort(dim=-1, descending=True).values
        case "few_values":
            return (below * 3).round().sort(dim=-1, descending=True).values
        case "equal":
            return torch.full(shape, -1.5)
        case "impossible":
            certain = torch.full(shape, -torch.inf)
            certain[..., 0] = 0.0
            return certain
        case "tiny":  # about the unit of the sums, where they are rounded
            return (below * 2.0**-38).sort(dim=-1, descending=True).values
        case "not_numbers":
            sound = (below * 6).sort(dim=-1, descending=True).values
            sound[1::2] = torch.nan
            return sound
    raise AssertionError(kind)


def assert_same_trees(edge_BDRM: Tensor, num_nodes: int, device: str) -> None:
    B, D, _, M = edge_BDRM.shape
    generator = torch.Generator().manual_seed(num_nodes)
    candidate_BDM = torch.randint(1 << 33, (B, D, M), generator=generator)
    anchor_B = torch.randint(1 << 33, (B,), generator=generator)
    expected = poisoned_tree(B, num_nodes)
    build_tree_ref(edge_BDRM, candidate_BDM, anchor_B, out=expected)
    found = poisoned_tree(B, num_nodes, device)
    build_tree_triton(
        edge_BDRM.to(device), candidate_BDM.to(device), anchor_B.to(device), out=found
    )
    assert_same(found, expected)
    slot_B = torch.randint(B + 2, (B,), generator=generator)
    anchor_S, length_S = torch.randint(1 << 33, (2, B + 2), generator=generator)
    seated, seated_pos_BN = poisoned_tree(B, num_nodes), torch.full((B, num_nodes), -77)
    found_pos_BN = seated_pos_BN.to(device, copy=True)
    own = (edge_BDRM, candidate_BDM, anchor_S, slot_B, length_S)
    build_tree_ref(*own, seated_pos_BN, out=seated)
    build_tree_triton(*copied(own, device), found_pos_BN, out=found)
    assert_same(found, seated)
    assert_same(found_pos_BN, seated_pos_BN)
    assert torch.equal(seated.token_BN[:, 0], anchor_S[slot_B])
    assert torch.equal(seated_pos_BN, length_S[slot_B][:, None] + seated.depth_BN)


@pytest.mark.parametrize("budget", BUDGETS)
def test_kernel_writes_the_reference_trees_for_every_budget(
    budget: int, kernel_device: str
) -> None:
    generator = torch.Generator().manual_seed(budget)
    kinds = KINDS
    if not IS_NATIVE:  # interpreting is slow
        step = 1 if budget < 10 else 2 if budget < 20 else 3
        kinds = KINDS[budget % step :: step]
    for number, kind in enumerate(kinds):
        depth, topk = min(15, budget), min(64, budget, 5 + 7 * number)
        edge = edges(kind, (3 if budget % 2 else 2, depth, 1, topk), generator)
        assert_same_trees(edge, tree_capacity(depth, topk, budget) + 1, kernel_device)


@given(
    seed=st.integers(0, 2**32 - 1),
    budget=st.integers(1, 40),
    depth=st.integers(1, 8),
    topk=st.integers(1, 6),
    kind=st.sampled_from(KINDS),
)
@settings(
    max_examples=300 if IS_NATIVE else 20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it is a word
)
def test_kernel_writes_the_reference_trees_when_scores_depend_on_the_parent(
    seed: int, budget: int, depth: int, topk: int, kind: str, kernel_device: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    edge = edges(kind, (2, depth, topk, topk), generator)
    assert_same_trees(edge, tree_capacity(depth, topk, budget) + 1, kernel_device)


@pytest.mark.parametrize("parents", [1, 64])
def test_the_deepest_and_widest_trees_are_the_reference_trees(
    parents: int, kernel_device: str
) -> None:
    """31 levels of floors are the smallest sum there is."""
    generator = torch.Generator().manual_seed(parents)
    for kind in ("few_values", "not_numbers"):
        edge = edges(kind, (2, 31, parents, 64), generator)
        assert_same_trees(edge, 129 if IS_NATIVE else 40, kernel_device)
    chain = torch.full((2, 31, 1, 1), torch.nan)
    assert_same_trees(chain, 32, kernel_device)


def test_a_tree_of_every_node_there_can_be_is_the_reference_tree(kernel_device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for kind in KINDS:
        edge = edges(kind, (2, 3, 1, 3), generator)
        assert_same_trees(edge, 3 + 9 + 27 + 1, kernel_device)


def test_without_drafts_the_kernel_writes_the_root_alone(kernel_device: str) -> None:
    assert_same_trees(torch.zeros(3, 0, 1, 0), 1, kernel_device)


def test_a_row_of_no_numbers_leaves_its_neighbours_trees_alone(kernel_device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    edge = edges("normal", (3, 5, 1, 6), generator)
    candidate, anchor = torch.arange(90).view(3, 5, 6), torch.arange(3)
    trees = []
    for bad in (edge, edge.clone().index_fill_(0, torch.tensor(1), torch.nan)):
        trees.append(poisoned_tree(3, 18, kernel_device))
        build_tree_triton(
            bad.to(kernel_device),
            candidate.to(kernel_device),
            anchor.to(kernel_device),
            out=trees[-1],
        )
    for before, after in zip(*trees, strict=True):
        assert torch.equal(before[::2], after[::2])


def test_slots_that_are_none_are_not_looked_up(kernel_device: str) -> None:
    nodes, pos_BN = poisoned_tree(3, 1, kernel_device), torch.zeros(3, 1, dtype=torch.long)
    wild_B, table_S = torch.tensor([-(1 << 40), 1, 1 << 40]), torch.arange(3) + 5
    made = (
        torch.zeros(3, 0, 1, 0),
        pos_BN[:, :0, None][..., :0],
        table_S,
        wild_B,
        table_S * 2,
        pos_BN,
    )
    twin = copied(made, kernel_device)
    build_tree_triton(*twin, out=nodes)
    assert nodes.token_BN[1].item() == 6
    assert twin[-1][1].item() == 12
