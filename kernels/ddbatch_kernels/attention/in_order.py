"""Attention whose sums depend on a query's position alone, as two launches.

A query adds its keys up position by position, whether one lies in the pages yet or is an own token
that the query descends from: the same token gets the same bits from plain decoding, from any tree
and from prefill. So keys are cut at absolute multiples of SPLIT, and these into tiles. The first
launch takes the splits of what all queries of a tile share: of a tree the committed keys, up to the
last whole tile. The second adds the splits up, in order; for each query of a tree it goes on where
the last one ended, with the committed keys that are left and the own tokens of the query's path,
each at its position. A tile or a split in which a query sees nothing changes none of its bits.

How many queries stand in a tile decides no bit: tensor cores add up a row of either size alike.
Knows nothing about trees: a path is a list of own tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.attention.reference import RowKeys
from ddbatch_kernels.attention.tiles import LOG2_E, Setting, add_keys, check_inputs, join_split
from ddbatch_kernels.build_tree import MAX_DEPTH
from ddbatch_kernels.overlap import IS_NATIVE, OVERLAP, gdc_launch_dependents, gdc_wait


def in_order_setting(queries: int, width: int, dtype: torch.dtype) -> Setting:
    """The tiles of a launch. queries: (query, head) pairs that share keys; width: of a head,
    padded."""
    # Not every GPU takes 16 and 64 rows by instructions that add up alike (compute capability 10
    # is not known to), and an interpreter leaves them to numpy.
    is_alike = IS_NATIVE and torch.cuda.get_device_capability()[0] in (8, 9, 12)
    is_few = is_alike and queries <= 16
    if dtype == torch.float32:  # no tensor cores, and twice the space
        return Setting(16 if is_few else 32, keys=32, split=256, warps=4, stages=1)
    warps, stages = (4, 3) if width <= 128 else (8, 2)
    return Setting(16 if is_few else 64, keys=64, split=256, warps=warps, stages=stages)


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
    block_e, group = max(16, triton.next_power_of_2(E)), H // G
    shared = in_order_setting(Q * group, block_e, q_BQHE.dtype)
    ends, takes = shared, shared.lanes  # of the second launch, and the lanes of its programs
    path, depth = keys.stop_BQ, 0
    if keys.path_BQD is not None:
        path, depth = keys.path_BQD, keys.path_BQD.shape[2]
        assert path.shape == (B, Q, depth), (path.shape, B, Q)
        assert depth <= MAX_DEPTH + 1, depth
        assert path.is_contiguous(), path.stride()
        ends, takes = in_order_setting(group, block_e, q_BQHE.dtype), group
        assert group <= ends.lanes, (group, ends)
    splits = triton.cdiv(keys.num_keys, shared.split)
    out_BQHE = torch.empty(B, Q, H, E, dtype=q_BQHE.dtype, device=q_BQHE.device)
    # Of each split: sums, and the maximum and the total weight beside them.
    parts = B * G * splits
    part = torch.empty(parts, Q * group, block_e, dtype=torch.float32, device=q_BQHE.device)
    stat = torch.empty(parts, 2, Q * group, dtype=torch.float32, device=q_BQHE.device)
    first = keys.stop_BQ if keys.first_BQ is None else keys.first_BQ
    same = {
        "scale": scale * LOG2_E,
        "G": G,
        "GROUP": group,
        "E": E,
        "PAGE": keys.page,
        "SPLIT": shared.split,
        "HAS_FIRST": keys.first_BQ is not None,
        "HAS_PATH": keys.path_BQD is not None,
        "BLOCK_E": block_e,
        "BLOCK_KEYS": shared.keys,
        **OVERLAP,
    }
    given = (
        q_BQHE,
        k_cache_XGE,
        v_cache_XGE,
        part,
        stat,
        keys.page_table_SP,
        keys.slot_B,
        first,
        keys.stop_BQ,
        Q,
        splits,
        keys.slot_B.stride(0),
        keys.page_table_SP.stride(0),
        *q_BQHE.stride()[:3],
        *k_cache_XGE.stride()[:2],
        *first.stride(),
        *keys.stop_BQ.stride(),
    )
    tiles = triton.cdiv(Q * group, shared.lanes)
    _split_kernel[(B * G, tiles * splits)](
        *given, BLOCK_M=shared.lanes, num_warps=shared.warps, num_stages=shared.stages, **same
    )
    _end_kernel[(B * G, triton.cdiv(Q * group, takes))](
        *given,
        out_ptr=out_BQHE,
        path_ptr=path,
        own_cell=keys.own_cell,
        D=depth,
        BLOCK_M=ends.lanes,
        BLOCK_D=MAX_DEPTH + 1,
        num_warps=ends.warps,
        num_stages=ends.stages,
        **same,
    )
    return out_BQHE


@triton.jit(do_not_specialize=["Q", "splits"])
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
    Q,
    splits,
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
    HAS_PATH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) // G
    head = tl.program_id(0).to(tl.int64) % G
    lane_M = tl.program_id(1) // splits * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1) % splits
    query_M = lane_M // GROUP
    is_lane_M = query_M < Q
    stop_at = stop_ptr + row * stop_stride_b + query_M * stop_stride_q
    stop_M = tl.load(stop_at, mask=is_lane_M, other=0).to(tl.int32)
    last = tl.max(stop_M, axis=0)  # of a tree all queries have the same
    if HAS_PATH:
        last = last // BLOCK_KEYS * BLOCK_KEYS
    start = split * SPLIT
    stop = tl.minimum(start + SPLIT, last)
    if start >= stop:
        return
    e_E = tl.arange(0, BLOCK_E)
    is_e_E = e_E < E
    head_M = head * GROUP + lane_M % GROUP
    at_M = row * q_stride_b + query_M * q_stride_q + head_M * q_stride_h
    is_query_ME = is_lane_M[:, None] & is_e_E[None, :]
    q_ME = tl.load(q_ptr + at_M[:, None] + e_E[None, :], mask=is_query_ME, other=0.0)
    if HAS_FIRST:
        first_at = first_ptr + row * first_stride_b + query_M * first_stride_q
        first_M = tl.load(first_at, mask=is_lane_M, other=0x7FFFFFFF).to(tl.int32)
        # A window leaves most of a long prefix out: whole tiles of it are not even read.
        start = tl.maximum(start, tl.min(first_M, axis=0) // BLOCK_KEYS * BLOCK_KEYS)
    best_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    page_at = page_table_ptr + tl.load(slot_ptr + row * slot_stride) * table_stride
    for at in range(start, stop, BLOCK_KEYS):
        z_Z = at + tl.arange(0, BLOCK_KEYS)
        page_Z = tl.load(page_at + z_Z // PAGE, mask=z_Z < stop, other=0)
        cell_Z = page_Z * PAGE + z_Z % PAGE
        at_ZE = (cell_Z * cell_stride + head * head_stride)[:, None] + e_E[None, :]
        is_there_ZE = (z_Z < stop)[:, None] & is_e_E[None, :]
        k_ZE = tl.load(k_ptr + at_ZE, mask=is_there_ZE, other=0.0)
        v_ZE = tl.load(v_ptr + at_ZE, mask=is_there_ZE, other=0.0)
        s_MZ = tl.dot(q_ME, tl.trans(k_ZE), input_precision="ieee")
        if HAS_FIRST or not HAS_PATH:  # of a tree these keys are seen by all
            sees_MZ = z_Z[None, :] < stop_M[:, None]
            if HAS_FIRST:
                sees_MZ &= z_Z[None, :] >= first_M[:, None]
            s_MZ = tl.where(sees_MZ, s_MZ, float("-inf"))
        best_M, total_M, acc_ME = add_keys(
            s_MZ, v_ZE, best_M, total_M, acc_ME, scale, IN_ORDER=True
        )
    part = tl.program_id(0).to(tl.int64) * splits + split
    part_at = part_ptr + (part * Q * GROUP + lane_M)[:, None] * BLOCK_E + e_E[None, :]
    stat_at = stat_ptr + part * 2 * Q * GROUP + lane_M
    tl.store(part_at, acc_ME, mask=is_lane_M[:, None])
    tl.store(stat_at, best_M, mask=is_lane_M)
    tl.store(stat_at + Q * GROUP, total_M, mask=is_lane_M)


@triton.jit(do_not_specialize=["Q", "splits", "own_cell", "D"])
def _end_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    stat_ptr,
    page_table_ptr,
    slot_ptr,
    first_ptr,
    stop_ptr,
    Q,
    splits,
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
    out_ptr,
    path_ptr,
    own_cell,
    D,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_PATH: tl.constexpr,
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
    place_M = tl.arange(0, BLOCK_M)
    if HAS_PATH:  # the heads of one query
        query = tl.program_id(1)
        lane_M = query * GROUP + place_M
        is_lane_M = place_M < GROUP
    else:
        lane_M = tl.program_id(1) * BLOCK_M + place_M
        is_lane_M = lane_M < Q * GROUP
    query_M = lane_M // GROUP
    stop_at = stop_ptr + row * stop_stride_b + query_M * stop_stride_q
    stop_M = tl.load(stop_at, mask=is_lane_M, other=0).to(tl.int32)
    last = tl.max(stop_M, axis=0)
    e_E = tl.arange(0, BLOCK_E)
    is_e_E = e_E < E
    head_M = head * GROUP + lane_M % GROUP
    best_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    num_splits = last // SPLIT if HAS_PATH else tl.cdiv(last, SPLIT)
    for number in range(num_splits):
        its_best_M, its_total_M, its_acc_ME = _read_split(
            part_ptr, stat_ptr, number, splits, lane_M, is_lane_M, Q * GROUP, BLOCK_E
        )
        best_M, total_M, acc_ME = join_split(
            best_M, total_M, acc_ME, its_best_M, its_total_M, its_acc_ME
        )
    if HAS_PATH:
        at_M = row * q_stride_b + query_M * q_stride_q + head_M * q_stride_h
        is_query_ME = is_lane_M[:, None] & is_e_E[None, :]
        q_ME = tl.load(q_ptr + at_M[:, None] + e_E[None, :], mask=is_query_ME, other=0.0)
        if HAS_FIRST:
            first_at = first_ptr + row * first_stride_b + query_M * first_stride_q
            first_M = tl.load(first_at, mask=is_lane_M, other=0x7FFFFFFF).to(tl.int32)
        path_at = path_ptr + (row * Q + query) * D
        d_D = tl.arange(0, BLOCK_D)
        path_D = tl.load(path_at + d_D, mask=d_D < D, other=-1)
        end = last + tl.sum((path_D >= 0).to(tl.int32), axis=0)
        page_at = page_table_ptr + tl.load(slot_ptr + row * slot_stride) * table_stride
        whole = last // BLOCK_KEYS * BLOCK_KEYS
        # Of the split that the whole tiles end in; nothing where they end with a split.
        has_begun_M = place_M < tl.where(whole > num_splits * SPLIT, GROUP, 0)
        run_best_M, run_total_M, run_acc_ME = _read_split(
            part_ptr, stat_ptr, num_splits, splits, lane_M, has_begun_M, Q * GROUP, BLOCK_E
        )
        for at in range(whole, end, BLOCK_KEYS):
            z_Z = at + tl.arange(0, BLOCK_KEYS)
            is_committed_Z = z_Z < last
            page_Z = tl.load(page_at + z_Z // PAGE, mask=is_committed_Z, other=0)
            is_own_Z = (z_Z < end) & (z_Z >= last)
            own_Z = tl.load(path_at + (z_Z - last), mask=is_own_Z, other=0)
            cell_Z = tl.where(is_own_Z, own_cell + row * Q + own_Z, page_Z * PAGE + z_Z % PAGE)
            at_ZE = (cell_Z * cell_stride + head * head_stride)[:, None] + e_E[None, :]
            is_there_ZE = (z_Z < end)[:, None] & is_e_E[None, :]
            k_ZE = tl.load(k_ptr + at_ZE, mask=is_there_ZE, other=0.0)
            v_ZE = tl.load(v_ptr + at_ZE, mask=is_there_ZE, other=0.0)
            sees_MZ = (z_Z < end)[None, :] & is_lane_M[:, None]
            if HAS_FIRST:
                sees_MZ &= z_Z[None, :] >= first_M[:, None]
            s_MZ = tl.dot(q_ME, tl.trans(k_ZE), input_precision="ieee")
            s_MZ = tl.where(sees_MZ, s_MZ, float("-inf"))
            run_best_M, run_total_M, run_acc_ME = add_keys(
                s_MZ, v_ZE, run_best_M, run_total_M, run_acc_ME, scale, IN_ORDER=True
            )
            if at % SPLIT == SPLIT - BLOCK_KEYS:  # the next tile is of the next split
                best_M, total_M, acc_ME = join_split(
                    best_M, total_M, acc_ME, run_best_M, run_total_M, run_acc_ME
                )
                run_best_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
                run_total_M = tl.zeros([BLOCK_M], tl.float32)
                run_acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        best_M, total_M, acc_ME = join_split(
            best_M, total_M, acc_ME, run_best_M, run_total_M, run_acc_ME
        )
    # Zeros, and no 0 / 0, where no key was visible.
    acc_ME = acc_ME / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    out_at_ME = ((row * Q + query_M) * (G * GROUP) + head_M)[:, None] * E + e_E[None, :]
    is_out_ME = is_lane_M[:, None] & is_e_E[None, :]
    tl.store(out_ptr + out_at_ME, acc_ME.to(out_ptr.dtype.element_ty), mask=is_out_ME)


@triton.jit
def _read_split(
    part_ptr, stat_ptr, number, splits, lane_M, is_there_M, lanes, BLOCK_E: tl.constexpr
):
    """Maximum, total weight and sums of a split as the first launch left them; of one that saw
    nothing where there is none."""
    part = tl.program_id(0).to(tl.int64) * splits + number
    part_at = part_ptr + (part * lanes + lane_M)[:, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    stat_at = stat_ptr + part * 2 * lanes + lane_M
    best_M = tl.load(stat_at, mask=is_there_M, other=float("-inf"))
    total_M = tl.load(stat_at + lanes, mask=is_there_M, other=0.0)
    acc_ME = tl.load(part_at, mask=is_there_M[:, None], other=0.0)
    return best_M, total_M, acc_ME
