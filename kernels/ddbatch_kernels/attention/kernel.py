"""Attention over pages and own tokens as one launch.

A program takes a tile of the queries of one key head (the query heads that share it, packed) and
one split of the prefix; own tokens follow the prefix's last split. Splits begin at absolute
multiples of a fixed number of keys, so a row is summed up in the same order whatever stands beside
it; the split that arrives last adds them up, in order. Knows nothing about trees: visible own
tokens are bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.attention.in_order import attention_in_order_triton
from ddbatch_kernels.attention.reference import RowKeys
from ddbatch_kernels.attention.tiles import LOG2_E, Setting, add_keys, check_inputs, join_split
from ddbatch_kernels.overlap import OVERLAP, ask_for_rows, gdc_launch_dependents, gdc_wait

# (programs without splits up to, keys a split): a few tiles a program where programs do not fill a
# GPU. These and setting_of were found by tests/measure_attention.py and tests/measure_layers.py.
SPLITS = ((16, 128), (132, 256), (528, 1024))
LARGE_SPLIT = 4096


def setting_of(rows: int, kv_heads: int, queries: int, width: int, dtype: torch.dtype) -> Setting:
    """For so many rows; queries: those of a row times the query heads of a key head; width: of a
    head, padded."""
    is_float32, is_narrow = dtype == torch.float32, width <= 64
    # What fits in registers, twice: float32 takes no tensor cores and twice the space.
    most, keys = (32, 32) if is_float32 else (64, 64)
    heads = rows * kv_heads
    is_few = heads <= (32 if is_narrow else 16)
    if is_few or (is_narrow and heads * triton.cdiv(queries, 16) <= 192):
        most = 16  # too few programs: smaller ones are done sooner
    lanes = min(max(16, triton.next_power_of_2(queries)), most)
    programs = heads * triton.cdiv(queries, lanes)
    split = next((keys for most, keys in SPLITS if programs <= most), LARGE_SPLIT)
    # The sums of a split are written and read again, and large ones fill a multiprocessor alone.
    split = max(split, lanes**2 // 16)
    is_many = programs > 132
    warps = 8 if lanes * width > 64 * 128 else 2 if lanes == 16 and is_many else 4
    # A tile's page is known some tiles ahead of its keys.
    stages = 1 if is_float32 else 3 if width <= 128 else 2
    if is_narrow and not is_float32:
        stages = 6 if lanes == 16 or not is_many else 4
    # While there is room a program that looks at more keys at once is done in fewer steps.
    has_room = not is_many or queries > 8 if is_narrow else programs <= 32
    if not is_float32 and width <= 128 and lanes == 16 and has_room:
        keys, warps, stages = 128, 4, 2
    # Where keys are read as fast as they come, or scores take the time, masks cost.
    two_loops = not is_narrow and is_many
    return Setting(lanes, keys, split, warps, stages, two_loops)


def splits_ahead(cut: Setting, block_e: int) -> int:
    """How many splits are read at once, in up to 64 registers a thread."""
    return max(1, min(8, 64 * 32 * cut.warps // (cut.lanes * block_e)))


def attention_triton(
    q_BQHE: Tensor,
    k_cache_XGE: Tensor,
    v_cache_XGE: Tensor,
    keys: RowKeys,
    *,
    scale: float,
    setting: Setting | None = None,
) -> Tensor:
    """attention_ref on a GPU; q's strides are free, but its heads must be dense in E."""
    if keys.in_order:
        return attention_in_order_triton(q_BQHE, k_cache_XGE, v_cache_XGE, keys, scale=scale)
    B, Q, H, E = q_BQHE.shape
    G = k_cache_XGE.shape[1]
    check_inputs(q_BQHE, k_cache_XGE, v_cache_XGE, keys)
    queries, BLOCK_E = H // G * Q, max(16, triton.next_power_of_2(E))
    cut = setting or setting_of(B, G, queries, BLOCK_E, q_BQHE.dtype)
    assert cut.split % cut.keys == 0, cut
    tiles = B * G * triton.cdiv(queries, cut.lanes)
    splits = max(1, triton.cdiv(keys.num_keys, cut.split))
    if keys.arrivals is None:
        keys.arrivals = torch.zeros(tiles, dtype=torch.int32, device=q_BQHE.device)
    assert keys.arrivals.numel() == tiles, (keys.arrivals.shape, tiles)
    out_BQHE = torch.empty(B, Q, H, E, dtype=q_BQHE.dtype, device=q_BQHE.device)
    # Of each split: sums, and the maximum and the total weight beside them.
    parts = tiles * splits if splits > 1 else 1
    part = torch.empty(parts, cut.lanes, BLOCK_E, dtype=torch.float32, device=q_BQHE.device)
    stat = torch.empty(parts, 2, cut.lanes, dtype=torch.float32, device=q_BQHE.device)
    first = keys.stop_BQ if keys.first_BQ is None else keys.first_BQ
    own = keys.stop_BQ
    if keys.own_BQW is not None:
        own = keys.own_BQW.expand(B, Q, -1)
        assert own.stride(-1) == 1 or own.shape[-1] == 1, own.stride()
    _attention_kernel[(tiles, splits)](
        q_BQHE,
        k_cache_XGE,
        v_cache_XGE,
        out_BQHE,
        part,
        stat,
        keys.arrivals,
        keys.page_table_SP,
        keys.slot_B,
        first,
        keys.stop_BQ,
        own,
        keys.own_cell,
        Q,
        keys.slot_B.stride(0),
        keys.page_table_SP.stride(0),
        q_BQHE.stride(0),
        q_BQHE.stride(1),
        q_BQHE.stride(2),
        k_cache_XGE.stride(0),
        k_cache_XGE.stride(1),
        first.stride(0),
        first.stride(1),
        keys.stop_BQ.stride(0),
        keys.stop_BQ.stride(1),
        own.stride(0),
        own.stride(1),
        scale * LOG2_E,
        G=G,
        GROUP=H // G,
        E=E,
        PAGE=keys.page,
        SPLIT=cut.split,
        HAS_FIRST=keys.first_BQ is not None,
        HAS_OWN=keys.own_BQW is not None,
        HAS_TWO_LOOPS=cut.two_loops,
        BLOCK_M=cut.lanes,
        BLOCK_E=BLOCK_E,
        BLOCK_KEYS=cut.keys,
        AHEAD=splits_ahead(cut, BLOCK_E),
        BLOCK_W=triton.next_power_of_2(triton.cdiv(Q, 32)),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **OVERLAP,
    )
    return out_BQHE


