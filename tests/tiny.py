"""Tiny random checkpoints, in the form in which Hugging Face and DFlash folders are released.

Writing uses raw config keys and tensor names and no code of ddbatch; the read_ and load_ functions
read what was written, through ddbatch.models. Activations are of order 1 and scores spread by about
2.5, so that two best scores are seldom close.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fake import VOCAB, write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash, read_drafter_dims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import check_pair, load_drafter, load_target

SPREAD = 2.5  # standard deviation of scores
DROP = ...  # as a value of edit_config: remove the key; ids of tests show it, the same each time

# All three bands of Llama 3.1's scaling are hit at head width 10: the first frequency is kept, the
# second blended, the others are divided.
LLAMA3_ROPE: dict[str, object] = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Form(NamedTuple):
    """What is a family's own in its released folders. keys: config keys that all of them have."""

    architecture: str
    model_type: str
    keys: dict[str, object]
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


FORMS = {
    "llama": Form(
        "LlamaForCausalLM", "llama", {"attention_bias": False, "mlp_bias": False, "bos_token_id": 1}
    ),
    "mistral": Form("MistralForCausalLM", "mistral", {}),
    "qwen2": Form("Qwen2ForCausalLM", "qwen2", {}, has_qkv_bias=True),
    "qwen3": Form("Qwen3ForCausalLM", "qwen3", {"attention_bias": False}, has_qk_norm=True),
}


def write_target(
    folder: Path,
    *,
    family: str = "llama",
    window: int | None = None,
    full_layers: int = 0,
    seed: int = 0,
    vocab: int = 97,
    width: int = 24,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_width: int = 10,
    mlp_width: int = 40,
    tied: bool = True,
    rope: dict[str, object] | None = None,
    max_positions: int = 512,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    scale: float = 2.0,
    nested_keys: bool = False,
    eos_token_id: int | list[int] | None = None,
) -> Path:
    """A target's folder; returns it.

    family: of FORMS. window: what layers see, but for the first full_layers (a Qwen's alone). rope:
    rope_parameters as transformers 5 writes them (None = theta 10000). nested_keys: write that
    form, layer_types and `dtype`; else rope_theta, rope_scaling, max_window_layers and torch_dtype.
    scale: factor on the projections.
    """
    form = FORMS[family]
    rope = {"rope_theta": 10000.0, "rope_type": "default"} if rope is None else rope
    config = {
        "architectures": [form.architecture],
        "model_type": form.model_type,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_width,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "eos_token_id": eos_token_id,
        **form.keys,
        **_window_keys(family, window, full_layers, layers, nested_keys),
        **_rope_keys(rope, nested_keys),
        **_dtype_key(dtype, nested_keys),
    }
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, width)
    for layer in range(layers):
        shapes |= _layer_shapes(
            f"model.layers.{layer}", width, heads * head_width, kv_heads * head_width, mlp_width
        )
        prefix = f"model.layers.{layer}.self_attn"
        if form.has_qkv_bias:
            for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                shapes[f"{prefix}.{letter}_proj.bias"] = (count * head_width,)
        if form.has_qk_norm:
            for norm in ("q_norm", "k_norm"):
                shapes[f"{prefix}.{norm}.weight"] = (head_width,)
    _write(folder, config, _random(shapes, seed, scale, dtype), shards)
    return folder


def write_drafter(
    folder: Path,
    *,
    target_folder: Path | None = None,
    seed: int = 1,
    vocab: int = 97,
    width: int = 24,
    target_layers: int = 4,
    rope_theta: float = 10000.0,
    block: int = 5,
    layers: int = 2,
    tap_layers: tuple[int, ...] = (0, 2),
    mask_token_id: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_width: int = 8,
    mlp_width: int = 32,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
    scale: float = 2.0,
    nested_keys: bool = False,
) -> Path:
    """A DFlash folder; returns it.

    target_folder: take vocab, width, target_layers and rope_theta from that target. mask_token_id
    None: the last id. windows: one entry per layer, None = full attention; a checkpoint has one
    window size. nested_keys: block_size in dflash_config, theta in rope_parameters, dtype.
    """
    if target_folder is not None:
        values = json.loads((target_folder / "config.json").read_text())
        vocab, width = values["vocab_size"], values["hidden_size"]
        target_layers = values["num_hidden_layers"]
        rope_theta = (values.get("rope_parameters") or values)["rope_theta"]
    windows = (None,) * layers if windows is None else windows
    sizes = {window for window in windows if window is not None}
    assert len(windows) == layers, (windows, layers)
    assert len(sizes) <= 1, windows
    dflash: dict[str, object] = {
        "mask_token_id": vocab - 1 if mask_token_id is None else mask_token_id,
        "target_layer_ids": list(tap_layers),
    }
    config: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_width,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_positions,
        "num_target_layers": target_layers,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_window_layers": layers,
        "use_sliding_window": bool(sizes),
        "sliding_window": sizes.pop() if sizes else None,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "dflash_config": dflash,
        **_rope_keys({"rope_theta": rope_theta, "rope_type": "default"}, nested_keys),
        **_dtype_key(dtype, nested_keys),
    }
    (dflash if nested_keys else config)["block_size"] = block
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(tap_layers) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(layers):
        shapes |= _layer_shapes(
            f"layers.{layer}", width, heads * head_width, kv_heads * head_width, mlp_width
        )
        for norm in ("q_norm", "k_norm"):
            shapes[f"layers.{layer}.self_attn.{norm}.weight"] = (head_width,)
    _write(folder, config, _random(shapes, seed, scale, dtype), shards=1)
    return folder


