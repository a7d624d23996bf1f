"""Mistral 7B and its successors of the same shape: every layer slides, or none does.

Source: Mistral (Mistral AI), in the Hugging Face layout (`MistralForCausalLM`). Knows only its
config keys.
"""

from __future__ import annotations

from dataclasses import replace

from ddbatch.models.config_file import ConfigFile
from ddbatch.models.decoder_config import read_decoder, sliding_windows
from ddbatch.models.dims import ModelDims


def read_mistral(config: ConfigFile) -> ModelDims:
    """Dims of a Mistral target. sliding_window: null is none, an absent one is 4096."""
    config.unset("layer_types")  # layers that differ are another architecture's
    dims = read_decoder(config, theta=10000.0, kv_heads=8)
    if config.is_null("sliding_window"):
        return dims
    window = config.positive("sliding_window", default=4096)
    return replace(dims, windows=sliding_windows([True] * dims.layers, window, dims.max_positions))
