"""Write what was trained as the folder that the loaders read, and begin a training at random.

Knows tensor names and config keys; the places of the tensors are told by the models.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddbatch.models.dims import DrafterDims, ModelDims


def draw_weights(places: dict[str, Tensor], *, layers: int, seed: int) -> None:
    """Random weights in place: normal with a deviation of 0.02, norms 1.

    Projections back into the stream are smaller by sqrt(2 layers), as in GPT-2: their outputs add
    up.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, place in places.items():
            if place.ndim == 1:
                place.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            is_back = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.02 / math.sqrt(2 * layers) if is_back else 0.02
            place.copy_(deviation * torch.randn(place.shape, generator=generator))


def write_weights(folder: Path, places: dict[str, Tensor], dims: ModelDims) -> None:
    """model.safetensors of the tensors in `places`, by their names, in dims.stored_dtype."""
    dtype = getattr(torch, str(dims.stored_dtype))
    tensors = {name: place.detach().to("cpu", dtype).contiguous() for name, place in places.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_target_config(folder: Path, dims: ModelDims) -> None:
    """config.json and generation_config.json of a Qwen3 target without windows."""
    assert dims.has_qk_norm
    assert not dims.has_qkv_bias
    assert dims.window is None
    assert dims.rope.llama3 is None
    eos = list(dims.eos_token_ids)
    _write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **_decoder_keys(dims),
            "tie_word_embeddings": dims.is_tied,
            "use_sliding_window": False,
            "eos_token_id": eos,
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": eos})


def write_drafter_config(folder: Path, dims: DrafterDims) -> None:
    """config.json of a DFlash drafter without windows, in the released form."""
    assert dims.decoder.window is None
    assert dims.decoder.rope.llama3 is None
    _write_json(
        folder / "config.json",
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **_decoder_keys(dims.decoder),
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * dims.decoder.layers,
            "block_size": dims.block,
            "num_target_layers": dims.num_target_layers,
            "dflash_config": {
                "mask_token_id": dims.mask_token_id,
                "target_layer_ids": list(dims.tap_layers),
            },
        },
    )


def _decoder_keys(dims: ModelDims) -> dict[str, object]:
    return {
        "vocab_size": dims.vocab,
        "hidden_size": dims.width,
        "intermediate_size": dims.mlp_width,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": dims.norm_eps,
        "rope_theta": dims.rope.theta,
        "max_position_embeddings": dims.max_positions,
        "torch_dtype": dims.stored_dtype,
    }


def _write_json(path: Path, values: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
