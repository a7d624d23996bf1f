"""Which way a product of a layer is made, and in which tiles: the one table, of sizes alone.

T tokens, N rows of the weight, K their width. Chosen by tests/measure_linears.py and, where they
run, by tests/measure_layers.py on an H200. Knows nothing about kernels.
"""

from enum import Enum
from typing import NamedTuple

import torch


class Op(Enum):
    """Products that have a kernel of their own."""

    ADD = "linear_add"
    GATED = "gated_linear"
    HEADS = "project_heads, and its product where that is a launch of its own"
    NORMED_HEADS = "project_heads, heads with norms"
    SCORES = "linear_float32"


class Way(Enum):
    """How an op is made: all in one Triton kernel; the product in one, the rest in another; the
    product by cuBLAS, with PyTorch's norm before it and an elementwise kernel behind it."""

    ONE_LAUNCH = 1
    TWO_LAUNCHES = 2
    CUBLAS = 3


class Loop(NamedTuple):
    """How a program goes along K: rows of the weight that it owns, length of a block, warps, and
    bytes of shared memory for blocks in flight."""

    outputs: int
    depth: int
    warps: int
    shared: int


class Tile(NamedTuple):
    """Launch settings: tokens x rows of the weight a program, length of a block of K, and stages,
    which are one more than the blocks that shared memory is taken for. in_order: whether T may
    decide no bit."""

    tokens: int
    outputs: int
    depth: int
    warps: int
    stages: int
    in_order: bool = False


class Row(NamedTuple):
    """Of the table: for up to `most` tokens, tokens a program and how it goes along K."""

    most: int
    tokens: int
    loop: Loop


KB = 1 << 10
MOST_SHARED = 227 * KB  # of a program
LARGE = 1 << 22  # elements of a weight that takes longer to read than a kernel to start
# For small weights and for large ones; more tokens than the last row has are cuBLAS's, or, of heads
# with norms, go through two launches.
TABLE: dict[Op, tuple[tuple[Row, ...], tuple[Row, ...]]] = {
    Op.ADD: (
        (
            Row(16, 16, Loop(16, 128, 4, 96 * KB)),
            Row(48, 32, Loop(16, 128, 4, 96 * KB)),
            Row(192, 64, Loop(32, 128, 4, 96 * KB)),
            Row(1536, 64, Loop(64, 64, 8, 80 * KB)),  # 128 tokens would leave the GPU half empty
            Row(2304, 128, Loop(64, 64, 8, 80 * KB)),
        ),
        (Row(16, 16, Loop(32, 128, 4, 96 * KB)), Row(64, 64, Loop(32, 128, 4, 96 * KB))),
    ),
    Op.GATED: (
        (
            Row(16, 16, Loop(32, 64, 4, 96 * KB)),
            Row(32, 32, Loop(32, 64, 4, 96 * KB)),
            Row(128, 64, Loop(64, 64, 4, 96 * KB)),
            Row(256, 128, Loop(64, 64, 8, 72 * KB)),
            Row(384, 64, Loop(128, 64, 8, 96 * KB)),
            Row(768, 128, Loop(128, 64, 8, 96 * KB)),
            Row(2304, 128, Loop(128, 64, 8, 64 * KB)),
        ),
        (Row(16, 16, Loop(32, 128, 4, 96 * KB)), Row(64, 64, Loop(128, 64, 8, 192 * KB))),
    ),
    Op.HEADS: (
        (
            Row(16, 16, Loop(16, 64, 4, 96 * KB)),
            Row(32, 32, Loop(16, 64, 4, 96 * KB)),
            Row(96, 32, Loop(32, 64, 4, 64 * KB)),
            Row(160, 32, Loop(64, 64, 4, 64 * KB)),
            Row(256, 64, Loop(64, 64, 8, 72 * KB)),
            Row(768, 64, Loop(64, 64, 4, 64 * KB)),
            Row(1536, 64, Loop(64, 64, 4, 48 * KB)),
            Row(2304, 128, Loop(64, 64, 8, 72 * KB)),
        ),
        (Row(16, 16, Loop(32, 128, 4, 96 * KB)), Row(64, 64, Loop(64, 128, 4, 192 * KB))),
    ),
    Op.NORMED_HEADS: (
        (
            Row(16, 16, Loop(16, 64, 4, 96 * KB)),
            Row(32, 32, Loop(16, 64, 4, 96 * KB)),
            Row(768, 64, Loop(64, 64, 4, 64 * KB)),
            Row(2304, 128, Loop(64, 64, 8, 72 * KB)),
        ),
        (Row(16, 16, Loop(16, 128, 4, 192 * KB)),),
    ),
}
EVER = 1 << 40
# Sums in order: T decides no bit, though it decides the tile. Tiles have 64 tokens or more, which
# the same instruction of tensor cores takes along K, 16 elements at a time, whatever their sizes;
# where a norm is ended, squares are added up by a tree (products.py). test_products_in_order.py
# holds a GPU to it. float32 has no such instruction, and one tile: that of the first row.
IN_ORDER: dict[Op, tuple[tuple[Row, ...], tuple[Row, ...]]] = {
    Op.ADD: (
        (
            Row(288, 64, Loop(32, 128, 4, 96 * KB)),
            Row(EVER, 128, Loop(64, 64, 8, 80 * KB)),
        ),
        (
            Row(64, 64, Loop(32, 128, 4, 96 * KB)),
            Row(512, 64, Loop(64, 128, 4, 192 * KB)),
            Row(EVER, 128, Loop(128, 64, 8, 160 * KB)),
        ),
    ),
    Op.GATED: (
        (
            Row(128, 64, Loop(64, 64, 4, 96 * KB)),
            Row(384, 64, Loop(128, 64, 4, 72 * KB)),
            Row(EVER, 128, Loop(128, 64, 8, 64 * KB)),
        ),
        (
            Row(128, 64, Loop(128, 64, 8, 192 * KB)),
            Row(EVER, 128, Loop(256, 64, 8, 150 * KB)),
        ),
    ),
    Op.HEADS: (
        (
            Row(128, 64, Loop(32, 64, 4, 48 * KB)),
            Row(768, 64, Loop(64, 64, 4, 64 * KB)),
            Row(EVER, 128, Loop(64, 64, 8, 72 * KB)),
        ),
        (
            Row(128, 64, Loop(64, 128, 4, 192 * KB)),
            Row(EVER, 128, Loop(256, 64, 8, 150 * KB)),
        ),
    ),
    Op.NORMED_HEADS: (
        (
            Row(768, 64, Loop(64, 64, 4, 64 * KB)),
            Row(EVER, 128, Loop(64, 64, 8, 72 * KB)),
        ),
        (),
    ),
    Op.SCORES: (
        (
            Row(128, 64, Loop(128, 64, 8, 96 * KB)),
            Row(EVER, 128, Loop(256, 64, 8, 150 * KB)),
        ),
        (
            Row(128, 64, Loop(128, 64, 8, 192 * KB)),
            Row(EVER, 128, Loop(256, 64, 8, 150 * KB)),
        ),
    ),
}


