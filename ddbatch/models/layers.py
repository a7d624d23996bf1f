"""Layers that every family shares, in plain PyTorch.

Knows nothing about checkpoints, rows or trees: tokens are a flat list with positions, and a forward
is told where the keys lie that each query may see.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddbatch.models.dims import ModelDims, Rope
from ddbatch_kernels.attention import RowKeys, attention


class Planes(NamedTuple):
    """Keys and values of all layers, [L, X, G, E]; X = cells of a cache, or tokens."""

    k_LXGE: Tensor
    v_LXGE: Tensor


class LayerKeys(NamedTuple):
    """What layers see: `full` those without a window, `sliding` the others (`full` where there are
    none).
    """

    full: RowKeys
    sliding: RowKeys

    def under(self, window: int | None) -> RowKeys:
        """What a layer with this window sees."""
        return self.full if window is None else self.sliding


def frozen(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised weight: every element is written by the loader, or the load fails."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class RmsNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, inner maths in float32."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = frozen(width, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Module):
    """y = x W^T + b, the bias only where asked for; weight [out, in], bias [out]."""

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.weight = frozen(fan_out, fan_in, dtype=dtype, device=device)
        self.bias = frozen(fan_out, dtype=dtype, device=device) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class GatedMlp(nn.Module):
    """Weights of down(silu(gate(x)) * up(x)); gate and up are one matrix, so that they are one
    product."""

    def __init__(self, dims: ModelDims, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.mlp_width = dims.mlp_width
        self.gate_up = Linear(dims.width, 2 * dims.mlp_width, dtype, device)
        self.down = Linear(dims.mlp_width, dims.width, dtype, device)


def rope_frequencies(rope: Rope, head_width: int) -> Tensor:
    """Inverse frequencies [E / 2] in float32 on the CPU.

    Plain: theta^(-2i/E) (RoFormer). llama3: wavelengths beyond original / low_freq_factor are
    stretched by `factor`, those below original / high_freq_factor are kept, and the band between is
    blended linearly in original / wavelength (Llama 3.1).
    """
    freq_E = 1.0 / rope.theta ** (
        torch.arange(0, head_width, 2, dtype=torch.int64).float() / head_width
    )
    scaling = rope.llama3
    if scaling is None:
        return freq_E
    turns_E = scaling.original_max_positions * freq_E / (2 * math.pi)
    keep_E = (turns_E - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    keep_E = keep_E.clamp(0.0, 1.0)
    return keep_E * freq_E + (1 - keep_E) * freq_E / scaling.factor


def rope_table(rope: Rope, head_width: int, num_positions: int, device: torch.device) -> Tensor:
    """cos and sin of positions 0..num_positions-1: [num_positions, 2, E] float32, halves equal."""
    angle = torch.outer(
        torch.arange(num_positions, dtype=torch.float32), rope_frequencies(rope, head_width)
    )
    angle = torch.cat((angle, angle), dim=-1)
    return torch.stack((angle.cos(), angle.sin()), dim=1).to(device)


def attend(q_THE: Tensor, cache: Planes, layer: int, keys: RowKeys) -> Tensor:
    """Attention of T = B x Q flat tokens over their rows' keys; [T, H * E].

    Each row is a batch entry of its own: not even a NaN reaches another row.
    """
    out_BQHE = attention(
        q_THE.unflatten(0, keys.stop_BQ.shape),
        cache.k_LXGE[layer],
        cache.v_LXGE[layer],
        keys,
        scale=q_THE.shape[-1] ** -0.5,
    )
    return out_BQHE.flatten(2).flatten(0, 1)
