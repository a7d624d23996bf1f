"""The decoder that all families share, and a target made of it: a forward over a flat list of
tokens.

What a family switches on stands in ModelDims; nothing here asks for its name. Knows nothing about
rows, trees or rounds: it is told positions and visible keys.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddbatch.models.dims import ModelDims
from ddbatch.models.layers import (
    GatedMlp,
    LayerKeys,
    Linear,
    Planes,
    RmsNorm,
    attend,
    frozen,
    rope_table,
)
from ddbatch_kernels.embed_normed import embed_normed
from ddbatch_kernels.gated_linear import gated_linear
from ddbatch_kernels.linear_add import linear_add
from ddbatch_kernels.linear_float32 import linear_float32
from ddbatch_kernels.normed import Normed
from ddbatch_kernels.project_heads import Heads, project_heads


class DecoderLayer(nn.Module):
    """Pre-norm layer with grouped-query attention; q, k and v are one matrix."""

    def __init__(
        self,
        dims: ModelDims,
        dtype: torch.dtype,
        device: torch.device,
        *,
        in_order: bool = False,
    ) -> None:
        """in_order: see Target."""
        super().__init__()
        self.dims, self.in_order = dims, in_order
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

    def forward(
        self,
        normed: Normed,
        next_norm: RmsNorm,
        rope_P2E: Tensor,
        pos_T: Tensor,
        cache: Planes,
        number: int,
        cell_T: Tensor,
        keys: LayerKeys,
        *,
        keeps_input: bool = False,
    ) -> Normed:
        """From the stream, to be normed by this layer's input norm, to its output, to be normed by
        next_norm. The layer's keys and values, layer `number` of the cache, go to these cells, from
        which attention reads them like all others. keeps_input: else the stream is overwritten."""
        mlp_norm, mlp = self.mlp_norm, self.mlp
        q_THE = project_heads(
            normed,
            self.qkv.weight,
            self.qkv.bias,
            Heads(
                None if self.q_norm is None else self.q_norm.weight[None],
                None if self.k_norm is None else self.k_norm.weight[None],
                self.dims.norm_eps,
                rope_P2E,
                pos_T,
                cache.k_LXGE[number : number + 1],
                cache.v_LXGE[number : number + 1],
                cell_T,
            ),
            in_order=self.in_order,
        )
        attended_TX = attend(q_THE, cache, number, keys.under(self.dims.windows[number]))
        add = partial(linear_add, in_order=self.in_order)
        normed = add(
            attended_TX,
            self.out.weight,
            normed.x_TD,
            mlp_norm.weight,
            mlp_norm.eps,
            overwrites=not keeps_input,
        )
        act_TF = gated_linear(normed, mlp.gate_up.weight, in_order=self.in_order)
        return add(
            act_TF,
            mlp.down.weight,
            normed.x_TD,
            next_norm.weight,
            next_norm.eps,
            overwrites=True,
        )

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


def norms_of(layers: nn.ModuleList, final: RmsNorm) -> list[RmsNorm]:
    """What the stream is normed by ahead of each layer, and behind the last."""
    own = [layer.input_norm for layer in layers if isinstance(layer, DecoderLayer)]
    return [*own, final]


class TargetOutput(NamedTuple):
    """hidden_TD: after the final norm. feature_TC: outputs of the tapped layers side by side."""

    hidden_TD: Tensor
    feature_TC: Tensor


class Target(nn.Module):
    """Weights and forward of a target of any family; weights are uninitialised until loaded."""

    def __init__(
        self,
        dims: ModelDims,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        *,
        in_order: bool = False,
    ) -> None:
        """num_positions: how far the rope table reaches, drafted tokens included. in_order: whether
        a GPU must sum up in orders that depend on positions and weights alone, so that a token's
        bits do not depend on how many are run with it, nor on which of them form a tree.
        """
        super().__init__()
        self.dims, self.in_order = dims, in_order
        self.embed = frozen(dims.vocab, dims.width, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(dims, dtype, device, in_order=in_order) for _ in range(dims.layers)
        )
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
        feature_TC: Tensor | None = None,
    ) -> TargetOutput:
        """Run T = B x Q tokens at their positions; their keys and values go to these cells of the
        cache. feature_TC: where features are to go."""
        norms = norms_of(self.layers, self.norm)
        normed = embed_normed(token_T, self.embed, norms[0].weight, norms[0].eps)
        tapped = []
        for number, layer in enumerate(self.layers):
            normed = layer(
                normed,
                norms[number + 1],
                self.rope_P2E,
                pos_T,
                cache,
                number,
                cell_T,
                keys,
                keeps_input=number - 1 in tap_layers,
            )
            if number in tap_layers:
                tapped.append(normed.x_TD)
        tapped_TC = torch.cat(tapped, dim=-1, out=feature_TC) if tapped else normed.x_TD[:, :0]
        return TargetOutput(normed.made(), tapped_TC)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """float32 scores [T, V]."""
        return linear_float32(hidden_TD, self.head, in_order=self.in_order)

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
