"""The oracle: plain decoding of one sequence, slow and obviously right. The judge of everything
else.

It reads a target's weights and nothing more: its own formulas for norm, rope and attention, its own
cache, no trees, no batch, no op that the engine uses. float32 whatever the weights' dtype.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.models.llama import Llama, LlamaLayer


class OracleStep(NamedTuple):
    """token_id: the greedy choice. gap: its score minus the second best, small at a near-tie."""

    token_id: int
    gap: float


class Oracle:
    """One sequence of one target; `scores` appends tokens and returns the scores after them."""

    def __init__(self, target: Llama) -> None:
        self.target = target
        self.length = 0
        self._cache: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def scores(self, token_ids: list[int]) -> Tensor:
        """Append tokens; float32 scores [T, V] of the token after each of them."""
        target, dims = self.target, self.target.dims
        device = target.embed.device
        x = target.embed[torch.tensor(token_ids, device=device)].float()
        pos = torch.arange(self.length, self.length + len(token_ids), device=device)
        for number, layer in enumerate(target.layers):
            assert isinstance(layer, LlamaLayer)
            x = x + self._attention(number, layer, self._norm(x, layer.input_norm.weight), pos)
            y = self._norm(x, layer.mlp_norm.weight)
            gate, up = (y @ layer.mlp.gate_up.weight.float().T).split(dims.mlp_width, dim=-1)
            x = x + (gate * torch.sigmoid(gate) * up) @ layer.mlp.down.weight.float().T
        self.length += len(token_ids)
        return self._norm(x, target.norm.weight) @ target.head.float().T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        mean_square = x.pow(2).mean(dim=-1, keepdim=True)
        return x / (mean_square + self.target.dims.norm_eps).sqrt() * weight.float()

    def _rotate(self, x: Tensor, pos: Tensor) -> Tensor:
        """x [T, heads, E] as E / 2 complex numbers (first half real), turned by pos * frequency."""
        dims = self.target.dims
        half = dims.head_width // 2
        freq = dims.rope.theta ** (-torch.arange(half, device=x.device) / half)
        scaling = dims.rope.llama3
        if scaling is not None:
            length = 2 * math.pi / freq
            low = scaling.original_max_positions / scaling.low_freq_factor
            high = scaling.original_max_positions / scaling.high_freq_factor
            mix = (scaling.original_max_positions / length - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            mixed = (1 - mix) * freq / scaling.factor + mix * freq
            freq = torch.where(
                length > low, freq / scaling.factor, torch.where(length < high, freq, mixed)
            )
        angle = pos[:, None, None].float() * freq
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.cat((turned.real, turned.imag), dim=-1)

    def _attention(self, number: int, layer: LlamaLayer, x: Tensor, pos: Tensor) -> Tensor:
        dims = self.target.dims
        qkv = (x @ layer.qkv.weight.float().T).unflatten(-1, (-1, dims.head_width))
        q, k, v = qkv.split([dims.heads, dims.kv_heads, dims.kv_heads], dim=1)
        q, k = self._rotate(q, pos), self._rotate(k, pos)
        if number < len(self._cache):
            k, v = (torch.cat(pair) for pair in zip(self._cache[number], (k, v), strict=True))
            self._cache[number] = (k, v)
        else:
            self._cache.append((k, v))
        group = dims.heads // dims.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        score = torch.einsum("qhe,khe->hqk", q, k) / math.sqrt(dims.head_width)
        is_later = torch.arange(len(k), device=x.device) > pos[:, None]
        weight = score.masked_fill(is_later, -torch.inf).softmax(dim=-1)
        out = torch.einsum("hqk,khe->qhe", weight, v).flatten(1)
        return out @ layer.out.weight.float().T


def decode(
    target: Llama,
    prompt_ids: tuple[int, ...],
    *,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...],
) -> list[OracleStep]:
    """Greedy decoding, ends after a stop token (included) or max_new_tokens."""
    oracle = Oracle(target)
    steps: list[OracleStep] = []
    fresh = list(prompt_ids)
    while len(steps) < max_new_tokens:
        best, token = oracle.scores(fresh)[-1].topk(2)
        # topk leaves the order of equal scores open; the rule is the lower token id.
        token_id = int(token.min() if best[0] == best[1] else token[0])
        steps.append(OracleStep(token_id, float(best[0] - best[1])))
        if token_id in stop_token_ids:
            break
        fresh = [token_id]
    return steps
