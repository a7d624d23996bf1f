"""Draw one token per node: filters, then keyed noise, then the largest score."""

from torch import Tensor

from ddbatch_kernels.keyed_draw.reference import (
    Draw,
    DrawParams,
    gumbel,
    keyed_draw_ref,
    philox4x32,
)

__all__ = ["Draw", "DrawParams", "gumbel", "keyed_draw", "keyed_draw_ref", "philox4x32"]


def keyed_draw(
    logits_BNV: Tensor,
    depth_BN: Tensor,
    index_B: Tensor,
    params: DrawParams,
    *,
    num_depths: int,
    has_top_k: bool = True,
    has_top_p: bool = True,
) -> Draw:
    """The token that each node's float32 scores draw.

    depth_BN: int64 in 0..num_depths - 1; a node at depth d draws the row's output index
    index_B + d (from 0). has_top_k, has_top_p: False where no row uses the filter.
    """
    if logits_BNV.is_cuda:
        from ddbatch_kernels.keyed_draw.kernel import keyed_draw_triton

        draw = keyed_draw_triton
    else:
        draw = keyed_draw_ref
    return draw(
        logits_BNV,
        depth_BN,
        index_B,
        params,
        num_depths=num_depths,
        has_top_k=has_top_k,
        has_top_p=has_top_p,
    )
