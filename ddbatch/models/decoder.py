"""The decoder that all families share, and a target made of it: a forward over a flat list of
tokens.

What a family switches on stands in ModelDims; nothing here asks for its name. Knows nothing about
rows, trees or rounds: it is told positions and visible keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddbatch.models.dims import ModelDims
from ddbatch.models.layers import (
    GatedMlp,
    LayerKeys,
    Linear,
    Planes,
    RmsNorm,
    apply_rope,
    attend,
    frozen,
    linear_float32,
    rope_table,
    write_keys,
)


class Heads(NamedTuple):
    """Queries, keys (both roped) and values of T tokens."""

    q_THE: Tensor
    k_TGE: Tensor
    v_TGE: Tensor


class DecoderLayer(nn.Module):
    """Pre-norm layer with grouped-query attention; q, k and v are one matrix."""

    def __init__(self, dims: ModelDims, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dims = dims
        q_width = dims.heads * dims.head_width
        qkv_width = q_width + 2 * dims.kv_heads * dims.head_width
        self.input_norm = RmsNorm(dims.width, dims.norm_eps, dtype, device)
        self.qkv = Linear(dims.width, qkv_width, dtype, device, has_bias=dims.has_qkv_bias)
        self.q_norm = self.k_norm = None
        if dims.has_qk_norm:
            self.q_norm = RmsNorm(dims.head_width, dims.norm_eps, dtype, device)
            self.k_norm = RmsNorm(dims.head_width, dims.norm_eps, dtype, device)
        self.out = Linear(q_width, dims.width, dtype, device)
        self.mlp_norm = RmsNorm(dims.width, dims.norm_eps, dtype, device)
        self.mlp = GatedMlp(dims, dtype, device)

    def project(self, x_TD: Tensor, rope_T2E: Tensor) -> Heads:
        """The layer's input, normed, as heads."""
        H, G = self.dims.heads, self.dims.kv_heads
        qkv = self.qkv(self.input_norm(x_TD)).unflatten(-1, (H + 2 * G, -1))
        qk = qkv[:, : H + G]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])), dim=1)
        qk = apply_rope(qk, rope_T2E)
        return Heads(qk[:, :H], qk[:, H:], qkv[:, H + G :])

    def context(self, x_TD: Tensor, rope_T2E: Tensor) -> tuple[Tensor, Tensor]:
        """Roped keys and values [T, G, E] of x itself, which passes through no input norm."""
        H, G, E = self.dims.heads, self.dims.kv_heads, self.dims.head_width
        bias = None if self.qkv.bias is None else self.qkv.bias[H * E :]
        kv = F.linear(x_TD, self.qkv.weight[H * E :], bias).unflatten(-1, (2 * G, E))
        k_TGE = kv[:, :G] if self.k_norm is None else self.k_norm(kv[:, :G])
        return apply_rope(k_TGE, rope_T2E), kv[:, G:]

    def finish(self, x_TD: Tensor, attended_TX: Tensor) -> Tensor:
        """The layer's output: its input plus attention ([T, H * E]), plus the MLP of that."""
        x_TD = x_TD + self.out(attended_TX)
        out_TD: Tensor = x_TD + self.mlp(self.mlp_norm(x_TD))
        return out_TD

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name, which begins with `prefix` -> the part of a weight it fills."""
        H, G, E = self.dims.heads, self.dims.kv_heads, self.dims.head_width
        gate, up = self.mlp.gate_up.weight.chunk(2)
        found = {
            "input_layernorm.weight": self.input_norm.weight,
            "self_attn.o_proj.weight": self.out.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.mlp.down.weight,
        }
        for kind, whole in (("weight", self.qkv.weight), ("bias", self.qkv.bias)):
            if whole is not None:
                parts = whole.split([H * E, G * E, G * E])
                found |= {
                    f"self_attn.{letter}_proj.{kind}": part
                    for letter, part in zip("qkv", parts, strict=True)
                }
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                found[f"self_attn.{name}.weight"] = norm.weight
        return {f"{prefix}.{name}": part for name, part in found.items()}


class TargetOutput(NamedTuple):
    """hidden_TD: after the final norm. feature_TC: outputs of the tapped layers side by side."""

    hidden_TD: Tensor
    feature_TC: Tensor


class Target(nn.Module):
    """Weights and forward of a target of any family; weights are uninitialised until loaded."""

    def __init__(
        self, dims: ModelDims, dtype: torch.dtype, device: torch.device, num_positions: int
    ) -> None:
        """num_positions: how far the rope table reaches, drafted tokens included."""
        super().__init__()
        self.dims = dims
        self.embed = frozen(dims.vocab, dims.width, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(dims, dtype, device) for _ in range(dims.layers))
        self.norm = RmsNorm(dims.width, dims.norm_eps, dtype, device)
        self.head = (
            self.embed
            if dims.is_tied
            else frozen(dims.vocab, dims.width, dtype=dtype, device=device)
        )
        self.rope_P2E = rope_table(dims.rope, dims.head_width, num_positions, device)

    def forward(
        self,
        token_T: Tensor,
        pos_T: Tensor,
        cache: Planes,
        cell_T: Tensor,
        keys: LayerKeys,
        tap_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run T = B x Q tokens at their positions. Their keys and values go to these cells of the
        cache, from which attention reads them like all others."""
        x_TD = self.embed[token_T]
        rope_T2E = self.rope_P2E[pos_T]
        tapped = []
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            heads = layer.project(x_TD, rope_T2E)
            write_keys(cache, number, cell_T, heads.k_TGE, heads.v_TGE)
            visible = keys.under(self.dims.windows[number])
            x_TD = layer.finish(x_TD, attend(heads.q_THE, cache, number, visible))
            if number in tap_layers:
                tapped.append(x_TD)
        feature_TC = torch.cat(tapped, dim=-1) if tapped else x_TD[:, :0]
        return TargetOutput(self.norm(x_TD), feature_TC)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """float32 scores [T, V]."""
        return linear_float32(hidden_TD, self.head)

    def destinations(self) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the part of a weight that it fills."""
        found: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": self.norm.weight,
        }
        if not self.dims.is_tied:
            found["lm_head.weight"] = self.head
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            found |= layer.destinations(f"model.layers.{number}")
        return found