def way_of(op: Op, T: int, N: int, K: int, dtype: torch.dtype, *, in_order: bool = False) -> Way:
    """The way for these sizes. float32 goes to cuBLAS where sums need no order: without tensor
    cores the rows that fill a tile up cost as much as others."""
    is_large = N * K >= LARGE
    if not in_order and (dtype == torch.float32 or op not in TABLE):
        return Way.CUBLAS
    if most_of(op, is_large, in_order) >= T:
        return Way.ONE_LAUNCH
    if op is Op.NORMED_HEADS and most_of(Op.HEADS, is_large, in_order) >= T:
        return Way.TWO_LAUNCHES
    return Way.CUBLAS


def most_of(op: Op, is_large: bool, in_order: bool) -> int:
    """Tokens that the table's last row is for."""
    rows = (IN_ORDER if in_order else TABLE)[op][is_large]
    return rows[-1].most if rows else 0


def tile_of(
    op: Op,
    T: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    *,
    in_order: bool = False,
    head_width: int = 0,
) -> Tile:
    """The tile of a launch. head_width: of heads with norms, which may not be cut."""
    is_large = N * K >= LARGE
    rows = (IN_ORDER if in_order else TABLE)[op][is_large]
    if in_order and dtype == torch.float32:
        rows = rows[:1]
    _, tokens, loop = next((row for row in rows if row.most >= T), rows[-1])
    loop = whole_head(loop, head_width) if op is Op.NORMED_HEADS else loop
    return make_tile(tokens, K, dtype, loop)._replace(in_order=in_order)


def whole_head(loop: Loop, head_width: int) -> Loop:
    """The loop with as many rows of the weight as a head has, made a power of two."""
    return loop._replace(outputs=max(loop.outputs, 1 << (head_width - 1).bit_length()))


def make_tile(tokens: int, K: int, dtype: torch.dtype, loop: Loop) -> Tile:
    """Fill in what follows from the sizes."""
    depth, warps = loop.depth, loop.warps
    if dtype == torch.float32:
        tokens, depth = 16, 32  # operands lie in registers
    elif depth > 64 and K % depth and K % (depth // 2) == 0:
        depth //= 2  # whole blocks need no masks
    if tokens * loop.outputs > 8192:
        warps = max(warps, 8)  # sums lie in registers
    block = (tokens + loop.outputs) * depth * dtype.itemsize
    stages = max(1, min(loop.shared // block, -(-K // depth))) + 1
    return Tile(tokens, loop.outputs, depth, warps, min(stages, MOST_SHARED // block))
