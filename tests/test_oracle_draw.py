"""What the oracle says about draws: its own generator and filters, and which scores explain which
token."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddbatch.core import Key, Sampling
from ddbatch.engine.oracle_draw import DrawnScores, draw_scores, kept_bounds
from ddbatch.engine.sampling import key_hash
from ddbatch_kernels.keyed_draw import DrawParams, keyed_draw

KEY = Key(11, 2, 3)


def sampling_of(chance: random.Random) -> Sampling:
    return Sampling(
        temperature=chance.choice([0, 0.3, 0.7, 1.0, 1.5]),
        top_p=chance.choice([1.0, 0.9, 0.5, 0.05]),
        top_k=chance.choice([0, 1, 2, 3, 40]),
        min_p=chance.choice([0, 0.01, 0.3, 1.0]),
        seed=chance.choice([0, 7, 2**63 - 1]),
    )


def scores_of(chance: random.Random, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    scores = torch.randn(rows, vocab, generator=generator) * 2.5
    return scores.round() if chance.random() < 0.3 else scores  # ties


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 97, 257, 4099])
def test_the_engines_draw_is_the_oracles(vocab: int) -> None:
    chance = random.Random(vocab)
    for _ in range(25):
        scores, own = scores_of(chance, 5, vocab), sampling_of(chance)
        key = Key(chance.randrange(1 << 62), chance.randrange(9), chance.randrange(9))
        words = [[value & 0xFFFFFFFF, value >> 32] for value in (own.seed, key_hash(key))]
        params = DrawParams(
            torch.tensor([own.temperature], dtype=torch.float32),
            torch.tensor([own.top_k]),
            torch.tensor([own.top_p], dtype=torch.float64),
            torch.tensor([own.min_p], dtype=torch.float32),
            *(torch.tensor([pair]) for pair in words),
        )
        depth = torch.arange(5)[None]
        drawn = keyed_draw(scores[None], depth, torch.tensor([3]), params, num_depths=5)
        assert drawn.token_BN[0].tolist() == draw_scores(scores, own, key, 3).tokens.tolist()


@given(st.integers(0, 2**32), st.sampled_from([1e-3, 0.02, 0.3, 1.5]))
def test_what_scores_with_errors_draw_is_what_the_oracle_says_they_could(
    seed: int, error: float
) -> None:
    """Scores are moved by up to half the error each; the drawn token is explained by it."""
    chance = random.Random(seed)
    own = sampling_of(chance)
    scores = scores_of(chance, 4, chance.choice([2, 5, 33]))
    scale = own.temperature or 1.0
    moved = scores + (torch.rand(scores.shape) - 0.5) * error * scale * 0.999
    exact, other = draw_scores(scores, own, KEY, 0), draw_scores(moved, own, KEY, 0)
    assert exact.could_draw(other.tokens, error).all()
    assert (exact.slack(other.tokens) <= error * 1.001 + 1e-4).all()
    differs = exact.tokens != other.tokens
    assert exact.is_close(error)[differs].all()


@given(st.integers(0, 2**32))
def test_without_error_a_token_is_kept_surely_or_not_at_all(seed: int) -> None:
    chance = random.Random(seed)
    scaled = scores_of(chance, 3, chance.choice([1, 2, 17]))
    own = sampling_of(chance)
    bounds = kept_bounds(scaled, own, 0.0)
    assert torch.equal(bounds.may, bounds.surely)
    assert (bounds.may <= scaled.amax(dim=1)).all()


def test_a_wrong_token_is_not_explained_by_a_small_error() -> None:
    scores = torch.tensor([[3.0, 1.0, 0.0], [3.0, 2.99, 0.0]])
    drawn = draw_scores(scores, Sampling(), KEY, 0)
    other = torch.tensor([1, 1])
    assert drawn.could_draw(other, 0.02).tolist() == [False, True]
    assert drawn.slack(other).tolist() == pytest.approx([2.0, 0.01], abs=2e-5)
    assert drawn.is_close(0.02).tolist() == [False, True]
    assert drawn.slack(drawn.tokens).tolist() == [0.0, 0.0]


def test_a_token_that_a_filter_dropped_by_little_is_explained() -> None:
    """Token 1 would win by its noise, and is the second of top_k=1; token 2 is far from it."""
    scaled = torch.tensor([[3.0, 2.995, 0.0]])
    drawn = DrawnScores(scaled, torch.tensor([[3.0, 9.0, 9.0]]), Sampling(top_k=1))
    assert drawn.tokens.tolist() == [0]
    assert drawn.could_draw(torch.tensor([1]), 0.01).tolist() == [True]
    assert drawn.could_draw(torch.tensor([2]), 0.01).tolist() == [False]
    # top_p: the first token holds 0.8999 of the mass, the second fills 0.9.
    share = torch.tensor([[0.8999, 0.0801, 0.02]]).log()
    drawn = DrawnScores(share, torch.tensor([[0.0, -1.0, 9.0]]), Sampling(top_p=0.9))
    assert drawn.tokens.tolist() == [0]
    assert drawn.could_draw(torch.tensor([2]), 0.02).tolist() == [False]
    assert drawn.could_draw(torch.tensor([2]), 0.1).tolist() == [True]
