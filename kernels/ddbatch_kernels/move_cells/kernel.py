"""Moves and gathers as one launch: a program takes some layers, or a part of the feature, of one
place. Nothing is read or written for a place that belongs to the trash cell, but its feature.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_BYTES = 16 << 10  # of a plane, that a program moves: 128 a lane


def move_cells_triton(
    k_LXGE: Tensor,
    v_LXGE: Tensor,
    feature_XC: Tensor,
    node_T: Tensor,
    cell_T: Tensor,
    *,
    scratch_cell: int,
    trash_cell: int,
) -> Tensor:
    """move_cells_ref on a GPU. The trash cell is left as it is."""
    L, X, G, E = k_LXGE.shape
    T, C = len(node_T), feature_XC.shape[1]
    assert v_LXGE.shape == k_LXGE.shape, (v_LXGE.shape, k_LXGE.shape)
    assert len(cell_T) == T, (cell_T.shape, T)
    tensors = (k_LXGE, v_LXGE, feature_XC, node_T, cell_T)
    assert all(tensor.is_contiguous() for tensor in tensors)
    feature_TC = torch.empty(T, C, dtype=feature_XC.dtype, device=feature_XC.device)
    BLOCK_X = triton.next_power_of_2(G * E)
    most = PROGRAM_BYTES // k_LXGE.element_size()
    LAYERS = max(1, min(triton.next_power_of_2(L), most // BLOCK_X))
    BLOCK_C = max(1, min(triton.next_power_of_2(C), most))
    layer_parts = triton.cdiv(L, LAYERS)
    _move_cells_kernel[(T, layer_parts + triton.cdiv(C, BLOCK_C))](
        k_LXGE,
        v_LXGE,
        feature_XC,
        feature_TC,
        node_T,
        cell_T,
        L,
        X,
        len(feature_XC),
        layer_parts,
        scratch_cell,
        trash_cell,
        WIDTH=G * E,
        C=C,
        LAYERS=LAYERS,
        BLOCK_X=BLOCK_X,
        BLOCK_C=BLOCK_C,
        num_warps=4,
    )
    return feature_TC


@triton.jit
def _move_cells_kernel(
    k_ptr,
    v_ptr,
    feature_ptr,
    out_ptr,
    node_ptr,
    cell_ptr,
    num_layers,
    num_cells,
    num_nodes,
    layer_parts,
    scratch_cell,
    trash_cell,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    node = tl.load(node_ptr + place)
    node = tl.minimum(tl.maximum(node, 0), num_nodes - 1)
    if part < layer_parts:
        cell = tl.load(cell_ptr + place)
        if (cell != trash_cell) & (cell >= 0) & (cell < num_cells):
            layer = part.to(tl.int64) * LAYERS + tl.arange(0, LAYERS)
            column = tl.arange(0, BLOCK_X)
            is_there = (layer < num_layers)[:, None] & (column < WIDTH)[None, :]
            plane = layer[:, None] * (num_cells.to(tl.int64) * WIDTH) + column[None, :]
            source = plane + (scratch_cell + node) * WIDTH
            target = plane + cell * WIDTH
            k = tl.load(k_ptr + source, mask=is_there)
            v = tl.load(v_ptr + source, mask=is_there)
            tl.store(k_ptr + target, k, mask=is_there)
            tl.store(v_ptr + target, v, mask=is_there)
    else:
        column = (part - layer_parts) * BLOCK_C + tl.arange(0, BLOCK_C)
        value = tl.load(feature_ptr + node * C + column, mask=column < C)
        tl.store(out_ptr + place * C + column, value, mask=column < C)
