"""The acceptance table: a pair that does not fit and cells that depart are told, chance is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer

from ddbatch.core import ShapePlan
from ddbatch.demo import demo_paths
from ddbatch.engine import acceptance, oracle
from ddbatch.engine.acceptance import AcceptanceTable, chance
from ddbatch.engine.oracle_ddtree import trace
from ddbatch.models.dflash import read_drafter_dims
from ddbatch.models.dims import DrafterDims, Rope
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import load_drafter, load_target

MAX_LEN = 240
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # as the demo was trained
# Budget -> tokens a round that misfits of the demo pair accept, and that sound pairs do at 1.
MEASURED = {1: (0.05, 0.46), 2: (0.07, 0.72), 4: (0.12, 0.95), 8: (0.20, 1.14)}
MEASURED |= {16: (0.48, 1.38), 32: (0.39, 1.54), 64: (0.51, 1.69)}
Fate = Callable[[int, int, int], float]  # row, prefix length, rounds before -> what is left


def plan_of(rows: int, budget: int = 16, topk: int = 16) -> ShapePlan:
    return ShapePlan(rows, budget + 1, 8, min(budget, 7), topk)


def filled(
    sequences: Sequence[Sequence[int]],
    rows: int,
    fate: Fate = lambda row, prefix, before: 1.0,
    plan: ShapePlan | None = None,
) -> AcceptanceTable:
    """A batch that decodes these accepted counts; a free row takes the next sequence."""
    table = AcceptanceTable(plan or plan_of(rows), MAX_LEN)
    waiting = list(sequences)[::-1]
    seats: list[list[int]] = [[] for _ in range(rows)]  # what is left of a sequence, reversed
    prefixes, before = [0] * rows, [0] * rows
    while waiting or any(seats):
        lines = []
        for row, left in enumerate(seats):
            if not left and waiting:
                left += list(waiting.pop())[::-1]
                prefixes[row], before[row] = 20, 0
            if left:
                accepted = int(left.pop() * fate(row, prefixes[row], before[row]))
                lines.append((row, prefixes[row], before[row], accepted))
                prefixes[row], before[row] = prefixes[row] + accepted + 1, before[row] + 1
        table.add(*np.array(lines).T)
    return table


def drawn(count: int, seed: int = 0, rounds: int = 25, mean: float = 1.5) -> list[list[int]]:
    """Sequences, each of its own difficulty and length."""
    chance_of = np.random.default_rng(seed)
    return [
        chance_of.poisson(mean * chance_of.gamma(2.0, 0.5), chance_of.integers(2, 2 * rounds))
        .clip(0, 7)
        .tolist()
        for _ in range(count)
    ]


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("order", ["drawn", "longest first", "hard and easy in turn"])
def test_a_clean_run_has_no_notes(rows: int, order: str) -> None:
    for seed in range(5):
        sequences = drawn(200 if rows < 10 else 900, seed)
        if order == "longest first":
            sequences.sort(key=len, reverse=True)
        elif order == "hard and easy in turn":
            sequences.sort(key=lambda accepted: sum(accepted) / len(accepted))
            half = len(sequences) // 2
            pairs = zip(sequences[:half], sequences[half:], strict=True)
            sequences = [one for pair in pairs for one in pair]
        assert filled(sequences, rows).notes() == []


@pytest.mark.parametrize("budget", MEASURED)
def test_the_alarm_lies_between_misfits_and_sound_pairs(budget: int) -> None:
    misfit, sound = MEASURED[budget]
    bound = chance(plan_of(3, budget, topk=budget))
    assert 1.3 * misfit < bound < sound / 1.7


def test_the_alarm_waits_for_rounds_and_sequences_and_names_the_causes() -> None:
    stuck = [[0, 0, 1, 0, 0]] * 300
    (note,) = filled(stuck, rows=3).notes()
    for word in ("1.20 tokens a round", "1,500 rounds", "rope theta", "mask token", "tap layers"):
        assert word in note
    assert "chat" in note
    assert filled(stuck[:190], rows=3).notes() == []
    assert filled([[0] * 190] * 7, rows=3).notes() == []
    plain = ShapePlan(3, 1, 1, 0, 0)
    assert filled([[0] * 5] * 300, rows=3, plan=plain).notes() == []


def test_what_was_told_is_not_told_again() -> None:
    def fate(row: int, prefix: int, before: int) -> float:
        return 0.0 if row == 1 or before == 3 else 1.0

    for table, count in ((filled(drawn(400), 3, fate), 2), (filled([[0] * 5] * 300, 3), 1)):
        assert len(table.notes()) == count
        table.add(*(np.array([value]) for value in (0, 30, 1, 2)))
        assert table.notes() == []


def test_a_chain_is_held_to_less_than_a_tree() -> None:
    sequences = drawn(100, mean=0.4)
    assert filled(sequences, rows=3, plan=plan_of(3, budget=7, topk=1)).notes() == []
    assert len(filled(sequences, rows=3).notes()) == 1


@pytest.mark.parametrize(("rows", "count"), [(2, 100), (3, 150), (8, 400)])
def test_a_row_that_departs_is_named(rows: int, count: int) -> None:
    def fate(row: int, prefix: int, before: int) -> float:
        return 0.2 if row == 1 else 1.0

    (note,) = filled(drawn(count), rows, fate).notes()
    assert "row 1 of the batch is" in note
    assert "please report it" in note


def test_of_several_rows_the_worst_is_named() -> None:
    def fate(row: int, prefix: int, before: int) -> float:
        return {2: 0.2, 5: 0.0, 6: 0.2}.get(row, 1.0)

    (note,) = filled(drawn(900), 9, fate).notes()
    assert "row 5 of the batch (and in 2 more) is 0.00 drafted tokens" in note


def test_a_row_with_few_sequences_does_not_depart() -> None:
    def fate(row: int, prefix: int, before: int) -> float:
        return 0.0 if row == 1 else 1.0

    assert filled(drawn(48), 8, fate).notes() == []


def test_a_prefix_length_that_loses_all_is_named() -> None:
    def fate(row: int, prefix: int, before: int) -> float:
        return 0.1 if 48 <= prefix < 72 else 1.0

    (note,) = filled(drawn(400), 5, fate).notes()
    assert "after 48 to 71 tokens is 0." in note
    assert "overall" in note


@pytest.mark.parametrize(
    ("first", "last", "named"), [(0, 0, "after 0 rounds"), (16, 31, "after 16 to 31 rounds")]
)
def test_rounds_since_refill_that_lose_all_are_named(first: int, last: int, named: str) -> None:
    def fate(row: int, prefix: int, before: int) -> float:
        return 0.1 if first <= before <= last else 1.0

    notes = filled(drawn(400), 5, fate).notes()
    assert any(named in note for note in notes)
    assert not any("row" in note for note in notes)


def test_few_sequences_do_not_make_a_cell() -> None:
    """A handful of texts that the drafter cannot follow, and that alone are long."""
    sequences = [*drawn(400, rounds=12), *([0] * 200 for _ in range(20))]
    assert filled(sequences, 5).notes() == []


def test_a_prefix_and_a_round_at_the_very_end_have_a_cell() -> None:
    table = AcceptanceTable(plan_of(2), 7)
    for last in (0, 7):
        table.add(*(np.array([value]) for value in (1, last, last, 2)))


def misfit(name: str, dims: DrafterDims) -> DrafterDims:
    if name == "rope theta":
        return replace(dims, decoder=replace(dims.decoder, rope=Rope(2.0)))
    return replace(dims, mask_token_id=0) if name == "mask token" else dims


@pytest.fixture(scope="module")
def accepted() -> Callable[[str], list[list[int]]]:
    """What the oracle accepts of the demo's drafter, misfitted in some way, in ten texts."""
    folders, device = demo_paths(), torch.device("cpu")
    target_folder, drafter_folder = Path(folders.model), Path(folders.drafter)
    target = load_target(target_folder, read_target_dims(target_folder), "float32", device, 128)
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    texts = pq.read_table(folders.data)["prompt"].to_pylist()[:10]
    prompts = [tuple(tokenizer.encode(PROMPT.format(text)).ids) for text in texts]
    outputs = [
        tuple(
            step.token_id
            for step in oracle.decode(target, prompt, max_new_tokens=24, stop_token_ids=())
        )
        for prompt in prompts
    ]

    def of(name: str) -> list[list[int]]:
        dims = misfit(name, read_drafter_dims(drafter_folder))
        drafter = load_drafter(drafter_folder, dims, "float32", device, 128)
        return [
            [
                len(told.accepted_nodes) - 1
                for told in trace(target, drafter, prompt, output, budget=8, topk=8)
            ]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    return of


@pytest.mark.parametrize("name", ["rope theta", "mask token", "sound"])
def test_a_drafter_with_a_wrong_config_raises_the_alarm(
    accepted: Callable[[str], list[list[int]]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "MIN_ROUNDS", 60)
    notes = filled(accepted(name), 3, plan=plan_of(3, budget=8, topk=8)).notes()
    assert [name in note for note in notes] == ([] if name == "sound" else [True])
