"""The tree of each row as one launch: a warp a row takes the best prefix left, node by node.

What can come next are the next children of the nodes so far, one a node. Each node holds its own:
its sum of log-probs, and which of all these comes first where sums are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.build_tree.reference import (
    FIXED_POINT,
    FLOOR,
    MAX_DEPTH,
    TreeNodes,
    tree_capacity,
)
from ddbatch_kernels.slots import slot_of

_FIXED_POINT = tl.constexpr(FIXED_POINT)
_FLOOR = tl.constexpr(FLOOR)
_NO_CHILD = tl.constexpr(-(2**63))  # MAX_DEPTH floors are more
# Below 2^51 the sum of a float64 and this number is an integer: adding it rounds, half to even.
_ROUND = tl.constexpr(1.5 * 2.0**52)
_IS_WHOLE = tl.constexpr(-(2.0**51))


def build_tree_triton(
    edge_BDRM: Tensor,
    candidate_BDM: Tensor,
    anchor_S: Tensor,
    slot_B: Tensor | None = None,
    length_S: Tensor | None = None,
    pos_BN: Tensor | None = None,
    *,
    out: TreeNodes,
) -> None:
    """build_tree_ref on a GPU."""
    B, D, R, M = edge_BDRM.shape
    N, W = out.ancestor_BNW.shape[1:]
    assert candidate_BDM.shape == (B, D, M), (candidate_BDM.shape, edge_BDRM.shape)
    num_slots = len(anchor_S)
    assert (num_slots if slot_B is None else len(slot_B)) == B, (num_slots, B)
    assert pos_BN is None or (length_S is not None and len(length_S) == num_slots), num_slots
    assert pos_BN is None or pos_BN.shape == (B, N), (B, N)
    assert out.token_BN.shape == out.parent_BN.shape == out.depth_BN.shape == (B, N), (B, N)
    assert W == -(-N // 32), (W, N)
    assert D <= MAX_DEPTH, D
    assert tree_capacity(D, M, N - 1) >= N - 1, (N, D, M)
    tensors = (edge_BDRM, candidate_BDM, anchor_S, slot_B, length_S, pos_BN, *out)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    _build_tree_kernel[(B,)](
        edge_BDRM,
        candidate_BDM,
        anchor_S,
        slot_B,
        length_S,
        pos_BN,
        *out,
        num_slots,
        D,
        R,
        M,
        N,
        W,
        # A whole warp of nodes: sums over a warp are one instruction.
        BLOCK_N=max(32, triton.next_power_of_2(N)),
        NUM_JUMPS=min(D, N - 1).bit_length(),
        num_warps=1,
    )


@triton.jit
def _build_tree_kernel(
    edge_ptr,
    candidate_ptr,
    anchor_ptr,
    slot_ptr,  # None: row b has slot b
    length_ptr,
    pos_ptr,  # None: not asked for
    token_ptr,
    parent_ptr,
    depth_ptr,
    ancestor_ptr,
    num_slots,
    D,
    R,
    M,
    N,
    W,
    BLOCK_N: tl.constexpr,
    NUM_JUMPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    edge_ptr += row * D * R * M
    candidate_ptr += row * D * M
    slot = slot_of(slot_ptr, row, num_slots)
    anchor = tl.load(anchor_ptr + slot)

    node_N = tl.arange(0, BLOCK_N)
    parent_N = tl.zeros([BLOCK_N], tl.int32)
    depth_N = tl.zeros([BLOCK_N], tl.int32)
    rank_N = tl.zeros([BLOCK_N], tl.int32)
    # Of a node's best child that is not in the tree: rank, sum of log-probs, and its place in the
    # lexicographic order of all these children's rank tuples. BLOCK_N: no such node yet.
    next_N = tl.zeros([BLOCK_N], tl.int32)
    first = _fixed_point(tl.load(edge_ptr, mask=N > 1, other=0.0))
    sum_N = tl.where(node_N == 0, first, _NO_CHILD)
    order_N = tl.where(node_N == 0, 0, BLOCK_N)
    for node in range(1, N):
        best = tl.max(sum_N, 0)
        order = tl.min(tl.where(sum_N == best, order_N, BLOCK_N), 0)
        is_parent_N = order_N == order
        parent = tl.sum(tl.where(is_parent_N, node_N, 0), 0)
        depth = tl.sum(tl.where(is_parent_N, depth_N, 0), 0) + 1
        parent_rank = tl.sum(tl.where(is_parent_N, rank_N, 0), 0)
        rank = tl.sum(tl.where(is_parent_N, next_N, 0), 0)
        is_node_N = node_N == node
        parent_N = tl.where(is_node_N, parent, parent_N)
        depth_N = tl.where(is_node_N, depth, depth_N)
        rank_N = tl.where(is_node_N, rank, rank_N)

        # The next sibling stands where the node stood, the node's first child has a place of its
        # own: no tuple lies between the node's and these two, child first.
        own_ptr = edge_ptr + ((depth - 1) * R + parent_rank % R) * M + rank
        has_sibling, has_child = rank + 1 < M, depth < D
        own = _fixed_point(tl.load(own_ptr))
        sibling = _fixed_point(tl.load(own_ptr + 1, mask=has_sibling, other=0.0))
        child_ptr = edge_ptr + (depth * R + rank % R) * M
        child = _fixed_point(tl.load(child_ptr, mask=has_child, other=0.0))
        sibling_sum = tl.where(has_sibling, best - own + sibling, _NO_CHILD)
        child_sum = tl.where(has_child, best + child, _NO_CHILD)
        next_N = tl.where(is_parent_N, rank + 1, next_N)
        sum_N = tl.where(is_parent_N, sibling_sum, tl.where(is_node_N, child_sum, sum_N))
        order_N += (order_N >= order).to(tl.int32)
        order_N = tl.where(is_node_N, order, order_N)

    is_node_N = node_N < N
    is_draft_N = is_node_N & (node_N > 0)
    place_N = (depth_N - 1) * M + rank_N
    token_N = tl.load(candidate_ptr + place_N, mask=is_draft_N, other=0)
    token_N = tl.where(is_draft_N, token_N, anchor)
    tl.store(token_ptr + row * N + node_N, token_N, mask=is_node_N)
    out_parent_N = tl.where(is_draft_N, parent_N, -1).to(tl.int64)
    tl.store(parent_ptr + row * N + node_N, out_parent_N, mask=is_node_N)
    tl.store(depth_ptr + row * N + node_N, depth_N.to(tl.int64), mask=is_node_N)
    if pos_ptr is not None:
        pos_N = tl.load(length_ptr + slot) + depth_N
        tl.store(pos_ptr + row * N + node_N, pos_N, mask=is_node_N)

    # Bits of the nodes from a node upwards, a word at a time; their reach doubles each step.
    bit_N = tl.full([BLOCK_N], 1, tl.int32) << (node_N % 32)
    for word in range(W):
        ancestor_N = tl.where(node_N // 32 == word, bit_N, 0)
        jump_N = parent_N
        for _ in tl.static_range(NUM_JUMPS):
            ancestor_N |= tl.gather(ancestor_N, jump_N, 0)
            jump_N = tl.gather(jump_N, jump_N, 0)
        tl.store(ancestor_ptr + (row * N + node_N) * W + word, ancestor_N, mask=is_node_N)


@triton.jit
def _fixed_point(edge):
    """A float32 log-prob in the units of the reference, which no order of summation changes."""
    units = edge.to(tl.float64) * _FIXED_POINT
    units = tl.where(units > _FLOOR, units, _FLOOR)  # NaN is not larger
    units = tl.where(units < 0.0, units, 0.0)
    # What is no integer is small: float32 has 24 bits.
    units = tl.where(units > _IS_WHOLE, (units + _ROUND) - _ROUND, units)
    return units.to(tl.int64)
