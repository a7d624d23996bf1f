"""Prefill calls: prompts are cut at multiples of a fixed count; what shares a call, in which place
and with how much padding, changes no bit and writes nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from decoding import decode, make_engine, random_prompts, token_prompts
from hypothesis import given
from hypothesis import strategies as st
from tiny import load_tiny_pair
from torch import Tensor

from ddbatch.core import Completion, Key, PrefillPlan, Rejected, Sampling, TokenPrompt
from ddbatch.engine import engine as engine_module
from ddbatch.engine.engine import Engine
from ddbatch.engine.prefill import Placed, pieces_of
from ddbatch.engine.programs import EagerPrograms
from ddbatch.engine.sampling import TokenFlags
from ddbatch.engine.state import RoundShape, RoundState, cell_of
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.facts import ChunkFact

VOCAB, CAP = 29, 20
Pair = tuple[Target, DFlash]


@pytest.fixture(scope="module", params=[None, 5], ids=["full", "window"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return load_tiny_pair(folder, family="mistral", window=request.param, vocab=VOCAB, block=5)


def filled(
    pair: Pair, prompts: Sequence[Sequence[int]], plan: PrefillPlan, max_len: int = 64
) -> Engine:
    """An engine with room for all prompts, after the calls that prefill them: slot = place."""
    engine = make_engine(*pair, rows=7, max_len=max_len, page=8, prefill_plan=plan)
    engine.fill(iter(token_prompts(prompts, CAP)))
    return engine


def keys_of(state: RoundState, slot: int, length: int) -> Tensor:
    """Keys and values of all planes at the first positions of a slot, side by side."""
    assert state.drafter_cache is not None
    cell_S = cell_of(state, torch.full((length,), slot), torch.arange(length))
    planes = (*state.target_cache, *state.drafter_cache)
    return torch.cat(
        [plane[:, cell_S].flatten(2).transpose(0, 1).flatten(1) for plane in planes], 1
    )


@given(st.integers(1, 200), st.integers(1, 70))
def test_pieces_begin_at_multiples_of_the_chunk_and_hold_the_whole_prompt(
    length: int, chunk: int
) -> None:
    ids = tuple(range(length))
    pieces = pieces_of(Placed(3, [0], 1, TokenPrompt(Key(0, 0, 0), ids, 1)), chunk)
    assert [piece.start for piece in pieces] == list(range(0, length, chunk))
    assert sum((piece.token_ids for piece in pieces), ()) == ids
    assert all(piece.stop - piece.start == chunk for piece in pieces[:-1])
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("plan", [PrefillPlan(1, 4, False), PrefillPlan(3, 4, False)])
def test_a_long_prompts_pieces_share_calls_and_leave_what_one_piece_leaves(
    pair: Pair, plan: PrefillPlan
) -> None:
    prompts = random_prompts([33, 2, 9], VOCAB)
    engine, whole = filled(pair, prompts, plan), filled(pair, prompts, PrefillPlan(3, 64, False))
    for slot, prompt in enumerate(prompts):
        ours, theirs = (keys_of(each.state, slot, len(prompt)) for each in (engine, whole))
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    for name in ("length_S", "anchor_S", "num_out_S", "generation_S", "ready_tail"):
        assert torch.equal(getattr(engine.state, name), getattr(whole.state, name)), name
    assert sorted(engine.state.ready_S[:3].tolist()) == [0, 1, 2]


def test_the_order_of_the_pieces_of_a_call_changes_nothing(pair: Pair) -> None:
    """Nor does the device rely on it: a piece that is not the last leaves its slot alone."""

    class Reversed(EagerPrograms):
        def prefill(self, shape: RoundShape, num_chunks: int) -> None:
            state.chunk_RX.copy_(state.chunk_RX.flip(0))
            super().prefill(shape, num_chunks)

    prompts, plan = random_prompts([13, 6], VOCAB, seed=9), PrefillPlan(7, 4, True)
    engine = make_engine(*pair, rows=7, max_len=64, page=8, prefill_plan=plan)
    state, expected = engine.state, filled(pair, prompts, plan).state
    engine.programs = Reversed(engine.target, engine.drafter, state)
    engine.fill(iter(token_prompts(prompts, CAP)))
    for name in ("length_S", "anchor_S", "num_out_S", "ready_tail"):
        assert torch.equal(getattr(state, name), getattr(expected, name)), name
    assert state.length_S[:2].tolist() == [13, 6]
    for slot, prompt in enumerate(prompts):
        ours, theirs = (keys_of(each, slot, len(prompt)) for each in (state, expected))
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_calls_hold_as_many_pieces_as_the_plan_says(pair: Pair) -> None:
    """33, 2 and 9 tokens are 9, 1 and 3 pieces of 4."""
    for chunks, num_calls in ((1, 13), (3, 5), (13, 1), (20, 1)):
        for is_fixed in (False, True):
            engine = filled(
                pair, random_prompts([33, 2, 9], VOCAB), PrefillPlan(chunks, 4, is_fixed)
            )
            assert int(engine.state.call_number) == num_calls


MIXES = [[0], [0, 1], [1, 0], [2, 0, 1], [3, 2, 1, 0], [0, 0, 0], [4, 0], [1, 5, 0, 4], [5, 5, 0]]


@pytest.mark.parametrize(
    "plan", [PrefillPlan(5, 4, True), PrefillPlan(2, 16, True), PrefillPlan(4, 16, True)]
)
def test_keys_of_a_prompt_have_the_same_bits_whatever_shares_its_calls(
    pair: Pair, plan: PrefillPlan
) -> None:
    """All calls are of one size; prompts stand in any place of them and begin in any call. With the
    long one among them calls look at 128 keys, without it at 64."""
    prompts = random_prompts([33, 1, 6, 21, 40, 100], VOCAB, seed=1)
    expected = keys_of(filled(pair, [prompts[0]], plan, 128).state, 0, 33)
    for mix in MIXES:
        engine = filled(pair, [prompts[place] for place in mix], plan, 128)
        assert engine.cache_plan.key_counts == (64, 128)
        for slot, place in enumerate(mix):
            if place == 0:
                assert torch.equal(keys_of(engine.state, slot, 33), expected), mix


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_call_writes_its_prompts_cells_and_no_others(pair: Pair, is_fixed: bool) -> None:
    """Padding goes to the trash cell. Every other cell keeps its bits, those of the last pages
    behind the prompts and the scratch cells among them."""
    prompts, plan = random_prompts([9, 1, 17], VOCAB, seed=2), PrefillPlan(5, 4, is_fixed)
    engine = make_engine(*pair, rows=7, max_len=64, page=8, prefill_plan=plan)
    state = engine.state
    assert state.drafter_cache is not None
    planes = (*state.target_cache, *state.drafter_cache)
    generator = torch.Generator().manual_seed(3)
    for plane in planes:
        plane.copy_(torch.randn(plane.shape, generator=generator))
        plane[:, state.null_cell] = 0
    before = [plane.clone() for plane in planes]
    engine.fill(iter(token_prompts(prompts, CAP)))
    is_own = torch.zeros(planes[0].shape[1], dtype=torch.bool)
    for slot, prompt in enumerate(prompts):
        pos = torch.arange(len(prompt))
        is_own[cell_of(state, torch.full_like(pos, slot), pos)] = True
    assert int(is_own.sum()) == 27
    for plane, old in zip(planes, before, strict=True):
        is_changed = (plane != old).flatten(2).any(dim=2)
        is_changed[:, state.trash_cell] = False
        assert (is_changed == is_own[: plane.shape[1]]).all()


def test_a_call_leaves_slots_that_it_does_not_finish_as_they_were(pair: Pair) -> None:
    """Live slots, and nobody's, which takes what padding has to say."""
    engine = make_engine(*pair, rows=2, prefill_plan=PrefillPlan(3, 4, True))
    engine.fill(iter(token_prompts(random_prompts([6, 2], VOCAB, seed=4), CAP)))
    engine.step()
    state = engine.state
    names = ("length_S", "anchor_S", "num_out_S", "cap_S", "generation_S")
    before = {name: getattr(state, name).clone() for name in names}
    list(engine.collect())
    engine.fill(iter([TokenPrompt(Key(5, 0, 0), tuple(random_prompts([9], VOCAB)[0]), CAP)]))
    for name, old in before.items():
        new = getattr(state, name)
        assert torch.equal(new[[0, 1, 3]], old[[0, 1, 3]]), name
        assert new[state.nobody] == 0, name
        assert new[2] != old[2], name


