"""What a program tells the host is held against what the host knows: a record of anything else
stops the run and says why. A copy on its way to the host is never overwritten."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from decoding import decode, make_engine, random_prompts, token_prompts
from numpy.typing import NDArray
from tiny import load_tiny_pair

from ddbatch.core import Completion, Key, PrefillPlan, RunError, Sampling, TokenPrompt
from ddbatch.engine.commit import commit
from ddbatch.engine.engine import Engine
from ddbatch.engine.programs import Programs
from ddbatch.engine.record import Facts, check_sum, read_record
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.engine.transfer import RING_SIZE, Ring
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.facts import ERRORS, Error, Fact, Finish

VOCAB = 29
LENGTHS = (5, 1, 9)
Pair = tuple[Target, DFlash]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_tiny_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, block=5)


def started(pair: Pair, num_prompts: int = 3) -> Engine:
    """An engine after one round, which the host has read; rows and slots 0.. are live."""
    engine = make_engine(*pair, page=8)
    engine.fill(iter(token_prompts(random_prompts(LENGTHS[:num_prompts], VOCAB), 20)))
    engine.step()
    assert list(engine.collect()) == []
    return engine


def fails_after(engine: Engine, change: Callable[[RoundState], object]) -> str:
    """What the host says of the round that follows a change of the state."""
    with torch.inference_mode():
        change(engine.state)
    engine.step()
    with pytest.raises(RunError) as caught:
        list(engine.collect())
    return str(caught.value)


def test_a_record_of_another_round_is_refused(pair: Pair) -> None:
    said = fails_after(started(pair), lambda state: state.round_number.add_(1))
    assert "the record of round 2 came where 1 was expected" in said


def test_an_end_that_does_not_exist_is_no_mistake_of_the_user(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(pair)

    def commit_and_tell(drafter: DFlash | None, state: RoundState) -> None:
        commit(drafter, state)
        state.told.row_BX[0, Fact.FINISH] = 9

    monkeypatch.setattr("ddbatch.engine.round.commit", commit_and_tell)
    said = fails_after(engine, lambda state: None)
    assert "engine: round 1, row 0: no such end: 9" in said


class Skipping:
    """Programs that are launched and leave everything as it was, as a replay of nothing does."""

    def round(self, shape: RoundShape) -> None:
        pass

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        pass


def test_a_record_that_was_not_written_anew_is_refused(pair: Pair) -> None:
    engine = started(pair)
    engine.programs = Skipping()
    assert "the record of round 0 came where 1 was expected" in fails_after(engine, id)
    engine = started(pair)
    engine.programs = Skipping()
    engine.fill(iter([TokenPrompt(Key(7, 0, 0), (1, 2), 20)]))
    with pytest.raises(RunError, match="record of prefill call 0 came where 1 was expected"):
        list(engine.collect())


def test_a_row_that_works_on_another_sequence_of_its_slot_is_refused(pair: Pair) -> None:
    said = fails_after(started(pair), lambda state: state.generation_S[1].sub_(1))
    assert "row 1 worked on sequence 0 of slot 1 where 1 is seated" in said


def test_a_row_that_works_on_a_slot_without_a_sequence_is_refused(pair: Pair) -> None:
    def strays(state: RoundState) -> None:
        state.slot_B[2], state.cap_S[4] = 4, 20

    said = fails_after(started(pair), strays)
    assert "row 2 worked on sequence 0 of slot 4 where None is seated" in said


def test_two_rows_on_one_slot_are_refused(pair: Pair) -> None:
    """The second of them is where the host has the sequence only after it has read the first."""
    engine = started(pair)
    length = int(engine.state.length_S[1])
    said = fails_after(engine, lambda state: state.slot_B[2].fill_(1))
    assert f"slot 1 had {length} tokens committed on the device where the host has" in said


@pytest.mark.parametrize("wrong_by", [-1, 1])
def test_a_sequence_of_another_length_is_refused(pair: Pair, wrong_by: int) -> None:
    engine = started(pair)
    length = int(engine.state.length_S[2])
    said = fails_after(engine, lambda state: state.length_S[2].add_(wrong_by))
    assert (
        f"slot 2 had {length + wrong_by} tokens committed on the device where the host has {length}"
    ) in said


FAULTS: list[tuple[int, Callable[[RoundState, int], object]]] = [
    (Error.TOKEN, lambda state, row: state.tree.token_BN[row, 3].fill_(VOCAB)),
    (Error.TOKEN, lambda state, row: state.choice_BN[row, 2].fill_(-1)),
    (Error.PARENT, lambda state, row: state.tree.parent_BN[row, 3].fill_(3)),
    (Error.PARENT, lambda state, row: state.tree.parent_BN[row, 1].fill_(4)),
    (Error.PARENT, lambda state, row: state.tree.parent_BN[row, 2].fill_(-1)),
    (Error.PARENT, lambda state, row: state.tree.parent_BN[row, 0].fill_(0)),
    (Error.EMITTED, lambda state, row: state.num_emitted_B[row].fill_(0)),
    (Error.EMITTED, lambda state, row: state.num_emitted_B[row].fill_(-1)),
    (Error.EMITTED, lambda state, row: state.num_emitted_B[row].fill_(6)),
    (Error.LENGTH, lambda state, row: state.cap_S[state.slot_B[row]].fill_(1)),
]


def told_after(state: RoundState, change: Callable[[RoundState, int], object], row: int) -> Facts:
    """The record of the last round, which is committed and told anew after a change of one row."""
    with torch.inference_mode():
        change(state, row)
        number = int(state.round_number)
        commit(None, state)
    return read_record([state.told.row_BX], number, state.nobody, "round")


@pytest.mark.parametrize(("bit", "change"), FAULTS)
def test_the_error_word_stops_the_run_and_names_what_is_wrong(
    pair: Pair, bit: int, change: Callable[[RoundState, int], object]
) -> None:
    for row in range(3):
        state = started(pair).state
        with pytest.raises(RunError) as caught:
            told_after(state, change, row)
        found = [text for text in ERRORS.values() if text in str(caught.value)]
        assert found == [ERRORS[bit]]
        assert f"round 1, row {row}, slot {row}: " in str(caught.value)


def test_a_sequence_beyond_its_pages_is_an_error(pair: Pair) -> None:
    state = started(pair).state
    with torch.inference_mode():
        state.pos_BN[1] += state.cache_plan.max_len - state.pos_BN[1, 0]
        commit(None, state)
    with pytest.raises(RunError, match="row 1, slot 1: a sequence longer than its pages"):
        read_record([state.told.row_BX], 1, state.nobody, "round")


@pytest.mark.parametrize(("bit", "change"), FAULTS)
def test_an_inert_row_tells_nothing_not_even_an_error(
    pair: Pair, bit: int, change: Callable[[RoundState, int], object]
) -> None:
    state = started(pair, num_prompts=2).state
    assert state.active_B.tolist() == [True, True, False]
    found = told_after(state, change, 2)
    assert found.row_L.tolist() == [0, 1]
    assert state.told.row_BX[2, Fact.ERROR] == 0


@pytest.mark.parametrize("finish", [Finish.CANCELLED, Finish.NAN_LOGITS])
def test_a_row_may_end_without_a_token(pair: Pair, finish: Finish) -> None:
    def ends(state: RoundState, row: int) -> None:
        state.num_emitted_B[row] = 0
        state.finish_B[row] = int(finish)

    found = told_after(started(pair).state, ends, 1)
    assert (found.finish_L[1], found.emitted_L[1]) == (finish, 0)


class Tampering:
    """Programs that change the input of each prefill call."""

    def __init__(self, programs: Programs, change: Callable[[], object]) -> None:
        self._programs, self._change = programs, change

    def round(self, shape: RoundShape) -> None:
        self._programs.round(shape)

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        self._change()
        self._programs.prefill(shape, num_chunks)


@pytest.mark.parametrize(
    "change",
    [
        lambda chunk_RX: chunk_RX[1, 5].add_(1),  # another token
        lambda chunk_RX: chunk_RX[0, 4:].copy_(chunk_RX[0, 4:].flip(0)),  # in another order
        lambda chunk_RX: chunk_RX[0, 2].sub_(1),  # one token less
        lambda chunk_RX: chunk_RX[2, 0].fill_(0),  # in another slot
        lambda chunk_RX: chunk_RX[1, 0].fill_(6),  # in nobody's
        lambda chunk_RX: chunk_RX[:2].copy_(chunk_RX[:2].flip(0)),  # the last call's input
    ],
)
def test_a_prefill_call_that_saw_something_else_is_refused(
    pair: Pair, change: Callable[[torch.Tensor], object]
) -> None:
    """The staging buffer was written too late, or too early."""
    engine = make_engine(*pair, prefill_plan=PrefillPlan(chunks=4, chunk=4, is_fixed=True))
    engine.programs = Tampering(engine.programs, lambda: change(engine.state.chunk_RX))
    engine.fill(iter(token_prompts([[1, 2, 3, 4, 5, 6], [7, 8, 9]], 20)))
    with pytest.raises(RunError, match="a prefill call saw other tokens than were sent to it"):
        list(engine.collect())


def test_a_prompt_that_was_put_into_a_slots_earlier_sequence_is_refused(pair: Pair) -> None:
    engine = make_engine(*pair)
    slot_0 = engine.state.generation_S[0]
    engine.programs = Tampering(engine.programs, lambda: slot_0.sub_(1))
    engine.fill(iter(token_prompts([[1, 2, 3]], 20)))
    with pytest.raises(RunError, match=r"\(0, 0, 14\)\] instead of \[\(0, 1, 14\)"):
        list(engine.collect())


def test_the_check_sum_tells_tokens_places_and_their_number() -> None:
    ids = [3, 0, 7, 7, 2]
    for other in ([3, 0, 7, 7], [3, 0, 7, 2, 7], [0, 3, 7, 7, 2], [3, 0, 7, 7, 3], [4, 0, 7, 7, 2]):
        assert check_sum(other) != check_sum(ids)
    assert check_sum([151_935] * 4096) < 1_000_003  # it fits int32 whatever the tokens are


def test_without_a_fault_records_are_read_to_the_end(pair: Pair) -> None:
    """Guards the tests above: tampering with nothing stops nothing."""
    engine = started(pair)
    engine.programs = Tampering(engine.programs, lambda: None)
    while engine.is_busy:
        engine.step()
        assert all(isinstance(item, Completion) for item in engine.collect())
    assert len(decode(engine, [[1, 2, 3]])) == 1


def test_acceptance_is_told_of_rows_that_go_on_and_are_not_hot(pair: Pair) -> None:
    """As one finds it in the completions: all rounds but the last, by prefix and rounds before."""
    engine, told = make_engine(*pair), list[tuple[int, ...]]()
    add = engine._layout.acceptance.add

    def note(*columns: NDArray[np.int64]) -> None:
        told.extend(zip(*(column.tolist() for column in columns[1:]), strict=True))
        add(*columns)

    engine._layout.acceptance.add = note  # type: ignore[method-assign]
    prompts, own = random_prompts([5, 1, 9, 4], VOCAB), [Sampling(), Sampling(temperature=1.0)]
    own += [Sampling(temperature=1.1), Sampling(temperature=0.5)]
    expected = []
    for prompt, done in zip(prompts, decode(engine, prompts, 20, own), strict=True):
        length = len(prompt)
        for place, accepted in enumerate(done.accepted[:-1]):
            if own[done.key.row_id].temperature <= 1:
                expected.append((length, place, accepted))
            length += accepted + 1
    assert sorted(told) == sorted(expected)


def test_rounds_are_told_apart_beyond_31_bits(pair: Pair) -> None:
    engine = started(pair)
    engine.state.round_number.add_((1 << 31) - 3)
    engine.stats.rounds += (1 << 31) - 3
    done = list(engine.run(iter([])))
    assert all(isinstance(item, Completion) for item in done)
    assert engine.stats.rounds > 1 << 31
    said = fails_after(engine, lambda state: state.round_number.add_(1))
    assert "came where" in said


def test_a_ring_refuses_to_overwrite_a_copy_that_was_not_read() -> None:
    tensor = torch.zeros(2, dtype=torch.int32)
    ring = Ring([tensor], size=3)
    tickets = []
    for number in range(3):
        assert not ring.is_full
        tensor.fill_(number)
        tickets.append(ring.push())
    assert ring.is_full
    with pytest.raises(AssertionError, match="a copy that was not read would be overwritten"):
        ring.push()
    tensor.fill_(9)
    assert ring.read(tickets[0])[0].tolist() == [0, 0]  # as it was when it was pushed
    assert not ring.is_full
    again = ring.push()
    assert ring.is_full
    assert [ring.read(ticket)[0][0].item() for ticket in (*tickets[1:], again)] == [1, 2, 9]


def test_rounds_that_are_collected_late_are_not_lost(pair: Pair) -> None:
    """More of them than the ring holds."""
    late, prompt = make_engine(*pair), random_prompts([7], VOCAB)[0]
    late.fill(iter(token_prompts([prompt], 60)))
    for _ in range(RING_SIZE + 3):
        late.step()
    (done,) = late.run(iter([]))
    assert isinstance(done, Completion)
    assert len(done.accepted) > RING_SIZE + 3
    assert done.token_ids == decode(make_engine(*pair), [prompt], 60)[0].token_ids
