"""Seat what a prefill call drew: first tokens of the prompts that end in it, slots that are ready,
and what the call tells.

R pieces of up to Q tokens; R1 lines of a record, one of them the call's own.
"""

import torch
from torch import Tensor

from ddbatch_kernels.admit.reference import Ready
from ddbatch_kernels.facts import CHECK_PRIME, ChunkFact, Error, Fact, Finish, TokenFlag
from ddbatch_kernels.rows import Slots, has_flag


def first_tokens_ref(
    chunk_RX: Tensor,
    token_R: Tensor,
    is_finite_R: Tensor,
    slots: Slots,
    ready: Ready,
    record_BX: Tensor,
    number: Tensor,
) -> None:
    """Write lengths, anchors and counts of slots whose prompts end, queue those that go on, and
    write the record; `number` grows by one. The ring's spare place holds anything afterwards."""
    slot_R, start_R, size_R, flag_R = chunk_RX[:, : len(ChunkFact)].unbind(dim=1)
    is_last_R, nobody = flag_R != 0, len(slots.length_S) - 1
    finish_R = torch.where(slots.cap_S[slot_R] == 1, int(Finish.LENGTH), int(Finish.LIVE))
    is_stop_R = has_flag(slots.token_flag_SV, slot_R, token_R, TokenFlag.STOP_ID)
    finish_R = torch.where(is_stop_R, int(Finish.STOP), finish_R)
    finish_R = torch.where(is_finite_R, finish_R, int(Finish.NAN_LOGITS))
    finish_R = torch.where(is_last_R, finish_R, int(Finish.LIVE))
    # A draw from scores that are no numbers is no token. What is not last leaves nobody zeros.
    emitted_R = (is_finite_R & is_last_R).long()
    home_R = torch.where(is_last_R, slot_R, nobody)
    slots.length_S[home_R] = torch.where(is_last_R, start_R + size_R, 0)
    slots.anchor_S[home_R] = torch.where(is_last_R, token_R, 0)
    slots.num_out_S[home_R] = emitted_R
    _push(ready, slot_R, is_last_R & (finish_R == int(Finish.LIVE)))
    may_end_R = has_flag(slots.token_flag_SV, slot_R, token_R, TokenFlag.MAY_END_STRING)
    vocab, R = slots.token_flag_SV.shape[1], len(slot_R)
    facts = {
        Fact.SLOT: slot_R,
        Fact.GENERATION: slots.generation_S[slot_R],
        Fact.CHECK: _check(chunk_RX),
        Fact.EMITTED: emitted_R,
        Fact.FINISH: finish_R,
        Fact.MAY_END: may_end_R * emitted_R,
        Fact.ERROR: ((token_R < 0) | (token_R >= vocab)).long() * Error.TOKEN,
    }
    columns = [facts.get(fact, torch.zeros_like(token_R)) for fact in Fact]
    record_BX[:R] = torch.stack([*columns, token_R], dim=1)
    record_BX[R:-1, Fact.SLOT] = nobody  # a call may be smaller than the plan's
    record_BX[-1, 0] = number
    number.add_(1)


def _check(chunk_RX: Tensor) -> Tensor:
    token_RQ = chunk_RX[:, len(ChunkFact) :]
    place_Q = torch.arange(token_RQ.shape[1], device=token_RQ.device)
    is_token_RQ = place_Q < chunk_RX[:, ChunkFact.SIZE, None]
    return (token_RQ * (place_Q + 1) * is_token_RQ).sum(dim=1) % CHECK_PRIME


def _push(ready: Ready, slot_R: Tensor, is_live_R: Tensor) -> None:
    """Queue slots that still have tokens to emit."""
    ring = len(ready.slot_Y) - 1
    place_R = (ready.tail + is_live_R.cumsum(dim=0) - 1) % ring
    ready.slot_Y[torch.where(is_live_R, place_R, ring)] = slot_R
    ready.tail.add_(is_live_R.sum())
