"""What top_k, then top_p of the rest leave of a node's scores / T: all that are not below its bar.

The bar is the largest key such that the tokens not below it weigh enough: each weighs 1 for top_k,
its probability as an integer for top_p. Integers have exact sums in any order, so the bar is exact.
A bracket around the bar is narrowed over the whole scores until at most MAX_LIST tokens are not
below it, mostly one pass; these are listed, and the bracket is halved over the list until it is the
bar. Where more tokens tie with the bar than a list takes, all passes are over the whole scores.

T = B * N nodes, V vocabulary, X places of a list, L lanes of a tile. Knows nothing about noise.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.best_token.kernel import best_of, is_number, node_stride, packed_value
from ddbatch_kernels.keyed_draw.reference import WEIGHT_ONE, DrawParams
from ddbatch_kernels.slots import slot_of

MAX_LIST = 8192
# Lanes of a tile of whole scores and of listed ones, which mostly are few.
TILE = 2048
LIST_TILE = 1024

_WEIGHT_ONE = tl.constexpr(WEIGHT_ONE)
# A probability below exp(-28) of the best one's weighs 0.
_DEEPEST = tl.constexpr(28.0)
# Where the first pass looks: few tokens are above it, and most bars.
_FIRST_DEPTH = tl.constexpr(10.0)
# Scores are spread evenly as values, not as keys; keys end the search of scores that tie.
_VALUE_STEPS = tl.constexpr(6)


def filter_bar(
    logits_BNV: Tensor,
    best_TC: Tensor,
    params: DrawParams,
    slot_B: Tensor | None,
    *,
    has_top_k: bool,
    has_top_p: bool,
    max_list: int = MAX_LIST,
) -> Tensor:
    """float32 [T]; -inf where the row uses neither filter, is greedy, or its best score, packed in
    best_TC, is no number."""
    B, N, V = logits_BNV.shape
    listed_TX = logits_BNV.new_empty(B * N, min(max_list, V))
    bar_T = logits_BNV.new_empty(B * N)
    _filter_bar_kernel[(B * N,)](
        logits_BNV,
        best_TC,
        slot_B,
        params.temperature_B,
        params.top_k_B,
        params.top_p_B,
        listed_TX,
        bar_T,
        len(params.temperature_B),
        N,
        V,
        node_stride(logits_BNV),
        best_TC.shape[1],
        listed_TX.shape[1],
        HAS_TOP_K=has_top_k,
        HAS_TOP_P=has_top_p,
        BEST_BLOCK=triton.next_power_of_2(best_TC.shape[1]),
        TILE=min(TILE, triton.next_power_of_2(V)),
        LIST_TILE=min(LIST_TILE, triton.next_power_of_2(V)),
        num_warps=8,
    )
    return bar_T


@triton.jit
def _key(value):
    """float32 as int64 that sort as the floats do; -0.0 equals 0.0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 of a key."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _part(total, top_p):
    """The part of the whole weight that top_p must leave."""
    need = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    return tl.minimum(tl.maximum(need, 1), total)


@triton.jit
def _weigh(source_ptr, size, divisor, top, bar, is_count, TILE: tl.constexpr):
    """Of scores / divisor that are not below `bar`: weight and number; and the weight of all."""
    weight_L = tl.zeros([TILE], tl.int64)
    total_L = tl.zeros([TILE], tl.int64)
    num_L = tl.zeros([TILE], tl.int32)
    for start in range(0, size, TILE):
        token_L = start + tl.arange(0, TILE)
        score_L = tl.load(source_ptr + token_L, mask=token_L < size, other=float("-inf"))
        scaled_L = tl.div_rn(score_L, divisor)
        # Of lanes beyond the end: none of the count, and exp(-inf) = 0.
        unit_L = tl.where(token_L < size, 1, 0)
        probability_L = (tl.exp(scaled_L - top) * _WEIGHT_ONE).to(tl.int64)
        own_L = tl.where(is_count, unit_L.to(tl.int64), probability_L)
        is_in_L = scaled_L >= bar
        weight_L += tl.where(is_in_L, own_L, 0)
        num_L += tl.where(is_in_L, unit_L, 0)
        total_L += own_L
    return tl.sum(weight_L, axis=0), tl.sum(num_L, axis=0), tl.sum(total_L, axis=0)


