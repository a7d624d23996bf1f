"""Prefill: run prompts through the target, a fixed number of pieces a call, and make their slots
ready.

A prompt is cut at multiples of a fixed count, so that its keys are added up in the same order
whatever shares the call; short prompts share a call, a long one takes several. Keys go straight to
their pages. A prompt's first output token is drawn here. Knows nothing about rows: slots wait in
the ready ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddbatch.core import RunError, TokenPrompt
from ddbatch.engine.choose import choose, tell_logprobs
from ddbatch.engine.commit import append_context
from ddbatch.engine.record import Facts, check_sum
from ddbatch.engine.sampling import TokenFlags, set_slots
from ddbatch.engine.state import Logprobs, RoundShape, RoundState, cell_of
from ddbatch.engine.transfer import upload
from ddbatch.engine.windows import piece_keys
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.facts import ChunkFact
from ddbatch_kernels.first_tokens import first_tokens


class Placed(NamedTuple):
    """A prompt, the slot and the pages that were reserved for it, and which of the slot's sequences
    it is."""

    slot: int
    pages: list[int]
    generation: int
    prompt: TokenPrompt


class Piece(NamedTuple):
    """Tokens of a sequence, from position `start` on. is_first: its slot is set up for it. is_last:
    the prompt ends with it, and the first output token is drawn."""

    placed: Placed
    start: int
    token_ids: tuple[int, ...]
    is_first: bool
    is_last: bool

    @property
    def stop(self) -> int:
        """One beyond its last position."""
        return self.start + len(self.token_ids)

    @property
    def check(self) -> int:
        """What the device is to say of these tokens."""
        return check_sum(self.token_ids)


def pieces_of(placed: Placed, chunk: int) -> list[Piece]:
    """Cut a prompt at multiples of `chunk` tokens."""
    ids = placed.prompt.token_ids
    return [
        Piece(
            placed,
            start,
            ids[start : start + chunk],
            is_first=not start,
            is_last=start + chunk >= len(ids),
        )
        for start in range(0, len(ids), chunk)
    ]


def open_slots(state: RoundState, flags: TokenFlags, placed: Sequence[Placed]) -> None:
    """Set the slots up for new sequences."""
    device = state.slot_B.device
    table_RX = np.zeros((len(placed), 3 + state.page_table_SP.shape[1]), np.int64)
    for line_X, item in zip(table_RX, placed, strict=True):
        line_X[:3] = item.slot, item.prompt.max_new_tokens, item.generation
        line_X[3 : 3 + len(item.pages)] = item.pages
    line_RX = upload(table_RX, torch.long, device)
    slot_R = line_RX[:, 0]
    state.cap_S[slot_R] = line_RX[:, 1]
    state.generation_S[slot_R] = line_RX[:, 2]
    state.page_table_SP[slot_R] = line_RX[:, 3:]
    state.is_cancelled_S.index_fill_(0, slot_R, value=False)
    for tensor_S in (state.length_S, state.anchor_S, state.num_out_S):
        tensor_S.index_fill_(0, slot_R, 0)
    keys, own = [item.prompt.key for item in placed], [item.prompt.sampling for item in placed]
    set_slots(state.sampling, slot_R, keys, own)
    alike: dict[tuple[object, object], list[Placed]] = {}  # by what ends them: most of a run are
    for item in placed:
        stops = (item.prompt.sampling.stop_token_ids, item.prompt.sampling.stop)
        alike.setdefault(stops, []).append(item)
    for group in alike.values():
        slot_Y = upload([item.slot for item in group], torch.long, device)
        state.sampling.token_flag_SV[slot_Y] = flags.row(group[0].prompt.sampling)


def put_pieces(state: RoundState, pieces: Sequence[Piece]) -> None:
    """Write the input of a call; what is not filled is padding."""
    table_RX = np.zeros(state.chunk_RX.shape, np.int64)
    table_RX[len(pieces) :, ChunkFact.SLOT] = state.nobody
    for line_X, piece in zip(table_RX, pieces, strict=False):
        ids, first = piece.token_ids, len(ChunkFact)
        line_X[:first] = piece.placed.slot, piece.start, len(ids), piece.is_last
        line_X[first : first + len(ids)] = ids
    state.chunk_RX.copy_(upload(table_RX, torch.long, state.chunk_RX.device))


def check_pieces(pieces: Sequence[Piece], facts: Facts) -> None:
    """RunError unless the device has seen these pieces, in these slots."""
    sent = [(piece.placed.slot, piece.placed.generation, piece.check) for piece in pieces]
    columns = (facts.slot_L, facts.generation_L, facts.check_L)
    seen = list(zip(*(column_L.tolist() for column_L in columns), strict=True))
    if sent != seen:
        raise RunError(
            f"engine: a prefill call saw other tokens than were sent to it (slot, sequence, sum: "
            f"{seen} instead of {sent}); nothing of these sequences can be trusted"
        )


def prefill(
    target: Target, drafter: DFlash | None, state: RoundState, shape: RoundShape, num_chunks: int
) -> None:
    """Run the first num_chunks pieces of chunk_RX, fill caches, draw first tokens, queue the live
    slots and tell the host."""
    chunk_RX = state.chunk_RX[:num_chunks]
    slot_R, start_R, size_R, _ = chunk_RX[:, : len(ChunkFact)].unbind(dim=1)
    token_RQ = chunk_RX[:, len(ChunkFact) :].contiguous()
    R, Q = token_RQ.shape
    place_Q = torch.arange(Q, device=slot_R.device)
    is_token_RQ = place_Q < size_R[:, None]
    pos_RQ = torch.where(is_token_RQ, start_R[:, None] + place_Q, 0)
    cell_RQ = torch.where(is_token_RQ, cell_of(state, slot_R[:, None], pos_RQ), state.trash_cell)
    stop_RQ = torch.where(is_token_RQ, pos_RQ + 1, 0)  # padding sees nothing
    keys = piece_keys(
        state,
        slot_R,
        pos_RQ,
        stop_RQ,
        shape.num_keys,
        window=target.dims.window,
        in_order=target.in_order,
    )
    out = target(
        token_RQ.flatten(),
        pos_RQ.flatten(),
        state.target_cache,
        cell_RQ.flatten(),
        keys,
        () if drafter is None else drafter.dims.tap_layers,
    )
    if drafter is not None:
        append_context(drafter, state, out.feature_TC, pos_RQ.flatten(), cell_RQ.flatten())
    end_token_R = torch.arange(R, device=slot_R.device) * Q + (size_R - 1).clamp(min=0)
    logits_RV = target.logits(out.hidden_TD[end_token_R])
    _draw(state, chunk_RX, logits_RV, shape)


def _draw(state: RoundState, chunk_RX: Tensor, logits_RV: Tensor, shape: RoundShape) -> None:
    """Draw the first tokens of the prompts that end here, make their slots ready, tell the host."""
    slot_R = chunk_RX[:, ChunkFact.SLOT]
    logits_R1V = logits_RV[:, None]
    drawn = choose(
        logits_R1V,
        torch.zeros_like(slot_R)[:, None],
        state.num_out_S,  # nothing yet
        slot_R,
        state.sampling,
        shape.draw,
        num_depths=1,
    )
    first_tokens(
        chunk_RX,
        drawn.token_BN[:, 0],
        drawn.is_finite_BN[:, 0],
        state.slots,
        state.ready,
        state.chunk_told.row_BX,
        state.call_number,
    )
    if state.chunk_told.logprobs_BK is not None:
        told = Logprobs(*(part[: len(slot_R)] for part in state.chunk_told.logprobs_BK))
        tell_logprobs(logits_R1V, drawn.token_BN, out=told)
