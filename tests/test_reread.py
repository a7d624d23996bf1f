"""What the gate takes for rounding: near ties between trees, and keys that are off as much as plain
PyTorch's. And a place of the ring that was not read is not taken."""

from __future__ import annotations

import pytest
import torch

from ddbatch.engine.oracle_ddtree import could_accept, oracle_round
from ddbatch.engine.reread import BLOCK_POSITIONS, FLOORS, distance
from ddbatch.engine.transfer import Ring
from ddbatch.models.layers import Planes


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


def test_a_ring_refuses_a_place_that_was_not_read() -> None:
    ring = Ring([torch.zeros(2)], size=2)
    first = ring.push()
    ring.push()
    with pytest.raises(AssertionError, match="overwritten"):
        ring.push()
    ring.read(first)
    ring.push()
