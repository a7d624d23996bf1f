"""Safetensors checkpoints: every tensor is used exactly once, or loading stops with a clear error.

Headers are read and compared before a byte of weight is touched; data is then copied from the
memory map straight into its place, converted to the model's dtype on the way.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddbatch.models.dims import DTYPE_NAMES

# Buffers that old checkpoints store although they follow from the config.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def load_weights(option: str, folder: Path, destinations: dict[str, Tensor]) -> None:
    """Fill `destinations` (tensor name -> place) from the checkpoint in `folder`.

    ValueError naming `option` and the tensors for files that are missing or cut short and for
    tensors that are missing, left over, misshapen or of an unknown dtype.
    """
    where = f"{option}={folder}"
    file_of = _index(where, folder)
    names = {name for name in file_of if not name.endswith(DERIVED_SUFFIXES)}
    missing, left_over = destinations.keys() - names, names - destinations.keys()
    if missing:
        raise ValueError(f"{where}: {len(missing)} tensors are missing: {_some(missing)}")
    if left_over == {"lm_head.weight"} and "model.embed_tokens.weight" in destinations:
        _check_tied(where, file_of, destinations["model.embed_tokens.weight"])
    elif left_over:
        raise ValueError(
            f"{where}: {len(left_over)} tensors have no place in this architecture: "
            f"{_some(left_over)}"
        )
    by_file: dict[Path, list[str]] = {}
    for name in destinations:
        by_file.setdefault(file_of[name], []).append(name)
    for path, wanted in by_file.items():
        _check_shapes(where, path, {name: destinations[name] for name in wanted})
    for path, wanted in by_file.items():
        with safe_open(path, framework="pt") as tensors:
            for name in wanted:
                destinations[name].copy_(tensors.get_tensor(name))


def _index(where: str, folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index of a sharded checkpoint or from the only file."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    found: dict[str, Path] = {}
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{where}: {index.name}: not an index of a sharded checkpoint: {error!r}"
            ) from error
        files = sorted({folder / str(name) for name in weight_map.values()})
        if single.is_file() and single not in files:
            raise ValueError(
                f"{where}: {single.name} and {index.name} are both there, and the index does not "
                "name that file; allowed: one checkpoint"
            )
    elif single.is_file():
        weight_map, files = {}, [single]
    else:
        raise ValueError(f"{where}: neither {single.name} nor {index.name} is there")
    for path in files:
        for name in _names(where, path):
            if name in found:
                raise ValueError(
                    f"{where}: tensor {name} stands in {found[name].name} and in {path.name}"
                )
            found[name] = path
    for name, file_name in weight_map.items():
        if found.get(name) != folder / str(file_name):
            raise ValueError(
                f"{where}: {index.name} promises {name} in {file_name}; it is not there"
            )
    return found


def _names(where: str, path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"{where}: {path.name} is missing")
    try:
        with safe_open(path, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise ValueError(
            f"{where}: {path.name} is not a whole safetensors file: {error}"
        ) from error


def _check_shapes(where: str, path: Path, wanted: dict[str, Tensor]) -> None:
    with safe_open(path, framework="pt") as tensors:
        for name, place in wanted.items():
            header = tensors.get_slice(name)
            if tuple(header.get_shape()) != tuple(place.shape):
                raise ValueError(
                    f"{where}: tensor {name} has shape {list(header.get_shape())}; "
                    f"config.json asks for {list(place.shape)}"
                )
            if header.get_dtype() not in STORED_DTYPES:
                raise ValueError(
                    f"{where}: tensor {name} has dtype {header.get_dtype()}; "
                    f"allowed: {', '.join(DTYPE_NAMES)}"
                )


def _check_tied(where: str, file_of: dict[str, Path], embed: Tensor) -> None:
    """A tied model may store its head too, as long as it is the embedding."""
    pair = []
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        _check_shapes(where, file_of[name], {name: embed})
        with safe_open(file_of[name], framework="pt") as tensors:
            pair.append(tensors.get_tensor(name))
    if not bool((pair[0] == pair[1]).all()):
        raise ValueError(
            f"{where}: tie_word_embeddings=true, but lm_head.weight differs from "
            "model.embed_tokens.weight"
        )


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")
