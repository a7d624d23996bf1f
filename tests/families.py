"""What tests of target families share: small random checkpoints of each, their transformers twins,
and a runner that drives a target as the engine does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny import LLAMA3_ROPE, read_target
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ddbatch.models.decoder import Target, TargetOutput
from ddbatch.models.families import read_target_dims
from ddbatch.models.layers import LayerKeys, Planes
from ddbatch_kernels.ancestors import pack_ancestors
from ddbatch_kernels.attention import RowKeys

TOLERANCE = 1e-4  # largest difference of scores, relative to the largest score

# Arguments of write_target. Sequences in the tests have up to 65 tokens, so a window of 7 hides
# most of a prompt, and one of 3 hides the root from the nodes of depth 3.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama, tied": {},
    "llama, untied, llama3 scaling, new keys, sharded": {
        "tied": False,
        "rope": LLAMA3_ROPE,
        "nested_keys": True,
        "shards": 3,
        "seed": 1,
    },
    "llama, one key head, llama3 scaling, old keys": {
        "heads": 3,
        "kv_heads": 1,
        "head_width": 6,
        "width": 33,
        "layers": 3,
        "rope": LLAMA3_ROPE | {"rope_theta": 500.0},
        "seed": 2,
    },
    "llama, no shared key heads, one layer, large theta": {
        "heads": 2,
        "kv_heads": 2,
        "head_width": 16,
        "width": 14,
        "layers": 1,
        "mlp_width": 9,
        "tied": False,
        "rope": {"rope_theta": 1e6, "rope_type": "default"},
        "seed": 3,
    },
    "qwen2, tied, one key head": {"family": "qwen2", "kv_heads": 1, "seed": 4},
    "qwen2, window 7 from layer 1, old keys": {
        "family": "qwen2",
        "window": 7,
        "full_layers": 1,
        "tied": False,
        "rope": {"rope_theta": 1e6, "rope_type": "default"},
        "seed": 5,
    },
    "qwen2, window 3 in the last layer, new keys": {
        "family": "qwen2",
        "window": 3,
        "layers": 2,
        "full_layers": 1,
        "nested_keys": True,
        "seed": 6,
    },
    "qwen3, tied": {
        "family": "qwen3",
        "rope": {"rope_theta": 1e6, "rope_type": "default"},
        "seed": 7,
    },
    "qwen3, no shared key heads, untied, new keys, sharded": {
        "family": "qwen3",
        "heads": 3,
        "kv_heads": 3,
        "head_width": 6,
        "width": 33,
        "tied": False,
        "nested_keys": True,
        "shards": 3,
        "seed": 8,
    },
    "qwen3, window 7 from layer 2, new keys": {
        "family": "qwen3",
        "window": 7,
        "full_layers": 2,
        "nested_keys": True,
        "seed": 9,
    },
    "mistral, untied": {"family": "mistral", "tied": False, "seed": 10},
    "mistral, window 7, new keys": {
        "family": "mistral",
        "window": 7,
        "heads": 6,
        "head_width": 8,
        "nested_keys": True,
        "seed": 13,
    },
    "mistral, window 3, tied, old keys": {"family": "mistral", "window": 3, "seed": 12},
}


@dataclass
class Twins:
    """One checkpoint, read by ddbatch and by transformers."""

    ours: Target
    theirs: PreTrainedModel

    def expected(self, token_ids: list[int]) -> Tensor:
        """Scores [T, V] of transformers after each token of one sequence, without a cache."""
        with torch.inference_mode():
            logits: Tensor = self.theirs(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits


def open_twins(folder: Path) -> Twins:
    """Both in float32; eager attention is transformers' plainest."""
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return Twins(read_target(folder), theirs.eval())


