"""silu(h Wg^T) * (h Wu^T) of h = RMSNorm(x): one launch for few tokens, three for many.

The one launch keeps gate and up in float32 to the end and rounds once.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.linear_add.kernel import check_product
from ddbatch_kernels.normed import Normed
from ddbatch_kernels.overlap import OVERLAP
from ddbatch_kernels.product_table import Op, Tile, Way, tile_of, way_of
from ddbatch_kernels.products import await_input, normed_product, pairs
from ddbatch_kernels.silu_mul.kernel import silu_mul_triton, silu_times


@triton.jit(do_not_specialize=["T"])
def _gated_linear_kernel(
    x_ptr,
    x_stride,
    square_ptr,  # None: x is normed
    num_squares,
    norm_eps,
    weight_ptr,
    weight_stride,
    out_ptr,
    T,
    F,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    IN_ORDER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    BLOCK_F: tl.constexpr = BLOCK_N // 2
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token_T = token_T < T
    first = tl.program_id(1).to(tl.int64) * BLOCK_F
    # Row 2 i of the tile is a gate, row 2 i + 1 its up; beyond the last they are read again.
    row_N = tl.arange(0, BLOCK_N)
    output_N = tl.minimum(first + row_N // 2, F - 1) + (row_N % 2) * F
    await_input(weight_ptr, weight_stride, output_N, D, BLOCK_N, OVERLAPS)
    sum_TN = normed_product(
        x_ptr,
        x_stride,
        square_ptr,
        num_squares,
        norm_eps,
        token_T,
        is_token_T,
        weight_ptr,
        weight_stride,
        output_N,
        D,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
        BLOCK_Y,
        IN_ORDER,
    )
    gate_TF, up_TF = pairs(sum_TN, BLOCK_T, BLOCK_N)
    place_F = first + tl.arange(0, BLOCK_F)
    tl.store(
        out_ptr + token_T[:, None] * F + place_F[None, :],
        silu_times(gate_TF, up_TF).to(out_ptr.dtype.element_ty),
        mask=is_token_T[:, None] & (place_F < F)[None, :],
    )


def gated_linear_triton(normed: Normed, weight_2FD: Tensor, *, in_order: bool = False) -> Tensor:
    """What gated_linear_ref computes, by the way that the table names for these sizes."""
    T, (N, D), dtype = normed.x_TD.shape[0], weight_2FD.shape, normed.x_TD.dtype
    if way_of(Op.GATED, T, N, D, dtype, in_order=in_order) is Way.CUBLAS:
        return gated_linear_split(normed, weight_2FD)
    tile = tile_of(Op.GATED, T, N, D, dtype, in_order=in_order)
    return gated_linear_fused(normed, weight_2FD, tile)


def gated_linear_split(normed: Normed, weight_2FD: Tensor) -> Tensor:
    """Norm, product and activation, a launch each."""
    return silu_mul_triton(F.linear(normed.made(), weight_2FD))


def gated_linear_fused(normed: Normed, weight_2FD: Tensor, tile: Tile) -> Tensor:
    """All in one launch, if the norm was begun."""
    own = normed.operand()
    (T, D), F = own.x_TD.shape, weight_2FD.shape[0] // 2
    assert weight_2FD.shape[0] == 2 * F, weight_2FD.shape
    check_product(own.x_TD, weight_2FD, vector_D=None)
    out_TF = torch.empty((T, F), dtype=own.x_TD.dtype, device=own.x_TD.device)
    grid = (triton.cdiv(T, tile.tokens), triton.cdiv(F, tile.outputs // 2))
    _gated_linear_kernel[grid](
        own.x_TD,
        own.x_TD.stride(0),
        own.square_TY,
        own.num_squares,
        normed.eps,
        weight_2FD,
        weight_2FD.stride(0),
        out_TF,
        T,
        F,
        D,
        tile.tokens,
        tile.outputs,
        tile.depth,
        triton.next_power_of_2(own.num_squares),
        tile.in_order,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OVERLAP,
    )
    return out_TF
