"""A synthetic drafter offers the oracle's token at a chosen rank: accepts of every kind are forced,
and afterwards the caches must be what a fresh prefill of the same tokens leaves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoding import make_engine, random_prompts, token_prompts
from tiny import load_tiny_pair

import ddbatch.engine.round as round_module
from ddbatch.core import Completion, Sampling
from ddbatch.engine import oracle
from ddbatch.engine.engine import Engine
from ddbatch.engine.state import RoundState, cell_of
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

VOCAB, BLOCK, CAP = 29, 5, 24
LENGTHS = (6, 1, 11)
Pair = tuple[Target, DFlash]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, block=BLOCK)


@pytest.fixture(scope="module")
def outputs(pair: Pair) -> list[list[int]]:
    """The oracle's tokens after each prompt, a block more than any test emits."""
    return [
        [
            step.token_id
            for step in oracle.decode(
                pair[0], tuple(prompt), max_new_tokens=CAP + BLOCK, stop_token_ids=()
            )
        ]
        for prompt in random_prompts(LENGTHS, VOCAB)
    ]


def force_drafts(
    monkeypatch: pytest.MonkeyPatch, outputs: list[list[int]], ranks: list[int | None]
) -> None:
    """Candidates of position d: the oracle's token at rank ranks[d] (None: not offered), wrong ones
    elsewhere, each a different token."""

    def draft(target: Target, drafter: DFlash, state: RoundState, num_keys: int) -> None:
        for row, slot in enumerate(state.slot_B.tolist()):
            if slot == state.nobody:
                continue
            num_out = int(state.num_out_S[slot])
            for place, rank in enumerate(ranks):
                right = outputs[slot][num_out + place]
                wrong = [token for token in range(VOCAB) if token != right]
                offered = wrong[: state.plan.topk]
                if rank is not None:
                    offered[rank] = right
                state.candidate_BDM[row, place] = torch.tensor(offered)
        state.edge_BDM.copy_(-0.01 * torch.arange(state.plan.topk).expand_as(state.edge_BDM))

    monkeypatch.setattr(round_module, "draft", draft)


def full_tree_engine(pair: Pair, **options: object) -> Engine:
    """Two candidates a position and every node of the tree: no forced rank is out of reach."""
    depth = BLOCK - 1
    return make_engine(*pair, budget=2 ** (depth + 1) - 2, topk=2, rows=3, page=8, **options)  # type: ignore[arg-type]


def run(
    engine: Engine, caps: int | list[int] = CAP, stops: tuple[int, ...] = ()
) -> list[Completion]:
    own = Sampling(stop_token_ids=stops)
    prompts = token_prompts(random_prompts(LENGTHS, VOCAB), caps, own)
    done = [item for item in engine.run(iter(prompts)) if isinstance(item, Completion)]
    return sorted(done, key=lambda completion: completion.key)


@pytest.mark.parametrize(
    ("ranks", "accepted"),
    [
        ([0, 0, 0, 0], 4),
        ([1, 1, 1, 1], 4),
        ([1, 0, 1, 0], 4),
        ([0, 1, 0, 1], 4),
        ([None, 0, 0, 0], 0),
        ([1, None, 0, 0], 1),
        ([0, 0, 1, None], 3),
    ],
)
def test_forced_paths_are_accepted_and_the_tokens_stay_the_targets(
    monkeypatch: pytest.MonkeyPatch,
    pair: Pair,
    outputs: list[list[int]],
    ranks: list[int | None],
    accepted: int,
) -> None:
    force_drafts(monkeypatch, outputs, ranks)
    for done, output in zip(run(full_tree_engine(pair)), outputs, strict=True):
        assert list(done.token_ids) == output[:CAP]
        assert set(done.accepted[:-1]) == {accepted}


@pytest.mark.parametrize("ranks", [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, None, 0], [None, 0, 0, 0]])
def test_caches_after_rounds_equal_a_fresh_prefill(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, outputs: list[list[int]], ranks: list[int | None]
) -> None:
    force_drafts(monkeypatch, outputs, ranks)
    engine = full_tree_engine(pair)
    prompts = random_prompts(LENGTHS, VOCAB)
    engine.fill(iter(token_prompts(prompts, CAP)))
    for _ in range(4):
        engine.step()
    for slot, prompt in enumerate(prompts):
        length = int(engine.state.length_S[slot])
        num_out = int(engine.state.num_out_S[slot])
        assert length == len(prompt) + num_out - 1
        fresh = full_tree_engine(pair)
        # One more token than was committed: its own key is the anchor's, not there yet.
        ids = [*prompt, *outputs[slot][: num_out - 1]]
        fresh.fill(iter(token_prompts([ids], 1)))
        for ours, theirs in zip(planes(engine.state), planes(fresh.state), strict=True):
            grown = ours[:, cells(engine.state, slot, length)]
            once = theirs[:, cells(fresh.state, 0, length)]
            assert (grown - once).norm() <= 1e-5 * once.norm()


def planes(state: RoundState) -> list[torch.Tensor]:
    assert state.drafter_cache is not None
    return [*state.target_cache, *state.drafter_cache]


def cells(state: RoundState, slot: int, length: int) -> torch.Tensor:
    pos = torch.arange(length)
    return cell_of(state, torch.full_like(pos, slot), pos)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_token_at_every_depth_of_an_accepted_path_ends_the_row_there(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, outputs: list[list[int]], depth: int, rank: int
) -> None:
    """depth 4 is the bonus. A stop id is planted: the token at that depth of the first round."""
    force_drafts(monkeypatch, outputs, [rank] * (BLOCK - 1))
    for row, output in enumerate(outputs):
        stop = output[1 + depth]
        first = output.index(stop)
        done = run(full_tree_engine(pair), stops=(stop,))[row]
        assert list(done.token_ids) == output[: first + 1]
        assert (done.finish_reason, done.stop_token_id) == ("stop", stop)
        # Drafted tokens that were kept, the bonus apart: the last round ends inside its path or
        # with it.
        assert sum(done.accepted) <= first
        assert done.accepted == expected_accepts(first)


def expected_accepts(num_after_first: int) -> tuple[int, ...]:
    """Rounds that emit BLOCK tokens each, the last cut where the output ends."""
    accepts = []
    while num_after_first > 0:
        accepts.append(min(num_after_first, BLOCK - 1))
        num_after_first -= BLOCK
    return tuple(accepts)


@pytest.mark.parametrize("cap", range(1, 12))
def test_a_cap_inside_an_accepted_path_ends_the_row_there(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, outputs: list[list[int]], cap: int
) -> None:
    force_drafts(monkeypatch, outputs, [1] * (BLOCK - 1))
    for done, output in zip(run(full_tree_engine(pair), cap), outputs, strict=True):
        assert list(done.token_ids) == output[:cap]
        assert done.accepted == expected_accepts(cap - 1)
        assert done.finish_reason == "length"


def test_a_stop_token_at_the_cap_counts_as_a_stop(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, outputs: list[list[int]]
) -> None:
    force_drafts(monkeypatch, outputs, [0] * (BLOCK - 1))
    first = outputs[0].index(outputs[0][3])
    done = run(full_tree_engine(pair), first + 1, stops=(outputs[0][3],))[0]
    assert done.finish_reason == "stop"


def test_weights_of_the_pair_are_not_touched(pair: Pair, tmp_path: Path) -> None:
    again = load_tiny_pair(tmp_path, vocab=VOCAB, block=BLOCK)
    for ours, theirs in zip(pair, again, strict=True):
        for name, weight in ours.state_dict().items():
            assert torch.equal(weight, theirs.state_dict()[name]), name
