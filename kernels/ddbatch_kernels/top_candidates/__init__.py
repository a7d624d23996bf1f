"""Candidates of each draft position."""

from torch import Tensor

from ddbatch_kernels.top_candidates.reference import top_candidates_ref

__all__ = ["top_candidates", "top_candidates_ref"]


def top_candidates(
    logits_BDV: Tensor,
    num_candidates: int,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    log_total_BD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens (int64) and log-probs (float32, at most 0) of the candidates, both [B, D, M], ordered
    by (logit desc, token id asc); logits: float32. Written into `out` where that is given, in its
    dtypes; log_total_BD: gets the log-sum-exp of each position's scores, float32. Where these are
    not all numbers the candidates are still distinct tokens.
    """
    if logits_BDV.is_cuda:
        from ddbatch_kernels.top_candidates.kernel import (  # only a GPU needs Triton
            top_candidates_triton,
        )

        return top_candidates_triton(logits_BDV, num_candidates, out=out, log_total_BD=log_total_BD)
    return top_candidates_ref(logits_BDV, num_candidates, out=out, log_total_BD=log_total_BD)
