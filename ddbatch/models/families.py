"""The target families: which architecture is read by which file.

docs/families.md says how to add one. Knows nothing about what a family switches on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ddbatch.models.config_file import ConfigFile
from ddbatch.models.dims import ModelDims
from ddbatch.models.llama import read_llama
from ddbatch.models.mistral import read_mistral
from ddbatch.models.qwen2 import read_qwen2
from ddbatch.models.qwen3 import read_qwen3

# The only entry of config.json's `architectures` -> who reads the rest.
FAMILIES: dict[str, Callable[[ConfigFile], ModelDims]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
}


def read_target_dims(folder: Path) -> ModelDims:
    """Dims of the target in `folder`; ValueError for what this project does not compute."""
    config = ConfigFile("model.path", folder)
    architecture = config.architecture(tuple(FAMILIES))
    return FAMILIES[architecture](config)
