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

import torch
from torch import Tensor

from ddbatch.core import RunError, TokenPrompt
from ddbatch.engine.admit import push_ready
from ddbatch.engine.choose import choose, tell_logprobs
from ddbatch.engine.commit import append_context
from ddbatch.engine.facts import ChunkFact, Error, Fact, Finish
from ddbatch.engine.record import CHECK_PRIME, RowFacts, check_sum
from ddbatch.engine.sampling import TokenFlags, set_slots
from ddbatch.engine.state import RoundShape, RoundState, cell_of
from ddbatch.engine.transfer import upload
from ddbatch.engine.windows import layer_keys, prefix_keys
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash


class Placed(NamedTuple):
    """A prompt, the slot and the pages that were reserved for it, and which of the slot's sequences
    it is."""

    slot: int
    pages: list[int]
    generation: int
    prompt: TokenPrompt


class Piece(NamedTuple):
    """Tokens start..stop of a prompt."""

    placed: Placed
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the first output token is drawn after it."""
        return self.stop == len(self.placed.prompt.token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its tokens."""
        return self.placed.prompt.token_ids[self.start : self.stop]

    @property
    def check(self) -> int:
        """What the device is to say of these tokens."""
        return check_sum(self.token_ids)


def pieces_of(placed: Placed, chunk: int) -> list[Piece]:
    """Cut a prompt at multiples of `chunk` tokens."""
    length = len(placed.prompt.token_ids)
    return [Piece(placed, start, min(start + chunk, length)) for start in range(0, length, chunk)]


def open_slots(state: RoundState, flags: TokenFlags, placed: Sequence[Placed]) -> None:
    """Set the slots up for new sequences."""
    device = state.slot_B.device
    width = state.page_table_SP.shape[1]
    lines = [
        [item.slot, item.prompt.max_new_tokens, item.generation]
        + item.pages
        + [0] * (width - len(item.pages))
        for item in placed
    ]
    line_RX = upload(lines, torch.long, device)
    slot_R = line_RX[:, 0]
    state.cap_S[slot_R] = line_RX[:, 1]
    state.generation_S[slot_R] = line_RX[:, 2]
    state.page_table_SP[slot_R] = line_RX[:, 3:]
    state.is_cancelled_S.index_fill_(0, slot_R, value=False)
    for tensor_S in (state.length_S, state.anchor_S, state.num_out_S):
        tensor_S.index_fill_(0, slot_R, 0)
    keys, own = [item.prompt.key for item in placed], [item.prompt.sampling for item in placed]
    set_slots(state.sampling, slot_R, keys, own)
    for item in placed:
        state.sampling.token_flag_SV[item.slot] = flags.row(item.prompt.sampling)


def put_pieces(state: RoundState, pieces: Sequence[Piece]) -> None:
    """Write the input of a call; what is not filled is padding."""
    plan = state.prefill_plan
    lines = []
    for piece in pieces:
        ids = piece.token_ids
        facts = [piece.placed.slot, piece.start, len(ids), int(piece.is_last)]
        lines.append([*facts, *ids, *[0] * (plan.chunk - len(ids))])
    padding = [state.nobody] + [0] * (state.chunk_RX.shape[1] - 1)
    lines += [padding] * (plan.chunks - len(lines))
    state.chunk_RX.copy_(upload(lines, torch.long, state.chunk_RX.device))


