"""Qwen2 and Qwen2.5, dense: biases on q, k and v, and sliding layers where they are switched on.

Source: Qwen2 (Alibaba), in the Hugging Face layout (`Qwen2ForCausalLM`). Knows only its config
keys.
"""

from __future__ import annotations

from dataclasses import replace

from ddbatch.models.config_file import ConfigFile
from ddbatch.models.decoder_config import read_decoder, read_layer_types, sliding_windows
from ddbatch.models.dims import ModelDims


def read_qwen2(config: ConfigFile) -> ModelDims:
    """Dims of a Qwen2 target; no key switches its biases."""
    dims = read_decoder(config, theta=10000.0, kv_heads=32)
    return replace(dims, has_qkv_bias=True, windows=read_qwen_windows(config, dims))


def read_qwen_windows(config: ConfigFile, dims: ModelDims) -> tuple[int | None, ...]:
    """Windows of Qwen2 and Qwen3: sliding_window counts only beside use_sliding_window=true.

    Layers that slide stand in layer_types; older configs let those from max_window_layers on slide.
    """
    is_sliding = read_layer_types(config, dims.layers)
    is_on = config.optional("use_sliding_window", bool, False)
    if is_on and not config.is_null("sliding_window"):
        if is_sliding is None:
            first = config.optional("max_window_layers", int, 28)
            is_sliding = tuple(layer >= first for layer in range(dims.layers))
        window = config.positive("sliding_window", default=4096)
        return sliding_windows(is_sliding, window, dims.max_positions)
    if is_sliding is not None and any(is_sliding):
        raise ValueError(
            f"{config.where}: layer_types has sliding_attention beside use_sliding_window={is_on} "
            f"and sliding_window={config.values.get('sliding_window')!r}; allowed: "
            "use_sliding_window=True and a size, or full_attention alone"
        )
    return dims.windows
