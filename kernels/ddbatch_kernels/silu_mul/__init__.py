"""The activation of a gated MLP, element by element."""

from torch import Tensor

from ddbatch_kernels.silu_mul.reference import silu_mul_ref

__all__ = ["silu_mul", "silu_mul_ref"]


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up -> [T, F]; each row holds gate first, then up."""
    if gate_up_T2F.is_cuda:
        from ddbatch_kernels.silu_mul.kernel import silu_mul_triton

        return silu_mul_triton(gate_up_T2F)
    return silu_mul_ref(gate_up_T2F)
