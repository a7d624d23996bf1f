"""The loop of a product of few rows with a weight that is read once: x W^T, and what stands around
it: weights asked for ahead of time, and the rest of a norm that ddbatch_kernels.normed begins.

Its end is the caller's: a residual, a gate, rope. T tokens (a tile of them), N rows of the weight
(those of one program), K width of both. The time is that of reading the weight, so a program owns
few of its rows, all of K, and keeps several blocks of K in flight.

A row of x meets no other row: its bits depend on its own elements, K and the launch settings.
"""

import triton
import triton.language as tl

from ddbatch_kernels.overlap import LINE_BYTES, ask_for

# What a program asks for while it waits: what all of them may hold of a large weight at a time.
AHEAD_BYTES = tl.constexpr(48 << 10)


@triton.jit
def product_tile(
    x_ptr,
    x_stride,
    token_T,  # int64
    is_token_T,
    weight_ptr,
    weight_stride,
    output_N,  # int64: rows of the weight, all of which exist
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [BLOCK_T, BLOCK_N]."""
    IS_EVEN: tl.constexpr = K % BLOCK_K == 0
    place_K = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + token_T[:, None] * x_stride + place_K[None, :]
    weight_ptrs = weight_ptr + output_N[None, :] * weight_stride + place_K[:, None]
    sum_TN = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if IS_EVEN:
            x_TK = tl.load(x_ptrs + start, mask=is_token_T[:, None], other=0.0)
            weight_KN = tl.load(weight_ptrs + start)
        else:
            is_place_K = place_K < K - start
            x_TK = tl.load(
                x_ptrs + start, mask=is_token_T[:, None] & is_place_K[None, :], other=0.0
            )
            weight_KN = tl.load(weight_ptrs + start, mask=is_place_K[:, None], other=0.0)
        sum_TN = tl.dot(x_TK, weight_KN, sum_TN, input_precision="ieee")
    return sum_TN


@triton.jit
def ask_for_weight(
    weight_ptr,
    weight_stride,
    output_N,  # int64: rows of the weight, all of which exist
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Have the beginning of these rows brought to the L2 cache."""
    SIZE: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    LINE: tl.constexpr = LINE_BYTES // SIZE
    MOST: tl.constexpr = AHEAD_BYTES // SIZE // BLOCK_N
    AHEAD: tl.constexpr = MOST if MOST < K else K
    STEP: tl.constexpr = 8 * LINE
    for start in tl.static_range(0, AHEAD, STEP):
        place_K = tl.minimum(start + tl.arange(0, 8) * LINE, K - 1)
        ptrs = weight_ptr + output_N[:, None] * weight_stride + place_K[None, :]
        ask_for(ptrs)


@triton.jit
def read_squares(square_ptr, num_squares, token_T, is_token_T, BLOCK_Y: tl.constexpr):
    """float32 [T, BLOCK_Y], zeros beyond. It is read ahead of the product and used behind it."""
    place_Y = tl.arange(0, BLOCK_Y)
    return tl.load(
        square_ptr + token_T[:, None] * num_squares + place_Y[None, :],
        mask=is_token_T[:, None] & (place_Y < num_squares)[None, :],
        other=0.0,
    )


@triton.jit
def norm_scale(square_TY, norm_eps, D: tl.constexpr):
    """1 / rms of each row, [T, 1]."""
    return tl.rsqrt(tl.sum(square_TY, axis=1) / D + norm_eps)[:, None]


@triton.jit
def pairs(sum_TN, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns 0, 2, 4, .. and 1, 3, 5, ..: a thread holds both of a pair, so nothing moves."""
    return tl.split(tl.reshape(sum_TN, (BLOCK_T, BLOCK_N // 2, 2)))
