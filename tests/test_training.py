"""The DFlash recipe: what a drafter learns from, how it is weighed, and that it is learned."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny import load_tiny_pair
from torch import Tensor

from ddbatch.engine.oracle import Oracle, decode
from ddbatch.engine.oracle_ddtree import draft_scores, trace
from ddbatch.models.dflash import DFlash
from ddbatch.training.drafter import (
    Anchors,
    Recipe,
    block_loss,
    draw_anchors,
    train_drafter,
)
from ddbatch.training.optimiser import Optimiser, Schedule
from ddbatch.training.sequences import Batch, Example, Sequences, read_completions

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_batch(examples: list[Example], max_len: int = 99) -> Batch:
    sequences = Sequences(examples, max_len=max_len)
    (batch,) = sequences.batches(len(examples), seeded(), CPU)
    return batch


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=12), st.integers(1, 5))
def test_a_pass_deals_out_every_response_once_and_nothing_else(
    lengths: list[tuple[int, int]], rows: int
) -> None:
    max_len = 13
    examples = [
        Example([100 * n + place for place in range(prompt)], [100 * n + 50] * response)
        for n, (prompt, response) in enumerate(lengths, 1)
    ]
    if not any(response for _, response in examples):
        with pytest.raises(ValueError, match="within its first 13 tokens"):
            Sequences(examples, max_len=max_len)
        return
    sequences = Sequences(examples, max_len=max_len)
    seen = []
    for batch in sequences.batches(rows, seeded(), CPU):
        assert len(batch.token_BT) <= rows
        assert batch.token_BT.shape[1] == batch.length_B.max()
        for ids, length, is_learned in zip(
            batch.token_BT, batch.length_B.tolist(), batch.response(), strict=True
        ):
            assert not ids[length:].any()
            seen.append((ids[:length].tolist(), ids[is_learned].tolist()))
    expected = [
        ([*prompt, *response][:max_len], [*response][: max_len - len(prompt)])
        for prompt, response in examples
        if response
    ]
    assert sorted(seen) == sorted(expected)
    assert sequences.num_learned == sum(len(learned) for _, learned in expected)
    assert sequences.num_batches(rows) == math.ceil(len(expected) / rows)


def test_sequences_come_from_the_completions_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    table = pa.table({"prompt_token_ids": [[1, 2], [3]], "output_token_ids": [[4], [5, 6]]})
    pq.write_table(table, tmp_path / "completions" / "a.parquet")
    assert list(read_completions(tmp_path)) == [([1, 2], [4]), ([3], [5, 6])]


def test_a_run_that_kept_no_prompt_ids_is_refused_by_the_columns_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no completions there"):
        list(read_completions(tmp_path))
    (tmp_path / "completions").mkdir()
    pq.write_table(pa.table({"output_token_ids": [[1]]}), tmp_path / "completions" / "a.parquet")
    with pytest.raises(ValueError, match="no column prompt_token_ids"):
        list(read_completions(tmp_path))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1), st.integers(1, 7))
def test_anchors_are_distinct_response_tokens_that_another_one_follows(
    lengths: list[tuple[int, int]], num_anchors: int
) -> None:
    batch = one_batch([Example([1] * prompt, [2] * response) for prompt, response in lengths])
    anchors = draw_anchors(batch, num_anchors, seeded(3))
    for row in range(len(lengths)):
        found = anchors.pos_BA[row][anchors.is_real_BA[row]].tolist()
        start, length = int(batch.start_B[row]), int(batch.length_B[row])
        assert len(found) == len(set(found)) == min(num_anchors, length - start - 1)
        assert all(start <= pos < length - 1 for pos in found)


def test_every_anchor_is_drawn_in_some_pass() -> None:
    batch = one_batch([Example([1, 1], [2] * 6)])
    generator = seeded()
    drawn = {int(draw_anchors(batch, 1, generator).pos_BA) for _ in range(60)}
    assert drawn == {2, 3, 4, 5, 6}


def test_block_loss_is_the_weighted_cross_entropy_of_the_oracles_drafts(tmp_path: Path) -> None:
    target, drafter = load_tiny_pair(tmp_path, family="qwen3", block=5)
    examples = [Example([7, 8, 9], [3, 1, 4, 1, 5, 9, 2]), Example([2, 7], [1, 8, 2])]
    batch = one_batch(examples)
    anchors = Anchors(torch.tensor([[3, 8], [2, 3]]), torch.tensor([[True, True], [True, False]]))
    if int(batch.length_B[0]) == 5:  # the pass turned them round
        anchors = Anchors(anchors.pos_BA.flip(0), anchors.is_real_BA.flip(0))
    gamma = 2.5
    found, chain_length = block_loss(drafter, target, batch, anchors, gamma)

    total = weights = 0.0
    hits = []
    for row in range(2):
        length = int(batch.length_B[row])
        ids = batch.token_BT[row, :length].tolist()
        oracle = Oracle(target, drafter.dims.tap_layers)
        oracle.scores(ids)
        for pos, is_real in zip(
            anchors.pos_BA[row].tolist(), anchors.is_real_BA[row].tolist(), strict=True
        ):
            if not is_real:
                continue
            features = oracle.features[0][:pos]
            scores_KV = draft_scores(target, drafter, features, ids[pos], 5)
            for slot in range(1, min(5, length - pos)):
                weight = math.exp(-(slot - 1) / gamma)
                total += weight * float(
                    F.cross_entropy(scores_KV[slot], torch.tensor(ids[pos + slot]))
                )
                weights += weight
            if pos + 5 <= length:
                best = scores_KV.argmax(dim=-1).tolist()
                run = 0
                while run < 4 and best[run + 1] == ids[pos + run + 1]:
                    run += 1
                hits.append(1 + run)
    torch.testing.assert_close(found, torch.tensor(total / weights), atol=1e-4, rtol=1e-4)
    assert float(chain_length) == pytest.approx(sum(hits) / len(hits))


def test_the_published_gammas_belong_to_their_block_sizes() -> None:
    assert [Recipe().gamma_of(block) for block in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert Recipe().gamma_of(4) < 4.0 < 7.0 < Recipe().gamma_of(24)
    assert Recipe(gamma=3.0).gamma_of(16) == 3.0


def accepted_lengths(target: object, drafter: DFlash, examples: list[Example]) -> float:
    """Emitted tokens a round of the oracle's chain over all examples."""
    rounds = [
        len(found.accepted_nodes)
        for prompt, response in examples
        for found in trace(
            target,  # type: ignore[arg-type]
            drafter,
            tuple(prompt),
            tuple(response),
            budget=drafter.dims.block - 1,
            topk=1,
        )
    ]
    return sum(rounds) / len(rounds)


