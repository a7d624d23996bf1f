"""DFlash drafter: a block-diffusion decoder that proposes K - 1 tokens in one forward.

Source: DFlash (z-lab), checkpoint format as released. The block [anchor, MASK x (K - 1)] attends to
itself and to a context made of the target's tapped hidden states. A token's context keys and values
depend on its own features alone, so they are computed once, when it is committed, and cached.
The layers are Qwen3's; the embedding and the head are the target's. Knows nothing about trees, rows
or the target's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ddbatch.models.config_file import ConfigFile
from ddbatch.models.decoder import DecoderLayer, norms_of
from ddbatch.models.decoder_config import read_decoder, read_layer_types
from ddbatch.models.dims import DrafterDims
from ddbatch.models.layers import LayerKeys, Linear, Planes, RmsNorm, rope_table
from ddbatch_kernels.build_tree import MAX_DEPTH
from ddbatch_kernels.embed_normed import embed_normed
from ddbatch_kernels.rope_append import Heads, rope_append


def read_drafter_dims(folder: Path) -> DrafterDims:
    """Dims of the DFlash drafter in `folder`, from released (flat) and newer (nested) configs."""
    config = ConfigFile("drafter.path", folder)
    config.architecture(("DFlashDraftModel",))
    config.only("attention_bias", False)
    # Its layers are Qwen3's, and so is what an absent key means, but for a theta that is not told.
    decoder = read_decoder(config, theta=None, kv_heads=32, head_width=128)
    windows = _read_windows(config, decoder.layers)
    decoder = replace(decoder, has_qk_norm=True, windows=windows)
    dflash = config.section("dflash_config")
    _check_variant(dflash, windows)
    has_block = dflash.values.get("block_size") is not None
    block = (dflash if has_block else config).positive("block_size")
    if not 2 <= block <= MAX_DEPTH + 1:
        raise ValueError(
            f"{config.where}: block_size={block}: 2..{MAX_DEPTH + 1} is required: no tree is "
            f"deeper than {MAX_DEPTH}"
        )
    num_target_layers = config.positive("num_target_layers")
    tap_layers = dflash.int_list("target_layer_ids")
    # The last layer is left out: its entry of hidden_states is taken after the final norm by some
    # runtimes and before it by others, so a drafter that taps it is ambiguous.
    if not tap_layers or not all(0 <= layer < num_target_layers - 1 for layer in tap_layers):
        raise ValueError(
            f"{dflash.where}: target_layer_ids={list(tap_layers)}: ids in "
            f"0..{num_target_layers - 2} are required (num_target_layers="
            f"{num_target_layers})"
        )
    # Features stand side by side in the order of the target's layers.
    if list(tap_layers) != sorted(set(tap_layers)):
        raise ValueError(
            f"{dflash.where}: target_layer_ids={list(tap_layers)}: ascending ids are required"
        )
    mask_token_id = dflash.required("mask_token_id", int)
    if not 0 <= mask_token_id < decoder.vocab:
        raise ValueError(
            f"{dflash.where}: mask_token_id={mask_token_id}: "
            f"0..{decoder.vocab - 1} is required (vocab_size={decoder.vocab})"
        )
    return DrafterDims(decoder, block, mask_token_id, tap_layers, num_target_layers)


def _check_variant(dflash: ConfigFile, windows: tuple[int | None, ...]) -> None:
    """Refuse what relatives of DFlash add: without it they would load and draft badly, silently."""
    known = ("block_size", "mask_token_id", "mask_token", "target_layer_ids", "causal", "use_swa")
    for key, value in dflash.values.items():
        if key not in known and value is not None:
            raise ValueError(
                f"{dflash.where}: {key}={value!r}: DFlash 2 and other variants are not supported; "
                f"allowed keys: {', '.join(known)}"
            )
    dflash.only("use_swa", False)
    is_causal = dflash.values.get("causal")
    is_sliding = [window is not None for window in windows]
    if is_causal is not None and is_sliding != [is_causal] * len(windows):
        raise ValueError(
            f"{dflash.where}: causal={is_causal!r} does not fit these layer_types; allowed: null, "
            "False where all are full_attention, True where all are sliding_attention"
        )


def _read_windows(config: ConfigFile, layers: int) -> tuple[int | None, ...]:
    is_sliding = read_layer_types(config, layers)
    if is_sliding is None:
        config.only("use_sliding_window", False)
        return (None,) * layers
    if not any(is_sliding):
        return (None,) * layers
    config.only("use_sliding_window", True)
    window = config.positive("sliding_window")
    return tuple(window if slides else None for slides in is_sliding)


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
            DecoderLayer(decoder, dtype, device) for _ in range(decoder.layers)
        )
        # The context of all layers is one product: their weights are parts of one tensor.
        self._qkv_LXD = _stacked([layer.qkv for layer in self._own_layers()])
        self._k_norm_LE = _stacked([layer.k_norm for layer in self._own_layers()])
        self.norm = RmsNorm(decoder.width, decoder.norm_eps, dtype, device)
        self.rope_P2E = rope_table(decoder.rope, decoder.head_width, num_positions, device)

    def _own_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def append_context(
        self, feature_TC: Tensor, pos_T: Tensor, cache: Planes, cell_T: Tensor
    ) -> None:
        """Write context keys and values of committed tokens, from their tapped states, to cells.

        The fused features skip the layers' input norms: only the block passes through those.
        """
        dims = self.dims.decoder
        fused_TD = self.fuse_norm(self.fuse(feature_TC))
        kv_weight_LXD = self._qkv_LXD[:, dims.heads * dims.head_width :]
        kv_LTX = torch.bmm(fused_TD.expand(dims.layers, -1, -1), kv_weight_LXD.transpose(1, 2))
        heads = Heads(None, self._k_norm_LE, dims.norm_eps, self.rope_P2E, pos_T, *cache, cell_T)
        rope_append(kv_LTX, heads)

    def forward(
        self,
        token_T: Tensor,
        embed_VD: Tensor,
        pos_T: Tensor,
        cache: Planes,
        cell_T: Tensor,
        keys: LayerKeys,
    ) -> Tensor:
        """Hidden states [T, D] of B blocks (T = B K) of tokens, embedded like the target's. The
        block's keys and values go to these cells of the cache."""
        norms = norms_of(self.layers, self.norm)
        normed = embed_normed(token_T, embed_VD, norms[0].weight, norms[0].eps)
        for number, layer in enumerate(self.layers):
            normed = layer(
                normed, norms[number + 1], self.rope_P2E, pos_T, cache, number, cell_T, keys
            )
        return normed.made()

    def destinations(self) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the part of a weight that it fills."""
        found: dict[str, Tensor] = {
            "fc.weight": self.fuse.weight,
            "hidden_norm.weight": self.fuse_norm.weight,
            "norm.weight": self.norm.weight,
        }
        for number, layer in enumerate(self._own_layers()):
            found |= layer.destinations(f"layers.{number}")
        return found


def _stacked(modules: Sequence[Linear | RmsNorm | None]) -> Tensor:
    """One tensor [L, ...] whose parts are the weights of these modules."""
    weights = [module.weight for module in modules if module is not None]
    whole = torch.stack([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole, strict=True):
        weight.data = part
    return whole
