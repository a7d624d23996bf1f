"""What config.json may say, in old and new keys, and every value that is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from families import refused_target
from tiny import DROP, FORMS, LLAMA3_ROPE, edit_config, write_drafter, write_target

from ddbatch.models.decoder_config import read_generation_config
from ddbatch.models.dflash import read_drafter_dims
from ddbatch.models.dims import DrafterDims, Llama3Scaling, ModelDims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import check_pair, choose_dtype

SCALING = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter")


def refused_drafter(folder: Path, *words: str) -> None:
    """Reading fails with a message that names drafter.path, the folder and all `words`."""
    with pytest.raises(ValueError, match=r"^drafter.path=") as error:
        read_drafter_dims(folder)
    for word in (str(folder), *words):
        assert word in str(error.value), (word, str(error.value))


def test_old_and_new_keys_of_a_target_mean_the_same(tmp_path: Path) -> None:
    old = write_target(tmp_path / "old", rope=LLAMA3_ROPE, dtype=torch.bfloat16)
    new = write_target(tmp_path / "new", rope=LLAMA3_ROPE, dtype=torch.bfloat16, nested_keys=True)
    assert {"rope_theta", "rope_scaling", "torch_dtype"} <= json.loads(
        (old / "config.json").read_text()
    ).keys()
    assert {"rope_parameters", "dtype"} <= json.loads((new / "config.json").read_text()).keys()
    dims = read_target_dims(old)
    assert dims == read_target_dims(new)
    assert dims.rope.theta == 10000.0
    assert dims.rope.llama3 == Llama3Scaling(4.0, 1.0, 4.0, 64)
    assert dims.stored_dtype == "bfloat16"


def test_old_and_new_keys_of_a_drafter_mean_the_same(tmp_path: Path) -> None:
    sizes = {"rope_theta": 5e5, "windows": (3, None), "block": 7}
    old = write_drafter(tmp_path / "old", **sizes)
    new = write_drafter(tmp_path / "new", nested_keys=True, **sizes)
    assert "block_size" in json.loads((old / "config.json").read_text())
    assert "block_size" in json.loads((new / "config.json").read_text())["dflash_config"]
    dims = read_drafter_dims(old)
    assert dims == read_drafter_dims(new)
    assert (dims.block, dims.decoder.windows, dims.decoder.rope.theta) == (7, (3, None), 5e5)
    assert (dims.mask_token_id, dims.tap_layers, dims.num_target_layers) == (96, (0, 2), 4)


def test_the_name_type_of_older_rope_scaling_is_read(target: Path) -> None:
    values = {"type" if key == "rope_type" else key: value for key, value in SCALING.items()}
    edit_config(target, rope_scaling=values)
    assert read_target_dims(target).rope.llama3 == Llama3Scaling(4.0, 1.0, 4.0, 64)


def test_theta_beside_rope_parameters_without_one_is_read(target: Path) -> None:
    edit_config(target, rope_theta=5e5, rope_parameters={"rope_type": "default"})
    assert read_target_dims(target).rope.theta == 5e5


def test_theta_in_rope_parameters_goes_before_the_flat_one(drafter: Path) -> None:
    edit_config(drafter, rope_theta=123.0, rope_parameters={"rope_theta": 10**7})
    assert read_drafter_dims(drafter).decoder.rope.theta == 1e7


def test_a_target_without_any_theta_has_the_llama_default(target: Path) -> None:
    edit_config(target, rope_theta=DROP, rope_scaling=DROP)
    assert read_target_dims(target).rope.theta == 10000.0


def test_absent_sizes_follow_from_the_others(target: Path) -> None:
    edit_config(target, head_dim=DROP, num_key_value_heads=None)
    dims = read_target_dims(target)
    assert (dims.head_width, dims.kv_heads) == (24 // 4, 4)


def test_a_null_dtype_leaves_the_word_to_torch_dtype(target: Path) -> None:
    edit_config(target, dtype=None, torch_dtype="float16")
    assert read_target_dims(target).stored_dtype == "float16"
    edit_config(target, torch_dtype=None)
    assert read_target_dims(target).stored_dtype is None


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (2, (2,)), ([5, 7], (5, 7))])
def test_eos_is_none_one_id_or_a_list(target: Path, value: object, ids: tuple[int, ...]) -> None:
    edit_config(target, eos_token_id=value)
    assert read_target_dims(target).eos_token_ids == ids


def test_a_drafter_without_layer_types_sees_everything(drafter: Path) -> None:
    edit_config(drafter, layer_types=DROP)
    assert read_drafter_dims(drafter).decoder.windows == (None, None)


def test_a_window_that_no_layer_uses_is_ignored(drafter: Path) -> None:
    edit_config(drafter, sliding_window=4096)
    assert read_drafter_dims(drafter).decoder.windows == (None, None)


@pytest.mark.parametrize(("windows", "is_causal"), [((None, None), False), ((3, 3), True)])
def test_a_causal_key_that_says_what_layer_types_say_is_accepted(
    tmp_path: Path, windows: tuple[int | None, ...], is_causal: bool
) -> None:
    folder = write_drafter(tmp_path / "drafter", windows=windows)
    edit_config(folder, dflash_config__causal=is_causal, dflash_config__use_swa=False)
    assert read_drafter_dims(folder).decoder.windows == windows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            ["GemmaForCausalLM", *(form.architecture for form in FORMS.values())],
        ),
        (
            {"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]},
            ["['LlamaForCausalLM', 'Qwen2ForCausalLM']", "one of"],
        ),
        ({"architectures": "LlamaForCausalLM"}, ["architectures='LlamaForCausalLM'", "one of"]),
        ({"architectures": DROP}, ["architectures=None", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type='yarn'", "'llama3'"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type='linear'", "'llama3'"]),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ["rope_type='dynamic'"]),
        ({"rope_scaling": "llama3"}, ["rope_scaling='llama3'", "object"]),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}},
            ["longrope", "'default'"],
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["rope_scaling", "factor is missing"]),
        ({"rope_scaling": SCALING | {"factor": 0}}, ["factor=0", "above 0"]),
        ({"rope_scaling": SCALING | {"factor": "8"}}, ["factor='8'", "float"]),
        (
            {"rope_scaling": SCALING | {"low_freq_factor": 4.0}},
            ["low_freq_factor=4.0", "high_freq"],
        ),
        (
            {"rope_scaling": SCALING | {"original_max_position_embeddings": 0}},
            ["original_max_position_embeddings=0"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_theta": DROP},
            ["rope_theta is missing"],
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": SCALING},
            ["rope_scaling", "rope_parameters"],
        ),
        ({"rope_theta": 0}, ["rope_theta=0", "above 0"]),
        ({"rope_theta": float("nan")}, ["rope_theta=nan"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "1.0"]),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            ["partial_rotary_factor=0.25"],
        ),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias=True", "False"]),
        ({"mlp_bias": True}, ["mlp_bias=True", "False"]),
        ({"pretraining_tp": 2}, ["pretraining_tp=2", "1"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "bfloat16"]),
        ({"torch_dtype": "int8"}, ["dtype='int8'", "float32, bfloat16, float16"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads=0", "at least 1"]),
        ({"head_dim": 9}, ["head_dim=9", "even"]),
        ({"hidden_size": DROP}, ["hidden_size is missing", "int"]),
        ({"hidden_size": 24.0}, ["hidden_size=24.0", "int"]),
        ({"hidden_size": True}, ["hidden_size=True", "int"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers=-1", "at least 1"]),
        ({"vocab_size": "97"}, ["vocab_size='97'", "int"]),
        ({"max_position_embeddings": DROP}, ["max_position_embeddings is missing"]),
        ({"rms_norm_eps": -1e-5}, ["rms_norm_eps=-1e-05", "above 0"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'", "bool"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id='</s>'", "list of integers"]),
    ],
)
def test_a_target_that_is_not_computed_is_refused(
    target: Path, changes: dict[str, object], words: list[str]
) -> None:
    edit_config(target, **changes)
    refused_target(target, "config.json", *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, ["DFlash2DraftModel", "DFlashDraftModel"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "DFlashDraftModel"]),
        ({"dflash_config": DROP}, ["dflash_config=None", "object"]),
        ({"dflash_config__selector_rank": 256}, ["selector_rank=256", "DFlash 2"]),
        ({"dflash_config__selector_top_k": 16}, ["selector_top_k=16"]),
        ({"dflash_config__conv_kernel_size": 2}, ["conv_kernel_size=2", "DFlash 2"]),
        ({"dflash_config__use_swa": True}, ["use_swa=True"]),
        ({"dflash_config__swa_window_size": 3}, ["swa_window_size=3"]),
        ({"dflash_config__causal": True}, ["causal=True", "False"]),
        ({"dflash_config__causal": ["no"]}, ["causal=['no']", "False"]),
        ({"dflash_config__output_multiplier": 0.2}, ["output_multiplier=0.2", "mask_token_id"]),
        ({"block_size": DROP}, ["block_size is missing"]),
        ({"block_size": 1}, ["block_size=1", "2..32 is required"]),
        ({"block_size": 33}, ["block_size=33", "2..32 is required"]),
        ({"block_size": 0}, ["block_size=0", "at least"]),
        ({"dflash_config__block_size": 1}, ["block_size=1", "2..32 is required"]),
        ({"dflash_config__mask_token_id": 97}, ["mask_token_id=97", "0..96"]),
        ({"dflash_config__mask_token_id": -1}, ["mask_token_id=-1", "0..96"]),
        ({"dflash_config__mask_token_id": None}, ["mask_token_id is missing"]),
        ({"dflash_config__target_layer_ids": [0, 3]}, ["target_layer_ids=[0, 3]", "0..2"]),
        ({"dflash_config__target_layer_ids": [-1, 2]}, ["target_layer_ids=[-1, 2]", "0..2"]),
        ({"dflash_config__target_layer_ids": [2, 0]}, ["[2, 0]", "ascending"]),
        ({"dflash_config__target_layer_ids": [1, 1]}, ["[1, 1]", "ascending"]),
        ({"dflash_config__target_layer_ids": []}, ["target_layer_ids=[]", "0..2"]),
        ({"dflash_config__target_layer_ids": [0, 2.0]}, ["[0, 2.0]", "list of integers"]),
        ({"dflash_config__target_layer_ids": None}, ["target_layer_ids=None"]),
        ({"num_target_layers": DROP}, ["num_target_layers is missing"]),
        ({"num_target_layers": 3}, ["target_layer_ids=[0, 2]", "0..1"]),
        ({"rope_theta": DROP}, ["rope_theta is missing"]),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_theta": DROP},
            ["rope_theta is missing"],
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            ["partial_rotary_factor=0.25"],
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_type='yarn'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types=", "2 entries"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["linear_attention", "sliding"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
            ["sliding_window is missing"],
        ),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 0,
                "use_sliding_window": True,
            },
            ["sliding_window=0", "at least 1"],
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            ["use_sliding_window=False", "True"],
        ),
        ({"layer_types": DROP, "use_sliding_window": True}, ["use_sliding_window=True", "False"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ],
)
def test_a_drafter_that_is_not_computed_is_refused(
    drafter: Path, changes: dict[str, object], words: list[str]
) -> None:
    edit_config(drafter, **changes)
    refused_drafter(drafter, "config.json", *words)


@pytest.mark.parametrize("is_causal", [True, False])
def test_an_explicit_causal_key_is_refused_where_layers_differ(
    tmp_path: Path, is_causal: bool
) -> None:
    folder = write_drafter(tmp_path / "drafter", windows=(3, None))
    edit_config(folder, dflash_config__causal=is_causal)
    refused_drafter(folder, f"causal={is_causal}")


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    refused_target(tmp_path / "nowhere", "no config.json")
    refused_target(tmp_path, "no config.json")
    path = tmp_path / "config.json"
    path.write_text('{"architectures": [')
    refused_target(tmp_path, "config.json", "not JSON")
    path.write_bytes(b"\xff\xfe{}")
    refused_target(tmp_path, "config.json", "not JSON")
    path.write_text("[1, 2]")
    refused_target(tmp_path, "holds list", "object")


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (2, (2,)), ([5, 7], (5, 7))])
def test_a_generation_config_gives_eos_ids_and_what_it_recommends(
    target: Path, value: object, ids: tuple[int, ...]
) -> None:
    (target / "generation_config.json").write_text(
        json.dumps({"eos_token_id": value, "temperature": 0.6, "top_p": 0.9, "do_sample": True})
    )
    advice = read_generation_config(target)
    assert advice.eos_token_ids == ids
    assert advice.recommended == ("temperature=0.6", "top_p=0.9")


def test_a_folder_without_generation_config_recommends_nothing(target: Path) -> None:
    advice = read_generation_config(target)
    assert (advice.eos_token_ids, advice.recommended) == ((), ())


def test_a_broken_generation_config_is_refused(target: Path) -> None:
    (target / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^model\.path=.*generation_config\.json: not JSON"):
        read_generation_config(target)


def pair(target: Path, drafter: Path) -> tuple[ModelDims, DrafterDims]:
    return read_target_dims(target), read_drafter_dims(drafter)


def test_a_fitting_pair_and_its_own_block_pass(target: Path, drafter: Path) -> None:
    check_pair(*pair(target, drafter), None)
    check_pair(*pair(target, drafter), 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48}, ["hidden_size=48", "24"]),
        ({"num_target_layers": 36}, ["num_target_layers=36", "4"]),
        ({"vocab_size": 101}, ["vocab_size=101", "97"]),
        ({"rope_theta": 1e6}, ["rope_theta=1000000.0", "10000.0"]),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(
    target: Path, drafter: Path, changes: dict[str, object], words: list[str]
) -> None:
    edit_config(drafter, **changes)
    with pytest.raises(ValueError, match=r"^drafter.path") as error:
        check_pair(*pair(target, drafter), None)
    for word in (*words, "model.path"):
        assert word in str(error.value)


@pytest.mark.parametrize("block", [1, 4, 6, 16])
def test_another_block_than_the_checkpoints_is_refused(
    target: Path, drafter: Path, block: int
) -> None:
    with pytest.raises(ValueError, match=rf"^drafter.block={block}: .* 5"):
        check_pair(*pair(target, drafter), block)


def test_auto_dtype_is_float32_on_the_cpu_and_the_checkpoints_elsewhere(target: Path) -> None:
    dims = dataclasses.replace(read_target_dims(target), stored_dtype="bfloat16")
    assert choose_dtype("auto", dims, torch.device("cpu")) == "float32"
    assert choose_dtype("auto", dims, torch.device("cuda")) == "bfloat16"
    assert choose_dtype("float16", dims, torch.device("cpu")) == "float16"
    unnamed = dataclasses.replace(dims, stored_dtype=None)
    with pytest.raises(ValueError, match=r"model.dtype=auto.*float32, bfloat16, float16"):
        choose_dtype("auto", unnamed, torch.device("cuda"))
