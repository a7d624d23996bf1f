"""Open a pair: read configs, check that drafter and target fit, then load weights.

Knows nothing about prompts, rows or trees.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.dims import DrafterDims, DtypeName, ModelDims
from ddbatch.models.weights import load_weights


def check_pair(target: ModelDims, drafter: DrafterDims, block: int | None) -> None:
    """ValueError with both values where the drafter was not made for this target.

    block: the user's drafter.block, which may only confirm the checkpoint's.
    """
    facts = {
        "hidden_size": (drafter.decoder.width, target.width),
        "num_target_layers": (drafter.num_target_layers, target.layers),
        "vocab_size": (drafter.decoder.vocab, target.vocab),
        "rope_theta": (drafter.decoder.rope.theta, target.rope.theta),
    }
    for key, (ours, theirs) in facts.items():
        if ours != theirs:
            raise ValueError(
                f"drafter.path: {key}={ours} does not fit model.path, whose value is "
                f"{theirs}; allowed: a drafter trained for this target"
            )
    if block is not None and block != drafter.block:
        raise ValueError(
            f"drafter.block={block}: the checkpoint was trained with block size "
            f"{drafter.block}; allowed: {drafter.block} or null"
        )


def choose_dtype(option: str, dims: ModelDims, device: torch.device) -> DtypeName:
    """What model.dtype=option means: auto is the checkpoint's dtype on CUDA, float32 on a CPU."""
    if option == "auto":
        if device.type == "cpu":
            return "float32"
        if dims.stored_dtype is None:
            raise ValueError(
                "model.dtype=auto: config.json names no dtype; allowed: float32, bfloat16, float16"
            )
        return dims.stored_dtype
    names: dict[str, DtypeName] = {
        "float32": "float32",
        "bfloat16": "bfloat16",
        "float16": "float16",
    }
    return names[option]


def set_numerics() -> None:
    """No TF32 and no rounding to bf16 inside a sum: what the numerics rule is measured against."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def load_target(
    folder: Path,
    dims: ModelDims,
    dtype: DtypeName,
    device: torch.device,
    num_positions: int,
    *,
    in_order: bool = False,
) -> Target:
    """The target with its weights on `device`; the rope table reaches num_positions. in_order: see
    Target."""
    target = Target(dims, getattr(torch, dtype), device, num_positions, in_order=in_order)
    load_weights("model.path", folder, target.destinations())
    return target


def load_drafter(
    folder: Path, dims: DrafterDims, dtype: DtypeName, device: torch.device, num_positions: int
) -> DFlash:
    """The drafter with its weights on `device`; it shares embedding and head of the target."""
    drafter = DFlash(dims, getattr(torch, dtype), device, num_positions)
    load_weights("drafter.path", folder, drafter.destinations())
    return drafter