def test_a_prompt_with_scores_that_are_no_numbers_does_not_reach_its_neighbours(
    tmp_path: Path,
) -> None:
    """They share a call, and so does a first piece of it with other first pieces."""
    target, drafter = load_tiny_pair(tmp_path, vocab=VOCAB, block=5, tied=False)
    target.embed.data[28] = torch.nan
    plan = PrefillPlan(8, 4, True)
    (bad,) = random_prompts([9], 28, seed=6)
    for place in (0, 5, 8):  # in a first piece, in one between, in the last
        poisoned = [*bad[:place], 28, *bad[place + 1 :]]
        good = random_prompts([7, 3, 9], 28, seed=5)
        engine = filled((target, drafter), [good[0], poisoned, good[1], good[2]], plan)
        sound = filled((target, drafter), [good[0], bad, good[1], good[2]], plan)
        assert keys_of(engine.state, 1, 9)[place:].isnan().any(dim=1).all()
        for slot, prompt in ((0, good[0]), (2, good[1]), (3, good[2])):
            ours, theirs = (keys_of(each.state, slot, len(prompt)) for each in (engine, sound))
            assert torch.equal(ours, theirs)
        assert engine.state.ready_S[:3].tolist() == [0, 2, 3]
        (rejected,) = engine.collect()
        assert isinstance(rejected, Rejected)
        assert (rejected.key.row_id, rejected.code) == (1, "nan_logits")
        assert "after 0 output tokens" in rejected.reason
        assert engine.stats.output_tokens == 3


