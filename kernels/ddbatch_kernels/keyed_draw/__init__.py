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
    index_S: Tensor,
    params: DrawParams,
    *,
    num_depths: int,
    has_top_k: bool = True,
    has_top_p: bool = True,
    slot_B: Tensor | None = None,
    out: Draw | None = None,
) -> Draw:
    """The token that each node's float32 scores draw, written into `out` where that is given.

    depth_BN: int64 in 0..num_depths - 1; a node at depth d draws output index index_S + d (from 0)
    of its row's slot, by the slot's params. has_top_k, has_top_p: False where no row uses the
    filter. slot_B: int64, the slots of the rows; None: row b has slot b.
    """
    if logits_BNV.is_cuda:
        from ddbatch_kernels.keyed_draw.kernel import keyed_draw_triton

        draw = keyed_draw_triton
    else:
        draw = keyed_draw_ref
    return draw(
        logits_BNV,
        depth_BN,
        index_S,
        params,
        num_depths=num_depths,
        has_top_k=has_top_k,
        has_top_p=has_top_p,
        slot_B=slot_B,
        out=out,
    )
