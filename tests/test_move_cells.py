"""Kept keys and values move to their cells bit for bit, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from conftest import KERNEL_DEVICE
from torch import Tensor

from ddbatch_kernels.move_cells import move_cells_ref
from ddbatch_kernels.move_cells.kernel import move_cells_triton

IS_NATIVE = KERNEL_DEVICE == "cuda"
CELLS, NODES, TRASH, SCRATCH = 40, 21, 33, 40
# Layers, heads, head width, width of a feature: odd ones, more layers than a program takes,
# features of several programs, none.
SHAPES = [(1, 1, 1, 3), (3, 2, 3, 0), (5, 2, 64, 100), (13, 8, 128, 9000)]


def made_planes(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Two planes and the features of nodes."""
    L, G, E, C = shape
    generator = torch.Generator().manual_seed(L)
    sizes = [(L, SCRATCH + NODES, G, E)] * 2 + [(NODES, C)]
    parts = [torch.randn(*size, generator=generator).to(dtype) for size in sizes]
    for part in parts:
        part[..., 1:2] = torch.nan  # bits are moved, not numbers
    return tuple(parts)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(torch.uint8)


def move(op: object, parts: tuple[Tensor, ...], node_T: Tensor, cell_T: Tensor) -> Tensor:
    assert callable(op)
    options = {"scratch_cell": SCRATCH, "trash_cell": TRASH}
    found = op(*parts, node_T.to(parts[0].device), cell_T.to(parts[0].device), **options)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 3, 16, 130] if IS_NATIVE else [1, 7])
def test_cells_move_as_by_the_reference(
    shape: tuple[int, int, int, int], dtype: torch.dtype, count: int
) -> None:
    generator = torch.Generator().manual_seed(count)
    node_T = torch.randint(NODES, (count,), generator=generator)
    home_T = torch.randperm(TRASH, generator=generator)
    home_T = torch.cat((home_T, torch.full((count,), TRASH)))[:count]
    is_kept_T = torch.rand(count, generator=generator) < 0.7
    cell_T = torch.where(is_kept_T, home_T, TRASH)
    expected = made_planes(shape, dtype)
    found = tuple(part.to(KERNEL_DEVICE, copy=True) for part in expected)
    before = bits(found[0][:, TRASH])
    feature_TC = move(move_cells_triton, found, node_T, cell_T)
    assert torch.equal(bits(feature_TC), bits(move(move_cells_ref, expected, node_T, cell_T)))
    assert torch.equal(bits(found[0][:, TRASH]), before)  # an inert lane writes nothing
    for one, other in zip(found[:2], expected[:2], strict=True):
        other[:, TRASH] = one[:, TRASH].cpu()
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("cell", [-1, SCRATCH + NODES, 1 << 40, -(1 << 40)])
def test_a_cell_that_is_none_is_not_written(cell: int) -> None:
    parts = tuple(part.to(KERNEL_DEVICE) for part in made_planes((2, 1, 4, 5), torch.float32))
    before = [bits(part) for part in parts]
    move(move_cells_triton, parts, torch.tensor([3]), torch.tensor([cell]))
    assert all(torch.equal(bits(part), old) for part, old in zip(parts, before, strict=True))


@pytest.mark.parametrize(("node", "nearest"), [(-9, 0), (NODES, NODES - 1), (1 << 40, NODES - 1)])
def test_a_node_that_is_none_is_the_nearest(node: int, nearest: int) -> None:
    parts = tuple(part.to(KERNEL_DEVICE) for part in made_planes((2, 1, 4, 5), torch.float32))
    feature_TC = move(move_cells_triton, parts, torch.tensor([node]), torch.tensor([4]))
    assert torch.equal(bits(feature_TC[0]), bits(parts[2][nearest]))
    assert torch.equal(bits(parts[1][:, 4]), bits(parts[1][:, SCRATCH + nearest]))


@pytest.mark.gpu
@pytest.mark.skipif(not IS_NATIVE, reason="no CUDA device")
def test_cells_beyond_2_to_the_31_elements_are_addressed() -> None:
    L, X, WIDTH = 2, (1 << 31) // 1024 + 50, 1024
    k_LXGE, v_LXGE = (
        torch.zeros(L, X, 8, WIDTH // 8, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    for plane, value in ((k_LXGE, 3.0), (v_LXGE, 5.0)):
        plane[:, X - 1] = value
    one, cell = torch.zeros(1, dtype=torch.long, device="cuda"), X - 20
    options = {"scratch_cell": X - 1, "trash_cell": 0}
    move_cells_triton(k_LXGE, v_LXGE, torch.zeros(1, 0, device="cuda"), one, one + cell, **options)
    for plane, value in ((k_LXGE, 3.0), (v_LXGE, 5.0)):
        assert (plane[:, cell] == value).all()
        assert not plane[:, cell - 1].any()
        assert not plane[:, cell + 1].any()
