"""The activation of a gated MLP. T tokens, F width of the MLP."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul_ref(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up -> [T, F]; each row holds gate first, then up."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF
