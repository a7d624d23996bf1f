"""Attention whose sums depend on a query's position alone, as two launches.

A query adds its keys up position by position, whether one lies in the pages yet or is an own token
that the query descends from: the same token gets the same bits from plain decoding, from any tree
and from prefill. So keys are cut at absolute multiples of SPLIT. A split of committed keys alone is
shared by a tile of queries; one that reaches beyond them is summed up for each query with the own
tokens of its path, each at its position. The second launch adds the splits up, in order. A tile or
a split in which a query sees nothing changes none of its bits.

Tiles never depend on how many rows or queries there are: a row of a tile is summed up alike
wherever it stands in it. Knows nothing about trees: a path is a list of own tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.attention.reference import RowKeys
from ddbatch_kernels.attention.tiles import LOG2_E, Setting, add_keys, check_inputs, join_split
from ddbatch_kernels.build_tree import MAX_DEPTH
from ddbatch_kernels.overlap import OVERLAP, gdc_launch_dependents, gdc_wait


def in_order_setting(width: int, dtype: torch.dtype) -> Setting:
    """The tiles of a model. width: of a head, padded."""
    if dtype == torch.float32:  # no tensor cores, and twice the space
        return Setting(lanes=32, keys=32, split=256, warps=4, stages=1)
    return Setting(lanes=64, keys=64, split=256, warps=4 if width <= 128 else 8, stages=2)


def attention_in_order_triton(
    q_BQHE: Tensor, k_cache_XGE: Tensor, v_cache_XGE: Tensor, keys: RowKeys, *, scale: float
) -> Tensor:
    """attention_ref on a GPU, for keys.in_order; q's strides are free, but its heads must be dense
    in E. Own tokens are those of keys.path_BQD."""
    B, Q, H, E = q_BQHE.shape
    G = k_cache_XGE.shape[1]
    assert keys.in_order
    check_inputs(q_BQHE, k_cache_XGE, v_cache_XGE, keys)
    assert (keys.path_BQD is None) == (keys.own_BQW is None)
    block_e = max(16, triton.next_power_of_2(E))
    cut = in_order_setting(block_e, q_BQHE.dtype)
    group = H // G
    assert group <= cut.lanes, (group, cut)
    tiles, path, depth, own_splits = triton.cdiv(Q * group, cut.lanes), keys.stop_BQ, 0, 0
    if keys.path_BQD is not None:
        path, depth = keys.path_BQD, keys.path_BQD.shape[2]
        assert path.shape == (B, Q, depth), (path.shape, B, Q)
        assert depth <= MAX_DEPTH + 1, depth
        assert path.is_contiguous(), path.stride()
        own_splits = triton.cdiv(depth - 1, cut.split) + 1
    splits = triton.cdiv(keys.num_keys, cut.split)
    out_BQHE = torch.empty(B, Q, H, E, dtype=q_BQHE.dtype, device=q_BQHE.device)
    # Of each split: sums, and the maximum and the total weight beside them.
    parts = B * G * (splits + own_splits)
    part = torch.empty(parts, Q * group, block_e, dtype=torch.float32, device=q_BQHE.device)
    stat = torch.empty(parts, 2, Q * group, dtype=torch.float32, device=q_BQHE.device)
    first = keys.stop_BQ if keys.first_BQ is None else keys.first_BQ
    _split_kernel[(B * G, tiles * splits + Q * own_splits)](
        q_BQHE,
        k_cache_XGE,
        v_cache_XGE,
        part,
        stat,
        keys.page_table_SP,
        keys.slot_B,
        first,
        keys.stop_BQ,
        path,
        keys.own_cell,
        Q,
        splits,
        own_splits,
        depth,
        keys.slot_B.stride(0),
        keys.page_table_SP.stride(0),
        *q_BQHE.stride()[:3],
        *k_cache_XGE.stride()[:2],
        *first.stride(),
        *keys.stop_BQ.stride(),
        scale * LOG2_E,
        G=G,
        GROUP=group,
        E=E,
        PAGE=keys.page,
        SPLIT=cut.split,
        HAS_FIRST=keys.first_BQ is not None,
        BLOCK_M=cut.lanes,
        BLOCK_E=block_e,
        BLOCK_KEYS=cut.keys,
        BLOCK_D=MAX_DEPTH + 1,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **OVERLAP,
    )
    _join_kernel[(B * G, tiles)](
        part,
        stat,
        out_BQHE,
        keys.stop_BQ,
        Q,
        splits + own_splits,
        own_splits,
        *keys.stop_BQ.stride(),
        G=G,
        GROUP=group,
        E=E,
        SPLIT=cut.split,
        BLOCK_M=cut.lanes,
        BLOCK_E=block_e,
        num_warps=cut.warps,
        **OVERLAP,
    )
    return out_BQHE


@triton.jit(do_not_specialize=["own_cell", "Q", "splits", "own_splits", "D"])
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    stat_ptr,
    page_table_ptr,
    slot_ptr,
    first_ptr,
    stop_ptr,
    path_ptr,
    own_cell,
    Q,
    splits,
    own_splits,
    D,
    slot_stride,
    table_stride,
    q_stride_b,
    q_stride_q,
    q_stride_h,
    cell_stride,
    head_stride,
    first_stride_b,
    first_stride_q,
    stop_stride_b,
    stop_stride_q,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) // G
    head = tl.program_id(0).to(tl.int64) % G
    number = tl.program_id(1)
    tiles = tl.cdiv(Q * GROUP, BLOCK_M)
    is_own = number >= tiles * splits
    # Of a shared split a program takes a tile of lanes, (query, head) pairs; of one with own keys
    # the heads of one query.
    own_number = tl.maximum(number - tiles * splits, 0)
    own_query = own_number // tl.maximum(own_splits, 1)
    place_M = tl.arange(0, BLOCK_M)
    lane_M = tl.where(is_own, own_query * GROUP, number // splits * BLOCK_M) + place_M
    query_M = lane_M // GROUP
    is_lane_M = tl.where(is_own, place_M, query_M) < tl.where(is_own, GROUP, Q)
    stop_at = stop_ptr + row * stop_stride_b + query_M * stop_stride_q
    stop_M = tl.load(stop_at, mask=is_lane_M, other=0).to(tl.int32)
    committed = tl.max(stop_M, axis=0)  # of a tree all queries have the same
    path_at = path_ptr + (row * Q + own_query) * D
    d_D = tl.arange(0, BLOCK_D)
    path_D = tl.load(path_at + d_D, mask=d_D < tl.where(is_own, D, 0), other=-1)
    last = committed + tl.sum((path_D >= 0).to(tl.int32), axis=0)
    stop_M = tl.where(is_lane_M, tl.where(is_own, last, stop_M), 0)
    # The first split that holds own keys, or none at all.
    border = tl.where(own_splits > 0, committed // SPLIT, tl.cdiv(committed, SPLIT))
    split = number % splits
    if is_own:
        split = border + own_number % own_splits
    elif split >= border:
        return
    e_E = tl.arange(0, BLOCK_E)
    is_e_E = e_E < E
    head_M = head * GROUP + lane_M % GROUP
    at_M = row * q_stride_b + query_M * q_stride_q + head_M * q_stride_h
    is_query_ME = is_lane_M[:, None] & is_e_E[None, :]
    q_ME = tl.load(q_ptr + at_M[:, None] + e_E[None, :], mask=is_query_ME, other=0.0)
    start = split * SPLIT
    stop = tl.minimum(start + SPLIT, last)
    if HAS_FIRST:
        first_at = first_ptr + row * first_stride_b + query_M * first_stride_q
        first_M = tl.load(first_at, mask=is_lane_M, other=0x7FFFFFFF).to(tl.int32)
        # A window leaves most of a long prefix out: whole tiles of it are not even read.
        start = tl.maximum(start, tl.min(first_M, axis=0) // BLOCK_KEYS * BLOCK_KEYS)
    best_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    slot = tl.load(slot_ptr + row * slot_stride)
    page_at = page_table_ptr + slot * table_stride
    for at in range(start, stop, BLOCK_KEYS):
        z_Z = at + tl.arange(0, BLOCK_KEYS)
        is_key_Z = z_Z < stop
        page_Z = tl.load(page_at + z_Z // PAGE, mask=z_Z < tl.minimum(stop, committed), other=0)
        is_own_Z = is_key_Z & (z_Z >= committed)
        own_Z = tl.load(path_at + (z_Z - committed), mask=is_own_Z, other=0)
        cell_Z = tl.where(is_own_Z, own_cell + row * Q + own_Z, page_Z * PAGE + z_Z % PAGE)
        at_ZE = (cell_Z * cell_stride + head * head_stride)[:, None] + e_E[None, :]
        is_there_ZE = is_key_Z[:, None] & is_e_E[None, :]
        k_ZE = tl.load(k_ptr + at_ZE, mask=is_there_ZE, other=0.0)
        v_ZE = tl.load(v_ptr + at_ZE, mask=is_there_ZE, other=0.0)
        sees_MZ = z_Z[None, :] < stop_M[:, None]
        if HAS_FIRST:
            sees_MZ &= z_Z[None, :] >= first_M[:, None]
        s_MZ = tl.dot(q_ME, tl.trans(k_ZE), input_precision="ieee")
        s_MZ = tl.where(sees_MZ, s_MZ, float("-inf"))
        best_M, total_M, acc_ME = add_keys(s_MZ, v_ZE, best_M, total_M, acc_ME, scale)
    part = tl.program_id(0).to(tl.int64) * (splits + own_splits) + split
    part_at = part_ptr + (part * Q * GROUP + lane_M)[:, None] * BLOCK_E + e_E[None, :]
    stat_at = stat_ptr + part * 2 * Q * GROUP + lane_M
    tl.store(part_at, acc_ME, mask=is_lane_M[:, None])
    tl.store(stat_at, best_M, mask=is_lane_M)
    tl.store(stat_at + Q * GROUP, total_M, mask=is_lane_M)


@triton.jit(do_not_specialize=["Q", "all_splits", "own_splits"])
def _join_kernel(
    part_ptr,
    stat_ptr,
    out_ptr,
    stop_ptr,
    Q,
    all_splits,
    own_splits,
    stop_stride_b,
    stop_stride_q,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) // G
    head = tl.program_id(0).to(tl.int64) % G
    lane_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M = lane_M // GROUP
    is_lane_M = query_M < Q
    stop_at = stop_ptr + row * stop_stride_b + query_M * stop_stride_q
    committed = tl.max(tl.load(stop_at, mask=is_lane_M, other=0), axis=0)
    num_splits = tl.cdiv(committed, SPLIT)
    if own_splits > 0:
        num_splits = committed // SPLIT + own_splits
    e_E = tl.arange(0, BLOCK_E)
    best_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for number in range(num_splits):
        part = tl.program_id(0).to(tl.int64) * all_splits + number
        part_at = part_ptr + (part * Q * GROUP + lane_M)[:, None] * BLOCK_E + e_E[None, :]
        stat_at = stat_ptr + part * 2 * Q * GROUP + lane_M
        its_best_M = tl.load(stat_at, mask=is_lane_M, other=float("-inf"))
        its_total_M = tl.load(stat_at + Q * GROUP, mask=is_lane_M, other=0.0)
        its_acc_ME = tl.load(part_at, mask=is_lane_M[:, None], other=0.0)
        best_M, total_M, acc_ME = join_split(
            best_M, total_M, acc_ME, its_best_M, its_total_M, its_acc_ME
        )
    # Zeros, and no 0 / 0, where no key was visible.
    acc_ME = acc_ME / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    head_M = head * GROUP + lane_M % GROUP
    out_at_ME = ((row * Q + query_M) * (G * GROUP) + head_M)[:, None] * E + e_E[None, :]
    is_out_ME = is_lane_M[:, None] & (e_E < E)[None, :]
    tl.store(out_ptr + out_at_ME, acc_ME.to(out_ptr.dtype.element_ty), mask=is_out_ME)
