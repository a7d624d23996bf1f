"""The token of the largest score, as a plain max. The slow twin of the kernel.

B rows, N nodes, V vocabulary.
"""

from torch import Tensor

from ddbatch_kernels.keyed_draw.reference import Draw, empty_draw


def best_token_ref(logits_BNV: Tensor, *, out: Draw | None = None) -> Draw:
    """Of equal scores the first, that is the lower token id. NaN wins a max, so it is seen."""
    best = logits_BNV.max(dim=-1)
    out = out or empty_draw(logits_BNV)
    out.token_BN.copy_(best.indices)
    out.is_finite_BN.copy_(best.values.isfinite())
    return out
