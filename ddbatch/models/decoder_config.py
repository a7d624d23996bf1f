"""What config.json says about any decoder, and generation_config.json about decoding with it.

Every family reads these keys alike; what differs comes from the family's own file. A variant that
this project does not compute (another activation, an unknown rope type) stops here with the key,
its value and what is allowed. Knows nothing about architectures or weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddbatch.models.config_file import ConfigFile
from ddbatch.models.dims import DTYPE_NAMES, DtypeName, Llama3Scaling, ModelDims, Rope


def read_decoder(
    config: ConfigFile,
    *,
    theta: float | None,
    kv_heads: int | None = None,
    head_width: int | None = None,
) -> ModelDims:
    """Dims of a decoder without switches: no bias, no norm on q and k, no windows.

    The rest is what the family means by an absent key. theta: None = rope_theta must be there.
    kv_heads: None = as many as query heads. head_width: None = hidden_size / query heads.
    """
    if config.values.get("quantization_config") is not None:
        raise ValueError(
            f"{config.where}: quantization_config: quantised checkpoints are not "
            f"supported; allowed dtypes: {', '.join(DTYPE_NAMES)}"
        )
    config.only("hidden_act", "silu")
    width, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    layers = config.positive("num_hidden_layers")
    # In every family null means as many as query heads.
    absent = heads if kv_heads is None or config.is_null("num_key_value_heads") else kv_heads
    kv_heads = config.positive("num_key_value_heads", default=absent)
    head_width = config.positive("head_dim", default=head_width or max(1, width // heads))
    if heads % kv_heads:
        raise ValueError(
            f"{config.where}: num_key_value_heads={kv_heads}: a divisor of "
            f"num_attention_heads={heads} is required"
        )
    if head_width % 2:
        raise ValueError(f"{config.where}: head_dim={head_width}: an even number is required")
    return ModelDims(
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=config.positive("intermediate_size"),
        vocab=config.positive("vocab_size"),
        norm_eps=config.above_zero("rms_norm_eps", 1e-6),
        rope=_read_rope(config, theta),
        max_positions=config.positive("max_position_embeddings"),
        is_tied=config.optional("tie_word_embeddings", bool, False),
        stored_dtype=_read_dtype(config),
        eos_token_ids=_read_eos(config),
        windows=(None,) * layers,
    )


def read_layer_types(config: ConfigFile, layers: int) -> tuple[bool, ...] | None:
    """Per layer, whether it slides; None where config.json does not say."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise ValueError(
            f"{config.where}: layer_types={kinds!r}: {layers} entries of "
            f"{' or '.join(known)} are required"
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


def sliding_windows(
    is_sliding: Sequence[bool], window: int, max_positions: int
) -> tuple[int | None, ...]:
    """ModelDims.windows of a target. A window as wide as the context hides nothing: it is none."""
    size = window if window < max_positions else None
    return tuple(size if slides else None for slides in is_sliding)


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


def _read_rope(config: ConfigFile, absent_theta: float | None) -> Rope:
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
        scaling, absent_theta = config.section("rope_parameters"), None
        holder = scaling if scaling.values.get("rope_theta") is not None else config
    elif scaled is not None:
        scaling = config.section("rope_scaling")
    theta = holder.above_zero("rope_theta", absent_theta)
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
