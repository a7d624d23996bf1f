"""Draw one token per node: filters, then keyed noise, then the largest score."""

from ddbatch_kernels.keyed_draw.reference import (
    Draw,
    DrawParams,
    gumbel,
    keyed_draw_ref,
    philox4x32,
)

keyed_draw = keyed_draw_ref

__all__ = ["Draw", "DrawParams", "gumbel", "keyed_draw", "keyed_draw_ref", "philox4x32"]
