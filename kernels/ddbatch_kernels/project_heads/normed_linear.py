"""RMSNorm(x) W^T + bias in one launch, if the norm was begun: the product of project_heads where
the rest is a launch of its own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.linear_add.kernel import check_product
from ddbatch_kernels.normed import Normed, Operand
from ddbatch_kernels.overlap import OVERLAP
from ddbatch_kernels.product_table import Tile
from ddbatch_kernels.products import await_input, normed_product


@triton.jit(do_not_specialize=["T"])
def _normed_linear_kernel(
    x_ptr,
    x_stride,
    square_ptr,  # None: x is normed
    num_squares,
    norm_eps,
    weight_ptr,
    weight_stride,
    bias_ptr,
    out_ptr,
    T,
    N,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    IN_ORDER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token_T = token_T < T
    output_N = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    own_N = tl.minimum(output_N, N - 1)
    await_input(weight_ptr, weight_stride, own_N, D, BLOCK_N, OVERLAPS)
    # What the end needs is read first: it arrives while the product is made.
    if bias_ptr is not None:
        bias_N = tl.load(bias_ptr + own_N)
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
        own_N,
        D,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
        BLOCK_Y,
        IN_ORDER,
    )
    if bias_ptr is not None:
        sum_TN += bias_N.to(tl.float32)[None, :]
    tl.store(
        out_ptr + token_T[:, None] * N + output_N[None, :],
        sum_TN.to(out_ptr.dtype.element_ty),
        mask=is_token_T[:, None] & (output_N < N)[None, :],
    )


def normed_linear(normed: Normed, weight_ND: Tensor, bias_N: Tensor | None, tile: Tile) -> Tensor:
    """RMSNorm(x) W^T + bias -> [T, N]."""
    own = normed.operand()
    return _launch(own, normed.eps, weight_ND, bias_N, tile, own.x_TD.dtype)


def product(x_TD: Tensor, weight_ND: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """x W^T -> [T, N] in this dtype."""
    return _launch(Operand(x_TD, None), 0.0, weight_ND, None, tile, dtype)


def _launch(
    own: Operand,
    eps: float,
    weight_ND: Tensor,
    bias_N: Tensor | None,
    tile: Tile,
    dtype: torch.dtype,
) -> Tensor:
    (T, D), N = own.x_TD.shape, weight_ND.shape[0]
    check_product(own.x_TD, weight_ND, vector_D=bias_N)
    out_TN = torch.empty((T, N), dtype=dtype, device=own.x_TD.device)
    _normed_linear_kernel[triton.cdiv(T, tile.tokens), triton.cdiv(N, tile.outputs)](
        own.x_TD,
        own.x_TD.stride(0),
        own.square_TY,
        own.num_squares,
        eps,
        weight_ND,
        weight_ND.stride(0),
        bias_N,
        out_TN,
        T,
        N,
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
    return out_TN
