"""Llama 1 to 3.x, and models of its shape such as SmolLM2: the decoder without any switch.

Source: Llama (Meta), in the Hugging Face layout (`LlamaForCausalLM`). Knows only its config keys.
"""

from __future__ import annotations

from ddbatch.models.config_file import ConfigFile
from ddbatch.models.decoder_config import read_decoder
from ddbatch.models.dims import ModelDims


def read_llama(config: ConfigFile) -> ModelDims:
    """Dims of a Llama target; biases and the split matrices of pretraining are refused."""
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    config.only("pretraining_tp", 1)
    return read_decoder(config, theta=10000.0)
