"""Every tensor of a checkpoint is used exactly once, unchanged, or loading stops with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import edit_config, edit_tensors, read_drafter, read_target, write_drafter, write_target
from torch import Tensor

from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.weights import load_weights

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


def refused(read: Callable[[], object], folder: Path, *words: str) -> None:
    """Loading fails with a message that names the option, the folder and all `words`."""
    with pytest.raises(ValueError, match=r"^(model|drafter)\.path=") as error:
        read()
    for word in (str(folder), *words):
        assert word in str(error.value), (word, str(error.value))


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read without ddbatch."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_filled(model: Target | DFlash, tensors: dict[str, Tensor]) -> None:
    """Every tensor stands in its place, and the places cover every weight of the model once."""
    places = model.destinations()
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        assert torch.equal(place, tensors[name].to(place.dtype)), name
    covered = torch.cat([_cells(place) for place in places.values()])
    weights = torch.cat([_cells(weight) for weight in model.parameters()])
    assert len(covered) == len(covered.unique())
    assert torch.equal(covered.sort().values, weights.sort().values)


def _cells(tensor: Tensor) -> Tensor:
    """Memory addresses of all elements of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr() + torch.arange(tensor.numel()) * tensor.element_size()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_target_is_filled_tensor_by_tensor(tmp_path: Path, tied: bool, shards: int) -> None:
    folder = write_target(tmp_path, tied=tied, shards=shards)
    assert len(list(folder.glob("*.safetensors"))) == shards
    assert_filled(read_target(folder), stored(folder))


def test_a_drafter_of_five_layers_has_the_58_released_tensors(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, layers=5, target_layers=9, tap_layers=(1, 2, 3, 5, 7))
    tensors = stored(folder)
    assert len(tensors) == 58
    assert_filled(read_drafter(folder), tensors)


@pytest.mark.parametrize("stored_dtype", [torch.bfloat16, torch.float16])
def test_half_checkpoints_load_into_float32_exactly(
    tmp_path: Path, stored_dtype: torch.dtype
) -> None:
    target = write_target(tmp_path / "target", dtype=stored_dtype)
    drafter = write_drafter(tmp_path / "drafter", dtype=stored_dtype)
    for folder, model in ((target, read_target(target)), (drafter, read_drafter(drafter))):
        tensors = stored(folder)
        assert {tensor.dtype for tensor in tensors.values()} == {stored_dtype}
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        for name, place in model.destinations().items():
            assert torch.equal(place.to(stored_dtype), tensors[name])
            assert torch.equal(place, tensors[name].float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_checkpoint_is_rounded_once_to_the_models_dtype(
    tmp_path: Path, dtype: str
) -> None:
    folder = write_target(tmp_path)
    model = read_target(folder, dtype)
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
    assert_filled(model, stored(folder))
    assert model.rope_P2E.dtype == torch.float32


def test_tensors_of_several_dtypes_may_stand_in_one_checkpoint(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({UP: tensors[UP].bfloat16()}))
    assert_filled(read_target(folder), stored(folder))


def test_a_stored_head_of_a_tied_model_is_accepted_when_equal(tmp_path: Path) -> None:
    folder = write_target(tmp_path, tied=True)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBED].clone()}))
    model = read_target(folder)
    assert model.head is model.embed


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head + torch.nn.functional.one_hot(torch.tensor(3), head.shape[1]) * 1e-6,
        lambda head: head[:-1].clone(),
        lambda head: head.to(torch.float8_e4m3fn),
        lambda head: head.to(torch.int8),
    ],
    ids=["another value", "another shape", "float8", "int8"],
)
def test_a_stored_head_of_a_tied_model_is_refused_when_different(
    tmp_path: Path, change: Callable[[Tensor], Tensor]
) -> None:
    folder = write_target(tmp_path, tied=True)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: change(tensors[EMBED])}))
    refused(lambda: read_target(folder), folder, HEAD)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, tied=True)
    edit_config(folder, tie_word_embeddings=False)
    refused(lambda: read_target(folder), folder, "missing", HEAD)


@pytest.mark.parametrize("prefix", ["model.", "model.layers.2.self_attn."])
def test_stored_rope_buffers_of_a_target_are_ignored(tmp_path: Path, prefix: str) -> None:
    folder = write_target(tmp_path)
    before = stored(folder)
    edit_tensors(
        folder, lambda tensors: tensors.update({f"{prefix}rotary_emb.inv_freq": torch.ones(5)})
    )
    assert_filled(read_target(folder), before)


def test_a_stored_rope_buffer_of_a_drafter_is_ignored(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path)
    before = stored(folder)
    edit_tensors(folder, lambda tensors: tensors.update({"rotary_emb.inv_freq": torch.ones(4)}))
    assert_filled(read_drafter(folder), before)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", [UP, EMBED, "model.norm.weight"])
