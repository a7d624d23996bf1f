"""Norm, projection, rope and the write to cells: in one launch for few tokens, in two where heads
have norms and weights are large, in three for many tokens. All round where the reference does.

In the one launch a program owns pairs (j, j + E / 2) of one head, whose rope needs no other; where
heads have norms, which take a whole head, it owns that. Then there is one program a head, and they
may be too few to read a large weight at full speed.
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
from ddbatch_kernels.project_heads.normed_linear import normed_linear
from ddbatch_kernels.rope_append.kernel import (
    check_heads,
    finish_heads,
    read_angles,
    rope_append_triton,
)
from ddbatch_kernels.rope_append.reference import Heads


@triton.jit(do_not_specialize=["T"])
def _project_heads_kernel(
    x_ptr,
    x_stride,
    square_ptr,  # None: x is normed
    num_squares,
    norm_eps,
    weight_ptr,
    weight_stride,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    head_norm_eps,
    rope_ptr,
    num_positions,
    pos_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cell_ptr,
    num_cells,
    cell_stride,
    T,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    IN_ORDER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    BLOCK_J: tl.constexpr = BLOCK_N // 2
    HALF: tl.constexpr = E // 2
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token_T = token_T < T
    head = tl.program_id(2)
    first = tl.program_id(1) * BLOCK_J
    # Row 2 i of the tile is in the first half of the head, row 2 i + 1 its partner in the second;
    # beyond the last pair they are read again.
    row_N = tl.arange(0, BLOCK_N)
    output_N = head * E + tl.minimum(first + row_N // 2, HALF - 1) + (row_N % 2) * HALF
    output_N = output_N.to(tl.int64)
    await_input(weight_ptr, weight_stride, output_N, D, BLOCK_N, OVERLAPS)
    # What the end needs is read first: it arrives while the product is made.
    pair_J = first + tl.arange(0, BLOCK_J)
    cos_TJ, sin_TJ = read_angles(rope_ptr, num_positions, pos_ptr, token_T, is_token_T, pair_J, E)
    cell_T = tl.load(cell_ptr + token_T, mask=is_token_T, other=-1)
    if bias_ptr is not None:
        bias_N = tl.load(bias_ptr + output_N)
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
    if bias_ptr is not None:
        sum_TN += bias_N.to(tl.float32)[None, :]
    sum_TN = sum_TN.to(weight_ptr.dtype.element_ty).to(tl.float32)
    first_TJ, second_TJ = pairs(sum_TN, BLOCK_T, BLOCK_N)
    is_pair_1J = (pair_J < HALF)[None, :]
    finish_heads(
        tl.where(is_pair_1J, first_TJ, 0.0),
        tl.where(is_pair_1J, second_TJ, 0.0),
        cos_TJ,
        sin_TJ,
        cell_T,
        head,
        token_T,
        is_token_T,
        pair_J,
        q_norm_ptr,
        k_norm_ptr,
        head_norm_eps,
        q_ptr,
        k_cache_ptr,
        v_cache_ptr,
        num_cells,
        cell_stride,
        H,
        G,
        E,
    )


def project_heads_triton(
    normed: Normed,
    qkv_weight_XD: Tensor,
    qkv_bias_X: Tensor | None,
    heads: Heads,
    *,
    in_order: bool = False,
) -> Tensor:
    """What project_heads_ref computes, by the way that the table names for these sizes."""
    T, (N, D), E = normed.x_TD.shape[0], qkv_weight_XD.shape, heads.k_cache_LXGE.shape[3]
    has_norms = heads.q_norm_LE is not None or heads.k_norm_LE is not None
    op, dtype = Op.NORMED_HEADS if has_norms else Op.HEADS, normed.x_TD.dtype
    way = way_of(op, T, N, D, dtype, in_order=in_order)
    if way is Way.ONE_LAUNCH:
        tile = tile_of(op, T, N, D, dtype, in_order=in_order, head_width=E)
        return project_heads_fused(normed, qkv_weight_XD, qkv_bias_X, heads, tile)
    if way is Way.TWO_LAUNCHES:
        tile = tile_of(Op.HEADS, T, N, D, dtype, in_order=in_order)
        qkv_TX = normed_linear(normed, qkv_weight_XD, qkv_bias_X, tile)
    else:
        qkv_TX = F.linear(normed.made(), qkv_weight_XD, qkv_bias_X)
    return rope_append_triton(qkv_TX[None], heads)[0]


def project_heads_fused(
    normed: Normed, qkv_weight_XD: Tensor, qkv_bias_X: Tensor | None, heads: Heads, tile: Tile
) -> Tensor:
    """All in one launch, if the norm was begun; where heads have norms, the tile must hold a whole
    head."""
    own = normed.operand()
    (T, D), (_, num_cells, G, E) = own.x_TD.shape, heads.k_cache_LXGE.shape
    H = qkv_weight_XD.shape[0] // E - 2 * G
    assert qkv_weight_XD.shape[0] == (H + 2 * G) * E, (qkv_weight_XD.shape, H, G, E)
    assert tile.outputs >= E or heads.q_norm_LE is heads.k_norm_LE is None, (tile, E)
    check_product(own.x_TD, qkv_weight_XD, vector_D=qkv_bias_X)
    check_heads(heads, 1, T, own.x_TD.dtype)
    q_THE = torch.empty((T, H, E), dtype=own.x_TD.dtype, device=own.x_TD.device)
    grid = (triton.cdiv(T, tile.tokens), triton.cdiv(E, tile.outputs), H + 2 * G)
    _project_heads_kernel[grid](
        own.x_TD,
        own.x_TD.stride(0),
        own.square_TY,
        own.num_squares,
        normed.eps,
        qkv_weight_XD,
        qkv_weight_XD.stride(0),
        qkv_bias_X,
        heads.q_norm_LE,
        heads.k_norm_LE,
        heads.norm_eps,
        heads.rope_P2E,
        heads.rope_P2E.shape[0],
        heads.pos_T,
        q_THE,
        heads.k_cache_LXGE,
        heads.v_cache_LXGE,
        heads.cell_T,
        num_cells,
        heads.k_cache_LXGE.stride(1),
        T,
        H,
        G,
        E,
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
    return q_THE
