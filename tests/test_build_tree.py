"""The draft tree equals a best-first heap's, node by node, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trees import tree_of_ranks

from ddbatch.engine.oracle_ddtree import best_first
from ddbatch_kernels.ancestors import pack_ancestors, unpack_ancestors
from ddbatch_kernels.build_tree import tree_capacity
from ddbatch_kernels.top_candidates import top_candidates

KINDS = ("normal", "bf16", "three_valued", "equal", "one_hot", "peaked")
BUDGETS = (*range(1, 65), 128)


def random_logits(
    kind: str, rows: int, depth: int, vocab: int, generator: torch.Generator
) -> Tensor:
    """float32 [rows, depth, vocab], tie-heavy but for "normal" and "peaked"."""
    normal = torch.randn(rows, depth, vocab, generator=generator)
    match kind:
        case "normal":
            return normal
        case "bf16":
            return normal.bfloat16().float()
        case "three_valued":
            return torch.randint(-1, 2, normal.shape, generator=generator).float()
        case "equal":
            return torch.zeros_like(normal)
        case "one_hot":
            hot = torch.randint(vocab, (rows, depth, 1), generator=generator)
            return torch.zeros_like(normal).scatter(2, hot, 40.0)
        case "peaked":
            return normal * 8.0
    raise AssertionError(kind)


def heap_nodes(edge_DRM: Tensor, budget: int) -> list[tuple[int, int, int]]:
    """(parent, depth, rank) of every node besides the root, numbered from 1 in the heap's order."""
    tuples = best_first(edge_DRM, budget)
    number = {ranks: place for place, ranks in enumerate(tuples, start=1)}
    return [(number.get(ranks[:-1], 0), len(ranks), ranks[-1]) for ranks in tuples]


def assert_tree_is_the_heaps(edge_BDRM: Tensor, budget: int) -> None:
    nodes = tree_of_ranks(edge_BDRM, budget)
    assert nodes.token_BN[:, 0].tolist() == list(range(len(edge_BDRM)))
    assert nodes.parent_BN[:, 0].eq(-1).all()
    assert nodes.depth_BN[:, 0].eq(0).all()
    columns = (nodes.parent_BN, nodes.depth_BN, nodes.token_BN)
    for row, edge_DRM in enumerate(edge_BDRM):
        built = list(zip(*(column[row, 1:].tolist() for column in columns), strict=True))
        assert built == heap_nodes(edge_DRM, budget), (row, budget, edge_BDRM.shape)
    assert_ancestors_follow_parents(nodes.parent_BN, nodes.ancestor_BNW)


def assert_ancestors_follow_parents(parent_BN: Tensor, ancestor_BNW: Tensor) -> None:
    for parents, is_ancestor in zip(
        parent_BN.tolist(), unpack_ancestors(ancestor_BNW).tolist(), strict=True
    ):
        sets: list[set[int]] = []
        for node, parent in enumerate(parents):
            assert parent < node
            sets.append({node} | (sets[parent] if parent >= 0 else set()))
        assert [{j for j, on in enumerate(row) if on} for row in is_ancestor] == sets


@pytest.mark.parametrize("kind", KINDS)
def test_tree_equals_the_heaps_for_every_budget_and_block(kind: str) -> None:
    """65 budgets x 15 blocks x 3 rows x 6 kinds, candidates capped below the budget in half of
    them.
    """
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    for budget in BUDGETS:
        for block in range(2, 17):
            depth = min(block - 1, budget)
            vocab = int(torch.randint(3, 90, (), generator=generator))
            topk = min(budget, 64, vocab)
            if (budget + block) % 2:
                topk = min(topk, int(torch.randint(1, 9, (), generator=generator)))
            logits = random_logits(kind, 3, depth, vocab, generator)
            _, logprob = top_candidates(logits, topk)
            fitting = tree_capacity(depth, topk, budget)
            assert_tree_is_the_heaps(logprob[:, :, None], fitting)


@given(
    seed=st.integers(0, 2**32 - 1),
    budget=st.integers(1, 40),
    depth=st.integers(1, 8),
    topk=st.integers(1, 6),
    kind=st.sampled_from(KINDS),
    has_parent=st.booleans(),
)
@settings(max_examples=300)
def test_tree_equals_the_heaps_when_scores_depend_on_the_parent(
    seed: int, budget: int, depth: int, topk: int, kind: str, has_parent: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = topk if has_parent else 1
    logits = random_logits(kind, 2, depth * parents, 11, generator)
    _, logprob = top_candidates(logits, topk)
    edge = logprob.unflatten(1, (depth, parents))
    assert_tree_is_the_heaps(edge, tree_capacity(depth, topk, budget))


def test_impossible_candidates_are_still_ordered() -> None:
    edge = torch.full((1, 3, 1, 4), -torch.inf)
    edge[..., 0] = 0.0
    assert_tree_is_the_heaps(edge, 30)


def test_one_candidate_a_position_gives_the_chain() -> None:
    nodes = tree_of_ranks(-torch.rand(2, 5, 1, 1), 5)
    assert nodes.parent_BN.tolist() == [[-1, 0, 1, 2, 3, 4]] * 2


def test_no_drafts_give_the_root_alone() -> None:
    nodes = tree_of_ranks(torch.zeros(2, 0, 1, 0), 0)
    assert [column.tolist() for column in nodes] == [[[0], [1]], [[-1]] * 2, [[0]] * 2, [[[1]]] * 2]


@pytest.mark.parametrize(
    ("depth", "topk", "limit", "capacity"),
    [(1, 64, 128, 64), (2, 3, 128, 12), (15, 1, 128, 15), (15, 64, 64, 64), (3, 2, 5, 5)],
)
def test_capacity_counts_the_nodes_a_tree_can_have(
    depth: int, topk: int, limit: int, capacity: int
) -> None:
    assert tree_capacity(depth, topk, limit) == capacity


@pytest.mark.parametrize("num_nodes", [1, 2, 31, 32, 33, 64, 65, 129])
def test_ancestor_words_hold_every_bit(num_nodes: int) -> None:
    generator = torch.Generator().manual_seed(num_nodes)
    bits = torch.rand(2, num_nodes, num_nodes, generator=generator) < 0.5
    words = pack_ancestors(bits)
    assert words.dtype == torch.int32
    assert words.shape == (2, num_nodes, -(-num_nodes // 32))
    assert torch.equal(unpack_ancestors(words), bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "topk"), [(1, 1), (5, 5), (63, 7), (64, 64), (65, 3), (700, 16)])
def test_candidates_are_the_first_of_a_stable_sort(kind: str, vocab: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(kind, 3, 2, vocab, generator)
    token, logprob = top_candidates(logits, topk)
    order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(token, order.indices[..., :topk])
    expected = order.values[..., :topk] - logits.logsumexp(dim=-1, keepdim=True)
    assert torch.equal(logprob, expected)


def test_negative_zero_ties_with_zero() -> None:
    logits = torch.tensor([[[-1.0, -0.0, 0.0, -0.0, 1.0]]])
    token, _ = top_candidates(logits, 4)
    assert token.tolist() == [[[4, 1, 2, 3]]]


def test_tokens_of_minus_infinity_come_last_and_by_id() -> None:
    logits = torch.full((1, 1, 70), -torch.inf)
    logits[0, 0, 66] = 1.0
    token, _ = top_candidates(logits, 4)
    assert token.tolist() == [[[66, 0, 1, 2]]]
