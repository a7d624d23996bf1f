"""The slow twin of keyed sampling, written from its definition, and the statistics that judge it.

One number at a time: Philox by Python integers, filters by sorting and summing, the draw by a loop.
numpy's float32 exp and log may differ from torch's in the last bit, so a result says whether it
hangs on such a bit (is_near); every other result is exact. Uses no code of the engine or of
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ddbatch.core import Sampling

WORD = 0xFFFFFFFF
NEAR_SCORE = 1e-5  # perturbed scores closer than this are a tie
NEAR_MASS = 1e-6  # as a part of the whole mass: more than the last bits of exp add up to


class Kept(NamedTuple):
    """Which tokens the filters keep; is_near: some token is within rounding of a threshold."""

    flags: list[bool]
    is_near: bool


class Drawn(NamedTuple):
    """The drawn token; is_near: rounding could have drawn another one."""

    token_id: int
    is_near: bool


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10: four words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def twin_hash(row_id: int, turn: int, sample: int) -> int:
    """64 bits that stand for a key."""
    mask = 2**64 - 1
    mixed = 0
    for part in (row_id, turn, sample):
        z = ((mixed ^ part) + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        mixed = z ^ (z >> 31)
    return mixed


def word_of(seed: int, key_hash: int, index: int, token_id: int) -> int:
    """The random word of one token at one output index of one sequence."""
    counter = (token_id // 4, index, key_hash & WORD, key_hash >> 32)
    return philox(counter, (seed & WORD, seed >> 32))[token_id % 4]


def twin_gumbel(word: int) -> np.float32:
    """g of one word, float32 at every step."""
    v = (np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):  # v = 1 makes E infinite and g = -inf, as it should
        return np.float32(-np.log(-np.log1p(-v)))


def twin_scaled(scores: Sequence[float], temperature: float) -> list[np.float32]:
    """Scores by temperature, float32."""
    return [np.float32(score) / np.float32(temperature) for score in scores]


def twin_kept(scaled: Sequence[np.float32], sampling: Sampling) -> Kept:
    """What top_k, top_p and min_p keep, in this order, of scores that are divided already."""
    best = max(scaled)
    flags, is_near = [True] * len(scaled), False
    if 0 < sampling.top_k < len(scaled):
        bar = sorted(scaled, reverse=True)[sampling.top_k - 1]
        flags = [score >= bar for score in scaled]
    if sampling.top_p < 1.0:
        mass = dict.fromkeys(sorted(set(scaled), reverse=True), 0)
        for score, is_kept in zip(scaled, flags, strict=True):
            if is_kept:
                mass[score] += int(np.exp(score - best) * np.float32(2.0**40))
        total = sum(mass.values())
        # float64(total) may be above total, so its part may be too.
        need = min(total, max(1, math.ceil(float(total) * sampling.top_p)))
        so_far, bar = 0, None
        for score, weight in mass.items():
            so_far += weight
            is_near |= weight > 0 and so_far < total and abs(so_far - need) < NEAR_MASS * total
            if bar is None and so_far >= need:
                bar = score
        flags = [is_kept and score >= bar for score, is_kept in zip(scaled, flags, strict=True)]
    if sampling.min_p > 0.0:
        bar = best + np.log(np.float32(sampling.min_p))
        is_near |= any(score != best and abs(score - bar) < NEAR_SCORE for score in scaled)
        flags = [
            is_kept and (score >= bar or score == best)
            for score, is_kept in zip(scaled, flags, strict=True)
        ]
    return Kept(flags, bool(is_near))


def twin_draw(scores: Sequence[float], sampling: Sampling, key_hash: int, index: int) -> Drawn:
    """The token that a sequence says at this output index after these raw scores."""
    if sampling.temperature == 0.0:
        return Drawn(max(range(len(scores)), key=lambda token_id: scores[token_id]), False)
    scaled = twin_scaled(scores, sampling.temperature)
    kept = twin_kept(scaled, sampling)
    best, second, best_id = -np.inf, -np.inf, -1
    for token_id, score in enumerate(scaled):
        if not kept.flags[token_id]:
            continue
        perturbed = score + twin_gumbel(word_of(sampling.seed, key_hash, index, token_id))
        if best_id < 0 or perturbed > best:
            best, second, best_id = perturbed, best, token_id
        else:
            second = max(second, perturbed)
    is_tie = second > -np.inf and best - second < NEAR_SCORE  # two of -inf are equal, exactly
    return Drawn(best_id, bool(kept.is_near or is_tie))


def twin_probabilities(scores: Sequence[float], sampling: Sampling) -> list[float]:
    """The distribution that draws must follow: softmax over the kept tokens, float64."""
    scaled = twin_scaled(scores, sampling.temperature)
    flags = twin_kept(scaled, sampling).flags
    best = float(max(scaled))
    weights = [
        math.exp(float(score) - best) if is_kept else 0.0
        for score, is_kept in zip(scaled, flags, strict=True)
    ]
    return [weight / math.fsum(weights) for weight in weights]


def chi_square(counts: Sequence[int], probabilities: Sequence[float], least: float = 5.0) -> float:
    """Probability that draws of this distribution fit worse than these counts (Pearson).

    Cells that expect fewer than `least` draws are joined to one. A count where the probability is 0
    gives 0.
    """
    draws = sum(counts)
    cells: list[tuple[float, float]] = []
    rest_count = rest_mean = 0.0
    for count, probability in zip(counts, probabilities, strict=True):
        if probability == 0.0:
            if count:
                return 0.0
        elif draws * probability >= least:
            cells.append((count, draws * probability))
        else:
            rest_count, rest_mean = rest_count + count, rest_mean + draws * probability
    if rest_mean > 0.0:
        cells.append((rest_count, rest_mean))
    assert len(cells) > 1, (len(counts), draws)
    statistic = math.fsum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def at_least(count: int, draws: int, probability: float) -> float:
    """Probability of `count` or more hits in `draws` draws, each a hit with this probability."""
    if count == 0:
        return 1.0
    return math.fsum(
        math.exp(
            math.lgamma(draws + 1)
            - math.lgamma(hits + 1)
            - math.lgamma(draws - hits + 1)
            + hits * math.log(probability)
            + (draws - hits) * math.log1p(-probability)
        )
        for hits in range(count, min(draws, count + 1000) + 1)
    )
