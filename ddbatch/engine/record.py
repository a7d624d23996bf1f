"""What a program tells the host: written on the device at its end, read on the host later.

Columns are Fact (facts.py). The host holds every record against what it knows: a record of another
round, of a slot's earlier sequence or of a sequence of another length is a broken engine, and no
output of it can be trusted. Knows nothing about what the host does with the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.core import RunError, TokenLogprobs
from ddbatch.engine.facts import ERRORS, Error, Fact, Finish
from ddbatch.engine.state import RoundState

CHECK_PRIME = 1_000_003
_INT32 = (1 << 31) - 1


def tell_round(state: RoundState, length_B: Tensor, slot_B: Tensor, active_B: Tensor) -> None:
    """Write the round's record. length_B, slot_B, active_B: as they were before the commit."""
    row_BX = state.told.row_BX
    facts = {
        Fact.SLOT: torch.where(active_B, slot_B, state.nobody),
        Fact.GENERATION: state.generation_S[slot_B],
        Fact.CHECK: length_B,
        Fact.EMITTED: state.num_emitted_B,
        Fact.ACCEPTED: state.num_accepted_B,
        Fact.DEPTH: state.tree.depth_BN.amax(dim=1),
        Fact.FINISH: state.finish_B,
        Fact.MAY_END: _may_end(state, slot_B),
        Fact.ERROR: _error_word(state, length_B, slot_B, active_B),
    }
    row_BX[:-1, : len(Fact)] = torch.stack([facts[fact] for fact in Fact], dim=1)
    row_BX[:-1, len(Fact) :] = state.emitted_BK
    row_BX[-1, 0] = state.round_number
    state.round_number += 1
    if state.told.logprobs_BK is not None and state.logprobs_BN is not None:
        row_B1 = torch.arange(len(slot_B), device=slot_B.device)[:, None]
        for told_BK, drawn_BN in zip(state.told.logprobs_BK, state.logprobs_BN, strict=True):
            # The draw at a path's node is the token emitted at its place.
            told_BK.copy_(drawn_BN[row_B1, state.path_BK])


def _may_end(state: RoundState, slot_B: Tensor) -> Tensor:
    place_K = torch.arange(state.emitted_BK.shape[1], device=slot_B.device)
    is_kept_BK = place_K < state.num_emitted_B[:, None]
    may_end_BK = state.sampling.may_end_string(slot_B[:, None], state.emitted_BK) & is_kept_BK
    return torch.where(may_end_BK, place_K + 1, 0).amax(dim=1)


def _error_word(state: RoundState, length_B: Tensor, slot_B: Tensor, active_B: Tensor) -> Tensor:
    """Bits of Error for each live row."""
    vocab = state.sampling.token_flag_SV.shape[1]
    tree, num_B = state.tree, state.num_emitted_B
    token_BX = torch.cat((tree.token_BN, state.choice_BN), dim=1)
    node_N = torch.arange(tree.parent_BN.shape[1], device=slot_B.device)
    parent_depth_BN = tree.depth_BN.gather(1, tree.parent_BN.clamp(min=0))
    parent_depth_BN = torch.where(node_N == 0, -1, parent_depth_BN)
    is_bad = {
        Error.TOKEN: ((token_BX < 0) | (token_BX >= vocab)).any(dim=1),
        Error.PARENT: (
            (tree.parent_BN >= node_N)
            | ((tree.parent_BN < 0) != (node_N == 0))
            | (tree.depth_BN != parent_depth_BN + 1)
        ).any(dim=1),
        # A row may end without a token: cancelled, or with scores that are no numbers.
        Error.EMITTED: (num_B < (state.finish_B <= int(Finish.LENGTH)).long())
        | (num_B > state.emitted_BK.shape[1]),
        # Pages are there for the prompt and cap_S tokens.
        Error.LENGTH: (length_B + num_B > state.cache_plan.max_len)
        | (state.num_out_S[slot_B] > state.cap_S[slot_B]),
    }
    word_B = torch.zeros_like(slot_B)
    for bit, is_bad_B in is_bad.items():
        word_B = word_B + is_bad_B * bit
    return word_B * active_B


def check_sum(token_ids: Sequence[int]) -> int:
    """Of a piece's tokens, by place: what the device saw is what the host sent."""
    return sum(place * token for place, token in enumerate(token_ids, start=1)) % CHECK_PRIME


class RowFacts(NamedTuple):
    """Of one live row, or of one piece of a prompt."""

    row: int
    slot: int
    generation: int
    check: int
    accepted: int
    depth: int
    finish: Finish
    may_end: int
    token_ids: list[int]
    logprobs: TokenLogprobs | None


def read_record(copies: Sequence[Tensor], number: int, nobody: int, what: str) -> list[RowFacts]:
    """Facts of the live rows of a record. RunError where it is not the `number`-th one, or the
    device found something wrong."""
    table = copies[0].tolist()
    if table[-1][0] & _INT32 != number & _INT32:
        raise RunError(
            f"engine: the record of {what} {table[-1][0]} came where {number} was expected; "
            "nothing of it can be trusted"
        )
    found = []
    for row, line in enumerate(table[:-1]):
        if line[Fact.SLOT] == nobody:
            continue
        if line[Fact.ERROR]:
            bad = [text for bit, text in ERRORS.items() if line[Fact.ERROR] & bit]
            raise RunError(
                f"engine: {what} {number}, row {row}, slot {line[Fact.SLOT]}: {', '.join(bad)}; "
                "nothing of this round can be trusted"
            )
        if line[Fact.FINISH] not in iter(Finish):
            raise RunError(f"engine: {what} {number}, row {row}: no such end: {line[Fact.FINISH]}")
        count = line[Fact.EMITTED]
        found.append(
            RowFacts(
                row,
                line[Fact.SLOT],
                line[Fact.GENERATION],
                line[Fact.CHECK],
                line[Fact.ACCEPTED],
                line[Fact.DEPTH],
                Finish(line[Fact.FINISH]),
                line[Fact.MAY_END],
                line[len(Fact) : len(Fact) + count],
                _logprobs(copies[1:], row, count),
            )
        )
    return found


def _logprobs(copies: Sequence[Tensor], row: int, count: int) -> TokenLogprobs | None:
    if not copies:
        return None
    return TokenLogprobs(*(copy[row, :count].tolist() for copy in copies))
