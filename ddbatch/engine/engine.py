"""The engine: prompts in, completions out, over a static batch with refill from the first commit.

Three doors join host and device: fill (prefill), step and collect. On a GPU the host never waits
for the round that it has just launched: it reads the record of the one before. An engine may have
several plans over one cache; between rounds it changes from one to another, and sequences stay
where they are. Knows nothing about text, files or options, nor which plan is best.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from ddbatch.core import (
    CachePlan,
    Completion,
    EngineStats,
    PrefillPlan,
    Rejected,
    ShapePlan,
    StopFinder,
    TokenPrompt,
)
from ddbatch.engine.admit import leave
from ddbatch.engine.allocate import allocate_states
from ddbatch.engine.catching_up import Context
from ddbatch.engine.histories import Histories
from ddbatch.engine.layouts import make_layouts
from ddbatch.engine.plan import plan_prefill
from ddbatch.engine.prefill import Piece, Placed, check_pieces, open_slots, pieces_of, put_pieces
from ddbatch.engine.programs import GraphPool, Programs
from ddbatch.engine.record import Facts, read_record
from ddbatch.engine.sampling import DrawKind, TokenFlags, draw_kind
from ddbatch.engine.seats import Closing, Homes, IdleWatch, Load, Seat, closing
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.engine.stop_watch import StopWatch
from ddbatch.engine.transfer import Mark, Ring, Ticket, mark
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.facts import Finish


class _Call(NamedTuple):
    """A prefill call under way."""

    pieces: list[Piece]
    started: Mark


class _Pending(NamedTuple):
    """A program whose record is not read yet; call: None = a round."""

    number: int
    ticket: Ticket
    call: _Call | None


class Engine:
    """A pair, its state and the slots in flight.

    drafter None = plain decoding. plans: the engine starts with the first. pool: CUDA graphs are
    captured into it; None = eager. finder: for prompts with stop strings. top_logprobs: how many of
    the best tokens are told beside each emitted one; None = no log-probs. least_draw: what draws
    compute at least, so that a few prompts with other filters need no other graphs. keeps_scores:
    state.scores_BNV holds the last round's, to be measured.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlash | None,
        plans: ShapePlan | Sequence[ShapePlan],
        cache_plan: CachePlan,
        *,
        prefill_plan: PrefillPlan | None = None,
        pool: GraphPool | None = None,
        finder: StopFinder | None = None,
        top_logprobs: int | None = None,
        least_draw: DrawKind = DrawKind.GREEDY,
        keeps_scores: bool = False,
    ) -> None:
        plans = [plans] if isinstance(plans, ShapePlan) else list(dict.fromkeys(plans))
        is_drafted = any(plan.nodes > 1 for plan in plans)
        assert is_drafted == (drafter is not None), (plans, drafter is None)
        device = target.embed.device
        self.target, self._drafter, self.cache_plan = target, drafter, cache_plan
        states = allocate_states(
            plans,
            cache_plan,
            prefill_plan or plan_prefill(max(plan.rows for plan in plans), device.type),
            target=target.dims,
            drafter=None if drafter is None else drafter.dims.decoder,
            num_taps=0 if drafter is None else len(drafter.dims.tap_layers),
            top_logprobs=top_logprobs,
            keeps_scores=keeps_scores,
            dtype=target.embed.dtype,
            device=device,
        )
        self._layouts = make_layouts(target, drafter, states, pool)
        self._layout = self._layouts[plans[0]]
        self._lag = 1 if device.type == "cuda" else 0
        self._flags = TokenFlags(target.dims.vocab, finder, device)
        self._stop_watch = StopWatch(finder)
        self._least_draw = least_draw
        self.reset()

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget everything: as if just made, but for the plan in force and what caches hold."""
        for layout in self._layouts.values():
            layout.reset()
        self.stats = EngineStats()
        self._draw = self._least_draw
        self._homes, self._context = Homes(self.cache_plan), Context(self.cache_plan.slots)
        self._seats: dict[int, Seat] = {}
        self._pieces: deque[Piece] = deque()  # that wait for a prefill call
        deepest = max(self.plans, key=lambda plan: plan.draft_depth)
        logprobs = self.state.told.logprobs_BK
        self._histories = Histories(deepest, self.cache_plan, logprobs or ())
        self._is_hot_S = np.zeros(self.cache_plan.slots, np.bool_)
        self._flagged: set[int] = set()  # slots whose text is to be looked at
        self._longest = 0  # no sequence on a row has more committed tokens
        self._closing: list[Closing] = []
        self._waiting: TokenPrompt | None = None
        self._pending: deque[_Pending] = deque()
        self._call_ring = Ring(self.state.chunk_told.tensors())
        self._num_calls, self._idle, self._is_dry = 0, IdleWatch(), False

    def run(self, prompts: Iterator[TokenPrompt]) -> Iterator[Completion | Rejected]:
        """Decode all prompts; each becomes one Completion, or a Rejected with code nan_logits.

        They come back as they finish. Prompts are drawn as slots become free.
        """
        while True:
            self.fill(prompts)
            if not self.is_busy:
                return
            self.step()
            yield from self.collect()

    @property
    def plans(self) -> list[ShapePlan]:
        """All that it may change to."""
        return list(self._layouts)

    @property
    def plan(self) -> ShapePlan:
        """The one in force, as all that follows."""
        return self._layout.plan

    @property
    def state(self) -> RoundState:
        """Of the plan in force."""
        return self._layout.state

    @property
    def drafter(self) -> DFlash | None:
        """None where nothing is drafted."""
        return self._layout.drafter

    def notes(self) -> list[str]:
        """What a person should know of acceptance and was not told before."""
        return [note for item in self._layouts.values() for note in item.acceptance.notes()]

    @property
    def programs(self) -> Programs:
        """Of the plan in force; they may be replaced."""
        return self._layout.programs

    @programs.setter
    def programs(self, programs: Programs) -> None:
        self._layout.programs = programs

    def keep(self, plans: Sequence[ShapePlan]) -> None:
        """Change to no other plan from now on."""
        assert self.plan in plans, (self.plan, plans)
        self._layouts = {plan: self._layouts[plan] for plan in plans}

    @torch.inference_mode()
    def change(self, plan: ShapePlan) -> None:
        """Go on with another plan. The host waits for the rounds that were launched. A drafter that
        plain decoding has told nothing is given its context: committed tokens of all sequences go
        through prefill calls once more."""
        before, after = self._layout, self._layouts[plan]
        if before is after:
            return
        while self._pending:
            self._read(self._pending.popleft())
        leave(before.state)
        self._layout = after
        self._longest = self._histories.longest(0)
        if before.drafter is not None and after.drafter is None:
            self._context.sleep(self._histories)
        elif before.drafter is None and after.drafter is not None:
            self._catch_up()

    @property
    def load(self) -> Load:
        """What there is to do; counted, so not for every round."""
        histories = self._histories
        return Load(
            histories.num_loaded,
            histories.mean_length(),
            self._is_dry,
            self._context.num_untold(histories),
        )

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is in flight, waits for pages or has text to be looked at."""
        return bool(self._seats or self._closing) or self._waiting is not None

    @property
    def next_slot(self) -> int:
        """The slot of the next prompt; there is one whenever a prompt is drawn."""
        return self._homes.next_slot

    @property
    def seats(self) -> Mapping[int, Seat]:
        """Slots in flight."""
        return self._seats

    @torch.inference_mode()
    def fill(self, prompts: Iterator[TokenPrompt]) -> None:
        """Reserve a slot and pages for as many prompts as fit, and launch prefill calls."""
        chunks, has_more = self.state.prefill_plan.chunks, True
        while has_more:
            # While the device works on a call the next prompts are seated.
            placed = list(islice(self._place(prompts), chunks))
            if placed:
                self._draw = max(self._least_draw, *(seat.draw for seat in self._seats.values()))
            while len(self._pieces) >= chunks:
                self._prefill(chunks)
            has_more = len(placed) == chunks
        self._is_dry = self._homes.has_slot and self._waiting is None
        # A call waits to be full while rows and half the spare slots have work.
        enough = (self.plan.rows + self.cache_plan.slots) // 2
        if self._pieces and self._histories.num_loaded < enough:
            self._prefill(len(self._pieces))

    @torch.inference_mode()
    def step(self) -> None:
        """Launch one round over the rows."""
        if self.cache_plan.num_keys(self._longest) > self.cache_plan.key_counts[0]:
            # What is launched and not read may have added as much to every sequence.
            num_rounds = sum(item.call is None for item in self._pending)
            self._longest = self._histories.longest((self.plan.draft_depth + 1) * num_rounds)
        self.programs.round(RoundShape(self.cache_plan.num_keys(self._longest), self._draw))
        self._longest += self.plan.draft_depth + 1
        self._push(self.stats.rounds, None)
        self.stats.rounds += 1
        self.stats.row_rounds += self.plan.rows

    def collect(self) -> Iterator[Completion | Rejected]:
        """Read the records that are due; hand out what has ended and free its slots."""
        while len(self._pending) > self._lag:
            self._read(self._pending.popleft())
        with torch.inference_mode():  # around a generator it would be entered for each item
            for slot in list(self._flagged):
                self._look(slot)
        # While rows are live nobody waits for a look; afterwards there is nothing else to do.
        waits = not self._seats
        closed, self._closing = self._closing, []
        for item in closed:
            if waits or item.is_settled:
                outcome = item.outcome()
                if isinstance(outcome, Completion):
                    self.stats.output_tokens -= len(item.result.token_ids) - len(outcome.token_ids)
                yield outcome
            else:
                self._closing.append(item)

    def _place(self, prompts: Iterator[TokenPrompt]) -> Iterator[Placed]:
        """Seats for the next prompts, as many as slots and pages allow."""
        while self._homes.has_slot:
            self._waiting = self._waiting or next(prompts, None)
            if self._waiting is None:
                return
            placed = self._homes.take(self._waiting)
            if placed is None:
                return
            self._waiting, prompt = None, placed.prompt
            own = prompt.sampling
            self._seats[placed.slot] = Seat(
                placed, self._stop_watch.open(own.stop), time.monotonic(), draw_kind([own])
            )
            self._context.open(placed.slot, len(prompt.token_ids), is_told=self._is_drafting)
            self._histories.open(placed)
            self._is_hot_S[placed.slot] = own.temperature > 1
            self._pieces.extend(pieces_of(placed, self.state.prefill_plan.chunk))
            self.stats.prompt_tokens += len(prompt.token_ids)
            yield placed

    @property
    def _is_drafting(self) -> bool:
        """Whether the drafter is told of what is committed; there may be none to tell."""
        return self._drafter is None or self._layout.drafter is not None

    def _catch_up(self) -> None:
        """Tell the drafter what it does not know of the sequences in flight."""
        plan, waiting = self.state.prefill_plan, self._pieces
        missed = self._context.tell(self._seats.values(), self._histories, plan.chunk)
        self._pieces = deque(missed)
        while self._pieces:
            self._prefill(min(plan.chunks, len(self._pieces)))
        self._pieces = waiting

    def _prefill(self, count: int) -> None:
        """Launch a call for so many of the pieces that wait."""
        started = mark(self.target.embed.device)
        plan = self.state.prefill_plan
        pieces = [self._pieces.popleft() for _ in range(count)]
        placed = [piece.placed for piece in pieces if piece.is_first]
        if placed:
            open_slots(self.state, self._flags, placed)
        put_pieces(self.state, pieces)
        shape = RoundShape(
            self.cache_plan.num_keys(max(piece.stop for piece in pieces)), self._draw
        )
        self.programs.prefill(shape, plan.chunks if plan.is_fixed else len(pieces))
        self._push(self._num_calls, _Call(pieces, started))
        self._num_calls += 1
        for piece in pieces:
            if piece.is_prompt:
                self._context.launch(piece.placed.slot, piece.stop)
            if piece.is_last:
                self._histories.load(piece.placed)
                self._longest = max(self._longest, piece.stop)

    def _push(self, number: int, call: _Call | None) -> None:
        """Have the record of what was just launched copied."""
        ring = self._layout.ring if call is None else self._call_ring
        while ring.is_full:  # many prefill calls in a row
            self._read(self._pending.popleft())
        self._pending.append(_Pending(number, ring.push(), call))

    def _read(self, pending: _Pending) -> None:
        """Take what a program told; wait for it where it is still under way."""
        call = pending.call
        ring, what = (self._call_ring, "prefill call") if call else (self._layout.ring, "round")
        facts = read_record(ring.read(pending.ticket), pending.number, self.state.nobody, what)
        if call is not None:
            check_pieces(call.pieces, facts)
            self.stats.prefill_seconds += pending.ticket.there.seconds_since(call.started)
            facts = facts.only(np.flatnonzero([piece.is_last for piece in call.pieces]))
            self._histories.take(facts)
        else:
            self._take_round(facts)
        self.stats.output_tokens += int(facts.emitted_L.sum())
        self._flagged.update(facts.slot_L[facts.may_end_L > 0].tolist())
        for line in np.flatnonzero(facts.finish_L != Finish.LIVE):
            self._close(int(facts.slot_L[line]), Finish(facts.finish_L[line]))

    def _take_round(self, facts: Facts) -> None:
        self._idle.see(bool(len(facts.row_L)), self._histories.num_loaded)
        self._histories.take_round(facts, self.plan.nodes - 1)
        before_L = self._histories.num_rounds(facts.slot_L) - 1
        told = (facts.row_L, facts.check_L, before_L, facts.accepted_L)
        # What an ending row accepts is cut, and hot ones accept little by nature.
        is_sound_L = (facts.finish_L == Finish.LIVE) & ~self._is_hot_S[facts.slot_L]
        self._layout.acceptance.add(*(column_L[is_sound_L] for column_L in told))
        self.stats.live_row_rounds += int(np.count_nonzero(facts.emitted_L))
        self.stats.round_tokens += int(facts.emitted_L.sum())

    def _look(self, slot: int) -> None:
        """Have flagged text looked at; ask the device to end a sequence in which a string was
        found. What it emits until then is cut off."""
        seat, watched = self._seats[slot], self._seats[slot].watched
        if watched is None or seat.is_cancelled:
            self._flagged.discard(slot)
        elif watched.is_settled and watched.match() is not None:
            seat.is_cancelled = True
            self.state.is_cancelled_S[slot].fill_(True)  # item assignment would wait
        elif self._histories.may_end(slot) > watched.num_fed:
            self._stop_watch.feed(watched, self._histories.token_ids(slot, watched.num_fed))
        elif not watched.checks:
            self._flagged.discard(slot)

    def _close(self, slot: int, finish: Finish) -> None:
        """Free the slot of a sequence that has ended. What it was waits until its text is known."""
        seat, may_end = self._seats.pop(slot), self._histories.may_end(slot)
        said, watched = self._histories.close(slot), seat.watched
        text_end = len(said.token_ids) - (finish is Finish.STOP)  # a stop token is no text
        if watched is not None and min(may_end, text_end) > watched.num_fed:
            self._stop_watch.feed(watched, said.token_ids[watched.num_fed : text_end])
        self._closing.append(closing(seat, said, finish))
        self._flagged.discard(slot)
        self._context.close(slot)
        self._homes.give_back(seat.placed)
