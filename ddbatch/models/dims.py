"""Sizes and switches of a model, read from its config.json.

A variant that this project does not compute (another activation, a bias, an unknown rope type)
stops here with the key, its value and what is allowed. Knows nothing about weights or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddbatch.models.config_file import ConfigFile

DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_NAMES: tuple[DtypeName, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 ("rope_type": "llama3"); lengths are in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Rope:
    """Rotary embedding over the whole head width, halves rotated (the Hugging Face layout)."""

    theta: float
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True)
class ModelDims:
    """Sizes of a decoder; see the legend in ddbatch.core for the letters."""

    family: Literal["llama", "dflash"]
    width: int  # D
    layers: int  # L
    heads: int  # H
    kv_heads: int  # G
    head_width: int  # E
    mlp_width: int  # F
    vocab: int  # V
    norm_eps: float
    rope: Rope
    max_positions: int
    is_tied: bool
    stored_dtype: DtypeName | None  # what config.json says the checkpoint holds
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class DrafterDims:
    """A DFlash drafter: its decoder, and how it is tied to its target.

    tap_layers: 0-based target layers whose outputs it reads. windows: per layer, the number of keys
    a sliding layer sees (None = full attention).
    """

    decoder: ModelDims
    block: int  # K
    mask_token_id: int
    tap_layers: tuple[int, ...]
    num_target_layers: int
    windows: tuple[int | None, ...]


def read_target_dims(folder: Path) -> ModelDims:
    """Dims of the target in `folder`; ValueError for what this project does not compute."""
    config = ConfigFile("model.path", folder)
    architectures = config.values.get("architectures")
    if architectures != ["LlamaForCausalLM"]:
        raise ValueError(
            f"{config.where}: architectures={architectures!r} is not supported; "
            "allowed: ['LlamaForCausalLM']"
        )
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    config.only("pretraining_tp", 1)
    return _read_decoder(config, "llama", default_theta=10000.0)


def read_drafter_dims(folder: Path) -> DrafterDims:
    """Dims of the DFlash drafter in `folder`, from released (flat) and newer (nested) configs."""
    config = ConfigFile("drafter.path", folder)
    architectures = config.values.get("architectures")
    if architectures != ["DFlashDraftModel"]:
        raise ValueError(
            f"{config.where}: architectures={architectures!r} is not supported; "
            "allowed: ['DFlashDraftModel']"
        )
    config.only("attention_bias", False)
    decoder = _read_decoder(config, "dflash", default_theta=None)
    windows = _read_windows(config, decoder.layers)
    dflash = config.section("dflash_config")
    _check_variant(dflash, windows)
    has_block = dflash.values.get("block_size") is not None
    block = (dflash if has_block else config).positive("block_size")
    if block < 2:
        raise ValueError(f"{config.where}: block_size={block}: at least 2 is required")
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
    return DrafterDims(decoder, block, mask_token_id, tap_layers, num_target_layers, windows)


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


@dataclass(frozen=True)
class GenerationAdvice:
    """generation_config.json: eos ids are used; of the rest only what it recommends is told."""

    eos_token_ids: tuple[int, ...]
    recommended: tuple[str, ...]  # "temperature=0.6" and the like


def read_generation_config(folder: Path) -> GenerationAdvice:
    """What the target's generation_config.json says; nothing where there is none."""
    if not (folder / "generation_config.json").is_file():
        return GenerationAdvice((), ())
    config = ConfigFile("model.path", folder, "generation_config.json")
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    said = tuple(
        f"{key}={config.values[key]}" for key in keys if config.values.get(key) is not None
    )
    return GenerationAdvice(_read_eos(config), said)