def test_a_trained_drafter_is_accepted_more_often_and_the_target_stays_as_it_was(
    tmp_path: Path,
) -> None:
    target, drafter = load_tiny_pair(tmp_path, block=4, scale=1.0)
    examples = []
    for start in range(12):
        prompt = (start, 2 * start + 1, 5)
        steps = decode(target, prompt, max_new_tokens=14, stop_token_ids=())
        examples.append(Example(prompt, [step.token_id for step in steps]))
    frozen = {name: place.clone() for name, place in target.destinations().items()}
    before = accepted_lengths(target, drafter, examples)
    recipe = Recipe(passes=60, rows=12, num_anchors=8, schedule=Schedule(learning_rate=5e-3))
    history = list(train_drafter(drafter, target, Sequences(examples, max_len=64), recipe))
    assert [now.step for now in history] == list(range(1, history[-1].num_steps + 1))
    assert history[-1].loss < 0.5 * history[0].loss
    assert accepted_lengths(target, drafter, examples) > before + 1
    assert all(torch.equal(frozen[name], now) for name, now in target.destinations().items())
    assert not any(weight.requires_grad for weight in drafter.parameters())


def test_a_training_is_the_same_with_the_same_seed(tmp_path: Path) -> None:
    examples = [Example([n], [n + 1, n + 2, n + 3, n + 4]) for n in range(5)]
    found = []
    for seed in (0, 0, 1):
        target, drafter = load_tiny_pair(tmp_path, block=3)
        recipe = Recipe(passes=2, rows=2, num_anchors=2, seed=seed)
        history = train_drafter(drafter, target, Sequences(examples, max_len=9), recipe)
        found.append([now.loss for now in history])
    assert found[0] == found[1] != found[2]


def test_the_rate_warms_up_and_falls_to_its_final_share() -> None:
    schedule = Schedule(learning_rate=1.0, warmup=0.1, final=0.2)
    factors = [schedule.factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (n + 1) for n in range(10)])
    assert factors[9] == max(factors) == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.2)
    assert schedule.factor(0, 1) > 0


def test_a_step_is_adamws_with_a_clipped_gradient_and_no_decay_of_norms() -> None:
    weights = [torch.nn.Parameter(torch.tensor([[3.0, -4.0]])), torch.nn.Parameter(torch.ones(2))]
    twins = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    schedule = Schedule(learning_rate=0.1, warmup=0.0, final=1.0, weight_decay=0.5, clip=1.0)
    ours = Optimiser(weights, schedule, num_steps=3)
    theirs = torch.optim.AdamW(
        [{"params": twins[:1], "weight_decay": 0.5}, {"params": twins[1:], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
    )

    def loss(pair: list[torch.nn.Parameter]) -> Tensor:
        return 50 * (pair[0] ** 2).sum() + (pair[1] ** 3).sum()

    for _ in range(3):
        ours.step(loss(weights))
        theirs.zero_grad()
        loss(twins).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(twins, 1.0)
        theirs.step()
        for weight, twin in zip(weights, twins, strict=True):
            torch.testing.assert_close(weight, twin, atol=0, rtol=0)
