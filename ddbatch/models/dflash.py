"""DFlash drafter: a block-diffusion decoder that proposes K - 1 tokens in one forward.

Source: DFlash (z-lab), checkpoint format as released. The block [anchor, MASK x (K - 1)] attends to
itself and to a context made of the target's tapped hidden states. A token's context keys and values
depend on its own features alone, so they are computed once, when it is committed, and cached.
The embedding and the head are the target's. Knows nothing about trees, rows or the target's
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddbatch.models.dims import DrafterDims, ModelDims
from ddbatch.models.layers import (
    GatedMlp,
    Linear,
    Planes,
    RmsNorm,
    VisibleKeys,
    apply_rope,
    attend,
    rope_table,
)


class DFlashLayer(nn.Module):
    """Pre-norm layer with norms on q and k; one k and v projection for context and block."""

    def __init__(self, dims: ModelDims, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads, self.kv_heads = dims.heads, dims.kv_heads
        q_width, kv_width = dims.heads * dims.head_width, dims.kv_heads * dims.head_width
        self.input_norm = RmsNorm(dims.width, dims.norm_eps, dtype, device)
        self.q = Linear(dims.width, q_width, dtype, device)
        self.kv = Linear(dims.width, 2 * kv_width, dtype, device)
        self.q_norm = RmsNorm(dims.head_width, dims.norm_eps, dtype, device)
        self.k_norm = RmsNorm(dims.head_width, dims.norm_eps, dtype, device)
        self.out = Linear(q_width, dims.width, dtype, device)
        self.mlp_norm = RmsNorm(dims.width, dims.norm_eps, dtype, device)
        self.mlp = GatedMlp(dims, dtype, device)

    def keys_values(self, x_TD: Tensor, rope_T2E: Tensor) -> tuple[Tensor, Tensor]:
        """Roped keys and values [T, G, E] of context features or of the normed block."""
        kv = self.kv(x_TD).unflatten(-1, (2 * self.kv_heads, -1))
        k_TGE = apply_rope(self.k_norm(kv[:, : self.kv_heads]), rope_T2E)
        return k_TGE, kv[:, self.kv_heads :]

    def forward(
        self, x_TD: Tensor, rope_T2E: Tensor, cache: Planes, layer: int, keys: VisibleKeys
    ) -> Tensor:
        normed_TD = self.input_norm(x_TD)
        q_THE = self.q_norm(self.q(normed_TD).unflatten(-1, (self.heads, -1)))
        k_TGE, v_TGE = self.keys_values(normed_TD, rope_T2E)
        x_TD = x_TD + self.out(
            attend(apply_rope(q_THE, rope_T2E), k_TGE, v_TGE, cache, layer, keys)
        )
        out_TD: Tensor = x_TD + self.mlp(self.mlp_norm(x_TD))
        return out_TD


class DFlash(nn.Module):
    """Weights and forward of a drafter. Weights are uninitialised until a loader fills them."""

    def __init__(
        self, dims: DrafterDims, dtype: torch.dtype, device: torch.device, num_positions: int
    ) -> None:
        super().__init__()
        self.dims = dims
        decoder = dims.decoder
        self.fuse = Linear(len(dims.tap_layers) * decoder.width, decoder.width, dtype, device)
        self.fuse_norm = RmsNorm(decoder.width, decoder.norm_eps, dtype, device)
        self.layers = nn.ModuleList(
            DFlashLayer(decoder, dtype, device) for _ in range(decoder.layers)
        )
        self.norm = RmsNorm(decoder.width, decoder.norm_eps, dtype, device)
        self.rope_P2E = rope_table(decoder.rope, decoder.head_width, num_positions, device)

    def context(self, feature_TC: Tensor, pos_T: Tensor) -> Planes:
        """Context keys and values [L, T, G, E] of committed tokens, from their tapped states.

        The fused features skip the layers' input norms: only the block passes through those.
        """
        fused_TD = self.fuse_norm(self.fuse(feature_TC))
        rope_T2E = self.rope_P2E[pos_T]
        pairs = []
        for layer in self.layers:
            assert isinstance(layer, DFlashLayer)
            pairs.append(layer.keys_values(fused_TD, rope_T2E))
        return Planes(*(torch.stack(side) for side in zip(*pairs, strict=True)))

    def forward(
        self, x_TD: Tensor, pos_T: Tensor, cache: Planes, full: VisibleKeys, sliding: VisibleKeys
    ) -> Tensor:
        """Hidden states [T, D] of B blocks (T = B K), from the target's embeddings of the block.

        full, sliding: what full-attention and sliding-window layers see.
        """
        rope_T2E = self.rope_P2E[pos_T]
        for number, layer in enumerate(self.layers):
            keys = full if self.dims.windows[number] is None else sliding
            x_TD = layer(x_TD, rope_T2E, cache, number, keys)
        hidden_TD: Tensor = self.norm(x_TD)
        return hidden_TD

    def destinations(self) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the part of a weight that it fills."""
        found: dict[str, Tensor] = {
            "fc.weight": self.fuse.weight,
            "hidden_norm.weight": self.fuse_norm.weight,
            "norm.weight": self.norm.weight,
        }
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DFlashLayer)
            k, v = layer.kv.weight.chunk(2)
            gate, up = layer.mlp.gate_up.weight.chunk(2)
            for name, part in {
                "input_layernorm": layer.input_norm.weight,
                "self_attn.q_proj": layer.q.weight,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": layer.out.weight,
                "self_attn.q_norm": layer.q_norm.weight,
                "self_attn.k_norm": layer.k_norm.weight,
                "post_attention_layernorm": layer.mlp_norm.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": layer.mlp.down.weight,
            }.items():
                found[f"layers.{number}.{name}.weight"] = part
        return found