@triton.jit
def _between(low, high, top, step):
    """A key between two others."""
    low_value = tl.maximum(_value(low), top - _DEEPEST)
    middle = _key(0.5 * (low_value + _value(high)))
    is_between = (step < _VALUE_STEPS) & (middle > low) & (middle < high)
    return tl.where(is_between, middle, (low + high) >> 1)


@triton.jit
def _list(logits_ptr, V, divisor, bar, listed_ptr, max_list, TILE: tl.constexpr):
    """Write scores / divisor that are not below `bar`, one after the other."""
    num = 0
    for start in range(0, V, TILE):
        token_L = start + tl.arange(0, TILE)
        score_L = tl.load(logits_ptr + token_L, mask=token_L < V, other=float("-inf"))
        scaled_L = tl.div_rn(score_L, divisor)
        is_in_L = (token_L < V) & (scaled_L >= bar)
        unit_L = is_in_L.to(tl.int32)
        num_in = tl.sum(unit_L, axis=0)
        if num_in > 0:
            place_L = num + tl.cumsum(unit_L, axis=0) - 1
            tl.store(listed_ptr + place_L, scaled_L, mask=is_in_L & (place_L < max_list))
            num += num_in
    tl.debug_barrier()  # threads read what others have listed


@triton.jit
def _highest_bar(source_ptr, size, divisor, top, low, high, need, is_count, TILE: tl.constexpr):
    """The largest key from which on tokens weigh `need`; from low on they do, from high on not."""
    while high - low > 1:
        middle = (low + high) >> 1
        weight, _, _ = _weigh(source_ptr, size, divisor, top, _value(middle), is_count, TILE)
        if weight >= need:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _filter_bar_kernel(
    logits_ptr,
    best_ptr,
    slot_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    listed_ptr,
    bar_ptr,
    num_slots,
    N,
    V,
    node_stride,
    num_best,
    max_list,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    BEST_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    LIST_TILE: tl.constexpr,
):
    """One node. Grid (T,)."""
    node = tl.program_id(0).to(tl.int64)
    slot = slot_of(slot_ptr, node // N, num_slots)
    logits_ptr += node * node_stride
    listed_ptr += node * max_list
    best = packed_value(best_of(best_ptr, node, num_best, BEST_BLOCK))
    temperature = tl.load(temperature_ptr + slot)
    top_k, top_p = tl.full((), 0, tl.int64), tl.full((), 1.0, tl.float64)
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + slot)
    if HAS_TOP_P:
        top_p = tl.load(top_p_ptr + slot)
    is_count = (top_k > 0) & (top_k < V)
    bar = tl.full((), float("-inf"), tl.float32)
    if (is_count | (top_p < 1.0)) & (temperature != 0) & is_number(best):
        top = tl.div_rn(best, temperature)
        past_top = _key(top) + 1
        pivot = _key(top - _FIRST_DEPTH)
        weight, num, total = _weigh(logits_ptr, V, temperature, top, _value(pivot), is_count, TILE)
        need = tl.where(is_count, top_k, _part(total, top_p))
        is_enough = weight >= need
        low = tl.where(is_enough, pivot, _key(bar))
        high = tl.where(is_enough, past_top, pivot)
        num = tl.where(is_enough, num, V)
        step = 0
        while (num > max_list) & (high - low > 1):
            pivot = _between(low, high, top, step)
            weight, num_in, _ = _weigh(
                logits_ptr, V, temperature, top, _value(pivot), is_count, TILE
            )
            if weight >= need:
                low, num = pivot, num_in
            else:
                high = pivot
            step += 1
        source_ptr, size, divisor = logits_ptr, V, temperature
        if num <= max_list:
            _list(logits_ptr, V, temperature, _value(low), listed_ptr, max_list, TILE)
            source_ptr, size, divisor = listed_ptr, num, 1.0
        low = _highest_bar(source_ptr, size, divisor, top, low, high, need, is_count, LIST_TILE)
        if is_count & (top_p < 1.0):
            total, _, _ = _weigh(source_ptr, size, divisor, top, _value(low), False, LIST_TILE)
            need = _part(total, top_p)
            low = _highest_bar(
                source_ptr, size, divisor, top, low, past_top, need, False, LIST_TILE
            )
        bar = _value(low)
    tl.store(bar_ptr + node, bar)
