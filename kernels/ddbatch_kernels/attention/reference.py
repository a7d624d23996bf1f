"""Attention of a few new tokens a row over keys in the pages of a cache plane, and over themselves.

One op serves verify (tree mask), draft (block mask) and prefill (causal mask): what differs is only
which keys a query sees. B rows, Q queries a row, W words of 32 bits, S slots with P pages each, Z
keys a row, H query heads, G key/value heads, E head width, X cells of a cache plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ddbatch_kernels.ancestors import unpack_ancestors


class DenseKeys(NamedTuple):
    """addr_BZ: int64 cells of all keys that a row may see. is_visible_BQZ: which of them a query
    sees; one that is not there is the null cell, and nobody sees it."""

    addr_BZ: Tensor
    is_visible_BQZ: Tensor


@dataclass(eq=False)
class RowKeys:
    """Which keys the queries of B rows see; made once for the layers of a forward.

    Prefix: position p of a slot lies in cell page_table_SP[slot, p // page] * page + p % page. The
    query sees positions first_BQ..stop_BQ - 1 of its row's slot (first_BQ None: from 0); no stop
    is larger than num_keys. Own: token j of row b lies in cell own_cell + b * Q + j, and a query
    sees it where bit j % 32 of word j // 32 of own_BQW is set; own_BQW None: the tokens lie in the
    pages like all others. null_cell: a cell of zeros. Tensors are int64, words int32; those of
    [B, Q] may be broadcast views. arrivals: the kernel's own.

    in_order: whether a GPU must add keys up by position alone (attention/in_order.py); own tokens
    then stand at consecutive positions behind the prefix, and path_BQD, int32, names the one that
    the query sees at each of them; -1 beyond the query's own.
    """

    page_table_SP: Tensor
    slot_B: Tensor
    page: int
    num_keys: int
    first_BQ: Tensor | None
    stop_BQ: Tensor
    own_BQW: Tensor | None
    own_cell: int
    null_cell: int
    arrivals: Tensor | None = None
    in_order: bool = False
    path_BQD: Tensor | None = None

    @cached_property
    def dense(self) -> DenseKeys:
        """The same as lists of cells and a mask."""
        B, Q = self.stop_BQ.shape
        pos_Z = torch.arange(self.num_keys, device=self.slot_B.device)
        page_BZ = self.page_table_SP[self.slot_B[:, None], pos_Z // self.page]
        is_visible_BQZ = pos_Z < self.stop_BQ[..., None]
        # Memory of another row is never read, not even masked.
        exists_BZ = pos_Z < self.stop_BQ.amax(dim=1, keepdim=True)
        addr_BZ = torch.where(exists_BZ, page_BZ * self.page + pos_Z % self.page, self.null_cell)
        if self.first_BQ is not None:
            is_visible_BQZ = is_visible_BQZ & (pos_Z >= self.first_BQ[..., None])
        if self.own_BQW is None:
            return DenseKeys(addr_BZ, is_visible_BQZ)
        own_BQ = torch.arange(B * Q, device=addr_BZ.device).view(B, Q) + self.own_cell
        sees_own_BQQ = unpack_ancestors(self.own_BQW).expand(B, Q, Q)
        return DenseKeys(
            torch.cat((addr_BZ, own_BQ), dim=1), torch.cat((is_visible_BQZ, sees_own_BQQ), dim=2)
        )


def attention_ref(
    q_BQHE: Tensor, k_cache_XGE: Tensor, v_cache_XGE: Tensor, keys: RowKeys, *, scale: float
) -> Tensor:
    """softmax(q k^T * scale) v over the visible keys, float32 softmax; [B, Q, H, E] in q's dtype.

    A query that sees no key gets zeros. What a key's values are matters only where it is visible or
    of the query's own row (a masked weight is exactly 0, and 0 * NaN is NaN).
    """
    B, Q, H, E = q_BQHE.shape
    addr_BZ, is_visible_BQZ = keys.dense
    Z, G = addr_BZ.shape[1], k_cache_XGE.shape[1]
    assert is_visible_BQZ.shape == (B, Q, Z), (is_visible_BQZ.shape, B, Q, Z)
    assert H % G == 0, (H, G)
    k_BGZE, v_BGZE = (
        plane.index_select(0, addr_BZ.flatten()).unflatten(0, (B, Z)).transpose(1, 2)
        for plane in (k_cache_XGE, v_cache_XGE)
    )
    # The H / G query heads of a key head become extra queries of it: no key is copied per head.
    group = H // G
    q = q_BQHE.unflatten(2, (G, group)).permute(0, 2, 3, 1, 4).reshape(B, G, group * Q, E)
    mask = is_visible_BQZ[:, None, None].expand(B, 1, group, Q, Z).reshape(B, 1, group * Q, Z)
    out = F.scaled_dot_product_attention(
        q, k_BGZE, v_BGZE, attn_mask=mask.expand(B, G, group * Q, Z), scale=scale
    )
    out_BQHE: Tensor = out.unflatten(2, (group, Q)).permute(0, 3, 1, 2, 4).reshape(B, Q, H, E)
    return out_BQHE
