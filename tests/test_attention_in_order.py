"""Attention in the order of positions: the formula, and the same bits from a tree as from pages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import KERNEL_DEVICE
from test_attention import Case, assert_near, random_case

from ddbatch_kernels.ancestors import pack_ancestors, unpack_ancestors, unpack_paths
from ddbatch_kernels.attention.in_order import attention_in_order_triton

pytestmark = pytest.mark.usefixtures("like_a_gpu")

IS_NATIVE = KERNEL_DEVICE == "cuda"
BUDGETS = range(1, 129) if IS_NATIVE else [1, 7, 16, 33, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if IS_NATIVE else [torch.float32]


def in_order(case: Case, window: int | None = None) -> Case:
    """The same case, own tokens by their paths, and a window by positions on these."""
    keys = case.keys
    if keys.own_BQW is None:
        return replace(case, keys=replace(keys, in_order=True))
    sees_BQQ = unpack_ancestors(keys.own_BQW)
    depth_BQ = sees_BQQ.sum(dim=2) - 1
    pos_BQ, first_BQ = keys.stop_BQ + depth_BQ.clamp(min=0), None
    path_BQD = unpack_paths(keys.own_BQW, max(1, 1 + int(depth_BQ.max())))
    if window is not None:
        first_BQ = (pos_BQ - window + 1).clamp(min=0)
        sees_BQQ = sees_BQQ & (pos_BQ[:, None] >= first_BQ[..., None])
    keys = replace(
        keys,
        own_BQW=pack_ancestors(sees_BQQ),
        first_BQ=first_BQ,
        in_order=True,
        path_BQD=path_BQD,
    )
    return replace(case, keys=keys)


def in_pages(case: Case) -> list[tuple[int, int, Case]]:
    """Each query of each row of a tree as plain decoding would meet it: alone in its row, all keys
    of its path in the pages but its own. (row, query, case)."""
    keys, found = case.keys, []
    assert keys.path_BQD is not None
    for row in range(len(keys.slot_B)):
        for query in range(keys.stop_BQ.shape[1]):
            path = [int(node) for node in keys.path_BQD[row, query] if node >= 0]
            k, v = case.k_XGE.clone(), case.v_XGE.clone()
            length = int(keys.stop_BQ[row, query])
            table = keys.page_table_SP[keys.slot_B[row]]
            own = keys.own_cell + row * keys.stop_BQ.shape[1]
            for pos, node in enumerate(path[:-1], start=length):
                cell = int(table[pos // keys.page]) * keys.page + pos % keys.page
                k[cell], v[cell] = k[own + node], v[own + node]
            for plane in (k, v):
                plane[keys.own_cell] = plane[own + path[-1]].clone()
            alone = replace(
                keys,
                slot_B=keys.slot_B[row : row + 1],
                stop_BQ=torch.tensor([[length + len(path) - 1]]),
                own_BQW=torch.ones(1, 1, 1, dtype=torch.int32),
                path_BQD=torch.zeros(1, 1, 1, dtype=torch.int32),
                first_BQ=None
                if keys.first_BQ is None
                else keys.first_BQ[row : row + 1, query : query + 1],
            )
            q_BQHE = case.q_BQHE[row : row + 1, query : query + 1]
            found.append((row, query, Case(q_BQHE, k, v, alone, case.scale)))
    return found


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 10), (4, 1, 64)])
@pytest.mark.parametrize(
    ("rows", "queries", "longest", "page"),
    [(1, 1, 1, 64), (3, 7, 20, 8), (2, 33, 300, 64), (3, 1, 600, 16), (1, 40, 250, 64)],
)
@pytest.mark.parametrize("kind", ["tree", "prefill"])
def test_sums_in_order_are_the_formula(
    rows: int,
    queries: int,
    longest: int,
    page: int,
    heads: int,
    kv_heads: int,
    width: int,
    kind: str,
) -> None:
    case = in_order(
        random_case(
            rows,
            queries,
            longest,
            page=page,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            kind=kind,
            seed=queries,
        )
    )
    assert_near(case.to(KERNEL_DEVICE).run(attention_in_order_triton), case.formula())


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget_sees_its_tree_in_order(budget: int) -> None:
    case = random_case(2, budget + 1, 260, width=16, heads=2, kv_heads=1, seed=budget)
    case = in_order(case)
    assert_near(case.to(KERNEL_DEVICE).run(attention_in_order_triton), case.formula())


@pytest.mark.parametrize("window", [1, 3, 70])
def test_a_window_hides_what_is_far_in_order(window: int) -> None:
    tree = in_order(random_case(2, 5, 270), window)
    piece = in_order(random_case(2, 5, 270, kind="prefill", window=window))
    for case in (tree, piece):
        assert_near(case.to(KERNEL_DEVICE).run(attention_in_order_triton), case.formula())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("longest", [255, 256, 259])
@pytest.mark.parametrize("window", [None, 70])
def test_a_node_of_a_tree_has_the_bits_of_plain_decoding(
    longest: int, window: int | None, dtype: torch.dtype
) -> None:
    """On both sides of a border between splits. Triton's interpreter leaves products of tiles to
    numpy: there too a row's bits are its own, since all tiles are of one size."""
    tree = in_order(random_case(2, 9, longest, width=16, seed=longest), window)
    out = tree.to(KERNEL_DEVICE, dtype).run(attention_in_order_triton)
    assert not out.isnan().any()
    for row, query, alone in in_pages(tree):
        told = alone.to(KERNEL_DEVICE, dtype).run(attention_in_order_triton)
        assert torch.equal(told[0, 0], out[row, query]), (row, query)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_piece_of_a_prompt_has_the_bits_of_its_tokens_alone(dtype: torch.dtype) -> None:
    case = in_order(random_case(2, 70, 240, kind="prefill", width=16, seed=3))
    out = case.to(KERNEL_DEVICE, dtype).run(attention_in_order_triton)
    for row, query in [(1, 0), (1, 15), (0, 3), (1, 17), (1, 69)]:
        keys = replace(
            case.keys,
            slot_B=case.keys.slot_B[row : row + 1],
            stop_BQ=case.keys.stop_BQ[row : row + 1, query : query + 1],
        )
        q_BQHE = case.q_BQHE[row : row + 1, query : query + 1]
        alone = Case(q_BQHE, case.k_XGE, case.v_XGE, keys, case.scale)
        told = alone.to(KERNEL_DEVICE, dtype).run(attention_in_order_triton)
        assert torch.equal(told[0, 0], out[row, query]), (row, query)


