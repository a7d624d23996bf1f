"""The DFlash drafter, held against a slow drafter written from the published description.

The slow one reads the raw checkpoint, keeps no cache and works in float64: in every layer, keys and
values of the whole context and of the block are made anew from their concatenation.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import load_tiny_pair, read_drafter
from torch import Tensor

from ddbatch.engine.allocate import allocate_states
from ddbatch.engine.commit import append_context
from ddbatch.engine.draft import draft
from ddbatch.engine.plan import plan_cache, plan_prefill, plan_shapes
from ddbatch.engine.state import RoundState, cell_of
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.models.layers import LayerKeys, Planes
from ddbatch_kernels.ancestors import pack_ancestors
from ddbatch_kernels.attention import RowKeys

TOLERANCE = 1e-5  # largest difference, relative to the largest value
MIXES = {
    "full": (None, None, None),
    "window 3, full last": (3, 3, None),
    "window 7, full first": (None, 7, 7),
    "window 3 everywhere": (3, 3, 3),
    "window 1, mixed": (1, None, 1),
}


@dataclass
class SlowDrafter:
    """Raw tensors and config of a drafter and the target's embedding and head, all float64."""

    config: dict[str, object]
    tensors: dict[str, Tensor]
    embed_VD: Tensor
    head_VD: Tensor

    def number(self, key: str) -> float:
        value = self.config[key]
        assert isinstance(value, (int, float))
        return value

    def hidden(self, feature_SC: Tensor, token_K: list[int]) -> Tensor:
        """[K, D] after the final norm: a block after a context of S tokens."""
        context = self.norm(feature_SC.double() @ self.tensors["fc.weight"].T, "hidden_norm")
        x = self.embed_VD[token_K]
        kinds = self.config["layer_types"]
        assert isinstance(kinds, list)
        for layer, kind in enumerate(kinds):
            is_visible = self.visible(len(context), len(x), kind == "sliding_attention")
            prefix = f"layers.{layer}"
            x = x + self.attention(
                prefix, self.norm(x, f"{prefix}.input_layernorm"), context, is_visible
            )
            y = self.norm(x, f"{prefix}.post_attention_layernorm")
            gate, up = (
                y @ self.weight(f"{prefix}.mlp.{part}").T for part in ("gate_proj", "up_proj")
            )
            x = x + (gate / (1 + (-gate).exp()) * up) @ self.weight(f"{prefix}.mlp.down_proj").T
        return self.norm(x, "norm")

    def logits(self, feature_SC: Tensor, token_K: list[int]) -> Tensor:
        """[K - 1, V]: what the masked places propose."""
        return self.hidden(feature_SC, token_K)[1:] @ self.head_VD.T

    def visible(self, num_context: int, block: int, is_sliding: bool) -> Tensor:
        """Bool [K, S + K], entry by entry."""
        rows = []
        for query in range(num_context, num_context + block):
            if is_sliding:
                window = self.number("sliding_window")
                rows.append([0 <= query - key < window for key in range(num_context + block)])
            else:
                rows.append([True] * (num_context + block))
        return torch.tensor(rows)

    def attention(self, prefix: str, x: Tensor, context: Tensor, is_visible: Tensor) -> Tensor:
        heads, kv_heads = (
            int(self.number("num_attention_heads")),
            self.number("num_key_value_heads"),
        )
        width = int(self.number("head_dim"))
        source = torch.cat((context, x))
        pos = torch.arange(len(source))
        out = []
        for head in range(heads):
            group = int(head // (heads / kv_heads))
            q = self.head(prefix, "q", head, x, width)
            k = self.head(prefix, "k", group, source, width)
            v = self.head(prefix, "v", group, source, width)
            q = self.turn(self.norm(q, f"{prefix}.self_attn.q_norm"), pos[len(context) :])
            k = self.turn(self.norm(k, f"{prefix}.self_attn.k_norm"), pos)
            score = (q @ k.T / math.sqrt(width)).masked_fill(~is_visible, -math.inf)
            out.append(score.softmax(dim=-1) @ v)
        return torch.cat(out, dim=-1) @ self.weight(f"{prefix}.self_attn.o_proj").T

    def head(self, prefix: str, kind: str, number: int, x: Tensor, width: int) -> Tensor:
        weight = self.weight(f"{prefix}.self_attn.{kind}_proj")
        return x @ weight[number * width : (number + 1) * width].T

    def turn(self, x: Tensor, pos: Tensor) -> Tensor:
        """Pair (i, i + E / 2) of each head turned by pos * theta^(-2 i / E)."""
        half = x.shape[-1] // 2
        turned = x.clone()
        for i in range(half):
            angle = pos.double() * self.number("rope_theta") ** (-i / half)
            turned[:, i] = x[:, i] * angle.cos() - x[:, i + half] * angle.sin()
            turned[:, i + half] = x[:, i + half] * angle.cos() + x[:, i] * angle.sin()
        return turned

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.number("rms_norm_eps")
        return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * self.weight(name)

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]


