"""silu(gate) * up in one pass, for products that are too large to end in it.

Rounded once, where PyTorch also rounds silu(gate). Knows nothing about the product before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.overlap import OVERLAP, gdc_launch_dependents, gdc_wait

BLOCK_F = 512  # 16 bytes a thread in two warps; divides the widths of most models


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, row_stride, F, BLOCK_F: tl.constexpr, OVERLAPS: tl.constexpr
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_place = place < F
    gate_ptrs = gate_up_ptr + token * row_stride + place
    gate = tl.load(gate_ptrs, mask=is_place, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + F, mask=is_place, other=0.0).to(tl.float32)
    out = silu_times(gate, up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * F + place, out, mask=is_place)


def silu_mul_triton(gate_up_T2F: Tensor) -> Tensor:
    """What silu_mul_ref computes, in one launch."""
    T, F = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    assert gate_up_T2F.shape == (T, 2 * F), gate_up_T2F.shape
    assert gate_up_T2F.stride(1) == 1, gate_up_T2F.stride()
    out_TF = torch.empty((T, F), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    grid = (T, triton.cdiv(F, BLOCK_F))
    _silu_mul_kernel[grid](
        gate_up_T2F, out_TF, gate_up_T2F.stride(0), F, BLOCK_F, num_warps=2, **OVERLAP
    )
    return out_TF