def random_ids(length: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def refused_target(folder: Path, *words: str) -> None:
    """Reading fails with a message that names model.path, the folder and all `words`."""
    with pytest.raises(ValueError, match=r"^model.path=") as error:
        read_target_dims(folder)
    for word in (str(folder), *words):
        assert word in str(error.value), (word, str(error.value))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert error < TOLERANCE, error


class Runner:
    """Drives a target as the engine does: rows live in shuffled cells of the cache planes, a
    forward's own keys go to scratch cells behind them and are committed from there.

    Cells that nobody has written are NaN; a row's missing keys point at one cell of zeros.
    """

    def __init__(self, model: Target, rows: int, max_len: int, dtype: torch.dtype) -> None:
        dims = model.dims
        self.model = model
        cells = rows * max_len
        generator = torch.Generator().manual_seed(5)
        self.addr_BS = torch.randperm(cells, generator=generator).view(rows, max_len)
        self.null_cell, self.trash_cell, self.scratch_cell = cells, cells + 1, cells + 2
        shape = (dims.layers, 2 * cells + 2, dims.kv_heads, dims.head_width)
        self.cache = Planes(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
        for plane in self.cache:
            plane[:, self.null_cell] = 0
        self.length_B = torch.zeros(rows, dtype=torch.long)

    @torch.inference_mode()
    def forward(
        self,
        token_BQ: Tensor,
        pos_BQ: Tensor,
        is_visible_BQQ: Tensor,
        tap_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """All rows at once; a query sees its row's committed keys and those of is_visible_BQQ."""
        B, Q = token_BQ.shape
        cell_BQ = self.scratch_cell + torch.arange(B * Q).view(B, Q)
        stop_BQ = self.length_B[:, None].expand(B, Q)
        keys = self.keys(torch.arange(B), pos_BQ, stop_BQ, is_visible_BQQ)
        out: TargetOutput = self.model(
            token_BQ.flatten(), pos_BQ.flatten(), self.cache, cell_BQ.flatten(), keys, tap_layers
        )
        return out

    def keys(
        self, row_B: Tensor, pos_BQ: Tensor, stop_BQ: Tensor, is_visible_BQQ: Tensor | None
    ) -> LayerKeys:
        """A sliding layer's query at p sees keys at p - window + 1..p, wherever they stand.
        is_visible_BQQ: of the forward's own tokens in scratch."""
        window = self.model.dims.window or 0

        def made(first_BQ: Tensor | None, is_own_BQQ: Tensor | None) -> RowKeys:
            return RowKeys(
                self.addr_BS,
                row_B,
                1,
                int(stop_BQ.max()),
                first_BQ,
                stop_BQ,
                None if is_own_BQQ is None else pack_ancestors(is_own_BQQ),
                self.scratch_cell,
                self.null_cell,
            )

        is_near = None
        if is_visible_BQQ is not None:
            is_near = is_visible_BQQ.clone()
            for row, positions in enumerate(pos_BQ.tolist()):
                for query, here in enumerate(positions):
                    for key, there in enumerate(positions):
                        is_near[row, query, key] &= here - window < there <= here
        first_BQ = torch.tensor([[max(0, p - window + 1) for p in row] for row in pos_BQ.tolist()])
        return LayerKeys(made(None, is_visible_BQQ), made(first_BQ, is_near))

    def commit(self, row: int, tokens: list[int]) -> None:
        """Append scratch entries (flat token numbers of the last forward) to a row's cells."""
        start = int(self.length_B[row])
        cells = self.addr_BS[row, start : start + len(tokens)]
        for plane in self.cache:
            plane[:, cells] = plane[:, [self.scratch_cell + token for token in tokens]]
        self.length_B[row] += len(tokens)

    def extend(self, token_ids: list[int]) -> Tensor:
        """Scores of the next tokens of the only row, which are committed: a piece of a prefill."""
        start = int(self.length_B[0])
        pos = torch.arange(start, start + len(token_ids))
        causal = torch.ones(1, len(pos), len(pos), dtype=torch.bool).tril()
        out = self.forward(torch.tensor([token_ids]), pos[None], causal)
        self.commit(0, list(range(len(token_ids))))
        return self.model.logits(out.hidden_TD)

    @torch.inference_mode()
    def shared_call(self, pieces_of_rows: list[tuple[int, list[int]]]) -> list[Tensor]:
        """Scores [T, V] of pieces of prompts, each behind what its row has so far, in one call that
        writes their keys to the rows' own cells, as the engine's prefill does. Places beyond a
        short piece write into trash and see nothing."""
        width = max(len(ids) for _, ids in pieces_of_rows)
        token, pos, stop, cell = [], [], [], []
        for row, ids in pieces_of_rows:
            start, padding = int(self.length_B[row]), [0] * (width - len(ids))
            end = start + len(ids)
            token.append(ids + padding)
            pos.append([*range(start, end), *padding])
            stop.append([*range(start + 1, end + 1), *padding])
            cell.append(self.addr_BS[row, start:end].tolist() + [self.trash_cell] * len(padding))
            self.length_B[row] = end
        pos_RQ = torch.tensor(pos)
        row_R = torch.tensor([row for row, _ in pieces_of_rows])
        keys = self.keys(row_R, pos_RQ, torch.tensor(stop), None)
        out = self.model(
            torch.tensor(token).flatten(),
            pos_RQ.flatten(),
            self.cache,
            torch.tensor(cell).flatten(),
            keys,
        )
        logits_RQV = self.model.logits(out.hidden_TD).unflatten(0, (len(token), width))
        return [
            scores_QV[: len(ids)]
            for scores_QV, (_, ids) in zip(logits_RQV, pieces_of_rows, strict=True)
        ]


def prefilled(model: Target, texts: list[list[int]], max_len: int) -> Runner:
    """Rows of unequal length, each prefilled alone and moved to its cells."""
    runner = Runner(model, len(texts), max_len, torch.float32)
    for row, ids in enumerate(texts):
        alone = Runner(model, 1, max_len, torch.float32)
        alone.extend(ids)
        for plane, filled in zip(runner.cache, alone.cache, strict=True):
            plane[:, runner.addr_BS[row, : len(ids)]] = filled[:, alone.addr_BS[0, : len(ids)]]
        runner.length_B[row] = len(ids)
    return runner


def pieces(token_ids: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(token_ids), size):
        yield token_ids[start : start + size]


class Trees(NamedTuple):
    """Trees of one shape. paths: for each node, the nodes from the root to it."""

    token_BN: Tensor
    depth_N: Tensor
    is_ancestor_NN: Tensor
    paths: list[list[int]]


def grow(rows: int, vocab: int, seed: int) -> Trees:
    """7 nodes down to depth 3, two siblings at each of the first depths."""
    parents = [-1, 0, 0, 1, 1, 2, 5]
    paths: list[list[int]] = []
    is_ancestor = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        paths.append([*([] if parent < 0 else paths[parent]), node])
        is_ancestor[node, paths[node]] = True
    token = torch.tensor(random_ids(rows * len(parents), vocab, seed)).view(rows, -1)
    depth = torch.tensor([len(path) - 1 for path in paths])
    return Trees(token, depth, is_ancestor, paths)