def test_a_query_that_sees_nothing_gets_zeros_in_order() -> None:
    case = random_case(3, 4, 9)
    assert case.keys.own_BQW is not None
    words, stop = case.keys.own_BQW.clone(), case.keys.stop_BQ.clone()
    words[:, 2], stop[1] = 0, 0
    case = in_order(replace(case, keys=replace(case.keys, own_BQW=words, stop_BQ=stop)))
    out = case.to(KERNEL_DEVICE).run(attention_in_order_triton)
    assert out[1, 2].eq(0).all()
    assert_near(out, case.formula())


def test_not_a_number_in_one_rows_keys_reaches_no_other_row_in_order() -> None:
    case = in_order(random_case(3, 4, 150))
    expected = case.to(KERNEL_DEVICE).run(attention_in_order_triton)
    first = case.keys.own_cell + 4  # of row 1
    case.k_XGE[first : first + 4] = math.nan
    out = case.to(KERNEL_DEVICE).run(attention_in_order_triton)
    assert out[1].isnan().any()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_paths_are_the_nodes_from_the_root_in_order() -> None:
    generator = torch.Generator().manual_seed(5)
    parent = [int(torch.randint(n, (1,), generator=generator)) for n in range(1, 40)]
    sees, paths = torch.eye(40, dtype=torch.bool), [[0]]
    for node, above in enumerate(parent, start=1):
        sees[node] |= sees[above]
        paths.append([*paths[above], node])
    told = unpack_paths(pack_ancestors(sees[None]), 12)[0].tolist()
    assert max(map(len, paths)) <= 12
    assert told == [[*path, *[-1] * (12 - len(path))] for path in paths]
