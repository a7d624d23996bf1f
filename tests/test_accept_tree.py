"""The accepted path equals a plain walk from the root."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import tree_of_ranks

from ddbatch_kernels.accept_tree import accepted_path


def walk(token: list[int], parent: list[int], choice: list[int]) -> tuple[list[int], list[int]]:
    """Nodes of the accepted path, root first, and the tokens it emits, bonus last."""
    here, path, emitted = 0, [0], []
    while True:
        emitted.append(choice[here])
        match = [n for n in range(len(token)) if parent[n] == here and token[n] == choice[here]]
        if not match:
            return path, emitted
        (here,) = match  # siblings are distinct tokens
        path.append(here)


@given(
    seed=st.integers(0, 2**32 - 1),
    budget=st.integers(1, 40),
    depth=st.integers(1, 6),
    topk=st.integers(1, 5),
    luck=st.floats(0.0, 1.0),
)
@settings(max_examples=300)
def test_accepted_path_is_the_walk(
    seed: int, budget: int, depth: int, topk: int, luck: float
) -> None:
    """luck: how often the target's choice at a node is one of the node's children."""
    generator = torch.Generator().manual_seed(seed)
    budget = min(budget, sum(topk**d for d in range(1, depth + 1)))
    edge = -torch.rand(3, depth, 1, topk, generator=generator).cumsum(dim=-1)
    nodes = tree_of_ranks(edge, budget)
    # Tokens of a depth are distinct per rank, and differ between depths.
    token = nodes.depth_BN * 10 + nodes.token_BN
    choice = torch.randint(100, 200, token.shape, generator=generator)
    for row, parents in enumerate(nodes.parent_BN.tolist()):
        for node, parent in enumerate(parents):
            if parent >= 0 and float(torch.rand((), generator=generator)) < luck:
                choice[row, parent] = token[row, node]
    found = accepted_path(
        token, nodes.parent_BN, nodes.depth_BN, nodes.ancestor_BNW, choice, max_depth=depth
    )
    for row in range(3):
        path, emitted = walk(
            token[row].tolist(), nodes.parent_BN[row].tolist(), choice[row].tolist()
        )
        padding = [0] * (depth + 1 - len(path))
        assert found.path_BK[row].tolist() == path + padding
        assert found.num_accepted_B[row] == len(path) - 1
        assert found.emitted_BK[row].tolist() == emitted + padding


def test_a_match_below_a_missed_parent_is_not_accepted() -> None:
    token = torch.tensor([[9, 1, 2]])
    parent = torch.tensor([[-1, 0, 1]])
    depth = torch.tensor([[0, 1, 2]])
    ancestors = torch.tensor([[[1], [3], [7]]], dtype=torch.int32)
    choice = torch.tensor([[5, 2, 7]])  # the root wants 5, not node 1; node 1 would want node 2
    found = accepted_path(token, parent, depth, ancestors, choice, max_depth=2)
    assert found.num_accepted_B.tolist() == [0]
    assert found.emitted_BK.tolist() == [[5, 0, 0]]


def test_plain_decoding_is_the_tree_of_one_node() -> None:
    one = torch.zeros(2, 1, dtype=torch.long)
    found = accepted_path(
        one, one - 1, one, torch.ones(2, 1, 1, dtype=torch.int32), one + 7, max_depth=0
    )
    assert found.path_BK.tolist() == [[0], [0]]
    assert found.emitted_BK.tolist() == [[7], [7]]
