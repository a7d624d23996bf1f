"""Qwen3, dense: norms on q and k, a head width of its own, and Qwen2's sliding layers.

Source: Qwen3 (Alibaba), in the Hugging Face layout (`Qwen3ForCausalLM`). Knows only its config
keys.
"""

from __future__ import annotations

from dataclasses import replace

from ddbatch.models.config_file import ConfigFile
from ddbatch.models.decoder_config import read_decoder
from ddbatch.models.dims import ModelDims
from ddbatch.models.qwen2 import read_qwen_windows


def read_qwen3(config: ConfigFile) -> ModelDims:
    """Dims of a Qwen3 target; the biases that its config could switch on are refused."""
    config.only("attention_bias", False)
    dims = read_decoder(config, theta=10000.0, kv_heads=32, head_width=128)
    return replace(dims, has_qk_norm=True, windows=read_qwen_windows(config, dims))
