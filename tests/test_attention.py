"""Attention over keys in cache cells equals softmax by its formula, and reads nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from ddbatch_kernels.attention import attention


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 3), (9, 3), (4, 1)])
@pytest.mark.parametrize(
    ("rows", "queries", "keys"), [(1, 1, 1), (3, 7, 20), (2, 5, 5), (3, 1, 65), (2, 9, 4)]
)
def test_attention_is_the_formula_over_visible_keys(
    heads: int, kv_heads: int, rows: int, queries: int, keys: int
) -> None:
    generator = torch.Generator().manual_seed(heads * 100 + queries)
    E, cells = 10, 70

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q = normal(rows, queries, heads, E)
    k_cache, v_cache = normal(cells, kv_heads, E), normal(cells, kv_heads, E)
    addr = torch.randint(cells, (rows, keys), generator=generator)  # a cell may be named twice
    is_visible = torch.rand(rows, queries, keys, generator=generator) < 0.6
    is_visible[:, torch.arange(queries), torch.arange(queries) % keys] = True
    bias = torch.zeros(is_visible.shape).masked_fill(~is_visible, -torch.inf)
    out = attention(q, k_cache, v_cache, addr, bias, scale=0.3)
    assert out.shape == q.shape
    for row in range(rows):
        k, v = k_cache[addr[row]].double(), v_cache[addr[row]].double()
        for query in range(queries):
            seen = is_visible[row, query]
            for head in range(heads):
                own = head // (heads // kv_heads)
                score = k[seen, own] @ q[row, query, head].double() * 0.3
                expected = score.softmax(dim=0) @ v[seen, own]
                error = (out[row, query, head] - expected).norm() / expected.norm()
                assert error < 1e-5


def test_cells_that_no_address_names_are_never_read() -> None:
    generator = torch.Generator().manual_seed(0)
    k_cache = torch.full((9, 1, 4), math.nan)
    k_cache[[2, 5]] = torch.randn(2, 1, 4, generator=generator)
    q = torch.randn(1, 2, 1, 4, generator=generator)
    addr = torch.tensor([[5, 2, 5]])
    out = attention(q, k_cache, k_cache, addr, torch.zeros(1, 2, 3), scale=0.5)
    assert out.isfinite().all()


def test_not_a_number_in_one_rows_keys_reaches_no_other_row() -> None:
    generator = torch.Generator().manual_seed(1)
    q, cache = (torch.randn(shape, generator=generator) for shape in ((3, 2, 2, 4), (9, 1, 4)))
    cache[4] = math.nan
    addr = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    out = attention(q, cache, cache, addr, torch.zeros(3, 2, 3), scale=0.5)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
