"""Gathers rows of the embedding, a program each, which also begins their norm."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.normed import Normed, can_scale
from ddbatch_kernels.overlap import OVERLAP, gdc_launch_dependents, gdc_wait


@triton.jit
def _embed_normed_kernel(
    token_ptr,
    embed_ptr,
    embed_stride,
    V,
    norm_ptr,
    out_ptr,
    scaled_ptr,  # None: no part of the norm
    square_ptr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    place = tl.arange(0, BLOCK_D)
    is_place = place < D
    num_read = tl.where((token >= 0) & (token < V), D, 0)
    x = tl.load(embed_ptr + token * embed_stride + place, mask=place < num_read, other=0.0)
    tl.store(out_ptr + row * D + place, x, mask=is_place)
    if scaled_ptr is not None:
        wide = x.to(tl.float32)
        norm = tl.load(norm_ptr + place, mask=is_place, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + row * D + place, (wide * norm).to(x.dtype), mask=is_place)
        tl.store(square_ptr + row, tl.sum(wide * wide, axis=0))


def embed_normed_triton(
    token_T: Tensor, embed_VD: Tensor, norm_weight_D: Tensor, norm_eps: float
) -> Normed:
    """What embed_normed_ref computes, in one launch; a token that does not exist is zeros."""
    T, (V, D) = token_T.shape[0], embed_VD.shape
    assert token_T.shape == (T,), token_T.shape
    assert token_T.is_contiguous(), token_T.stride()
    assert embed_VD.stride(1) == 1, embed_VD.stride()
    assert norm_weight_D.shape == (D,), (norm_weight_D.shape, D)
    assert norm_weight_D.is_contiguous(), norm_weight_D.stride()
    out_TD = torch.empty((T, D), dtype=embed_VD.dtype, device=embed_VD.device)
    made = Normed(out_TD, norm_weight_D, norm_eps)
    if can_scale(embed_VD.dtype):
        made = made._replace(
            scaled_TD=torch.empty((T, D), dtype=embed_VD.dtype, device=embed_VD.device),
            square_TY=torch.empty((T, 1), dtype=torch.float32, device=embed_VD.device),
        )
    block = triton.next_power_of_2(D)
    _embed_normed_kernel[T,](
        token_T,
        embed_VD,
        embed_VD.stride(0),
        V,
        norm_weight_D,
        out_TD,
        made.scaled_TD,
        made.square_TY,
        D,
        block,
        num_warps=min(8, max(1, block // 256)),
        **OVERLAP,
    )
    return made
