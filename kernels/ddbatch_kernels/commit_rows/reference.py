"""The books of a round: tell what it did, advance lengths, counts and anchors, and say where the
keys of what was kept belong.

As many keys are committed as tokens were emitted: the anchor's and those of all emitted tokens but
the last, which becomes the next anchor. B rows, N nodes, K places of a path, M best tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch_kernels.facts import Error, Fact, Finish, TokenFlag
from ddbatch_kernels.rows import Accepted, Nodes, Rows, Slots, has_flag


class Record(NamedTuple):
    """What a round tells. row_BX: int32, Fact columns and the emitted tokens of each row; one more
    row holds `number`, int64 [1], which grows by one. drawn_BN, told_BK: log-probs of the nodes'
    draws and of the emitted tokens, the tensors of either [B, N] or [B, K], with any further
    dimension; empty where none are kept.
    """

    row_BX: Tensor
    number: Tensor
    drawn_BN: tuple[Tensor, ...]
    told_BK: tuple[Tensor, ...]


class Kept(NamedTuple):
    """int64. node_BK: the path as a place among B x N nodes. pos_BK: where in its sequence a node
    belongs, 0 beyond what is kept. cell_BK: its cell, the trash cell beyond."""

    node_BK: Tensor
    pos_BK: Tensor
    cell_BK: Tensor


def commit_rows_ref(
    nodes: Nodes,
    accepted: Accepted,
    rows: Rows,
    slots: Slots,
    record: Record,
    *,
    page: int,
    max_len: int,
    trash_cell: int,
) -> Kept:
    """Write the record, then slots and rows; rows that end become inert. max_len: tokens that the
    pages of a slot hold."""
    _tell(nodes, accepted, rows, slots, record, max_len)
    kept = _kept(nodes, accepted, rows, slots, page, max_len, trash_cell)
    slot_B, count_B, length_B = rows.slot_B, accepted.num_emitted_B, nodes.pos_BN[:, 0]
    # Inert rows share nobody's slot and leave zeros there.
    slots.length_S[slot_B] = torch.where(rows.is_active_B, length_B + count_B, 0)
    num_out_B = slots.num_out_S[slot_B] + count_B
    slots.num_out_S[slot_B] = torch.where(rows.is_active_B, num_out_B, 0)
    K = accepted.emitted_BK.shape[1]
    last_B1 = (count_B - 1).clamp(0, K - 1)[:, None]  # a wrong count is told, and not a fault
    anchor_B = accepted.emitted_BK.gather(1, last_B1).squeeze(1)
    slots.anchor_S[slot_B] = torch.where(rows.is_active_B, anchor_B, 0)
    rows.is_active_B.logical_and_(accepted.finish_B == int(Finish.LIVE))
    nobody = len(slots.length_S) - 1
    rows.slot_B.copy_(torch.where(rows.is_active_B, slot_B, nobody))
    return kept


def _kept(
    nodes: Nodes,
    accepted: Accepted,
    rows: Rows,
    slots: Slots,
    page: int,
    max_len: int,
    trash_cell: int,
) -> Kept:
    B, N = nodes.token_BN.shape
    length_B1, count_B1 = nodes.pos_BN[:, :1], accepted.num_emitted_B[:, None]
    place_K = torch.arange(accepted.path_BK.shape[1], device=count_B1.device)
    pos_BK = length_B1 + place_K
    is_kept_BK = (place_K < count_B1) & (pos_BK >= 0) & (pos_BK < max_len)
    pos_BK = torch.where(is_kept_BK, pos_BK, 0)
    page_BK = slots.page_table_SP[rows.slot_B[:, None], pos_BK // page]
    cell_BK = torch.where(is_kept_BK, page_BK * page + pos_BK % page, trash_cell)
    row_B1 = torch.arange(B, device=count_B1.device)[:, None]
    return Kept(row_B1 * N + accepted.path_BK, pos_BK, cell_BK)


def _tell(
    nodes: Nodes, accepted: Accepted, rows: Rows, slots: Slots, record: Record, max_len: int
) -> None:
    nobody, row_BX = len(slots.length_S) - 1, record.row_BX
    facts = {
        Fact.SLOT: torch.where(rows.is_active_B, rows.slot_B, nobody),
        Fact.GENERATION: slots.generation_S[rows.slot_B],
        # As the verified nodes saw it: another row on the slot cannot have changed it since.
        Fact.CHECK: nodes.pos_BN[:, 0],
        Fact.EMITTED: accepted.num_emitted_B,
        Fact.ACCEPTED: accepted.num_accepted_B,
        Fact.DEPTH: nodes.depth_BN.amax(dim=1),
        Fact.FINISH: accepted.finish_B,
        Fact.MAY_END: _may_end(accepted, rows, slots),
        Fact.ERROR: _error_word(nodes, accepted, rows, slots, max_len),
    }
    row_BX[:-1, : len(Fact)] = torch.stack([facts[fact] for fact in Fact], dim=1)
    row_BX[:-1, len(Fact) :] = accepted.emitted_BK
    row_BX[-1, 0] = record.number
    record.number.add_(1)
    row_B1 = torch.arange(len(rows.slot_B), device=row_BX.device)[:, None]
    for told_BK, drawn_BN in zip(record.told_BK, record.drawn_BN, strict=True):
        # The draw at a path's node is the token emitted at its place.
        told_BK.copy_(drawn_BN[row_B1, accepted.path_BK])


def _may_end(accepted: Accepted, rows: Rows, slots: Slots) -> Tensor:
    place_K = torch.arange(accepted.emitted_BK.shape[1], device=rows.slot_B.device)
    may_end_BK = has_flag(
        slots.token_flag_SV,
        rows.slot_B[:, None],
        accepted.emitted_BK,
        TokenFlag.MAY_END_STRING,
    )
    may_end_BK &= place_K < accepted.num_emitted_B[:, None]
    return torch.where(may_end_BK, place_K + 1, 0).amax(dim=1)


def _error_word(nodes: Nodes, accepted: Accepted, rows: Rows, slots: Slots, max_len: int) -> Tensor:
    """Bits of Error for each live row."""
    vocab, num_B = slots.token_flag_SV.shape[1], accepted.num_emitted_B
    token_BX = torch.cat((nodes.token_BN, nodes.choice_BN), dim=1)
    parent_BN, depth_BN, N = nodes.parent_BN, nodes.depth_BN, nodes.parent_BN.shape[1]
    node_N = torch.arange(N, device=num_B.device)
    parent_depth_BN = depth_BN.gather(1, parent_BN.clamp(0, N - 1))
    parent_depth_BN = torch.where(node_N == 0, -1, parent_depth_BN)
    is_bad = {
        Error.TOKEN: ((token_BX < 0) | (token_BX >= vocab)).any(dim=1),
        Error.PARENT: (
            (parent_BN >= node_N)
            | ((parent_BN < 0) != (node_N == 0))
            | (depth_BN != parent_depth_BN + 1)
        ).any(dim=1),
        # A row may end without a token: cancelled, or with scores that are no numbers.
        Error.EMITTED: (num_B < (accepted.finish_B <= int(Finish.LENGTH)).long())
        | (num_B > accepted.emitted_BK.shape[1]),
        # Pages are there for the prompt and cap_S tokens.
        Error.LENGTH: (nodes.pos_BN[:, 0] + num_B > max_len)
        | (slots.num_out_S[rows.slot_B] + num_B > slots.cap_S[rows.slot_B]),
    }
    word_B = torch.zeros_like(num_B)
    for bit, is_bad_B in is_bad.items():
        word_B = word_B + is_bad_B * bit
    return word_B * rows.is_active_B
