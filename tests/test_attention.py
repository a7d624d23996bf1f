"""Attention over cached and new keys equals softmax by its formula, and reads nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from ddbatch_kernels.attention import attention


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 3), (9, 3), (4, 1)])
@pytest.mark.parametrize(("rows", "queries", "cached"), [(1, 1, 1), (3, 7, 13), (2, 5, 0)])
def test_attention_is_the_formula_over_visible_keys(
    heads: int, kv_heads: int, rows: int, queries: int, cached: int
) -> None:
    generator = torch.Generator().manual_seed(heads * 100 + queries)
    E, cells = 10, 40

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q = normal(rows, queries, heads, E)
    k_new, v_new = normal(rows, queries, kv_heads, E), normal(rows, queries, kv_heads, E)
    k_cache, v_cache = normal(cells, kv_heads, E), normal(cells, kv_heads, E)
    addr = torch.randint(cells, (rows, cached), generator=generator)
    is_visible = torch.rand(rows, queries, cached + queries, generator=generator) < 0.6
    is_visible[:, :, cached:] |= torch.eye(queries, dtype=torch.bool)
    bias = torch.zeros(is_visible.shape).masked_fill(~is_visible, -torch.inf)
    out = attention(q, k_new, v_new, k_cache, v_cache, addr, bias, scale=0.3)
    assert out.shape == q.shape
    for row in range(rows):
        k = torch.cat((k_cache[addr[row]], k_new[row])).double()
        v = torch.cat((v_cache[addr[row]], v_new[row])).double()
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
    out = attention(
        q, q, q, k_cache, k_cache, torch.tensor([[5, 2, 5]]), torch.zeros(1, 2, 5), scale=0.5
    )
    assert out.isfinite().all()