def open_slow(tmp_path: Path) -> SlowDrafter:
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    config |= config.get("rope_parameters", {})
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    target = load_file(tmp_path / "target" / "model.safetensors")
    embed = target["model.embed_tokens.weight"].double()
    head = target.get("lm_head.weight", embed).double()
    return SlowDrafter(config, {name: t.double() for name, t in tensors.items()}, embed, head)


@dataclass
class Trio:
    target: Target
    drafter: DFlash
    slow: SlowDrafter

    def features(self, length: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        width = self.target.dims.width * len(self.drafter.dims.tap_layers)
        return torch.randn(length, width, generator=generator)

    def block(self, anchor: int) -> list[int]:
        dims = self.drafter.dims
        return [anchor] + [dims.mask_token_id] * (dims.block - 1)


@pytest.fixture(scope="module", params=MIXES)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    folder = tmp_path_factory.mktemp("pair")
    windows = MIXES[request.param]
    target, drafter = load_tiny_pair(folder, windows=windows, drafter_layers=3, tied=False)
    return Trio(target, drafter, open_slow(folder))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert error < TOLERANCE, error


@torch.inference_mode()
def run_blocks(trio: Trio, contexts: list[Planes], anchors: list[int]) -> Tensor:
    """Hidden states [B, K, D] of one block per row; contexts: keys and values [L, S, G, E] each.

    Cells are shuffled, those that nobody owns are NaN, missing keys point at a cell of zeros; the
    blocks' own keys go to the cells behind it.
    """
    drafter, block = trio.drafter, trio.drafter.dims.block
    lengths = torch.tensor([context.k_LXGE.shape[1] for context in contexts])
    rows, num_keys = len(contexts), int(lengths.max())
    cells = torch.randperm(rows * num_keys, generator=torch.Generator().manual_seed(3))
    addr_BS = cells.view(rows, num_keys).clone()
    null_cell, num_own = rows * num_keys, rows * block
    num_layers, _, *sizes = contexts[0].k_LXGE.shape
    shape = (num_layers, null_cell + 1 + num_own, *sizes)
    cache = Planes(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    cell_BK = torch.arange(null_cell + 1, null_cell + 1 + num_own).view(rows, block)
    for row, context in enumerate(contexts):
        for plane, new in zip(cache, context, strict=True):
            plane[:, addr_BS[row, : lengths[row]]] = new
            plane[:, null_cell] = 0
    addr_BS[torch.arange(num_keys) >= lengths[:, None]] = null_cell
    pos_BK = lengths[:, None] + torch.arange(block)
    window = max((w for w in drafter.dims.decoder.windows if w is not None), default=0)
    distance = pos_BK[:, :, None] - pos_BK[:, None]
    is_near = (distance >= 0) & (distance < window)
    stop_BK = lengths[:, None].expand(rows, block)
    full, sliding = (
        RowKeys(
            addr_BS,
            torch.arange(rows),
            1,
            num_keys,
            first_BK,
            stop_BK,
            pack_ancestors(is_own),
            null_cell + 1,
            null_cell,
        )
        for first_BK, is_own in (
            (None, torch.ones_like(is_near)),
            ((pos_BK - window + 1).clamp(min=0), is_near),
        )
    )
    token_BK = torch.tensor([trio.block(anchor) for anchor in anchors])
    keys = LayerKeys(full, sliding)
    embed = trio.target.embed
    hidden_TD = drafter(token_BK.flatten(), embed, pos_BK.flatten(), cache, cell_BK.flatten(), keys)
    return hidden_TD.unflatten(0, (rows, block))


@torch.inference_mode()
def context(drafter: DFlash, feature_TC: Tensor, pos_T: Tensor) -> Planes:
    """Context keys and values [L, T, G, E]."""
    dims, cell_T = drafter.dims.decoder, torch.arange(len(pos_T))
    shape = (dims.layers, len(pos_T), dims.kv_heads, dims.head_width)
    made = Planes(*(torch.full(shape, torch.nan, dtype=feature_TC.dtype) for _ in range(2)))
    drafter.append_context(feature_TC, pos_T, made, cell_T)
    return made


@torch.inference_mode()
def context_of(trio: Trio, feature_SC: Tensor, sizes: list[int]) -> Planes:
    """Context keys and values, made in pieces of the given sizes."""
    assert sum(sizes) == len(feature_SC)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    made = [
        context(trio.drafter, feature_SC[start : start + size], torch.arange(start, start + size))
        for start, size in zip(starts, sizes, strict=True)
    ]
    return Planes(*(torch.cat(planes, dim=1) for planes in zip(*made, strict=True)))


@pytest.mark.parametrize("length", [1, 2, 6, 13])
def test_a_block_after_a_whole_context_is_the_slow_drafters(trio: Trio, length: int) -> None:
    features = trio.features(length, seed=length)
    hidden = run_blocks(trio, [context_of(trio, features, [length])], [11])
    assert_close(hidden[0], trio.slow.hidden(features, trio.block(11)))


@pytest.mark.parametrize("sizes", [[1] * 13, [6, 1, 4, 2], [12, 1]])
def test_a_context_appended_in_steps_is_the_whole_one(trio: Trio, sizes: list[int]) -> None:
    features = trio.features(13, seed=20)
    hidden = run_blocks(trio, [context_of(trio, features, sizes)], [12])
    assert_close(hidden[0], trio.slow.hidden(features, trio.block(12)))


def test_rows_of_unequal_context_do_not_disturb_each_other(trio: Trio) -> None:
    features = [trio.features(length, seed=30 + length) for length in (13, 1, 6)]
    anchors = [5, 6, 7]
    contexts = [context_of(trio, feature, [len(feature)]) for feature in features]
    hidden = run_blocks(trio, contexts, anchors)
    for row, (feature, anchor) in enumerate(zip(features, anchors, strict=True)):
        assert_close(hidden[row], trio.slow.hidden(feature, trio.block(anchor)))


def fill_state(trio: Trio, features: list[Tensor], anchors: list[int], topk: int) -> RoundState:
    """An engine state whose rows have these contexts, appended in two steps, pages of 4 tokens."""
    rows, dims = len(features), trio.drafter.dims
    plan = plan_shapes(
        "ddtree",
        budget=9,
        topk=topk,
        rows=rows,
        block=dims.block,
        vocab=trio.target.dims.vocab,
        gemm_limit=None,
    )
    cache_plan = plan_cache(rows, max_len=24, page=4, device="cpu")
    (state,) = allocate_states(
        [plan],
        cache_plan,
        plan_prefill(rows, "cpu"),
        target=trio.target.dims,
        drafter=dims.decoder,
        num_taps=len(dims.tap_layers),
        top_logprobs=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pages = torch.randperm(cache_plan.pages, generator=torch.Generator().manual_seed(4))
    state.page_table_SP[:-1] = pages.view(cache_plan.slots, -1)
    state.slot_B.copy_(torch.arange(rows).flip(0) * 2)
    state.active_B[:] = True
    for row, feature in enumerate(features):
        slot = state.slot_B[row]
        half = (len(feature) + 1) // 2
        for pos in (torch.arange(half), torch.arange(half, len(feature))):
            append_context(
                trio.drafter, state, feature[pos], pos, cell_of(state, slot.expand(len(pos)), pos)
            )
        state.length_S[slot] = len(feature)
        state.anchor_S[slot] = anchors[row]
    return state


@torch.inference_mode()
def test_the_draft_stage_proposes_what_the_slow_drafter_ranks_first(trio: Trio) -> None:
    features = [trio.features(length, seed=40 + length) for length in (13, 1, 6)]
    anchors = [8, 9, 10]
    state = fill_state(trio, features, anchors, topk=5)
    draft(trio.target, trio.drafter, state, num_keys=13)  # as many as the longest row has
    for row, (feature, anchor) in enumerate(zip(features, anchors, strict=True)):
        logits = trio.slow.logits(feature, trio.block(anchor))
        best = logits.log_softmax(dim=-1).topk(6)
        assert (best.values[:, :-1] - best.values[:, 1:]).min() > 1e-4, "a near-tie: other seed"
        assert torch.equal(state.candidate_BDM[row], best.indices[:, :5])
        torch.testing.assert_close(
            state.edge_BDM[row].double(), best.values[:, :5], rtol=0, atol=1e-5
        )


def test_windows_change_what_is_drafted(tmp_path: Path) -> None:
    """Guards the comparisons above: masks that did nothing would pass them all the same way."""
    hidden = []
    for windows in ((None, None), (3, None), (7, None)):
        folder = tmp_path / str(windows[0])
        target, drafter = load_tiny_pair(folder, windows=windows)
        trio = Trio(target, drafter, open_slow(folder))
        features = trio.features(13, seed=50)
        hidden.append(run_blocks(trio, [context_of(trio, features, [13])], [3]))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (hidden[one] - hidden[other]).abs().max() > 0.01


def test_new_config_keys_give_the_slow_drafter_too(tmp_path: Path) -> None:
    target, drafter = load_tiny_pair(
        tmp_path,
        rope={"rope_theta": 321.0, "rope_type": "default"},
        nested_keys=True,
        drafter_nested_keys=True,
        windows=(3, None),
        block=4,
    )
    trio = Trio(target, drafter, open_slow(tmp_path))
    assert (trio.slow.number("rope_theta"), drafter.dims.block) == (321.0, 4)
    features = trio.features(13, seed=60)
    hidden = run_blocks(trio, [context_of(trio, features, [13])], [3])
    assert_close(hidden[0], trio.slow.hidden(features, trio.block(3)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_context_is_the_float32_one_but_for_rounding(tmp_path: Path, dtype: str) -> None:
    load_tiny_pair(tmp_path)
    drafter = read_drafter(tmp_path / "drafter", tmp_path / "target", dtype)
    features = torch.randn(6, 48, generator=torch.Generator().manual_seed(70))
    torch_dtype: torch.dtype = getattr(torch, dtype)
    pos = torch.arange(6)
    short = context(drafter, features.to(torch_dtype), pos)
    assert short.k_LXGE.dtype == torch_dtype
    exact = context(read_drafter(tmp_path / "drafter"), features, pos)
    for half, full in zip(short, exact, strict=True):
        assert ((half.float() - full).norm() / full.norm()).item() < 4 * torch.finfo(
            torch_dtype
        ).eps
