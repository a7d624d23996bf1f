"""Llama (1 to 3.x, and models of its shape such as SmolLM2): a forward over a flat list of tokens.

Knows nothing about rows, trees or rounds: it is told positions and visible keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddbatch.models.dims import ModelDims
from ddbatch.models.layers import (
    GatedMlp,
    Linear,
    Planes,
    RmsNorm,
    VisibleKeys,
    apply_rope,
    attend,
    frozen,
    linear_float32,
    rope_table,
)


class TargetOutput(NamedTuple):
    """hidden_TD: after the final norm. feature_TC: outputs of the tapped layers side by side."""

    hidden_TD: Tensor
    feature_TC: Tensor


class LlamaLayer(nn.Module):
    """Pre-norm decoder layer with grouped-query attention; q, k and v are one matrix."""

    def __init__(self, dims: ModelDims, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.kv_heads = dims.heads, dims.kv_heads
        qkv_width = (dims.heads + 2 * dims.kv_heads) * dims.head_width
        self.input_norm = RmsNorm(dims.width, dims.norm_eps, dtype, device)
        self.qkv = Linear(dims.width, qkv_width, dtype, device)
        self.out = Linear(dims.heads * dims.head_width, dims.width, dtype, device)
        self.mlp_norm = RmsNorm(dims.width, dims.norm_eps, dtype, device)
        self.mlp = GatedMlp(dims, dtype, device)

    def forward(
        self,
        x_TD: Tensor,
        rope_T2E: Tensor,
        cache: Planes,
        scratch: Planes,
        layer: int,
        keys: VisibleKeys,
    ) -> Tensor:
        H, G, T = self.heads, self.kv_heads, len(x_TD)
        qkv = self.qkv(self.input_norm(x_TD)).unflatten(-1, (H + 2 * G, -1))
        qk = apply_rope(qkv[:, : H + G], rope_T2E)
        k_TGE, v_TGE = scratch.k_LXGE[layer, :T], scratch.v_LXGE[layer, :T]
        k_TGE.copy_(qk[:, H:])
        v_TGE.copy_(qkv[:, H + G :])
        x_TD = x_TD + self.out(attend(qk[:, :H], k_TGE, v_TGE, cache, layer, keys))
        out_TD: Tensor = x_TD + self.mlp(self.mlp_norm(x_TD))
        return out_TD


class Llama(nn.Module):
    """Weights and forward of a Llama target; weights are uninitialised until loaded."""

    def __init__(
        self, dims: ModelDims, dtype: torch.dtype, device: torch.device, num_positions: int
    ) -> None:
        """num_positions: how far the rope table reaches, drafted tokens included."""
        super().__init__()
        self.dims = dims
        self.embed = frozen(dims.vocab, dims.width, dtype=dtype, device=device)
        self.layers = nn.ModuleList(LlamaLayer(dims, dtype, device) for _ in range(dims.layers))
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
        scratch: Planes,
        keys: VisibleKeys,
        tap_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run T = B x Q tokens at their positions; scratch keeps their keys and values."""
        x_TD = self.embed[token_T]
        rope_T2E = self.rope_P2E[pos_T]
        tapped = []
        for number, layer in enumerate(self.layers):
            x_TD = layer(x_TD, rope_T2E, cache, scratch, number, keys)
            if number in tap_layers:
                tapped.append(x_TD)
        feature_TC = torch.cat(tapped, dim=-1) if tapped else x_TD[:, :0]
        return TargetOutput(self.norm(x_TD), feature_TC)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """float32 scores [T, V]."""
        return linear_float32(hidden_TD, self.head)

    def destinations(self) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the part of a weight that it fills."""
        H, G, E = self.dims.heads, self.dims.kv_heads, self.dims.head_width
        found: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": self.norm.weight,
        }
        if not self.dims.is_tied:
            found["lm_head.weight"] = self.head
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            q, k, v = layer.qkv.weight.split([H * E, G * E, G * E])
            gate, up = layer.mlp.gate_up.weight.chunk(2)
            for name, part in {
                "input_layernorm": layer.input_norm.weight,
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": layer.out.weight,
                "post_attention_layernorm": layer.mlp_norm.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": layer.mlp.down.weight,
            }.items():
                found[f"model.layers.{number}.{name}.weight"] = part
        return found
