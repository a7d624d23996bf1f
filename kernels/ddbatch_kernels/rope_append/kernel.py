"""Norm, rope and the write to cells in one launch: element by element, for any number of layers.

`finish_heads` is also the end of project_heads, which has the sums of its product in registers.
Rounds where the reference does: after the norm and after rope.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.overlap import OVERLAP, gdc_launch_dependents, gdc_wait
from ddbatch_kernels.rope_append.reference import Heads

PAIRS = 512  # (first half, second half) pairs a program: 16 bytes of each half a thread
MAX_TOKENS = 16  # a program; heads are few where tokens are, and programs hide latency


@triton.jit
def read_angles(
    rope_ptr,
    num_positions,
    pos_ptr,
    token_T,
    is_token_T,
    pair_J,
    E: tl.constexpr,
):
    """cos and sin [T, J]: one of each a pair, as the table's halves are equal. A position that does
    not exist reads nothing."""
    pos_T = tl.load(pos_ptr + token_T, mask=is_token_T, other=-1)
    is_read_TJ = ((pos_T >= 0) & (pos_T < num_positions))[:, None] & (pair_J < E // 2)[None, :]
    cos_ptrs = rope_ptr + pos_T[:, None] * (2 * E) + pair_J[None, :]
    cos_TJ = tl.load(cos_ptrs, mask=is_read_TJ, other=0.0)
    sin_TJ = tl.load(cos_ptrs + E, mask=is_read_TJ, other=0.0)
    return cos_TJ, sin_TJ


@triton.jit
def finish_heads(
    first_TJ,  # float32: the pairs' elements in the first half of the head, 0 beyond the head
    second_TJ,
    cos_TJ,
    sin_TJ,
    cell_T,
    head,
    token_T,  # int64
    is_token_T,
    pair_J,
    q_norm_ptr,
    k_norm_ptr,
    norm_eps,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_cells,
    cell_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """Norm, rope and store one head of some tokens, or, where it has no norm, pairs of it. Nothing
    is written to a cell that does not exist."""
    dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    HALF: tl.constexpr = E // 2
    is_pair_J = pair_J < HALF
    is_TJ = is_token_T[:, None] & is_pair_J[None, :]
    if head < H + G:
        if head < H:
            first_TJ, second_TJ = _normed(
                first_TJ, second_TJ, q_norm_ptr, norm_eps, pair_J, is_pair_J, E, dtype
            )
        else:
            first_TJ, second_TJ = _normed(
                first_TJ, second_TJ, k_norm_ptr, norm_eps, pair_J, is_pair_J, E, dtype
            )
        turned_TJ = first_TJ * cos_TJ - second_TJ * sin_TJ
        second_TJ = second_TJ * cos_TJ + first_TJ * sin_TJ
        first_TJ = turned_TJ
    if head < H:
        out_ptrs = q_ptr + token_T[:, None] * (H * E) + head * E + pair_J[None, :]
        tl.store(out_ptrs, first_TJ.to(dtype), mask=is_TJ)
        tl.store(out_ptrs + HALF, second_TJ.to(dtype), mask=is_TJ)
    else:
        is_kept_TJ = is_TJ & ((cell_T >= 0) & (cell_T < num_cells))[:, None]
        place_TJ = cell_T[:, None] * cell_stride + ((head - H) % G) * E + pair_J[None, :]
        if head < H + G:
            tl.store(k_cache_ptr + place_TJ, first_TJ.to(dtype), mask=is_kept_TJ)
            tl.store(k_cache_ptr + place_TJ + HALF, second_TJ.to(dtype), mask=is_kept_TJ)
        else:
            tl.store(v_cache_ptr + place_TJ, first_TJ.to(dtype), mask=is_kept_TJ)
            tl.store(v_cache_ptr + place_TJ + HALF, second_TJ.to(dtype), mask=is_kept_TJ)


@triton.jit
def _normed(
    first_TJ,
    second_TJ,
    weight_ptr,
    norm_eps,
    pair_J,
    is_pair_J,
    E: tl.constexpr,
    dtype: tl.constexpr,
):
    """RMSNorm of whole heads; without a weight they stay as they are."""
    if weight_ptr is not None:
        first_J = tl.load(weight_ptr + pair_J, mask=is_pair_J, other=0.0).to(tl.float32)
        second_J = tl.load(weight_ptr + E // 2 + pair_J, mask=is_pair_J, other=0.0).to(tl.float32)
        square_T = tl.sum(first_TJ * first_TJ + second_TJ * second_TJ, axis=1)
        scale_T1 = tl.rsqrt(square_T / E + norm_eps)[:, None]
        first_TJ = (first_TJ * scale_T1 * first_J[None, :]).to(dtype).to(tl.float32)
        second_TJ = (second_TJ * scale_T1 * second_J[None, :]).to(dtype).to(tl.float32)
    return first_TJ, second_TJ


@triton.jit(do_not_specialize=["T"])
def _rope_append_kernel(
    qkv_ptr,
    qkv_layer_stride,
    qkv_token_stride,
    q_norm_ptr,
    k_norm_ptr,
    norm_eps,
    rope_ptr,
    num_positions,
    pos_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    layer_stride,
    cell_ptr,
    num_cells,
    cell_stride,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    pair_J = tl.arange(0, BLOCK_J)
    is_token_T = token_T < T
    is_TJ = is_token_T[:, None] & (pair_J < E // 2)[None, :]
    row_ptrs = qkv_ptr + layer * qkv_layer_stride + token_T[:, None] * qkv_token_stride
    first_ptrs = row_ptrs + head * E + pair_J[None, :]
    first_TJ = tl.load(first_ptrs, mask=is_TJ, other=0.0).to(tl.float32)
    second_TJ = tl.load(first_ptrs + E // 2, mask=is_TJ, other=0.0).to(tl.float32)
    cos_TJ, sin_TJ = read_angles(rope_ptr, num_positions, pos_ptr, token_T, is_token_T, pair_J, E)
    cell_T = tl.load(cell_ptr + token_T, mask=is_token_T, other=-1)
    if q_norm_ptr is not None:
        q_norm_ptr += layer * E
    if k_norm_ptr is not None:
        k_norm_ptr += layer * E
    finish_heads(
        first_TJ,
        second_TJ,
        cos_TJ,
        sin_TJ,
        cell_T,
        head,
        token_T,
        is_token_T,
        pair_J,
        q_norm_ptr,
        k_norm_ptr,
        norm_eps,
        q_ptr + layer * T * (H * E),
        k_cache_ptr + layer * layer_stride,
        v_cache_ptr + layer * layer_stride,
        num_cells,
        cell_stride,
        H,
        G,
        E,
    )


def rope_append_triton(qkv_LTX: Tensor, heads: Heads) -> Tensor:
    """What rope_append_ref computes, in one launch."""
    (L, T, width), (_, num_cells, G, E) = qkv_LTX.shape, heads.k_cache_LXGE.shape
    H = width // E - 2 * G
    assert width == (H + 2 * G) * E, (width, H, G, E)
    assert H >= 0, (width, G, E)
    assert qkv_LTX.stride(2) == 1, qkv_LTX.stride()
    check_heads(heads, L, T, qkv_LTX.dtype)
    q_LTHE = torch.empty((L, T, H, E), dtype=qkv_LTX.dtype, device=qkv_LTX.device)
    block_j = triton.next_power_of_2(E // 2)
    block_t = min(MAX_TOKENS, max(1, PAIRS // block_j))
    _rope_append_kernel[triton.cdiv(T, block_t), H + 2 * G, L](
        qkv_LTX,
        qkv_LTX.stride(0),
        qkv_LTX.stride(1),
        heads.q_norm_LE,
        heads.k_norm_LE,
        heads.norm_eps,
        heads.rope_P2E,
        heads.rope_P2E.shape[0],
        heads.pos_T,
        q_LTHE,
        heads.k_cache_LXGE,
        heads.v_cache_LXGE,
        heads.k_cache_LXGE.stride(0),
        heads.cell_T,
        num_cells,
        heads.k_cache_LXGE.stride(1),
        T,
        H,
        G,
        E,
        block_t,
        block_j,
        num_warps=2,
        **OVERLAP,
    )
    return q_LTHE


def check_heads(heads: Heads, L: int, T: int, dtype: torch.dtype) -> None:
    """What finish_heads takes for granted."""
    E = heads.k_cache_LXGE.shape[3]
    assert E % 2 == 0, E
    assert heads.rope_P2E.shape[1:] == (2, E), (heads.rope_P2E.shape, E)
    assert heads.rope_P2E.dtype == torch.float32, heads.rope_P2E.dtype
    assert heads.rope_P2E.is_contiguous(), heads.rope_P2E.stride()
    for weight_LE in (heads.q_norm_LE, heads.k_norm_LE):
        if weight_LE is not None:
            assert weight_LE.shape == (L, E), (weight_LE.shape, L, E)
            assert weight_LE.is_contiguous(), weight_LE.stride()
    for plane_LXGE in (heads.k_cache_LXGE, heads.v_cache_LXGE):
        assert plane_LXGE.dtype == dtype, (plane_LXGE.dtype, dtype)
        assert plane_LXGE.shape == heads.k_cache_LXGE.shape, plane_LXGE.shape
        assert plane_LXGE.shape[0] == L, (plane_LXGE.shape, L)
        assert plane_LXGE.stride() == heads.k_cache_LXGE.stride(), plane_LXGE.stride()
        assert plane_LXGE.stride()[2:] == (E, 1), plane_LXGE.stride()
    for place_T in (heads.pos_T, heads.cell_T):
        assert place_T.shape == (T,), (place_T.shape, T)
        assert place_T.dtype == torch.int64, place_T.dtype
        assert place_T.is_contiguous(), place_T.stride()