def load_tiny_pair(
    tmp_path: Path, device: str = "cpu", load_as: str = "float32", **sizes: Any
) -> tuple[Target, DFlash]:
    """Write and load a fitting pair in tmp_path/target and tmp_path/drafter.

    sizes: arguments of write_target (family, vocab, ...); block, tap_layers, mask_token_id, windows
    and names that begin with drafter_ (drafter_layers, drafter_seed, ...) are write_drafter's.
    """
    own = ("block", "tap_layers", "mask_token_id", "windows")
    for_drafter = {
        name.removeprefix("drafter_"): value
        for name, value in sizes.items()
        if name in own or name.startswith("drafter_")
    }
    for_target = {
        name: value
        for name, value in sizes.items()
        if name not in own and not name.startswith("drafter_")
    }
    target_folder = write_target(tmp_path / "target", **for_target)
    drafter_folder = write_drafter(tmp_path / "drafter", target_folder=target_folder, **for_drafter)
    return (
        read_target(target_folder, load_as, device),
        read_drafter(drafter_folder, target_folder, load_as, device),
    )


def write_cli_pair(folder: Path) -> Path:
    """A pair for whole commands, in folder/target and folder/drafter; the fake engine's tokenizer
    and vocabulary."""
    load_tiny_pair(folder, vocab=VOCAB, block=4, max_positions=80)
    write_tokenizer(folder / "target")
    return folder


def read_target(folder: Path, dtype: str = "float32", device: str = "cpu") -> Target:
    """The target in `folder`; its rope table reaches a little beyond its positions."""
    dims = read_target_dims(folder)
    return load_target(folder, dims, dtype, torch.device(device), dims.max_positions + 64)


def read_drafter(
    folder: Path, target_folder: Path | None = None, dtype: str = "float32", device: str = "cpu"
) -> DFlash:
    """The drafter in `folder`, checked against its target where one is given."""
    dims = read_drafter_dims(folder)
    if target_folder is not None:
        check_pair(read_target_dims(target_folder), dims, None)
    return load_drafter(folder, dims, dtype, torch.device(device), dims.decoder.max_positions + 64)


def edit_config(folder: Path, **changes: object) -> None:
    """Set or DROP keys of config.json; dflash_config__causal is the key causal of a section."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = values
        for section in sections:
            place = place[section]
        if value is DROP:
            del place[key]
        else:
            place[key] = value
    path.write_text(json.dumps(values))


def edit_tensors(
    folder: Path,
    change: Callable[[dict[str, Tensor]], object],
    file_name: str = "model.safetensors",
) -> None:
    """Read the tensors of one file, let `change` alter the dictionary, write them back."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file_name).items()}
    change(tensors)
    save_file(tensors, folder / file_name, metadata={"format": "pt"})


def _rope_keys(rope: dict[str, object], nested_keys: bool) -> dict[str, object]:
    if nested_keys:
        return {"rope_parameters": rope}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if is_plain else scaling}


def _window_keys(
    family: str, window: int | None, full_layers: int, layers: int, nested_keys: bool
) -> dict[str, object]:
    if family == "mistral":
        assert not full_layers
        return {"sliding_window": window}
    if not family.startswith("qwen"):
        assert window is None
        return {}
    # As released: the size stands there though nothing slides.
    keys = {"use_sliding_window": window is not None, "sliding_window": window or 4096}
    if not nested_keys:
        return keys | {"max_window_layers": full_layers}
    kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    kinds[:full_layers] = ["full_attention"] * full_layers
    return keys | {"layer_types": kinds}


def _dtype_key(dtype: torch.dtype, nested_keys: bool) -> dict[str, object]:
    return {"dtype" if nested_keys else "torch_dtype": str(dtype).removeprefix("torch.")}


def _layer_shapes(
    prefix: str, width: int, q_width: int, kv_width: int, mlp_width: int
) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.{name}.weight": shape
        for name, shape in {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (q_width, width),
            "self_attn.k_proj": (kv_width, width),
            "self_attn.v_proj": (kv_width, width),
            "self_attn.o_proj": (width, q_width),
            "mlp.gate_proj": (mlp_width, width),
            "mlp.up_proj": (mlp_width, width),
            "mlp.down_proj": (width, mlp_width),
        }.items()
    }


def _random(
    shapes: dict[str, tuple[int, ...]], seed: int, scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in sorted(shapes):
        noise = torch.randn(shapes[name], generator=generator)
        if name.endswith(".bias"):
            value = noise
        elif noise.ndim == 1:  # the weight of a norm
            value = 1 + 0.2 * noise
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            value = noise * SPREAD / math.sqrt(noise.shape[1])
        else:
            value = noise * scale / math.sqrt(noise.shape[1])
        tensors[name] = value.to(dtype)
    return tensors


def _write(
    folder: Path, config: dict[str, object], tensors: dict[str, Tensor], shards: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        old.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, names in zip(count(1), _deal(sorted(tensors), shards), strict=False):
        file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(
            {name: tensors[name] for name in names}, folder / file_name, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(names, file_name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )


def _deal(names: list[str], hands: int) -> Iterator[list[str]]:
    for hand in range(hands):
        yield names[hand::hands]