def check_pieces(pieces: Sequence[Piece], facts: Sequence[RowFacts]) -> None:
    """RunError unless the device has seen these pieces, in these slots."""
    sent = [(piece.placed.slot, piece.placed.generation, piece.check) for piece in pieces]
    seen = [(item.slot, item.generation, item.check) for item in facts]
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
    slot_R, start_R, size_R, flag_R = chunk_RX[:, : len(ChunkFact)].unbind(dim=1)
    is_last_R, end_R = flag_R != 0, start_R + size_R
    token_RQ = chunk_RX[:, len(ChunkFact) :]
    R, Q = token_RQ.shape
    place_Q = torch.arange(Q, device=slot_R.device)
    is_token_RQ = place_Q < size_R[:, None]
    pos_RQ = torch.where(is_token_RQ, start_R[:, None] + place_Q, 0)
    cell_RQ = torch.where(is_token_RQ, cell_of(state, slot_R[:, None], pos_RQ), state.trash_cell)
    addr_RS, exists_RS = prefix_keys(state, slot_R, end_R, shape.num_keys)
    pos_S = torch.arange(shape.num_keys, device=slot_R.device)
    is_visible_RQS = exists_RS[:, None] & (pos_S <= pos_RQ[..., None])
    is_visible_RQS[..., 0] = True  # padding sees a key, be it the null cell
    keys = layer_keys(
        state,
        addr_RS,
        is_visible_RQS,
        pos_RQ,
        pos_S.expand(R, -1),
        window=target.dims.window,
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
    place_sum_R = (token_RQ * (place_Q + 1) * is_token_RQ).sum(dim=1) % CHECK_PRIME
    logits_RV = target.logits(out.hidden_TD[end_token_R])
    _first_tokens(state, _Ends(slot_R, end_R, is_last_R, place_sum_R), logits_RV, shape)


class _Ends(NamedTuple):
    """Of each piece: slot, where it ends, whether its prompt ends there (bool), its check_sum."""

    slot_R: Tensor
    end_R: Tensor
    is_last_R: Tensor
    check_R: Tensor


def _first_tokens(state: RoundState, ends: _Ends, logits_RV: Tensor, shape: RoundShape) -> None:
    """Draw the first tokens of the prompts that end here, and make their slots ready."""
    slot_R, end_R, is_last_R, _ = ends
    zero_R1 = torch.zeros_like(slot_R)[:, None]
    logits_R1V = logits_RV[:, None]
    drawn = choose(
        logits_R1V, zero_R1, zero_R1[:, 0], slot_R, state.sampling, shape.draw, num_depths=1
    )
    token_R, is_finite_R = drawn.token_BN[:, 0], drawn.is_finite_BN[:, 0]
    finish_R = torch.where(state.cap_S[slot_R] == 1, int(Finish.LENGTH), int(Finish.LIVE))
    is_stop_R = state.sampling.is_stop(slot_R, token_R)
    finish_R = torch.where(is_stop_R, int(Finish.STOP), finish_R)
    finish_R = torch.where(is_finite_R, finish_R, int(Finish.NAN_LOGITS))
    finish_R = torch.where(is_last_R, finish_R, int(Finish.LIVE))
    # A draw from scores that are no numbers is no token. What is not last leaves nobody zeros.
    emitted_R = (is_finite_R & is_last_R).long()
    home_R = torch.where(is_last_R, slot_R, state.nobody)
    state.length_S[home_R] = torch.where(is_last_R, end_R, 0)
    state.anchor_S[home_R] = torch.where(is_last_R, token_R, 0)
    state.num_out_S[home_R] = emitted_R
    push_ready(state, slot_R, is_last_R & (finish_R == int(Finish.LIVE)))
    _tell(state, ends, token_R, emitted_R, finish_R)
    if state.chunk_told.logprobs_BK is not None:
        num_top = state.chunk_told.logprobs_BK.top.shape[-1]
        told = tell_logprobs(logits_R1V, drawn.token_BN, num_top)
        for place, value in zip(state.chunk_told.logprobs_BK, told, strict=True):
            place[: len(slot_R)] = value


def _tell(
    state: RoundState, ends: _Ends, token_R: Tensor, emitted_R: Tensor, finish_R: Tensor
) -> None:
    vocab = state.sampling.token_flag_SV.shape[1]
    facts = {
        Fact.SLOT: ends.slot_R,
        Fact.GENERATION: state.generation_S[ends.slot_R],
        Fact.CHECK: ends.check_R,
        Fact.EMITTED: emitted_R,
        Fact.FINISH: finish_R,
        Fact.MAY_END: state.sampling.may_end_string(ends.slot_R, token_R) * emitted_R,
        Fact.ERROR: ((token_R < 0) | (token_R >= vocab)).long() * Error.TOKEN,
    }
    row_BX, R = state.chunk_told.row_BX, len(token_R)
    columns = [facts.get(fact, torch.zeros_like(token_R)) for fact in Fact]
    row_BX[:R] = torch.stack([*columns, token_R], dim=1)
    row_BX[R:-1, Fact.SLOT] = state.nobody  # a call may be smaller than the plan's
    row_BX[-1, 0] = state.call_number
    state.call_number += 1
