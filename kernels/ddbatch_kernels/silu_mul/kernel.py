"""silu(gate) * up in one pass, for products that are too large to end in it.

Rounded once, where PyTorch also rounds silu(gate). Knows nothing about the product before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddbatch_kernels.overlap import OVERLAP, gdc_launch_dependents, gdc_wait

BLOCK = 1024  # elements a program; half as many start no faster than a GPU can launch them


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, num_outputs, F: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < num_outputs
    gate_ptrs = gate_up_ptr + place + place // F * F  # a token's row is as wide as two outputs
    gate = tl.load(gate_ptrs, mask=is_place, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + F, mask=is_place, other=0.0).to(tl.float32)
    out = silu_times(gate, up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, out, mask=is_place)


def silu_mul_triton(gate_up_T2F: Tensor) -> Tensor:
    """What silu_mul_ref computes, in one launch."""
    T, F = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    assert gate_up_T2F.shape == (T, 2 * F), gate_up_T2F.shape
    assert gate_up_T2F.is_contiguous(), gate_up_T2F.stride()
    out_TF = torch.empty((T, F), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    grid = (triton.cdiv(T * F, BLOCK),)
    _silu_mul_kernel[grid](gate_up_T2F, out_TF, T * F, F, BLOCK, num_warps=4, **OVERLAP)
    return out_TF
