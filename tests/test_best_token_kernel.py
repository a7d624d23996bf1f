"""The kernel of the greedy choice equals a plain max: ties, infinities and NaN included."""

from __future__ import annotations

import math

import pytest
import torch
from made_rounds import assert_same
from torch import Tensor

from ddbatch_kernels.best_token import best_token_ref
from ddbatch_kernels.best_token.kernel import best_token_triton, split_vocab
from ddbatch_kernels.keyed_draw import Draw

# (B, N, V): few nodes in chunks, many whole.
SIZES = [(1, 1, 1), (1, 1, 97), (2, 3, 513), (3, 1, 1000), (1, 17, 4099), (45, 3, 97), (140, 1, 3)]
NATIVE_SIZES = [(1, 1, 151_936), (1, 17, 49_152), (3, 44, 50_257), (7, 65, 49_152)]


def poisoned_draw(shape: torch.Size, device: str) -> Draw:
    """A place that holds no draw."""
    token_BN = torch.full(shape[:2], -77, device=device)
    return Draw(token_BN, torch.rand(shape[:2], device=device) > 0.5)


def assert_equal_choice(logits_BNV: Tensor, device: str) -> None:
    expected = poisoned_draw(logits_BNV.shape, "cpu")
    assert best_token_ref(logits_BNV, out=expected) is expected
    assert_same(best_token_ref(logits_BNV), expected)
    place = poisoned_draw(logits_BNV.shape, device)
    assert best_token_triton(logits_BNV.to(device), out=place) is place
    assert_same(place, expected)
    found = best_token_triton(logits_BNV.to(device))
    assert found.token_BN.dtype == torch.int64
    assert found.is_finite_BN.dtype == torch.bool
    assert found.token_BN.tolist() == expected.token_BN.tolist()
    assert found.is_finite_BN.tolist() == expected.is_finite_BN.tolist()


@pytest.mark.parametrize("kind", ["normal", "integers", "equal"])
@pytest.mark.parametrize("size", SIZES)
def test_the_first_largest_score_is_chosen(
    size: tuple[int, int, int], kind: str, kernel_device: str
) -> None:
    scores = torch.randn(size, generator=torch.Generator().manual_seed(size[2]))
    scale = {"normal": 1.0, "integers": 2.0, "equal": 0.0}[kind]
    assert_equal_choice(scores if kind == "normal" else (scores * scale).round(), kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("size", NATIVE_SIZES)
def test_the_first_largest_score_of_a_real_vocabulary_is_chosen(
    size: tuple[int, int, int], kernel_device: str
) -> None:
    if kernel_device == "cpu":
        pytest.skip("too large for the interpreter")
    scores = torch.randn(size, generator=torch.Generator().manual_seed(0))
    assert_equal_choice(scores, kernel_device)
    assert_equal_choice(scores.round(), kernel_device)


@pytest.mark.parametrize("nodes", [5, 150])
def test_scores_that_are_no_numbers_are_told_and_touch_no_other_node(
    nodes: int, kernel_device: str
) -> None:
    V = 1300
    scores = torch.randn(1, nodes, V, generator=torch.Generator().manual_seed(1))
    minus_nan = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    scores[0, 0, [700, 40, 1299]] = math.nan
    scores[0, 1, 5] = minus_nan
    scores[0, 1, 4] = math.inf
    scores[0, 2, [1299, 600]] = math.inf
    scores[0, 3] = -math.inf
    assert_equal_choice(scores, kernel_device)
    scores[0, 3, 1299] = -3e38  # the rest are no numbers, the best one is
    assert_equal_choice(scores, kernel_device)


def test_whole_nodes_of_several_tiles_keep_the_first_of_equals_and_the_first_nan(
    kernel_device: str,
) -> None:
    nodes, V = 132, 4500
    scores = torch.randn(1, nodes, V, generator=torch.Generator().manual_seed(3))
    scores[0, 0, 40] = math.nan
    scores[0, 1, [40, 41, 4136]] = math.nan
    scores[0, 2, [300, 4396]] = 9.0  # one lane of two tiles
    scores[0, 3, [301, 4396]] = 9.0
    scores[0, 4, 4499] = 9.0
    assert_equal_choice(scores, kernel_device)


def test_zeros_of_both_signs_are_equal_and_the_first_wins(kernel_device: str) -> None:
    scores = torch.full((1, 4, 600), -1.0)
    for node, (minus, plus) in enumerate([(3, 4), (4, 3), (3, 590), (590, 3)]):
        scores[0, node, minus], scores[0, node, plus] = -0.0, 0.0
    assert_equal_choice(scores, kernel_device)


@pytest.mark.parametrize("place", [0, 511, 512, 1023, 1024, 1098])
def test_a_best_score_at_the_edge_of_a_chunk_is_found(place: int, kernel_device: str) -> None:
    for nodes in (1, 133):
        scores = torch.zeros(1, nodes, 1099)
        scores[..., place] = 1.0
        assert_equal_choice(scores, kernel_device)


def test_nodes_may_lie_apart(kernel_device: str) -> None:
    """As the scores of a vocabulary that the head pads."""
    padded = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(2))
    padded[..., 97:] = 100.0
    found = best_token_triton(padded.to(kernel_device)[..., :97])
    assert found.token_BN.tolist() == padded[..., :97].argmax(dim=-1).tolist()


def test_chunks_cover_the_vocabulary_and_none_is_empty() -> None:
    for nodes in (1, 2, 17, 131, 500):
        for vocab in (1, 511, 512, 513, 49_152, 50_257, 151_936):
            num, size = split_vocab(nodes, vocab, 264)
            assert (num - 1) * size < vocab <= num * size
