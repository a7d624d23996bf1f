"""The oracle: plain decoding of one sequence, slow and obviously right. The judge of everything
else.

It reads a target's weights and nothing more: its own formulas for norm, rope and attention, its own
cache, no trees, no batch, no op that the engine uses. float32 whatever the weights' dtype; in
another dtype the same formulas are the plain PyTorch that score errors are measured against.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.models.decoder import DecoderLayer, Target
from ddbatch.models.dims import Rope
from ddbatch.models.layers import GatedMlp


class OracleStep(NamedTuple):
    """token_id: the greedy choice. gap: its score minus the second best, small at a near-tie."""

    token_id: int
    gap: float


class Oracle:
    """One sequence of one target; `scores` appends tokens and returns the scores after them."""

    def __init__(
        self,
        target: Target,
        tap_layers: tuple[int, ...] = (),
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """tap_layers: whose outputs `features` keeps, [T, C] a call, for a drafter. dtype: of the
        states between layers and the matrix products; norms, rope, softmax and the scores
        themselves are float32 in any case."""
        self.target, self.tap_layers, self.dtype = target, tap_layers, dtype
        self.length = 0
        self.features: list[Tensor] = []
        # Of each layer, keys (rotated) and values of all tokens so far, [T, G, E].
        self.cache: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def scores(self, token_ids: list[int]) -> Tensor:
        """Append tokens; float32 scores [T, V] of the token after each of them."""
        target, dims = self.target, self.target.dims
        device = target.embed.device
        x = target.embed[torch.tensor(token_ids, device=device)].to(self.dtype)
        pos = torch.arange(self.length, self.length + len(token_ids), device=device)
        tapped = []
        for number, layer in enumerate(target.layers):
            assert isinstance(layer, DecoderLayer)
            y = norm(x, layer.input_norm.weight, dims.norm_eps)
            x = x + self._attention(number, layer, y, pos)
            x = x + gated_mlp(norm(x, layer.mlp_norm.weight, dims.norm_eps), layer.mlp)
            if number in self.tap_layers:
                tapped.append(x)
        if tapped:
            self.features.append(torch.cat(tapped, dim=-1))
        self.length += len(token_ids)
        hidden = norm(x, target.norm.weight, dims.norm_eps).float()
        logits: Tensor = hidden @ target.head.float().T
        return logits

    def _attention(self, number: int, layer: DecoderLayer, x: Tensor, pos: Tensor) -> Tensor:
        dims = self.target.dims
        q, k, v = project(x, layer)
        q, k = rotate(q, pos, dims.rope), rotate(k, pos, dims.rope)
        if number < len(self.cache):
            k, v = (torch.cat(pair) for pair in zip(self.cache[number], (k, v), strict=True))
            self.cache[number] = (k, v)
        else:
            self.cache.append((k, v))
        distance = pos[:, None] - torch.arange(len(k), device=x.device)
        is_visible = distance >= 0
        window = dims.windows[number]
        if window is not None:
            is_visible &= distance < window
        return attention(q, k, v, is_visible) @ layer.out.weight.to(x.dtype).T


def project(x: Tensor, layer: DecoderLayer) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, E], k and v [T, G, E] of a normed x, before they are rotated."""
    dims = layer.dims
    qkv = x @ layer.qkv.weight.to(x.dtype).T
    if dims.has_qkv_bias:
        assert layer.qkv.bias is not None
        qkv = qkv + layer.qkv.bias.to(x.dtype)
    q, k, v = qkv.unflatten(-1, (-1, dims.head_width)).split(
        [dims.heads, dims.kv_heads, dims.kv_heads], dim=1
    )
    if dims.has_qk_norm:
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        q = norm(q, layer.q_norm.weight, dims.norm_eps)
        k = norm(k, layer.k_norm.weight, dims.norm_eps)
    return q, k, v


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm by its formula, in x's dtype."""
    wide = x.float()
    scaled = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight.float()
    return scaled.to(x.dtype)


def gated_mlp(x: Tensor, mlp: GatedMlp) -> Tensor:
    """down(silu(gate) * up) by its formula."""
    gate, up = (x @ mlp.gate_up.weight.to(x.dtype).T).split(mlp.mlp_width, dim=-1)
    out: Tensor = (gate * torch.sigmoid(gate) * up) @ mlp.down.weight.to(x.dtype).T
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor) -> Tensor:
    """q [Q, H, E], k and v [Z, G, E], is_visible [Q, Z]; out [Q, H * E]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    score = torch.einsum("qhe,khe->hqk", q, k).float() / math.sqrt(q.shape[-1])
    weight = score.masked_fill(~is_visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khe->qhe", weight.to(v.dtype), v).flatten(1)


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
    wide = x.float()
    turned = torch.complex(wide[..., :half], wide[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def decode(
    target: Target,
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
