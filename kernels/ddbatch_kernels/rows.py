"""Tensors that the ops of a round share; int64 unless stated. Knows nothing about what ops do.

B rows, S slots, N nodes of a tree (node 0 is the anchor), K places of a path (one more than a tree
is deep), P pages a slot, V vocabulary.
"""

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """slot_B: the home of a row's sequence. is_active_B: bool. An inert row is at nobody's slot."""

    slot_B: Tensor
    is_active_B: Tensor


class Slots(NamedTuple):
    """What is known of sequences. The last slot is nobody's; its counts stay zero.

    length_S: committed tokens. anchor_S: the last emitted token. cap_S: tokens that may be emitted.
    num_out_S: those that were. generation_S: which of a slot's sequences this is. is_cancelled_S:
    bool. page_table_SP: pages. token_flag_SV: uint8 TokenFlag bits.
    """

    length_S: Tensor
    anchor_S: Tensor
    cap_S: Tensor
    num_out_S: Tensor
    generation_S: Tensor
    is_cancelled_S: Tensor
    page_table_SP: Tensor
    token_flag_SV: Tensor


class Nodes(NamedTuple):
    """Verified trees. parent_BN: -1 for the root. depth_BN: 0 for the root. ancestor_BNW: int32 bit
    words (ddbatch_kernels.ancestors). pos_BN: the root stands behind its row's committed tokens.
    choice_BN: the token drawn at a node. is_finite_BN: bool, whether its scores are numbers.
    """

    token_BN: Tensor
    parent_BN: Tensor
    depth_BN: Tensor
    ancestor_BNW: Tensor
    pos_BN: Tensor
    choice_BN: Tensor
    is_finite_BN: Tensor


class Accepted(NamedTuple):
    """What a round keeps of its trees. path_BK: the accepted nodes, root first, 0 beyond.
    emitted_BK: their draws, 0 beyond: the tokens that follow, the bonus token last. num_emitted_B:
    tokens kept of them. num_accepted_B: drafted ones among those. finish_B: Finish.
    """

    path_BK: Tensor
    num_accepted_B: Tensor
    emitted_BK: Tensor
    num_emitted_B: Tensor
    finish_B: Tensor


def has_flag(token_flag_SV: Tensor, slot: Tensor, token: Tensor, bit: int) -> Tensor:
    """Bool: does a TokenFlag bit of the token hold for the slot; tensors that broadcast. What is no
    token is taken for the nearest one: others tell that it is none."""
    return (token_flag_SV[slot, token.clamp(0, token_flag_SV.shape[1] - 1)] & bit) != 0
