"""How each slot draws and what ends it: static tensors, filled when a prompt takes its slot.

Knows how options become what the draw op takes. Knows nothing about scores or trees.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ddbatch.core import Key, Sampling, StopFinder
from ddbatch.engine.transfer import upload
from ddbatch_kernels.facts import TokenFlag

_WORD = 0xFFFFFFFF
_MASK64 = (1 << 64) - 1
_MAX_FLAG_ROWS = 64  # distinct sets of stops whose flags are kept


class DrawKind(IntEnum):
    """What a draw must compute for the sequences in flight; the host knows, so that a greedy batch
    computes no noise and one without filters no thresholds."""

    GREEDY = 0
    NOISE = 1  # min_p included
    FILTERED = 2  # top_k and top_p too


@dataclass
class SlotSampling:
    """Per slot, S slots incl. nobody's; static, written by `set_slots`.

    The draw's parameters as in DrawParams. token_flag_SV: uint8, TokenFlag bits of each token.
    """

    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    seed_S2: Tensor
    hash_S2: Tensor
    token_flag_SV: Tensor


def allocate_slot_sampling(slots: int, vocab: int, device: torch.device) -> SlotSampling:
    """Greedy slots without stops."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return SlotSampling(
        temperature_S=zeros(slots, dtype=torch.float32),
        top_k_S=zeros(slots, dtype=torch.long),
        # Filled: a sum on the device without memory loads PyTorch's compiler, which takes seconds.
        top_p_S=zeros(slots, dtype=torch.float64).fill_(1),
        min_p_S=zeros(slots, dtype=torch.float32),
        seed_S2=zeros(slots, 2, dtype=torch.long),
        hash_S2=zeros(slots, 2, dtype=torch.long),
        token_flag_SV=zeros(slots, vocab, dtype=torch.uint8),
    )


def draw_kind(own: Iterable[Sampling]) -> DrawKind:
    """What the draws of these sequences need."""
    drawn = [item for item in own if item.temperature > 0]
    if any(item.top_k > 0 or item.top_p < 1 for item in drawn):
        return DrawKind.FILTERED
    return DrawKind.NOISE if drawn else DrawKind.GREEDY


def set_slots(
    sampling: SlotSampling, slot_R: Tensor, keys: Sequence[Key], own: Sequence[Sampling]
) -> None:
    """Write the draw's parameters of R slots."""
    device = slot_R.device
    floats = [[item.temperature, item.top_p, item.min_p] for item in own]
    words = [
        [item.top_k, *_words(item.seed), *_words(key_hash(key))]
        for key, item in zip(keys, own, strict=True)
    ]
    float_R3 = upload(floats, torch.float64, device)
    word_R5 = upload(words, torch.long, device)
    sampling.temperature_S[slot_R] = float_R3[:, 0].float()
    sampling.top_p_S[slot_R] = float_R3[:, 1]
    sampling.min_p_S[slot_R] = float_R3[:, 2].float()
    sampling.top_k_S[slot_R] = word_R5[:, 0]
    sampling.seed_S2[slot_R] = word_R5[:, 1:3]
    sampling.hash_S2[slot_R] = word_R5[:, 3:]


class TokenFlags:
    """Which tokens end a sequence or could complete a stop string, as rows of token_flag_SV.

    Most prompts of a run share their stops, so rows are kept on the device.
    """

    def __init__(self, vocab: int, finder: StopFinder | None, device: torch.device) -> None:
        self._vocab, self._finder, self._device = vocab, finder, device
        self._rows: OrderedDict[tuple[object, object], Tensor] = OrderedDict()

    def row(self, own: Sampling) -> Tensor:
        """uint8 [V]."""
        name = (own.stop_token_ids, own.stop)
        if name in self._rows:
            self._rows.move_to_end(name)
            return self._rows[name]
        flags = torch.zeros(self._vocab, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        if own.stop:
            assert self._finder is not None, "stop strings need a finder"
            # A tokenizer may have more entries than the model has scores.
            ids = [token for token in self._finder.flagged(own.stop) if token < self._vocab]
            flags[torch.tensor(ids, dtype=torch.long)] |= TokenFlag.MAY_END_STRING
        # Ids that no score stands for cannot be drawn.
        ids = [token for token in own.stop_token_ids if token < self._vocab]
        flags[torch.tensor(ids, dtype=torch.long)] |= TokenFlag.STOP_ID
        self._rows[name] = flags.to(self._device, non_blocking=True)
        if len(self._rows) > _MAX_FLAG_ROWS:
            self._rows.popitem(last=False)
        return self._rows[name]


def key_hash(key: Key) -> int:
    """The 64-bit hash of (row_id, turn, sample) that separates the noise of rows.

    A chain of SplitMix64 steps (Steele et al. 2014), each a bijection: keys that differ in one part
    never collide.
    """
    value = 0
    for part in key:
        value = _splitmix64(value ^ part)
    return value


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _words(value: int) -> tuple[int, int]:
    """A 64-bit number as its low and its high word."""
    return value & _WORD, value >> 32
