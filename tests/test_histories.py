"""What sequences have said is taken in a record at a time: it is what one finds row by row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from ddbatch.core import CachePlan, Key, RunError, ShapePlan, TokenLogprobs, TokenPrompt
from ddbatch.engine.histories import Histories
from ddbatch.engine.prefill import Placed
from ddbatch.engine.record import Facts, read_record
from ddbatch.engine.state import Logprobs
from ddbatch_kernels.facts import Fact, Finish

ROWS, SLOTS, MAX_LEN, TOP = 5, 9, 40, 2
CACHE_PLAN = CachePlan(SLOTS, SLOTS, MAX_LEN, MAX_LEN, (MAX_LEN,))
PLANS = [ShapePlan(ROWS, 1, 1, 0, 0), ShapePlan(ROWS, 8, 4, 3, 3)]


@dataclass
class Slowly:
    """One sequence, told token by token."""

    placed: Placed
    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    told: list[tuple[float, list[int], list[float]]] = field(default_factory=list)
    may_end: int = 0

    @property
    def length(self) -> int:
        return len(self.placed.prompt.token_ids) + max(0, len(self.token_ids) - 1)

    @property
    def room(self) -> int:
        return self.placed.prompt.max_new_tokens - len(self.token_ids)


class Device:
    """Writes records: of each live row its facts, tokens and log-probs, and garbage beyond them."""

    def __init__(self, plan: ShapePlan, seed: int, *, has_logprobs: bool) -> None:
        self._path, self._chance = plan.draft_depth + 1, random.Random(seed)
        self._garbage = torch.Generator().manual_seed(seed)
        self._has_logprobs = has_logprobs

    def tensors(self, rows: int, path: int) -> list[torch.Tensor]:
        shape, draw = (rows, path), self._garbage
        table = torch.randint(-99, 99, (rows + 1, len(Fact) + path), generator=draw).int()
        table[:, Fact.SLOT] = SLOTS  # nobody's
        told = Logprobs(
            -torch.rand(shape, generator=draw),
            torch.randint(99, (*shape, TOP), generator=draw).int(),
            -torch.rand(*shape, TOP, generator=draw).half(),
        )
        return [table, *told] if self._has_logprobs else [table]

    def tell(
        self, lines: Sequence[Slowly | None], number: int, path: int
    ) -> tuple[list[torch.Tensor], list[Slowly]]:
        """A record, and which of the sequences end with it; the sequences take it in."""
        copies, ended = self.tensors(len(lines), path), []
        table, told = copies[0], Logprobs(*copies[1:]) if self._has_logprobs else None
        table[-1, 0] = number
        for row, own in enumerate(lines):
            if own is None:
                continue
            finish = Finish(self._chance.choices(range(5), (12, 1, 1, 1, 1))[0])
            is_empty = finish in (Finish.CANCELLED, Finish.NAN_LOGITS)
            count = 0 if is_empty else self._chance.randint(1, min(path, own.room))
            if count == own.room:
                finish = Finish.LENGTH
            places = [place for place in range(count) if self._chance.random() < 0.2]
            may_end = max(places, default=-1) + 1
            accepted, depth = max(0, count - 1), self._chance.randint(count, 2 * path)
            placed = own.placed
            facts = [placed.slot, placed.generation, own.length, count, accepted, depth, finish]
            table[row, : len(Fact)] = torch.tensor([*facts, may_end, 0])
            self._note(own, table[row], told and Logprobs(*(item[row] for item in told)))
            if finish is not Finish.LIVE:
                ended.append(own)
        return copies, ended

    @staticmethod
    def _note(own: Slowly, line: torch.Tensor, told: Logprobs | None) -> None:
        facts = dict(zip(Fact, line.tolist(), strict=False))
        if facts[Fact.MAY_END]:
            own.may_end = len(own.token_ids) + facts[Fact.MAY_END]
        for place, token_id in enumerate(line[len(Fact) :][: facts[Fact.EMITTED]].tolist()):
            own.token_ids.append(token_id)
            if told is not None:
                own.told.append(tuple(item[place].tolist() for item in told))  # type: ignore[arg-type]
        if facts[Fact.FINISH] != Finish.CANCELLED:
            own.accepted.append(facts[Fact.ACCEPTED])
            own.depth.append(facts[Fact.DEPTH])


def placed_at(slot: int, generation: int, prompt_len: int = 3, cap: int = 20) -> Placed:
    prompt = TokenPrompt(Key(slot, 0, 0), tuple(range(prompt_len)), cap)
    return Placed(slot, [slot], generation, prompt)


@pytest.mark.parametrize("has_logprobs", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.nodes} nodes")
def test_what_is_taken_a_record_at_a_time_is_what_one_finds_row_by_row(
    plan: ShapePlan, has_logprobs: bool
) -> None:
    """Sequences come and go in slots and on rows, and end in every way."""
    chance = random.Random(plan.nodes)
    device = Device(plan, 1, has_logprobs=has_logprobs)
    path = plan.draft_depth + 1
    ours = Histories(plan, CACHE_PLAN, device.tensors(ROWS, path)[1:])
    free, lines = list(range(SLOTS)), list[Slowly | None]([None] * ROWS)
    generations, num_ended = [0] * SLOTS, 0
    for number in range(200):
        fresh = []
        for row in range(ROWS):
            if lines[row] is None and chance.random() < 0.6:
                slot = free.pop(chance.randrange(len(free)))
                generations[slot] += 1
                placed = placed_at(slot, generations[slot], chance.randint(1, 9), 30)
                ours.open(placed)
                ours.load(placed)
                lines[row] = Slowly(placed)
                fresh.append(row)
        first = [own if row in fresh else None for row, own in enumerate(lines)]
        for program, path_here in ((first, 1), (lines, path)):
            is_round = program is lines
            before = [len(own.accepted) for own in program if own is not None]
            copies, ended = device.tell(program, number, path_here)
            facts = read_record(copies, number, SLOTS, "round")
            if is_round:
                assert ours.num_rounds(facts.slot_L).tolist() == before
                ours.take_round(facts, 2)
            else:
                ours.take(facts)
                for own in filter(None, program):
                    own.accepted.clear()
                    own.depth.clear()
            live = [own for own in lines if own is not None]
            reach = chance.randrange(5)
            most = [len(own.placed.prompt.token_ids) + 30 for own in live]
            longest = [min(own.length + reach, top) for own, top in zip(live, most, strict=True)]
            assert ours.longest(reach) == max(longest, default=0)
            assert ours.num_loaded == len(live)
            for own in live:
                slot = own.placed.slot
                assert ours.may_end(slot) == own.may_end
                assert ours.token_ids(slot, own.may_end) == own.token_ids[own.may_end :]
            for own in ended:
                said = ours.close(own.placed.slot)
                expected = (own.token_ids, own.accepted, own.depth)
                assert (said.token_ids, said.accepted, said.depth) == expected
                if has_logprobs:
                    parts = zip(*own.told, strict=True) if own.told else ((), (), ())
                    assert said.logprobs == TokenLogprobs(*map(list, parts))
                else:
                    assert said.logprobs is None
                lines[lines.index(own)] = None
                free.append(own.placed.slot)
                num_ended += 1
    assert num_ended > 100


def started() -> tuple[Histories, list[list[int]]]:
    """Sequences in slots 0, 1 and 2, each with its first token; lines of a sound record."""
    histories = Histories(PLANS[1], CACHE_PLAN, [])
    lines = []
    for slot in range(3):
        placed = placed_at(slot, generation=slot + 4, prompt_len=slot + 1)
        histories.open(placed)
        histories.load(placed)
        lines.append([slot, slot + 4, slot + 1, 1, 0, 3, Finish.LIVE, 0, 0, 7, 7, 7, 7])
    histories.take(facts_of(lines))
    for line in lines:
        line[Fact.EMITTED] = 2
    return histories, lines


def facts_of(lines: list[list[int]]) -> Facts:
    table = torch.tensor([*lines, [0] * len(lines[0])], dtype=torch.int32)
    return read_record([table], 0, SLOTS, "round")


WRONG: list[tuple[Callable[[list[list[int]]], object], str]] = [
    (lambda lines: lines[1].__setitem__(Fact.GENERATION, 4), "sequence 4 of slot 1 where 5 is"),
    (lambda lines: lines[1].__setitem__(Fact.SLOT, 3), "row 1 worked on .* slot 3 where None is"),
    (lambda lines: lines[2].__setitem__(Fact.SLOT, -1), "row 2 worked on .* slot -1 where None is"),
    (lambda lines: lines[2].__setitem__(Fact.SLOT, 10), "slot 10 where None is seated"),
    (lambda lines: lines[0].__setitem__(Fact.SLOT, 2**31 - 1), "slot 2147483647 where None is"),
    (lambda lines: lines[2].__setitem__(Fact.CHECK, 4), "slot 2 had 4 tokens .* the host has 3"),
    (lambda lines: lines[1].__setitem__(Fact.CHECK, 0), "slot 1 had 0 tokens .* the host has 2"),
    (lambda lines: lines.append(lines[0]), "slot 0 had 1 tokens .* the host has 3"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_record_of_something_else_is_refused_and_taken_in_nowhere(
    change: Callable[[list[list[int]]], object], said: str
) -> None:
    histories, lines = started()
    sound = [list(line) for line in lines]
    change(lines)
    with pytest.raises(RunError, match=said):
        histories.take_round(facts_of(lines), 2)
    assert [histories.token_ids(slot) for slot in range(3)] == [[7]] * 3
    histories.take_round(facts_of(sound), 2)
    assert histories.num_rounds(np.arange(3)).tolist() == [1] * 3


def test_a_sequence_that_has_left_its_slot_is_stale() -> None:
    histories, lines = started()
    assert histories.close(1).token_ids == [7]
    for generation in (5, -1, 0):
        lines[1][Fact.GENERATION] = generation
        with pytest.raises(RunError, match=f"sequence {generation} of slot 1 where None is seated"):
            histories.take_round(facts_of(lines), 2)
    del lines[1]
    histories.take_round(facts_of(lines), 2)
    histories.open(placed_at(1, generation=6))
    assert histories.token_ids(1) == []
    assert histories.num_loaded == 2  # its prompt is not launched yet
