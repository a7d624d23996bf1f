"""The oracle's keyed draw: filters by sorting, noise by its own generator, obviously right.

It judges what an engine drew: which token the scores draw at each position, and how far the scores
must be off for another token to be drawn. Shares no op with the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.core import Key, Sampling
from ddbatch.engine.sampling import key_hash

_LOW16, _LOW32 = 0xFFFF, 0xFFFFFFFF
_LARGEST_SLACK = 64.0  # scores this far off explain anything


@dataclass(frozen=True)
class DrawnScores:
    """What T positions of one sequence draw, V tokens.

    scaled_TV: float32, score / temperature (greedy: the scores). perturbed_TV: with the noise.
    """

    scaled_TV: Tensor
    perturbed_TV: Tensor
    sampling: Sampling

    @cached_property
    def tokens(self) -> Tensor:
        """The drawn tokens, int64 [T]; of equal perturbed scores the lower id."""
        threshold_T = kept_bounds(self.scaled_TV, self.sampling, 0.0).may
        is_kept_TV = self.scaled_TV >= threshold_T[:, None]
        # A kept token without a chance (noise -inf) still beats a dropped one.
        order_TV = self.perturbed_TV.clamp(min=torch.finfo(torch.float32).min)
        order_TV = order_TV.masked_fill(~is_kept_TV, -torch.inf)
        is_best_TV = order_TV == order_TV.amax(dim=1, keepdim=True)
        return is_best_TV.int().argmax(dim=1)

    def could_draw(self, token_T: Tensor, error: float) -> Tensor:
        """Bool [T]: could scores that are off by up to error / 2 each (in units of score /
        temperature) draw these tokens?

        A token can if the filters may keep it, and no token that they surely keep beats it by more
        than the error.
        """
        may_keep_TV, surely_keep_TV = self._kept(error)
        rival_T = self.perturbed_TV.masked_fill(~surely_keep_TV, -torch.inf).amax(dim=1)
        own_T = self.perturbed_TV.gather(1, token_T[:, None]).squeeze(1)
        return may_keep_TV.gather(1, token_T[:, None]).squeeze(1) & (own_T >= rival_T - error)

    def is_close(self, error: float) -> Tensor:
        """Bool [T]: could such scores draw any token but `tokens`?"""
        may_keep_TV, surely_keep_TV = self._kept(error)
        drawn_T1 = self.tokens[:, None]
        others_TV = self.perturbed_TV.masked_fill(~may_keep_TV, -torch.inf)
        others_TV = others_TV.scatter(1, drawn_T1, -torch.inf)
        best_T1 = self.perturbed_TV.gather(1, drawn_T1)
        is_beaten_T = others_TV.amax(dim=1) >= best_T1.squeeze(1) - error
        return is_beaten_T | ~surely_keep_TV.gather(1, drawn_T1).squeeze(1)

    def _kept(self, error: float) -> tuple[Tensor, Tensor]:
        """Bool [T, V] each: what the filters may keep, and what they surely keep."""
        may_T, surely_T = kept_bounds(self.scaled_TV, self.sampling, error)
        return self.scaled_TV >= may_T[:, None], self.scaled_TV >= surely_T[:, None]

    def slack(self, token_T: Tensor) -> Tensor:
        """float32 [T]: the smallest error for which these tokens could be drawn, 0 where they are;
        found by bisection, to 1e-5 or a millionth."""
        found_T = torch.zeros(len(token_T), device=token_T.device)
        for place in (self.tokens != token_T).nonzero().flatten().tolist():
            one = slice(place, place + 1)
            here = DrawnScores(self.scaled_TV[one], self.perturbed_TV[one], self.sampling)
            low, high = 0.0, _LARGEST_SLACK
            while high - low > max(1e-5, 1e-6 * high):
                middle = (low + high) / 2
                is_enough = bool(here.could_draw(token_T[one], middle))
                low, high = (low, middle) if is_enough else (middle, high)
            found_T[place] = high
        return found_T


def draw_scores(scores_TV: Tensor, sampling: Sampling, key: Key, first_index: int) -> DrawnScores:
    """Draw at T positions in a row; position 0 draws output index first_index. scores: float32."""
    if sampling.temperature == 0:
        return DrawnScores(scores_TV, scores_TV, Sampling())
    scaled_TV = scores_TV / sampling.temperature
    noise_TV = _noise(sampling.seed, key_hash(key), first_index, scaled_TV)
    return DrawnScores(scaled_TV, scaled_TV + noise_TV, sampling)


class Bounds(NamedTuple):
    """Scores / temperature [T]: from `may` on the filters may keep a token, from `surely` on they
    do. With an error of 0 both are the threshold itself."""

    may: Tensor
    surely: Tensor


def kept_bounds(scaled_TV: Tensor, sampling: Sampling, error: float) -> Bounds:
    """What top_k, then top_p of the rest, then min_p keep of scores of which two may be off by
    `error` against each other; shares of probability by a factor of e^error.

    A token is kept while the tokens above it are fewer than top_k and weigh less than top_p. Those
    above it for sure lead by more than the error; those that may be do not trail by more.
    """
    vocab = scaled_TV.shape[1]
    best_T = scaled_TV.amax(dim=1)
    none_T = torch.full_like(best_T, -torch.inf)
    bounds = Bounds(none_T, none_T)
    has_top_k = 0 < sampling.top_k < vocab
    if has_top_k or sampling.top_p < 1:
        sorted_TV = scaled_TV.sort(dim=1, descending=True).values
        falling_TV = -sorted_TV
        # How many tokens lead a token for sure, and how many others may.
        sure_TV = torch.searchsorted(falling_TV, falling_TV - error)
        maybe_TV = torch.searchsorted(falling_TV, falling_TV + error)
        itself = int(error > 0)  # it trails itself by nothing
    if has_top_k:
        top_k = sampling.top_k
        bounds = _stricter(bounds, sorted_TV, sure_TV < top_k, maybe_TV - itself < top_k)
    if sampling.top_p < 1:
        weight_TV = ((sorted_TV - best_T[:, None]).exp() * 2.0**40).long()
        weight_TV[sorted_TV < bounds.may[:, None]] = 0
        mass_TV = torch.nn.functional.pad(weight_TV.cumsum(dim=1), (1, 0))
        total_T1 = mass_TV[:, -1:]
        need_T1 = (total_T1.double() * sampling.top_p).ceil().clamp(min=1).minimum(total_T1)
        above_TV = mass_TV.gather(1, sure_TV)
        others_TV = mass_TV.gather(1, maybe_TV) - itself * weight_TV
        bounds = _stricter(
            bounds,
            sorted_TV,
            above_TV < need_T1 * math.exp(error),
            others_TV < need_T1 * math.exp(-error),
        )
    if sampling.min_p > 0:
        log_min_p = torch.tensor(sampling.min_p, dtype=torch.float32, device=best_T.device).log()
        line_T = best_T + log_min_p
        second_T = scaled_TV.topk(min(2, vocab), dim=1).values[:, -1]
        # Only the second best can push the best token out.
        best_is_sure_T = (best_T >= second_T + log_min_p + error) | (line_T + error <= best_T)
        surely_T = torch.where(best_is_sure_T, (line_T + error).minimum(best_T), torch.inf)
        bounds = Bounds(bounds.may.maximum(line_T - error), bounds.surely.maximum(surely_T))
    return bounds


def _stricter(bounds: Bounds, sorted_TV: Tensor, may_TV: Tensor, surely_TV: Tensor) -> Bounds:
    """Bounds that also keep only these places of the sorted scores, of which each is a head."""
    lowest = (
        sorted_TV.masked_fill(~is_kept_TV, torch.inf).amin(dim=1)
        for is_kept_TV in (may_TV, surely_TV)
    )
    return Bounds(*(old.maximum(new) for old, new in zip(bounds, lowest, strict=True)))


def _noise(seed: int, hashed: int, first_index: int, like_TV: Tensor) -> Tensor:
    """Gumbel noise [T, V] of T output indices in a row."""
    num_rows, vocab = like_TV.shape
    quad_TQ = torch.arange(-(-vocab // 4), device=like_TV.device).expand(num_rows, -1)
    index_T1 = torch.arange(first_index, first_index + num_rows, device=like_TV.device)[:, None]
    words = [quad_TQ, index_T1.expand_as(quad_TQ)]
    words += [torch.full_like(quad_TQ, half) for half in (hashed & _LOW32, hashed >> 32)]
    keys = [seed & _LOW32, seed >> 32]
    for _ in range(10):
        high0, low0 = _product(words[0], 0xD2511F53)
        high1, low1 = _product(words[2], 0xCD9E8D57)
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [(keys[0] + 0x9E3779B9) & _LOW32, (keys[1] + 0xBB67AE85) & _LOW32]
    word_TV = torch.stack(words, dim=2).flatten(1)[:, :vocab]
    exponential = -torch.log1p(-(word_TV.to(torch.float32) + 0.5) * 2.0**-32)
    return -torch.log(exponential)


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of two 32-bit words, by its 16-bit halves."""
    below = (word & _LOW16) * factor
    above = (word >> 16) * factor + (below >> 16)
    return above >> 16, ((above & _LOW16) << 16) | (below & _LOW16)
