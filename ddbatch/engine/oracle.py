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

from ddbatch.models.dims import Rope
from ddbatch.models.layers import GatedMlp
from ddbatch.models.llama import Llama, LlamaLayer


class OracleStep(NamedTuple):
    """token_id: the greedy choice. gap: its score minus the second best, small at a near-tie."""

    token_id: int
    gap: float


class Oracle:
    """One sequence of one target; `scores` appends tokens and returns the scores after them."""

    def __init__(self, target: Llama, tap_layers: tuple[int, ...] = ()) -> None:
        """tap_layers: whose outputs `features` keeps, [T, C] a call, for a drafter."""
        self.target, self.tap_layers = target, tap_layers
        self.length = 0
        self.features: list[Tensor] = []
        self._cache: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def scores(self, token_ids: list[int]) -> Tensor:
        """Append tokens; float32 scores [T, V] of the token after each of them."""
        target, dims = self.target, self.target.dims
        device = target.embed.device
        x = target.embed[torch.tensor(token_ids, device=device)].float()
        pos = torch.arange(self.length, self.length + len(token_ids), device=device)
        tapped = []
        for number, layer in enumerate(target.layers):
            assert isinstance(layer, LlamaLayer)
            y = norm(x, layer.input_norm.weight, dims.norm_eps)
            x = x + self._attention(number, layer, y, pos)
            x = x + gated_mlp(norm(x, layer.mlp_norm.weight, dims.norm_eps), layer.mlp)
            if number in self.tap_layers:
                tapped.append(x)
        if tapped:
            self.features.append(torch.cat(tapped, dim=-1))
        self.length += len(token_ids)
        logits: Tensor = norm(x, target.norm.weight, dims.norm_eps) @ target.head.float().T
        return logits

    def _attention(self, number: int, layer: LlamaLayer, x: Tensor, pos: Tensor) -> Tensor:
        dims = self.target.dims
        qkv = (x @ layer.qkv.weight.float().T).unflatten(-1, (-1, dims.head_width))
        q, k, v = qkv.split([dims.heads, dims.kv_heads, dims.kv_heads], dim=1)
        q, k = rotate(q, pos, dims.rope), rotate(k, pos, dims.rope)
        if number < len(self._cache):
            k, v = (torch.cat(pair) for pair in zip(self._cache[number], (k, v), strict=True))
            self._cache[number] = (k, v)
        else:
            self._cache.append((k, v))
        is_later = torch.arange(len(k), device=x.device) > pos[:, None]
        return attention(q, k, v, ~is_later) @ layer.out.weight.float().T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm by its formula."""
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight.float()


def gated_mlp(x: Tensor, mlp: GatedMlp) -> Tensor:
    """down(silu(gate) * up) by its formula."""
    gate, up = (x @ mlp.gate_up.weight.float().T).split(mlp.mlp_width, dim=-1)
    out: Tensor = (gate * torch.sigmoid(gate) * up) @ mlp.down.weight.float().T
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor) -> Tensor:
    """q [Q, H, E], k and v [Z, G, E], is_visible [Q, Z]; out [Q, H * E]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    score = torch.einsum("qhe,khe->hqk", q, k) / math.sqrt(q.shape[-1])
    weight = score.masked_fill(~is_visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khe->qhe", weight, v).flatten(1)


def rotate(x: Tensor, pos: Tensor, rope: Rope) -> Tensor:
    """x [T, heads, E] as E / 2 complex numbers (first half real), turned by pos * frequency."""
    half = x.shape[-1] // 2
    freq = rope.theta ** (-torch.arange(half, device=x.device) / half)
    scaling = rope.llama3
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
        scores_V = oracle.scores(fresh)[-1]
        first, second = scores_V.topk(2).values.tolist()
        # Of equal scores the lower token id is drawn; topk leaves their order open.
        token_id = int((scores_V == first).nonzero()[0])
        steps.append(OracleStep(token_id, first - second))
        if token_id in stop_token_ids:
            break
        fresh = [token_id]
    return steps
