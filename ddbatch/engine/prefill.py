"""Prefill: run prompts through the target, a fixed number of tokens a call, and make their slots
ready.

Prompts are packed: short ones share a call, a long one takes several. A prompt's first output token
is drawn here. Knows nothing about rows: slots wait in the ready ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.core import TokenPrompt
from ddbatch.engine.admit import push_ready
from ddbatch.engine.choose import choose, tell_logprobs
from ddbatch.engine.commit import append_context, write_cells
from ddbatch.engine.sampling import TokenFlags, set_slots
from ddbatch.engine.state import Finish, RoundState, cell_of, prefix_keys
from ddbatch.engine.windows import layer_keys
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.layers import Planes, Ragged


class Placed(NamedTuple):
    """A prompt and the slot that was reserved for it."""

    slot: int
    prompt: TokenPrompt


class Piece(NamedTuple):
    """Tokens start..stop of a prompt, in one call."""

    placed: Placed
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.placed.prompt.token_ids)


def pack(placed: list[Placed], tokens_per_call: int) -> Iterator[list[Piece]]:
    """Cut prompts into calls of at most tokens_per_call tokens, in order."""
    call: list[Piece] = []
    room = tokens_per_call
    for item in placed:
        start, length = 0, len(item.prompt.token_ids)
        while start < length:
            stop = min(length, start + room)
            call.append(Piece(item, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield call
                call, room = [], tokens_per_call
    if call:
        yield call


def load(
    target: Target,
    drafter: DFlash | None,
    state: RoundState,
    flags: TokenFlags,
    placed: list[Placed],
    tokens_per_call: int,
) -> None:
    """Reset the slots, fill caches from the prompts, draw first tokens, queue the live ones."""
    device = state.slot_B.device
    slot_R = torch.tensor([item.slot for item in placed], device=device)
    caps = [item.prompt.max_new_tokens for item in placed]
    for tensor in (
        state.output_SO,
        state.accepted_SO,
        state.depth_SO,
        state.num_rounds_S,
        state.num_out_S,
        state.finish_S,
        state.flag_end_S,
        state.length_S,
        state.anchor_S,
    ):
        tensor[slot_R] = 0
    state.cap_S[slot_R] = torch.tensor(caps, device=device)
    own = [item.prompt.sampling for item in placed]
    set_slots(state.sampling, slot_R, [item.prompt.key for item in placed], own)
    for item in placed:
        state.sampling.token_flag_SV[item.slot] = flags.row(item.prompt.sampling)
    for pieces in pack(placed, tokens_per_call):
        _prefill_call(target, drafter, state, pieces)


def _prefill_call(
    target: Target, drafter: DFlash | None, state: RoundState, pieces: list[Piece]
) -> None:
    device = state.slot_B.device
    sizes = [piece.stop - piece.start for piece in pieces]
    starts = [piece.start for piece in pieces]
    slots = [piece.placed.slot for piece in pieces]
    ids = [
        token_id
        for piece in pieces
        for token_id in piece.placed.prompt.token_ids[piece.start : piece.stop]
    ]
    token_T = torch.tensor(ids, device=device)
    slot_R, start_R, size_R = torch.tensor([slots, starts, sizes], device=device)
    row_T = torch.arange(len(pieces), device=device).repeat_interleave(size_R, output_size=len(ids))
    begin_R = size_R.cumsum(0) - size_R  # a piece's first flat token
    index_T = torch.arange(len(ids), device=device) - begin_R[row_T]
    pos_T = start_R[row_T] + index_T
    index_Q = torch.arange(max(sizes), device=device)
    ragged = Ragged(
        token_BQ=begin_R[:, None] + torch.minimum(index_Q, size_R[:, None] - 1),
        place_T=row_T * max(sizes) + index_T,
    )
    addr_RS, is_visible_RQZ = _visible(state, slot_R, start_R, size_R, max(starts), max(sizes))
    keys = layer_keys(
        addr_RS,
        is_visible_RQZ,
        # A place beyond a piece repeats its last token, at that token's position.
        pos_T[ragged.token_BQ],
        window=target.dims.window,
        dtype=state.scratch.k_LXGE.dtype,
        ragged=ragged,
    )
    tap_layers = () if drafter is None else drafter.dims.tap_layers
    out = target(
        token_T,
        pos_T,
        state.target_cache,
        state.scratch,
        keys,
        tap_layers,
    )
    cell_T = cell_of(state, slot_R[row_T], pos_T)
    write_cells(
        state.target_cache, cell_T, Planes(*(plane[:, : len(ids)] for plane in state.scratch))
    )
    if drafter is not None:
        append_context(drafter, state, out.feature_TC, pos_T, cell_T)
    ends = [piece for piece in pieces if piece.is_last]
    if ends:
        last_R = (begin_R + size_R - 1)[[piece.is_last for piece in pieces]]
        _first_token(state, ends, target.logits(out.hidden_TD[last_R]))


def _visible(
    state: RoundState, slot_R: Tensor, start_R: Tensor, size_R: Tensor, cached: int, queries: int
) -> tuple[Tensor, Tensor]:
    """Cells of `cached` places of the cache, and what a token sees of them and of its call: its
    prompt's earlier tokens (bool)."""
    addr_RS, exists_RS = prefix_keys(state, slot_R, start_R, cached)
    index_Q = torch.arange(queries, device=slot_R.device)
    is_earlier_RQQ = (index_Q[:, None] >= index_Q) & (index_Q < size_R[:, None, None])
    is_cached_RQS = exists_RS[:, None].expand(-1, queries, -1)
    return addr_RS, torch.cat((is_cached_RQS, is_earlier_RQQ), dim=2)


def _first_token(state: RoundState, ends: list[Piece], logits_RV: Tensor) -> None:
    device = state.slot_B.device
    slot_R = torch.tensor([piece.placed.slot for piece in ends], device=device)
    zero_R1 = torch.zeros_like(slot_R)[:, None]
    logits_R1V = logits_RV[:, None]
    drawn = choose(logits_R1V, zero_R1, zero_R1[:, 0], slot_R, state.sampling, num_depths=1)
    token_R = drawn.token_BN[:, 0]
    finish_R = torch.where(state.cap_S[slot_R] == 1, int(Finish.LENGTH), int(Finish.LIVE))
    is_stop_R = state.sampling.is_stop(slot_R, token_R)
    finish_R = torch.where(is_stop_R, int(Finish.STOP), finish_R)
    finish_R = torch.where(drawn.is_finite_BN[:, 0], finish_R, int(Finish.NAN_LOGITS))
    state.length_S[slot_R] = torch.tensor([piece.stop for piece in ends], device=device)
    state.anchor_S[slot_R] = token_R
    state.output_SO[slot_R, 0] = token_R
    if state.logprobs_SO is not None:
        told = tell_logprobs(logits_R1V, drawn.token_BN, state.logprobs_SO.top.shape[-1])
        for history_SO, told_R1 in zip(state.logprobs_SO, told, strict=True):
            history_SO[slot_R, 0] = told_R1[:, 0]
    state.flag_end_S[slot_R] = state.sampling.may_end_string(slot_R, token_R).long()
    # A draw from scores that are no numbers is no token.
    state.num_out_S[slot_R] = drawn.is_finite_BN[:, 0].long()
    state.finish_S[slot_R] = finish_R
    push_ready(state, slot_R, finish_R == int(Finish.LIVE))
