"""Rounds as verify leaves them, made at random for the tests of what follows; no test.

Knows the tensors of a round. Knows nothing about models or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ddbatch_kernels.admit import Ready
from ddbatch_kernels.ancestors import pack_ancestors
from ddbatch_kernels.commit_rows import Record
from ddbatch_kernels.facts import Fact, TokenFlag
from ddbatch_kernels.rows import Accepted, Nodes, Rows, Slots

VOCAB, PAGE, PAGES_A_SLOT = 23, 4, 12
MAX_LEN = PAGE * PAGES_A_SLOT
GARBAGE = -77  # in what is to be written


@dataclass
class Round:
    """All that a round's books are kept in."""

    nodes: Nodes
    accepted: Accepted
    rows: Rows
    slots: Slots
    ready: Ready
    record: Record

    def on(self, device: str) -> Round:
        """A copy."""
        return Round(*(copied(getattr(self, part.name), device) for part in fields(self)))

    def commit_options(self) -> dict[str, int]:
        trash_cell = PAGES_A_SLOT * PAGE * (len(self.slots.length_S) - 1) + 1
        return {"page": PAGE, "max_len": MAX_LEN, "trash_cell": trash_cell}


def copied(value: Any, device: str) -> Any:
    """A copy of a tensor, or of the tensors of a tuple."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    parts = [copied(item, device) for item in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def assert_same(found: Any, expected: Any, name: str = "") -> None:
    """Every element of the tensors of two tuples is the same; NaN never is."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, name
        assert torch.equal(found.cpu(), expected), (name, found, expected)
        return
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        own = expected._fields[place] if hasattr(expected, "_fields") else str(place)
        assert_same(one, other, f"{name}.{own}")


def random_trees(
    generator: torch.Generator, B: int, N: int, max_depth: int, luck: float, length_B: Tensor
) -> Nodes:
    """Trees whose siblings hold distinct tokens. luck: how often the draw at a node is a child."""

    def below(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    token, parent = (torch.zeros(B, N, dtype=torch.long) for _ in range(2))
    depth, choice = torch.zeros_like(token), torch.randint(VOCAB, (B, N), generator=generator)
    is_ancestor = torch.eye(N, dtype=torch.bool).repeat(B, 1, 1)
    for row in range(B):
        token[row, 0], parent[row, 0] = below(VOCAB), -1
        num_children, first_token = [0] * N, [below(VOCAB) for _ in range(N)]
        for node in range(1, N):
            # A deep tree now and then: the parent is among the last nodes.
            reach = min(node, 3) if row % 2 else node
            up = node - 1 - below(reach)
            while depth[row, up] == max_depth or num_children[up] == VOCAB:
                up = (up - 1) % node
            parent[row, node], depth[row, node] = up, depth[row, up] + 1
            token[row, node] = (first_token[up] + num_children[up]) % VOCAB
            num_children[up] += 1
            is_ancestor[row, node] |= is_ancestor[row, up]
            if float(torch.rand((), generator=generator)) < luck:
                choice[row, up] = token[row, node]
    return Nodes(
        token,
        parent,
        depth,
        pack_ancestors(is_ancestor),
        length_B[:, None] + depth,
        choice,
        torch.rand(B, N, generator=generator) > 0.05,
    )


def made_round(
    seed: int,
    B: int,
    N: int,
    max_depth: int,
    *,
    luck: float = 0.6,
    num_top: int | None = None,
    stops: float = 0.05,
) -> Round:
    """A round after its verify stage; outputs hold garbage. Some rows are inert, some sequences
    cancelled, some near their caps or their last page."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def chance(p: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < p

    num_slots, K = B + 2, max_depth + 1
    order_S = torch.randperm(num_slots, generator=generator)
    is_active_B = chance(0.8, B)
    slot_B = torch.where(is_active_B, order_S[:B], num_slots)
    num_out_S = ints(1, 9, num_slots + 1)
    flag_SV = chance(stops, num_slots + 1, VOCAB) * TokenFlag.STOP_ID
    flag_SV = flag_SV + chance(0.3, num_slots + 1, VOCAB) * TokenFlag.MAY_END_STRING
    slots = Slots(
        length_S=ints(0, MAX_LEN - K, num_slots + 1) if K < MAX_LEN else num_out_S * 0,
        anchor_S=ints(0, VOCAB, num_slots + 1),
        cap_S=num_out_S + ints(1, 2 * K + 2, num_slots + 1),
        num_out_S=num_out_S,
        generation_S=ints(0, 99, num_slots + 1),
        is_cancelled_S=chance(0.1, num_slots + 1),
        page_table_SP=torch.randperm((num_slots + 1) * PAGES_A_SLOT, generator=generator).unflatten(
            0, (-1, PAGES_A_SLOT)
        ),
        token_flag_SV=flag_SV.to(torch.uint8),
    )
    for tensor_S in (slots.length_S, slots.anchor_S, slots.num_out_S):
        tensor_S[-1] = 0  # nobody's
    ready_Y = torch.cat((order_S, torch.tensor([GARBAGE])))
    head = ints(0, 1000, 1)

    def garbage(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.full(shape, GARBAGE, dtype=dtype)

    drawn = told = ()
    if num_top is not None:
        drawn = (
            torch.randn(B, N, generator=generator),
            ints(0, VOCAB, B, N, num_top).int(),
            torch.randn(B, N, num_top, generator=generator).half(),
        )
        told = tuple(garbage(B, K, *part.shape[2:], dtype=part.dtype) for part in drawn)
    return Round(
        random_trees(generator, B, N, max_depth, luck, slots.length_S[slot_B]),
        Accepted(garbage(B, K), garbage(B), garbage(B, K), garbage(B), garbage(B)),
        Rows(slot_B, is_active_B),
        slots,
        Ready(ready_Y, head, head + 2),
        Record(garbage(B + 1, len(Fact) + K, dtype=torch.int32), ints(0, 9, 1), drawn, told),
    )
