"""The forwards that training learns through give what the engine and the oracle compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import load_tiny_pair

from ddbatch.engine.oracle import Oracle
from ddbatch.engine.oracle_ddtree import draft_scores
from ddbatch.training.dense import block_states, target_states

B, T = 3, 23
PAIRS = [
    pytest.param({"family": "llama"}, id="llama"),
    pytest.param({"family": "qwen3", "block": 4}, id="qwen3"),
    pytest.param({"family": "qwen2", "window": 5, "windows": (None, 7)}, id="windows"),
    pytest.param({"family": "mistral", "block": 2, "windows": (3, 3)}, id="short_windows"),
]


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pair", PAIRS)
def test_target_states_are_the_oracles(tmp_path: Path, pair: dict[str, object]) -> None:
    target, drafter = load_tiny_pair(tmp_path, **pair)
    tap_layers = drafter.dims.tap_layers
    token_BT = tokens()
    found = target_states(target, token_BT, tap_layers)
    for row in range(B):
        oracle = Oracle(target, tap_layers)
        scores_TV = oracle.scores(token_BT[row].tolist())
        torch.testing.assert_close(
            target.logits(found.hidden_BTD[row]), scores_TV, atol=1e-4, rtol=0
        )
        torch.testing.assert_close(found.feature_BTC[row], oracle.features[0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_block_behind_any_anchor_is_drafted_as_if_it_were_alone(
    tmp_path: Path, pair: dict[str, object]
) -> None:
    target, drafter = load_tiny_pair(tmp_path, **pair)
    token_BT = tokens(1)
    feature_BTC = target_states(target, token_BT, drafter.dims.tap_layers).feature_BTC
    anchor_BA = torch.tensor([[1, 5, 22], [0 + 2, 7, 7], [21, 3, 12]])
    hidden_BAKD = block_states(drafter, target.embed, feature_BTC, token_BT, anchor_BA)
    for row in range(B):
        for number, anchor in enumerate(anchor_BA[row].tolist()):
            expected_KV = draft_scores(
                target,
                drafter,
                feature_BTC[row, :anchor],
                int(token_BT[row, anchor]),
                drafter.dims.block,
            )
            found_KV = target.logits(hidden_BAKD[row, number])
            torch.testing.assert_close(found_KV, expected_KV, atol=1e-4, rtol=0)
