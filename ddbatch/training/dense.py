"""Forwards to learn from: whole sequences at once, without caches, and gradients pass.

The engine's forwards see one round of tokens and the cached rest; these see the same keys, all at
once, through the same weights (a test holds one against the other). B sequences of T tokens, A
anchors a sequence. Knows nothing about losses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ddbatch.models.decoder import DecoderLayer, Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.rope_append import apply_rope


class DenseOutput(NamedTuple):
    """hidden_BTD: after the final norm. feature_BTC: outputs of the tapped layers side by side."""

    hidden_BTD: Tensor
    feature_BTC: Tensor


def target_states(
    target: Target, token_BT: Tensor, tap_layers: tuple[int, ...] = ()
) -> DenseOutput:
    """The target over whole sequences; padding behind a sequence changes nothing before it."""
    T = token_BT.shape[1]
    pos_T = torch.arange(T, device=token_BT.device)
    distance_TT = pos_T[:, None] - pos_T
    x_BTD = target.embed[token_BT]
    tapped = []
    for number, layer in enumerate(target.layers):
        assert isinstance(layer, DecoderLayer)
        window = target.dims.windows[number]
        is_visible_TT = (distance_TT >= 0) & (distance_TT < (window or T))
        heads = _project(layer, x_BTD, target.rope_P2E[pos_T.expand_as(token_BT)])
        x_BTD = _finish(layer, x_BTD, _attend(*heads, is_visible_TT))
        if number in tap_layers:
            tapped.append(x_BTD)
    feature_BTC = torch.cat(tapped, dim=-1) if tapped else x_BTD[..., :0]
    return DenseOutput(target.norm(x_BTD), feature_BTC)


def block_states(
    drafter: DFlash,
    embed_VD: Tensor,
    feature_BTC: Tensor,
    token_BT: Tensor,
    anchor_BA: Tensor,
) -> Tensor:
    """The drafter's hidden states [B, A, K, D] of a block behind each anchor.

    anchor_BA: int64, positions of the anchors. A block is [anchor, MASK x (K - 1)]; it sees the
    features of the positions before its anchor, and itself. Blocks do not see each other.
    """
    dims = drafter.dims
    (B, T), A, K = token_BT.shape, anchor_BA.shape[1], dims.block
    block_BAK = torch.full((B, A, K), dims.mask_token_id, device=token_BT.device)
    block_BAK[..., 0] = token_BT.gather(1, anchor_BA)
    pos_T = torch.arange(T, device=token_BT.device)
    pos_BQ = (anchor_BA[..., None] + torch.arange(K, device=pos_T.device)).flatten(1)  # Q = A K
    pos_BZ = torch.cat((pos_T.expand(B, T), pos_BQ), dim=1)  # Z = T + Q
    distance_BQZ = pos_BQ[..., None] - pos_BZ[:, None]

    place_Q = torch.arange(A * K, device=token_BT.device) // K
    is_context_BQT = pos_T < anchor_BA.repeat_interleave(K, dim=1)[..., None]
    is_own_QQ = place_Q[:, None] == place_Q
    is_visible_BQZ = torch.cat((is_context_BQT, is_own_QQ.expand(B, -1, -1)), dim=2)

    fused_BTD = drafter.fuse_norm(drafter.fuse(feature_BTC))
    x_BQD = embed_VD[block_BAK.flatten(1)]
    for number, layer in enumerate(drafter.layers):
        assert isinstance(layer, DecoderLayer)
        window = dims.decoder.windows[number]
        is_seen_BQZ = is_visible_BQZ
        if window is not None:  # as in the engine: sliding layers are causal inside the block
            is_seen_BQZ = is_visible_BQZ & (distance_BQZ >= 0) & (distance_BQZ < window)
        # The fused features skip the layer's input norm, and no query is made of them.
        context = _heads(layer, fused_BTD, drafter.rope_P2E[pos_T.expand(B, T)])
        own = _project(layer, x_BQD, drafter.rope_P2E[pos_BQ])
        k_BZGE = torch.cat((context.k_BTGE, own.k_BTGE), dim=1)
        v_BZGE = torch.cat((context.v_BTGE, own.v_BTGE), dim=1)
        attended_BQX = _attend(own.q_BTHE, k_BZGE, v_BZGE, is_seen_BQZ[:, None])
        x_BQD = _finish(layer, x_BQD, attended_BQX)
    hidden_BAKD: Tensor = drafter.norm(x_BQD).unflatten(1, (A, K))
    return hidden_BAKD


class _Heads(NamedTuple):
    """Queries, keys (both roped) and values."""

    q_BTHE: Tensor
    k_BTGE: Tensor
    v_BTGE: Tensor


def _project(layer: DecoderLayer, x_BTD: Tensor, rope_BT2E: Tensor) -> _Heads:
    """The layer's input, normed, as heads."""
    return _heads(layer, layer.input_norm(x_BTD), rope_BT2E)


def _heads(layer: DecoderLayer, x_BTD: Tensor, rope_BT2E: Tensor) -> _Heads:
    H, G = layer.dims.heads, layer.dims.kv_heads
    qkv = layer.qkv(x_BTD).unflatten(-1, (H + 2 * G, -1))
    q, k, v = qkv.split([H, G, G], dim=2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    rope_T2E = rope_BT2E.flatten(0, 1)
    q, k = (apply_rope(x.flatten(0, 1), rope_T2E).view_as(x) for x in (q, k))
    return _Heads(q, k, v)


def _finish(layer: DecoderLayer, x_BTD: Tensor, attended_BTX: Tensor) -> Tensor:
    """The layer's output: its input plus attention ([B, T, H * E]), plus the MLP of that."""
    x_BTD = x_BTD + layer.out(attended_BTX)
    gate, up = layer.mlp.gate_up(layer.mlp_norm(x_BTD)).chunk(2, dim=-1)
    out_BTD: Tensor = x_BTD + layer.mlp.down(F.silu(gate) * up)
    return out_BTD


def _attend(q_BQHE: Tensor, k_BZGE: Tensor, v_BZGE: Tensor, is_visible: Tensor) -> Tensor:
    """Attention under a mask that is broadcast over [B, H, Q, Z]; [B, Q, H * E]."""
    group = q_BQHE.shape[2] // k_BZGE.shape[2]
    k, v = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k_BZGE, v_BZGE))
    out = F.scaled_dot_product_attention(q_BQHE.transpose(1, 2), k, v, attn_mask=is_visible)
    return out.transpose(1, 2).flatten(2)
