"""Candidates of each draft position."""

from ddbatch_kernels.top_candidates.reference import top_candidates_ref

top_candidates = top_candidates_ref

__all__ = ["top_candidates", "top_candidates_ref"]
