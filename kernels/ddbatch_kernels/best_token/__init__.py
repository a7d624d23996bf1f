"""The token of the largest score of each node: a greedy choice."""

from torch import Tensor

from ddbatch_kernels.best_token.reference import best_token_ref
from ddbatch_kernels.keyed_draw.reference import Draw

__all__ = ["best_token", "best_token_ref"]


def best_token(logits_BNV: Tensor, *, out: Draw | None = None) -> Draw:
    """The first largest of float32 scores, and whether it is a finite number (NaN wins a max);
    written into `out` where that is given."""
    if logits_BNV.is_cuda:
        from ddbatch_kernels.best_token.kernel import best_token_triton

        return best_token_triton(logits_BNV, out=out)
    return best_token_ref(logits_BNV, out=out)
