"""The token of the largest score, as a plain max. The slow twin of the kernel.

B rows, N nodes, V vocabulary.
"""

from torch import Tensor

from ddbatch_kernels.keyed_draw.reference import Draw


def best_token_ref(logits_BNV: Tensor) -> Draw:
    """Of equal scores the first, that is the lower token id. NaN wins a max, so it is seen."""
    best = logits_BNV.max(dim=-1)
    return Draw(best.indices, best.values.isfinite())