@triton.jit(do_not_specialize=["own_cell"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    stat_ptr,
    arrivals_ptr,
    page_table_ptr,
    slot_ptr,
    first_ptr,
    stop_ptr,
    own_ptr,
    own_cell,
    Q,
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
    own_stride_b,
    own_stride_q,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_TWO_LOOPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    tiles = tl.cdiv(Q * GROUP, BLOCK_M)
    row = tile // (G * tiles)
    head = tile // tiles % G
    lane_M = (tile % tiles * BLOCK_M).to(tl.int32) + tl.arange(0, BLOCK_M)
    query_M = lane_M // GROUP
    is_lane_M = query_M < Q
    stop_M = tl.load(
        stop_ptr + row * stop_stride_b + query_M * stop_stride_q, mask=is_lane_M, other=0
    ).to(tl.int32)
    last = tl.max(stop_M, axis=0)
    num_splits = tl.maximum(tl.cdiv(last, SPLIT), 1)
    slot = tl.load(slot_ptr + row * slot_stride)
    page_at = page_table_ptr + slot * table_stride
    if OVERLAPS:
        # So far nothing was read that the kernel before this one may still write: it waited for all
        # before it. Committed keys begin to arrive while it runs.
        for ahead in tl.static_range(min(2 * BLOCK_KEYS, SPLIT) // BLOCK_KEYS):
            z_Z = split * SPLIT + ahead * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            page_Z = tl.load(page_at + z_Z // PAGE, mask=z_Z < last, other=0)
            cell_Z = page_Z * PAGE + z_Z % PAGE
            at_Z = cell_Z * cell_stride + head * head_stride
            ask_for_rows(k_ptr, at_Z, z_Z < last, E)
            ask_for_rows(v_ptr, at_Z, z_Z < last, E)
        gdc_wait()
        gdc_launch_dependents()
    if split >= num_splits:
        return
    e_E = tl.arange(0, BLOCK_E)
    is_e_E = e_E < E
    head_M = head * GROUP + lane_M % GROUP
    at_ME = row * q_stride_b + query_M * q_stride_q + head_M * q_stride_h
    at_ME = at_ME[:, None] + e_E[None, :]
    is_query_ME = is_lane_M[:, None] & is_e_E[None, :]
    q_ME = tl.load(q_ptr + at_ME, mask=is_query_ME, other=0.0)
    best_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    start = split * SPLIT
    stop = tl.minimum(start + SPLIT, last)
    if HAS_FIRST:
        first_at = first_ptr + row * first_stride_b + query_M * first_stride_q
        first_M = tl.load(first_at, mask=is_lane_M, other=0x7FFFFFFF).to(tl.int32)
        # A window leaves most of a long prefix out: whole tiles of it are not even read.
        near = tl.minimum(tl.min(first_M, axis=0), stop)
        start = tl.maximum(start, near // BLOCK_KEYS * BLOCK_KEYS)
    k_at_E = k_ptr + head * head_stride + e_E
    v_at_E = v_ptr + head * head_stride + e_E
    num_whole, end = 0, stop
    if HAS_TWO_LOOPS and not HAS_FIRST:
        # Tiles that all queries see whole need no masks.
        seen_by_all = tl.min(tl.where(is_lane_M, stop_M, 0x7FFFFFFF), axis=0)
        num_whole = tl.maximum(tl.minimum(seen_by_all, stop) - start, 0) // BLOCK_KEYS
    if HAS_OWN:
        word_W = tl.arange(0, BLOCK_W)
        word_at_MW = own_ptr + row * own_stride_b + (query_M * own_stride_q)[:, None] + word_W
        is_word_MW = is_lane_M[:, None] & (word_W * 32 < Q)[None, :]
        word_MW = tl.load(word_at_MW, mask=is_word_MW, other=0)
        # Own tokens are the keys behind the last of the prefix, most often in the same tile.
        end += tl.where(split == num_splits - 1, Q, 0)
    num_tiles = tl.maximum(tl.cdiv(end - start, BLOCK_KEYS), 0)
    for number in range(num_whole):
        at = start + number * BLOCK_KEYS
        z_Z = at + tl.arange(0, BLOCK_KEYS)
        if PAGE % BLOCK_KEYS == 0:
            cell_Z = tl.load(page_at + at // PAGE) * PAGE + z_Z % PAGE
        else:
            cell_Z = tl.load(page_at + z_Z // PAGE) * PAGE + z_Z % PAGE
        at_ZE = (cell_Z * cell_stride)[:, None]
        if E == BLOCK_E:
            k_ZE = tl.load(k_at_E[None, :] + at_ZE)
            v_ZE = tl.load(v_at_E[None, :] + at_ZE)
        else:
            k_ZE = tl.load(k_at_E[None, :] + at_ZE, mask=is_e_E[None, :], other=0.0)
            v_ZE = tl.load(v_at_E[None, :] + at_ZE, mask=is_e_E[None, :], other=0.0)
        s_MZ = tl.dot(q_ME, tl.trans(k_ZE), input_precision="ieee")
        best_M, total_M, acc_ME = add_keys(
            s_MZ, v_ZE, best_M, total_M, acc_ME, scale, IN_ORDER=False
        )
    for number in range(num_whole, num_tiles):
        at = start + number * BLOCK_KEYS
        z_Z = at + tl.arange(0, BLOCK_KEYS)
        if PAGE % BLOCK_KEYS == 0:
            # A tile of own tokens alone reads the last page of the prefix, and makes no use of it.
            page = tl.load(page_at + tl.minimum(at, tl.maximum(stop - 1, 0)) // PAGE)
            cell_Z = page * PAGE + z_Z % PAGE
        else:
            page_Z = tl.load(page_at + z_Z // PAGE, mask=z_Z < stop, other=0)
            cell_Z = page_Z * PAGE + z_Z % PAGE
        if HAS_OWN:
            cell_Z = tl.where(z_Z < stop, cell_Z, own_cell + row * Q + (z_Z - stop))
        at_ZE = (cell_Z * cell_stride)[:, None]
        is_there_ZE = (z_Z < end)[:, None] & is_e_E[None, :]
        k_ZE = tl.load(k_at_E[None, :] + at_ZE, mask=is_there_ZE, other=0.0)
        v_ZE = tl.load(v_at_E[None, :] + at_ZE, mask=is_there_ZE, other=0.0)
        sees_MZ = z_Z[None, :] < tl.minimum(stop_M, stop)[:, None]
        if HAS_FIRST:
            sees_MZ &= z_Z[None, :] >= first_M[:, None]
        if HAS_OWN:
            sees_MZ |= _sees_own(word_MW, z_Z - stop, BLOCK_W)
        s_MZ = tl.dot(q_ME, tl.trans(k_ZE), input_precision="ieee")
        s_MZ = tl.where(sees_MZ, s_MZ, float("-inf"))
        best_M, total_M, acc_ME = add_keys(
            s_MZ, v_ZE, best_M, total_M, acc_ME, scale, IN_ORDER=False
        )
    if num_splits > 1:
        place_M = tl.arange(0, BLOCK_M)
        part = tile * tl.num_programs(1)
        part_at = part_ptr + (part * BLOCK_M + place_M)[:, None] * BLOCK_E + e_E[None, :]
        stat_at = stat_ptr + part * 2 * BLOCK_M + place_M
        # Plain decoding fills few of a tile's lanes: the others are neither written nor read.
        tl.store(part_at + split * BLOCK_M * BLOCK_E, acc_ME, mask=is_lane_M[:, None])
        tl.store(stat_at + split * 2 * BLOCK_M, best_M, mask=is_lane_M)
        tl.store(stat_at + split * 2 * BLOCK_M + BLOCK_M, total_M, mask=is_lane_M)
        # Every thread's stores come before the count that tells of them.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
        if arrived < num_splits - 1:
            return
        tl.store(arrivals_ptr + tile, 0)  # for the next layer
        best_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total_M = tl.zeros([BLOCK_M], tl.float32)
        acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        for first in range(0, num_splits, AHEAD):
            # Unrolled, so that some are read at once: to wait for each would take longer.
            for ahead in tl.static_range(AHEAD):
                number = first + ahead
                is_split_M = lane_M < tl.where(number < num_splits, Q * GROUP, 0)
                # Past the L1: another multiprocessor wrote these.
                its_best_M = tl.load(
                    stat_at + number * 2 * BLOCK_M,
                    mask=is_split_M,
                    other=float("-inf"),
                    cache_modifier=".cg",
                )
                its_total_M = tl.load(
                    stat_at + number * 2 * BLOCK_M + BLOCK_M,
                    mask=is_split_M,
                    other=0.0,
                    cache_modifier=".cg",
                )
                its_acc_ME = tl.load(
                    part_at + number * BLOCK_M * BLOCK_E,
                    mask=is_split_M[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                best_M, total_M, acc_ME = join_split(
                    best_M, total_M, acc_ME, its_best_M, its_total_M, its_acc_ME
                )
    # Zeros, and no 0 / 0, where no key was visible.
    acc_ME = acc_ME / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    out_at_ME = ((row * Q + query_M) * (G * GROUP) + head_M)[:, None] * E + e_E[None, :]
    tl.store(out_ptr + out_at_ME, acc_ME.to(out_ptr.dtype.element_ty), mask=is_query_ME)


@triton.jit
def _sees_own(word_MW, own_Z, BLOCK_W: tl.constexpr):
    """Bool [BLOCK_M, BLOCK_KEYS]: the bits of these own tokens; those below 0 are none."""
    number_W = tl.arange(0, BLOCK_W)
    for word in tl.static_range(BLOCK_W):
        word_M = tl.sum(tl.where((number_W == word)[None, :], word_MW, 0), axis=1)
        is_in_word_Z = (own_Z >= word * 32) & (own_Z < word * 32 + 32)
        bit_MZ = (word_M[:, None] >> (own_Z & 31)[None, :]) & 1
        is_set_MZ = (bit_MZ != 0) & is_in_word_Z[None, :]
        if word == 0:
            sees_MZ = is_set_MZ
        else:
            sees_MZ |= is_set_MZ
    return sees_MZ
