"""Configs of every family, released ones and ones with keys left out, mean here what they mean to
transformers; what a family does not compute is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import refused_target
from tiny import DROP, FORMS, edit_config, write_target
from transformers import AutoConfig

from ddbatch.models.decoder_config import read_generation_config
from ddbatch.models.dims import ModelDims
from ddbatch.models.families import FAMILIES, read_target_dims

# What the released folders hold, without the keys that no reader looks at.
RELEASED: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
}
RELEASED["Mistral-7B-v0.3"] = RELEASED["Mistral-7B-v0.1"] | {
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}


def assert_means_the_same(folder: Path, dims: ModelDims) -> None:
    """Every number and switch is the one that transformers takes from the same file."""
    theirs = AutoConfig.from_pretrained(folder)
    assert dims.width == theirs.hidden_size
    assert dims.layers == theirs.num_hidden_layers
    assert dims.heads == theirs.num_attention_heads
    assert dims.kv_heads == theirs.num_key_value_heads
    assert dims.head_width == (getattr(theirs, "head_dim", None) or dims.width // dims.heads)
    assert dims.mlp_width == theirs.intermediate_size
    assert dims.vocab == theirs.vocab_size
    assert dims.norm_eps == theirs.rms_norm_eps
    assert dims.rope.theta == theirs.rope_parameters["rope_theta"]
    assert dims.max_positions == theirs.max_position_embeddings
    assert dims.is_tied == theirs.tie_word_embeddings
    window = getattr(theirs, "sliding_window", None)
    size = window if window is not None and window < dims.max_positions else None
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * dims.layers
    assert dims.windows == tuple(size if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_means_what_it_means_to_transformers(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED[name]))
    dims = read_target_dims(tmp_path)
    assert_means_the_same(tmp_path, dims)
    assert dims.has_qkv_bias == name.startswith("Qwen2")
    assert dims.has_qk_norm == name.startswith("Qwen3")
    assert dims.window == (4096 if name == "Mistral-7B-v0.1" else None)


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": DROP, "rope_scaling": DROP},
        {"rms_norm_eps": DROP, "tie_word_embeddings": DROP, "hidden_act": DROP},
        {"head_dim": DROP},
        {"num_key_value_heads": DROP, "num_attention_heads": 32},
        {"rope_theta": DROP, "rope_scaling": DROP, "rope_parameters": {"rope_theta": 5e5}},
    ],
    ids=str,
)
def test_keys_left_out_mean_what_they_mean_to_transformers(
    tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    folder = write_target(tmp_path, family=family, width=128, tied=False)
    edit_config(folder, **changes)
    assert_means_the_same(folder, read_target_dims(folder))


@pytest.mark.parametrize("family", FORMS)
def test_null_key_heads_are_as_many_as_query_heads(tmp_path: Path, family: str) -> None:
    """To transformers too, but that its MistralConfig takes no null any more."""
    folder = write_target(tmp_path, family=family)
    edit_config(folder, num_key_value_heads=None)
    dims = read_target_dims(folder)
    assert dims.kv_heads == dims.heads == 4


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": DROP}, (None,) * 4),  # 4096 is beyond the context
        (
            "mistral",
            {"sliding_window": DROP, "max_position_embeddings": 5000},
            (4096,) * 4,
        ),
        ("mistral", {"sliding_window": None, "max_position_embeddings": 5000}, (None,) * 4),
        ("mistral", {"sliding_window": 511}, (511,) * 4),
        ("mistral", {"sliding_window": 512}, (None,) * 4),
        *(
            (family, changes, windows)
            for family in ("qwen2", "qwen3")
            for changes, windows in (
                ({"sliding_window": 7}, (None,) * 4),
                ({"sliding_window": 7, "use_sliding_window": DROP}, (None,) * 4),
                ({"sliding_window": 7, "use_sliding_window": True}, (7,) * 4),
                (
                    {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3},
                    (None, None, None, 7),
                ),
                (
                    {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": DROP},
                    (None,) * 4,  # from layer 28 on
                ),
                ({"sliding_window": None, "use_sliding_window": True}, (None,) * 4),
                (
                    {
                        "sliding_window": DROP,
                        "use_sliding_window": True,
                        "max_position_embeddings": 5000,
                    },
                    (4096,) * 4,
                ),
                (
                    {
                        "sliding_window": 7,
                        "use_sliding_window": True,
                        "layer_types": ["sliding_attention", "full_attention"] * 2,
                    },
                    (7, None, 7, None),
                ),
                ({"layer_types": ["full_attention"] * 4}, (None,) * 4),
            )
        ),
    ],
)
def test_windows_are_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    folder = write_target(tmp_path, family=family)
    edit_config(folder, **changes)
    dims = read_target_dims(folder)
    assert dims.windows == windows
    assert_means_the_same(folder, dims)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"sliding_window": 0}, ["sliding_window=0", "at least 1"]),
        ("mistral", {"sliding_window": "7"}, ["sliding_window='7'", "int"]),
        ("mistral", {"layer_types": ["full_attention"] * 4}, ["layer_types=", "null"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias=True", "False"]),
        *(
            (family, changes, words)
            for family in ("qwen2", "qwen3")
            for changes, words in (
                (
                    {"layer_types": ["sliding_attention"] * 4, "sliding_window": 7},
                    ["sliding_attention", "use_sliding_window=False", "True"],
                ),
                (
                    {
                        "layer_types": ["sliding_attention"] * 4,
                        "use_sliding_window": True,
                        "sliding_window": None,
                    },
                    ["sliding_attention", "sliding_window=None"],
                ),
                ({"layer_types": ["full_attention"] * 3}, ["layer_types=", "4 entries"]),
                ({"layer_types": ["linear_attention"] * 4}, ["linear_attention", "sliding"]),
                ({"use_sliding_window": "yes"}, ["use_sliding_window='yes'", "bool"]),
                ({"use_sliding_window": True, "sliding_window": 0}, ["sliding_window=0"]),
                ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_type='yarn'"]),
                ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, ["'yarn'"]),
                ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
            )
        ),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    tmp_path: Path, family: str, changes: dict[str, object], words: list[str]
) -> None:
    folder = write_target(tmp_path, family=family)
    edit_config(folder, **changes)
    refused_target(folder, "config.json", *words)


def test_every_family_has_tests() -> None:
    assert {form.architecture for form in FORMS.values()} == FAMILIES.keys()


def test_qwens_generation_config_names_two_stop_ids(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps(
            {
                "bos_token_id": 151643,
                "pad_token_id": 151643,
                "do_sample": True,
                "eos_token_id": [151645, 151643],
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
            }
        )
    )
    advice = read_generation_config(tmp_path)
    assert advice.eos_token_ids == (151645, 151643)
    assert advice.recommended == ("temperature=0.7", "top_p=0.8", "top_k=20")
