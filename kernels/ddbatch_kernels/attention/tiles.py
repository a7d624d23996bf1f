"""A tile of keys and a split of them, taken into the running softmax of a tile of queries."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.attention.reference import RowKeys

LOG2_E = 1.4426950408889634


class Setting(NamedTuple):
    """How a launch is cut. lanes: (query, head) pairs a program; keys: looked at together; split:
    keys of a split, a multiple of `keys`; warps, stages: as Triton knows them; two_loops: whether
    tiles that need no masks have a loop of their own; the other one begins to read anew. All of it
    may change bits, so it depends on the sizes of a plan alone."""

    lanes: int
    keys: int
    split: int
    warps: int
    stages: int
    two_loops: bool = False


def check_inputs(q_BQHE: Tensor, k_cache_XGE: Tensor, v_cache_XGE: Tensor, keys: RowKeys) -> None:
    """What the kernels of attention take for granted."""
    (B, Q, H, E), G = q_BQHE.shape, k_cache_XGE.shape[1]
    assert k_cache_XGE.shape == v_cache_XGE.shape, (k_cache_XGE.shape, v_cache_XGE.shape)
    assert k_cache_XGE.shape[2] == E, (k_cache_XGE.shape, E)
    assert H % G == 0, (H, G)
    assert keys.stop_BQ.shape == (B, Q), (keys.stop_BQ.shape, B, Q)
    assert keys.page_table_SP.is_contiguous(), keys.page_table_SP.stride()
    assert q_BQHE.stride(-1) == k_cache_XGE.stride(-1) == v_cache_XGE.stride(-1) == 1
    assert k_cache_XGE.stride() == v_cache_XGE.stride()


# What the compiler may contract to one rounding or not is written as one: the same sums stand in
# several kernels, and some must agree.
@triton.jit
def add_keys(s_MZ, v_ZE, best_M, total_M, acc_ME, scale, IN_ORDER: tl.constexpr):
    """Take a tile of keys, by their raw scores, into the running maximum (of scaled scores, powers
    of two), weight and sum. IN_ORDER: the compiler's choice of a layout may not decide the order in
    which weights are added up, so tensor cores add them, as they do the values."""
    new_best_M = tl.maximum(best_M, tl.max(s_MZ, axis=1) * scale)
    # A query that has seen no key yet has no finite maximum.
    shift_M = tl.where(new_best_M == float("-inf"), 0.0, new_best_M)
    p_MZ = tl.exp2(tl.fma(s_MZ, scale, -shift_M[:, None]))
    old_M = tl.exp2(best_M - shift_M)
    rounded_MZ = p_MZ.to(v_ZE.dtype)
    if IN_ORDER:
        one_ZN = tl.full((v_ZE.shape[0], 16), 1.0, v_ZE.dtype)
        weight_M = tl.max(tl.dot(rounded_MZ, one_ZN, input_precision="ieee"), axis=1)
    else:
        weight_M = tl.sum(p_MZ, axis=1)
    total_M = tl.fma(total_M, old_M, weight_M)
    acc_ME = tl.dot(rounded_MZ, v_ZE, acc_ME * old_M[:, None], input_precision="ieee")
    return new_best_M, total_M, acc_ME


@triton.jit
def join_split(best_M, total_M, acc_ME, its_best_M, its_total_M, its_acc_ME):
    """Take the maximum, weight and sum of the next split into the running ones."""
    new_best_M = tl.maximum(best_M, its_best_M)
    shift_M = tl.where(new_best_M == float("-inf"), 0.0, new_best_M)
    old_M, its_M = tl.exp2(best_M - shift_M), tl.exp2(its_best_M - shift_M)
    total_M = tl.fma(total_M, old_M, its_total_M * its_M)
    acc_ME = tl.fma(acc_ME, old_M[:, None], its_acc_ME * its_M[:, None])
    return new_best_M, total_M, acc_ME