def test_a_missing_target_tensor_is_refused(tmp_path: Path, name: str, shards: int) -> None:
    folder = write_target(tmp_path, shards=shards)
    home = folder / "model.safetensors"
    if shards > 1:
        index = json.loads((folder / INDEX).read_text())
        home = folder / index["weight_map"].pop(name)
        (folder / INDEX).write_text(json.dumps(index))
    edit_tensors(folder, lambda tensors: tensors.pop(name), home.name)
    refused(lambda: read_target(folder), folder, "1 tensors are missing", name)


@pytest.mark.parametrize(
    "name", ["fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_norm.weight"]
)
def test_a_missing_drafter_tensor_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_drafter(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    refused(lambda: read_drafter(folder), folder, "1 tensors are missing", name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        HEAD + ".scale",
    ],
)
def test_a_left_over_target_tensor_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_target(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(2)}))
    refused(lambda: read_target(folder), folder, "1 tensors have no place", name)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attention_conv.base_kernel",
        "candidate_selector.predecessor_codebook",
        "layers.0.self_attn.sinks",
        HEAD,
        "embed_tokens.weight",
        "model.fc.weight",
    ],
)
def test_a_left_over_drafter_tensor_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_drafter(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(2)}))
    refused(lambda: read_drafter(folder), folder, "1 tensors have no place", name)


@pytest.mark.parametrize("shape", [(41, 24), (24, 40), (40 * 24,), (1, 40, 24)])
def test_a_misshapen_tensor_is_refused_with_both_shapes(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    folder = write_target(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({UP: torch.ones(shape)}))
    refused(lambda: read_target(folder), folder, UP, str(list(shape)), "[40, 24]")


def test_a_drafter_for_another_number_of_taps_is_refused(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path)
    edit_config(folder, dflash_config__target_layer_ids=[0, 1, 2])
    refused(lambda: read_drafter(folder), folder, "fc.weight", "[24, 48]", "[24, 72]")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int8, "I8"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float64, "F64"),
        (torch.uint8, "U8"),
    ],
)
def test_a_tensor_of_another_dtype_is_refused(
    tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    folder = write_target(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    refused(lambda: read_target(folder), folder, UP, name, "float32, bfloat16, float16")


def test_no_weight_is_touched_before_all_headers_are_checked(tmp_path: Path) -> None:
    folder = write_target(tmp_path, shards=3)
    last = sorted(folder.glob("*.safetensors"))[-1]
    edit_tensors(
        folder,
        lambda tensors: tensors.update({next(iter(tensors)): torch.ones(3, 3)}),
        last.name,
    )
    model = read_target(write_target(tmp_path / "good"))
    before = {name: place.clone() for name, place in model.destinations().items()}
    refused(lambda: load_weights("model.path", folder, model.destinations()), folder, "[3, 3]")
    for name, place in model.destinations().items():
        assert torch.equal(place, before[name])


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: int, shards: int) -> None:
    folder = write_target(tmp_path, shards=shards)
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:keep])
    refused(lambda: read_target(folder), folder, path.name, "not a whole safetensors file")


def test_a_pointer_file_in_place_of_weights_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    path = folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    refused(lambda: read_target(folder), folder, path.name, "not a whole safetensors file")


def test_a_file_with_bytes_after_its_tensors_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0" * 7)
    refused(lambda: read_target(folder), folder, path.name)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(lambda: read_target(folder), folder, "model.safetensors", INDEX)


def test_an_index_that_promises_a_missing_file_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, shards=3)
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    refused(lambda: read_target(folder), folder, path.name, "missing")


def test_an_index_that_promises_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, shards=3)
    home = json.loads((folder / INDEX).read_text())["weight_map"][UP]
    edit_tensors(folder, lambda tensors: tensors.pop(UP), home)
    refused(lambda: read_target(folder), folder, INDEX, UP, home)


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, shards=3)
    index = json.loads((folder / INDEX).read_text())
    others = set(index["weight_map"].values()) - {index["weight_map"][UP]}
    index["weight_map"][UP] = min(others)
    (folder / INDEX).write_text(json.dumps(index))
    refused(lambda: read_target(folder), folder, INDEX, UP, min(others))


def test_a_tensor_that_stands_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, shards=3)
    paths = sorted(folder.glob("*.safetensors"))
    twice = load_file(paths[0])
    name = sorted(twice)[0]
    edit_tensors(folder, lambda tensors: tensors.update({name: twice[name]}), paths[1].name)
    refused(lambda: read_target(folder), folder, name, paths[0].name, paths[1].name)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": 3}'])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_target(tmp_path, shards=3)
    (folder / INDEX).write_text(text)
    refused(lambda: read_target(folder), folder, INDEX)


def test_a_single_file_beside_an_index_of_other_files_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, shards=3)
    save_file(stored(folder), folder / "model.safetensors")
    refused(lambda: read_target(folder), folder, "model.safetensors", INDEX)


def test_an_index_of_the_single_file_is_accepted(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    tensors = stored(folder)
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_filled(read_target(folder), tensors)