def test_a_sequence_that_ends_with_its_first_token_takes_no_row(pair: Pair) -> None:
    prompts = random_prompts([5, 9, 2], VOCAB, seed=7)
    firsts = [done.token_ids[0] for done in decode(make_engine(*pair), prompts, 1)]
    stops = Sampling(stop_token_ids=(firsts[0],))
    ends = [place for place in range(3) if place == 1 or firsts[place] == firsts[0]]
    engine = make_engine(*pair, prefill_plan=PrefillPlan(2, 4, True))
    engine.fill(iter(token_prompts(prompts, [CAP, 1, CAP], stops)))
    done = {item.key.row_id: item for item in engine.collect()}
    assert sorted(done) == ends
    assert int(engine.state.ready_tail) == 3 - len(ends)
    for place, item in done.items():
        assert isinstance(item, Completion)
        assert (item.token_ids, item.accepted) == ((firsts[place],), ())
        assert item.finish_reason == ("stop" if firsts[place] == firsts[0] else "length")


def test_a_short_call_after_a_long_one_is_written_to_the_end(pair: Pair) -> None:
    """Every element of the input, padding included."""
    long, short = random_prompts([30, 3], VOCAB, seed=8)
    used, fresh = (make_engine(*pair, prefill_plan=PrefillPlan(4, 8, True)) for _ in range(2))
    used.fill(iter(token_prompts([long], CAP)))
    for engine in (used, fresh):
        engine.fill(iter([TokenPrompt(Key(1, 0, 0), tuple(short), CAP)]))
    rest = slice(ChunkFact.SLOT + 1, None)
    assert torch.equal(used.state.chunk_RX[:, rest], fresh.state.chunk_RX[:, rest])
    assert fresh.state.chunk_RX[0].tolist() == [0, 0, 3, 1, *short, *[0] * 5]
    assert fresh.state.chunk_RX[1:].tolist() == [[fresh.state.nobody] + [0] * 11] * 3
    assert used.state.chunk_RX[:, ChunkFact.SLOT].tolist() == [1, 6, 6, 6]


def test_slots_are_set_up_once_a_call_however_often_prompts_arrive(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting slots up takes many small launches, and prompts arrive with almost every round."""
    opened: list[int] = []
    original = engine_module.open_slots

    def open_slots(state: RoundState, flags: TokenFlags, placed: Sequence[Placed]) -> None:
        opened.append(len(placed))
        original(state, flags, placed)

    monkeypatch.setattr(engine_module, "open_slots", open_slots)
    engine = make_engine(*pair, rows=8, prefill_plan=PrefillPlan(4, 16, True))
    caps = [3 + 5 * (place % 4) for place in range(40)]
    done = decode(engine, random_prompts([9] * 40, VOCAB), caps)
    assert [len(item.token_ids) for item in done if isinstance(item, Completion)] == caps
    assert sum(opened) == 40
    assert max(opened) == 4
    assert sum(count == 4 for count in opened) >= 8  # calls wait to be full
