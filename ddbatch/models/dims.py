"""Sizes and switches of a model, as its config.json gives them.

Types only: families.py reads a target's, dflash.py a drafter's. Knows nothing about files, weights
or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    """Sizes of a decoder, see the legend in ddbatch.core for the letters, and what its family
    switches on.

    windows: per layer, how many keys a query sees, its own among them (None = all); a checkpoint
    has one such number. has_qkv_bias: q, k and v are biased, the output projection is not.
    has_qk_norm: RMSNorm over the head width on q and k, before they are rotated.
    """

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
    windows: tuple[int | None, ...]
    has_qkv_bias: bool = False
    has_qk_norm: bool = False

    @property
    def window(self) -> int | None:
        """What a sliding layer sees; None where every layer sees everything."""
        return max((window for window in self.windows if window is not None), default=None)


@dataclass(frozen=True)
class DrafterDims:
    """A DFlash drafter: its decoder, and how it is tied to its target.

    tap_layers: 0-based target layers whose outputs it reads. Its sliding layers are causal inside
    the block, the others see the whole block.
    """

    decoder: ModelDims
    block: int  # K
    mask_token_id: int
    tap_layers: tuple[int, ...]
    num_target_layers: int