def _read_decoder(
    config: ConfigFile, family: Literal["llama", "dflash"], default_theta: float | None
) -> ModelDims:
    if config.values.get("quantization_config") is not None:
        raise ValueError(
            f"{config.where}: quantization_config: quantised checkpoints are not "
            f"supported; allowed dtypes: {', '.join(DTYPE_NAMES)}"
        )
    config.only("hidden_act", "silu")
    width, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", default=heads)
    head_width = config.positive("head_dim", default=max(1, width // heads))
    if heads % kv_heads:
        raise ValueError(
            f"{config.where}: num_key_value_heads={kv_heads}: a divisor of "
            f"num_attention_heads={heads} is required"
        )
    if head_width % 2:
        raise ValueError(f"{config.where}: head_dim={head_width}: an even number is required")
    return ModelDims(
        family=family,
        width=width,
        layers=config.positive("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=config.positive("intermediate_size"),
        vocab=config.positive("vocab_size"),
        norm_eps=config.above_zero("rms_norm_eps", 1e-6),
        rope=_read_rope(config, default_theta),
        max_positions=config.positive("max_position_embeddings"),
        is_tied=config.optional("tie_word_embeddings", bool, False),
        stored_dtype=_read_dtype(config),
        eos_token_ids=_read_eos(config),
    )


def _read_rope(config: ConfigFile, default_theta: float | None) -> Rope:
    """Newer configs nest theta in rope_parameters, older ones keep rope_theta and rope_scaling."""
    nested, scaled = config.values.get("rope_parameters"), config.values.get("rope_scaling")
    if nested is not None and scaled is not None and nested != scaled:
        raise ValueError(
            f"{config.where}: rope_scaling={scaled!r} beside rope_parameters={nested!r}; "
            "allowed: one of them"
        )
    scaling, holder = None, config
    if nested is not None:
        # No default here: a theta per layer type, which other families nest, is not an absent one.
        scaling, default_theta = config.section("rope_parameters"), None
        holder = scaling if scaling.values.get("rope_theta") is not None else config
    elif scaled is not None:
        scaling = config.section("rope_scaling")
    theta = holder.above_zero("rope_theta", default_theta)
    config.only("partial_rotary_factor", 1.0)
    if scaling is None:
        return Rope(theta)
    scaling.only("partial_rotary_factor", 1.0)
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise ValueError(
            f"{scaling.where}: rope_type={kind!r} is not supported; allowed: 'default', 'llama3'"
        )
    llama3 = Llama3Scaling(
        factor=scaling.above_zero("factor"),
        low_freq_factor=scaling.above_zero("low_freq_factor"),
        high_freq_factor=scaling.above_zero("high_freq_factor"),
        original_max_positions=scaling.positive("original_max_position_embeddings"),
    )
    if llama3.low_freq_factor >= llama3.high_freq_factor:
        raise ValueError(
            f"{scaling.where}: low_freq_factor={llama3.low_freq_factor}: a number below "
            f"high_freq_factor={llama3.high_freq_factor} is required"
        )
    return Rope(theta, llama3)


def _read_windows(config: ConfigFile, layers: int) -> tuple[int | None, ...]:
    kinds = config.values.get("layer_types")
    if kinds is None:
        config.only("use_sliding_window", False)
        return (None,) * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise ValueError(
            f"{config.where}: layer_types={kinds!r}: {layers} entries of "
            f"{' or '.join(known)} are required"
        )
    if "sliding_attention" not in kinds:
        return (None,) * layers
    config.only("use_sliding_window", True)
    window = config.positive("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_dtype(config: ConfigFile) -> DtypeName | None:
    name = config.values.get("dtype")
    if name is None:
        name = config.values.get("torch_dtype")
    if name is None:
        return None
    for known in DTYPE_NAMES:
        if name == known:
            return known
    raise ValueError(
        f"{config.where}: dtype={name!r} is not supported; allowed: {', '.join(DTYPE_NAMES)}"
    )


def _read_eos(config: ConfigFile) -> tuple[int, ...]:
    eos = config.values.get("eos_token_id")
    if eos is None:
        return ()
    return (eos,) if type(eos) is int else config.int_list("eos_token_id")
