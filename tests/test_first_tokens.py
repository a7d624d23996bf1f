"""The kernel that seats and tells a prefill call leaves what its reference leaves."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from conftest import KERNEL_DEVICE
from made_rounds import GARBAGE, VOCAB, assert_same, copied, made_round
from torch import Tensor

from ddbatch_kernels.admit import Ready
from ddbatch_kernels.facts import ChunkFact, Error, Fact
from ddbatch_kernels.first_tokens import first_tokens_ref
from ddbatch_kernels.first_tokens.kernel import first_tokens_triton
from ddbatch_kernels.rows import Slots

IS_NATIVE = KERNEL_DEVICE == "cuda"
CALLS = [(1, 1, 1), (2, 3, 5), (5, 5, 8), (7, 16, 64)]  # pieces, those of the plan, tokens
CALLS += [(16, 16, 300), (31, 33, 65)] if IS_NATIVE else []


class Call(NamedTuple):
    """The arguments of the op."""

    chunk_RX: Tensor
    token_R: Tensor
    is_finite_R: Tensor
    slots: Slots
    ready: Ready
    record_BX: Tensor
    number: Tensor


def made_call(seed: int, num_pieces: int, most: int, chunk: int) -> Call:
    """Pieces of different sequences, some of them padding, some the last
    of a prompt; some draws from scores that are no numbers."""
    generator = torch.Generator().manual_seed(seed)
    slots = made_round(seed, most, 1, 0, stops=0.2).slots
    num_slots = len(slots.length_S) - 1
    slots.cap_S.copy_(torch.randint(1, 3, slots.cap_S.shape, generator=generator))
    chunk_RX = torch.zeros(num_pieces, len(ChunkFact) + chunk, dtype=torch.long)
    chunk_RX[:, ChunkFact.SLOT] = torch.randperm(num_slots, generator=generator)[:num_pieces]
    chunk_RX[:, ChunkFact.START] = torch.randint(0, 9, (num_pieces,), generator=generator)
    chunk_RX[:, ChunkFact.SIZE] = torch.randint(1, chunk + 1, (num_pieces,), generator=generator)
    chunk_RX[:, ChunkFact.IS_LAST] = torch.rand(num_pieces, generator=generator) < 0.7
    chunk_RX[:, len(ChunkFact) :] = torch.randint(
        0, 150_000, (num_pieces, chunk), generator=generator
    )
    if num_pieces > 2:
        chunk_RX[-1] = 0
        chunk_RX[-1, ChunkFact.SLOT] = num_slots
    tail = torch.randint(0, 1000, (1,), generator=generator)
    record = torch.full((most + 1, len(Fact) + 1), GARBAGE, dtype=torch.int32)
    return Call(
        chunk_RX,
        torch.randint(VOCAB, (num_pieces,), generator=generator),
        torch.rand(num_pieces, generator=generator) < 0.8,
        slots,
        Ready(torch.full((num_slots + 1,), GARBAGE), tail - 1, tail),
        record,
        torch.randint(9, (1,), generator=generator),
    )


@pytest.mark.parametrize(("num_pieces", "most", "chunk"), CALLS)
@pytest.mark.parametrize("seed", range(4))
def test_a_call_is_seated_and_told_as_by_the_reference(
    seed: int, num_pieces: int, most: int, chunk: int
) -> None:
    made = made_call(seed, num_pieces, most, chunk)
    twin = copied(made, KERNEL_DEVICE)
    first_tokens_ref(*made)
    first_tokens_triton(*twin)
    made.ready.slot_Y[-1] = GARBAGE  # the spare place holds anything
    assert_same(twin, made)


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 30])
@pytest.mark.parametrize("slot", [0, 4])
def test_a_draw_that_is_no_token_is_told(slot: int, token: int) -> None:
    made = made_call(1, 5, 5, 8)
    made.token_R[slot] = token
    twin = copied(made, KERNEL_DEVICE)
    first_tokens_ref(*made)
    first_tokens_triton(*twin)
    made.ready.slot_Y[-1] = GARBAGE
    assert_same(twin, made)
    assert twin.record_BX[slot, Fact.ERROR] == Error.TOKEN
