"""residual + x W^T in one launch, ours for few tokens and cuBLAS' for many; both round once.

Ours also scales what it made by the weight of the next norm and sums its squares, those of the
rounded elements: what ddbatch_kernels.normed is about.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.normed import Normed, can_scale
from ddbatch_kernels.overlap import OVERLAP
from ddbatch_kernels.product_table import Op, Tile, Way, tile_of, way_of
from ddbatch_kernels.products import await_input, product_tile, sum_pairs

SQUARE_COLUMNS = tl.constexpr(32)  # at most, of a sum of squares


@triton.jit(do_not_specialize=["T"])
def _linear_add_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    weight_stride,
    residual_ptr,
    residual_stride,
    norm_ptr,
    out_ptr,
    scaled_ptr,  # None: no part of the norm
    square_ptr,
    T,
    D,
    X: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token_T = token_T < T
    output_N = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_TN = is_token_T[:, None] & (output_N < D)[None, :]
    own_N = tl.minimum(output_N, D - 1)
    await_input(weight_ptr, weight_stride, own_N, X, BLOCK_N, OVERLAPS)
    # What the end needs is read first, if registers can hold it: it arrives while the product is
    # made.
    IS_SMALL: tl.constexpr = BLOCK_T * BLOCK_N <= 8192
    residual_ptrs = residual_ptr + token_T[:, None] * residual_stride + output_N[None, :]
    if IS_SMALL:
        residual_TN = tl.load(residual_ptrs, mask=is_TN, other=0.0)
    if scaled_ptr is not None:
        norm_N = tl.load(norm_ptr + output_N, mask=output_N < D, other=0.0)
    sum_TN = product_tile(
        x_ptr,
        x_stride,
        token_T,
        is_token_T,
        weight_ptr,
        weight_stride,
        own_N,
        X,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
    )
    if not IS_SMALL:
        residual_TN = tl.load(residual_ptrs, mask=is_TN, other=0.0)
    out_TN = (residual_TN.to(tl.float32) + sum_TN).to(dtype)
    place_TN = token_T[:, None] * D + output_N[None, :]
    tl.store(out_ptr + place_TN, out_TN, mask=is_TN)
    if scaled_ptr is not None:
        wide_TN = out_TN.to(tl.float32)
        scaled_TN = (wide_TN * norm_N.to(tl.float32)[None, :]).to(dtype)
        tl.store(scaled_ptr + place_TN, scaled_TN, mask=is_TN)
        # A sum for each few columns, so that the width of a tile does not decide which are added.
        COLUMNS: tl.constexpr = min(BLOCK_N, SQUARE_COLUMNS)
        SUMS: tl.constexpr = BLOCK_N // COLUMNS
        square_TN = tl.where(is_TN, wide_TN * wide_TN, 0.0)
        if IN_ORDER:
            square_YN = tl.reshape(square_TN, (BLOCK_T * SUMS, COLUMNS))
            square_TY = tl.reshape(sum_pairs(square_YN, BLOCK_T * SUMS, COLUMNS), (BLOCK_T, SUMS))
        else:
            square_TY = tl.sum(tl.reshape(square_TN, (BLOCK_T, SUMS, COLUMNS)), axis=2)
        place_Y = tl.program_id(1) * SUMS + tl.arange(0, SUMS)
        square_ptrs = square_ptr + token_T[:, None] * (tl.num_programs(1) * SUMS) + place_Y[None, :]
        tl.store(square_ptrs, square_TY, mask=is_token_T[:, None])


def linear_add_triton(
    x_TX: Tensor,
    weight_DX: Tensor,
    residual_TD: Tensor,
    norm_weight_D: Tensor,
    norm_eps: float,
    *,
    in_order: bool = False,
    overwrites: bool = False,
) -> Normed:
    """What linear_add_ref computes, by the way that the table names for these sizes."""
    T, (D, X) = x_TX.shape[0], weight_DX.shape
    if way_of(Op.ADD, T, D, X, x_TX.dtype, in_order=in_order) is Way.CUBLAS:
        out_TD = residual_TD if overwrites else None  # else PyTorch copies it first
        out_TD = torch.addmm(residual_TD, x_TX, weight_DX.t(), out=out_TD)
        return Normed(out_TD, norm_weight_D, norm_eps)
    tile = tile_of(Op.ADD, T, D, X, x_TX.dtype, in_order=in_order)
    return linear_add_fused(x_TX, weight_DX, residual_TD, norm_weight_D, norm_eps, tile)


def linear_add_fused(
    x_TX: Tensor,
    weight_DX: Tensor,
    residual_TD: Tensor,
    norm_weight_D: Tensor,
    norm_eps: float,
    tile: Tile,
) -> Normed:
    """In one launch, with the norm's beginning where the dtype allows it."""
    (T, X), D = x_TX.shape, weight_DX.shape[0]
    check_product(x_TX, weight_DX, vector_D=norm_weight_D)
    assert residual_TD.shape == (T, D), (residual_TD.shape, T, D)
    assert residual_TD.dtype == x_TX.dtype, (residual_TD.dtype, x_TX.dtype)
    assert residual_TD.stride(1) == 1, residual_TD.stride()
    tiles = triton.cdiv(D, tile.outputs)
    sums = tiles * (tile.outputs // min(tile.outputs, SQUARE_COLUMNS.value))
    out_TD = torch.empty((T, D), dtype=x_TX.dtype, device=x_TX.device)
    made = Normed(out_TD, norm_weight_D, norm_eps)
    if can_scale(x_TX.dtype):
        made = made._replace(
            scaled_TD=torch.empty((T, D), dtype=x_TX.dtype, device=x_TX.device),
            square_TY=torch.empty((T, sums), dtype=torch.float32, device=x_TX.device),
        )
    _linear_add_kernel[triton.cdiv(T, tile.tokens), tiles](
        x_TX,
        x_TX.stride(0),
        weight_DX,
        weight_DX.stride(0),
        residual_TD,
        residual_TD.stride(0),
        norm_weight_D,
        out_TD,
        made.scaled_TD,
        made.square_TY,
        T,
        D,
        X,
        tile.tokens,
        tile.outputs,
        tile.depth,
        tile.in_order,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OVERLAP,
    )
    return made


def check_product(x_TX: Tensor, weight_DX: Tensor, *, vector_D: Tensor | None) -> None:
    """What a kernel of a product takes for granted; vector_D: of its bias, or of a norm."""
    D, X = weight_DX.shape
    assert x_TX.shape[1] == X, (x_TX.shape, weight_DX.shape)
    assert x_TX.stride(1) == 1, x_TX.stride()
    assert weight_DX.stride(1) == 1, weight_DX.stride()
    assert x_TX.dtype == weight_DX.dtype, (x_TX.dtype, weight_DX.dtype)
    if vector_D is not None:
        assert vector_D.shape == (D,), (vector_D.shape, D)
        assert vector_D.is_contiguous(), vector_D.stride()
