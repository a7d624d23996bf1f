"""The loop of a product of few rows with a weight that is read once: x W^T, and what stands around
it: weights asked for ahead of time, and the rest of a norm that ddbatch_kernels.normed begins.

Its end is the caller's: a residual, a gate, rope. T tokens (a tile of them), N rows of the weight
(those of one program), K width of both. The time is that of reading the weight, so a program owns
few of its rows, all of K, and keeps several blocks of K in flight. Programs of the same rows stand
side by side in a grid: x stays in the L2 cache, a large weight would be read again for each tile of
tokens.

A row of x meets no other row: its bits depend on its own elements, K and the launch settings.
"""

import triton
import triton.language as tl

from ddbatch_kernels.overlap import LINE_BYTES, ask_for, gdc_launch_dependents, gdc_wait

# What a program asks for while it waits: its part of a small weight, and of a wide one what takes
# the time that a launch takes; more would stand in the way of the kernel before.
AHEAD_BYTES = tl.constexpr(48 << 10)
AHEAD_BYTES_WIDE = tl.constexpr(16 << 10)
WIDE = tl.constexpr(2048)


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
def await_input(
    weight_ptr,
    weight_stride,
    output_N,  # int64: rows of the weight, all of which exist
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Wait for the kernel before, which makes x; meanwhile the beginning of these rows comes to the
    L2 cache."""
    SIZE: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    LINE: tl.constexpr = LINE_BYTES // SIZE
    BYTES: tl.constexpr = AHEAD_BYTES if K <= WIDE else AHEAD_BYTES_WIDE
    MOST: tl.constexpr = BYTES // SIZE // BLOCK_N
    AHEAD: tl.constexpr = MOST if MOST < K else K
    STEP: tl.constexpr = 8 * LINE
    if OVERLAPS:
        for start in tl.static_range(0, AHEAD, STEP):
            place_K = tl.minimum(start + tl.arange(0, 8) * LINE, K - 1)
            ask_for(weight_ptr + output_N[:, None] * weight_stride + place_K[None, :])
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def normed_product(
    x_ptr,
    x_stride,
    square_ptr,  # None: x is normed
    num_squares,
    norm_eps,
    token_T,  # int64
    is_token_T,
    weight_ptr,
    weight_stride,
    output_N,  # int64: rows of the weight, all of which exist
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """product_tile of a norm that x is the beginning of, divided by the rms of its rows: their
    squares are read ahead of the product and used behind it. IN_ORDER: no tile decides the order in
    which these are added up."""
    if square_ptr is not None:
        place_Y = tl.arange(0, BLOCK_Y)
        square_TY = tl.load(
            square_ptr + token_T[:, None] * num_squares + place_Y[None, :],
            mask=is_token_T[:, None] & (place_Y < num_squares)[None, :],
            other=0.0,
        )
    sum_TN = product_tile(
        x_ptr,
        x_stride,
        token_T,
        is_token_T,
        weight_ptr,
        weight_stride,
        output_N,
        D,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
    )
    if square_ptr is not None:
        if IN_ORDER:
            total_T = sum_pairs(square_TY, BLOCK_T, BLOCK_Y)
        else:
            total_T = tl.sum(square_TY, axis=1)
        sum_TN *= tl.rsqrt(total_T / D + norm_eps)[:, None]
    return sum_TN


@triton.jit
def sum_pairs(x_TY, BLOCK_T: tl.constexpr, BLOCK_Y: tl.constexpr):
    """Over Y, neighbours first, then sums of neighbours: tl.sum's order is that of a layout, which
    the compiler chooses."""
    for step in tl.static_range(16):
        if BLOCK_Y >> step > 1:
            left_TY, right_TY = pairs(x_TY, BLOCK_T, BLOCK_Y >> step)
            x_TY = left_TY + right_TY
    return tl.reshape(x_TY, (BLOCK_T,))


@triton.jit
def pairs(sum_TN, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns 0, 2, 4, .. and 1, 3, 5, ..: a thread holds both of a pair, so nothing moves."""
    return tl.split(tl.reshape(sum_TN, (BLOCK_T, BLOCK_N // 2, 2)))
