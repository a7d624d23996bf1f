"""The engine: prompts in, completions out, over a static batch with refill from the first commit.

Three doors join host and device: fill (prefill), step and collect. On a GPU the host never waits
for the round that it has just launched: it reads the record of the one before. Knows nothing about
text, files or options.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
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
from ddbatch.engine.acceptance import AcceptanceTable
from ddbatch.engine.histories import Histories
from ddbatch.engine.plan import plan_prefill
from ddbatch.engine.prefill import Piece, Placed, check_pieces, open_slots, pieces_of, put_pieces
from ddbatch.engine.programs import CapturedPrograms, EagerPrograms, GraphPool, Programs
from ddbatch.engine.record import Facts, read_record
from ddbatch.engine.sampling import DrawKind, TokenFlags, draw_kind
from ddbatch.engine.seats import Closing, Homes, IdleWatch, Seat, closing
from ddbatch.engine.state import RoundShape, allocate_state
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

    drafter None = plain decoding. pool: CUDA graphs are captured into it; None = eager. finder: for
    prompts with stop strings. top_logprobs: how many of the best tokens are told beside each
    emitted one; None = no log-probs. least_draw: what draws compute at least, so that a few prompts
    with other filters need no other graphs. keeps_scores: state.scores_BNV holds the last round's,
    to be measured.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlash | None,
        plan: ShapePlan,
        cache_plan: CachePlan,
        *,
        prefill_plan: PrefillPlan | None = None,
        pool: GraphPool | None = None,
        finder: StopFinder | None = None,
        top_logprobs: int | None = None,
        least_draw: DrawKind = DrawKind.GREEDY,
        keeps_scores: bool = False,
    ) -> None:
        assert (plan.nodes == 1) == (drafter is None), (plan, drafter is None)
        device = target.embed.device
        self.target, self.drafter = target, drafter
        self.plan, self.cache_plan = plan, cache_plan
        self.state = allocate_state(
            plan,
            cache_plan,
            prefill_plan or plan_prefill(plan.rows, device.type),
            target=target.dims,
            drafter=None if drafter is None else drafter.dims.decoder,
            num_taps=0 if drafter is None else len(drafter.dims.tap_layers),
            top_logprobs=top_logprobs,
            keeps_scores=keeps_scores,
            dtype=target.embed.dtype,
            device=device,
        )
        self.programs: Programs = EagerPrograms(target, drafter, self.state)
        if pool is not None:
            self.programs = CapturedPrograms(self.programs, pool)
        self._lag = 1 if device.type == "cuda" else 0
        self._flags = TokenFlags(target.dims.vocab, finder, device)
        self._stop_watch = StopWatch(finder)
        self._least_draw = least_draw
        self.reset()

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget everything: as if just made, but for what is in the caches."""
        self.state.reset()
        self.stats = EngineStats()
        self.acceptance = AcceptanceTable(self.plan, self.cache_plan.max_len)
        self._draw = self._least_draw
        self._homes = Homes(self.cache_plan)
        self._seats: dict[int, Seat] = {}
        self._pieces: deque[Piece] = deque()  # that wait for a prefill call
        told = self.state.told
        self._histories = Histories(self.plan, self.cache_plan, told.logprobs_BK or ())
        self._is_hot_S = np.zeros(self.cache_plan.slots, np.bool_)
        self._flagged: set[int] = set()  # slots whose text is to be looked at
        self._longest = 0  # no sequence on a row has more committed tokens
        self._closing: list[Closing] = []
        self._waiting: TokenPrompt | None = None
        self._pending: deque[_Pending] = deque()
        self._call_ring = Ring(self.state.chunk_told.tensors())
        self._round_ring = Ring(told.tensors())
        self._num_calls, self._idle = 0, IdleWatch()

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
        # A call waits to be full while rows and half the spare slots have work.
        enough = (self.plan.rows + self.cache_plan.slots) // 2
        if self._pieces and self._histories.num_loaded < enough:
            self._prefill(len(self._pieces))

    @torch.inference_mode()
    def step(self) -> None:
        """Launch one round over the rows."""
        if self._num_keys(self._longest) > self.cache_plan.key_counts[0]:
            # What is launched and not read may have added as much to every sequence.
            num_rounds = sum(item.call is None for item in self._pending)
            self._longest = self._histories.longest((self.plan.draft_depth + 1) * num_rounds)
        self.programs.round(RoundShape(self._num_keys(self._longest), self._draw))
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
            self._histories.open(placed)
            self._is_hot_S[placed.slot] = own.temperature > 1
            self._pieces.extend(pieces_of(placed, self.state.prefill_plan.chunk))
            self.stats.prompt_tokens += len(prompt.token_ids)
            yield placed

    def _prefill(self, count: int) -> None:
        """Launch a call for so many of the pieces that wait."""
        started = mark(self.target.embed.device)
        plan = self.state.prefill_plan
        pieces = [self._pieces.popleft() for _ in range(count)]
        placed = [piece.placed for piece in pieces if not piece.start]
        if placed:
            open_slots(self.state, self._flags, placed)
        put_pieces(self.state, pieces)
        shape = RoundShape(self._num_keys(max(piece.stop for piece in pieces)), self._draw)
        self.programs.prefill(shape, plan.chunks if plan.is_fixed else len(pieces))
        self._push(self._num_calls, _Call(pieces, started))
        self._num_calls += 1
        for piece in pieces:
            if piece.is_last:
                self._histories.load(piece.placed)
                self._longest = max(self._longest, piece.stop)

    def _push(self, number: int, call: _Call | None) -> None:
        """Have the record of what was just launched copied."""
        ring = self._round_ring if call is None else self._call_ring
        while ring.is_full:  # many prefill calls in a row
            self._read(self._pending.popleft())
        self._pending.append(_Pending(number, ring.push(), call))

    def _num_keys(self, length: int) -> int:
        """Keys that attention looks at for sequences of up to so many; no sequence has more than
        the last count."""
        counts = self.cache_plan.key_counts
        return next((count for count in counts if count >= length), counts[-1])

    def _read(self, pending: _Pending) -> None:
        """Take what a program told; wait for it where it is still under way."""
        call = pending.call
        ring, what = (self._call_ring, "prefill call") if call else (self._round_ring, "round")
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
        self._histories.take_round(facts)
        before_L = self._histories.num_rounds(facts.slot_L) - 1
        told = (facts.row_L, facts.check_L, before_L, facts.accepted_L)
        # What an ending row accepts is cut, and hot ones accept little by nature.
        is_sound_L = (facts.finish_L == Finish.LIVE) & ~self._is_hot_S[facts.slot_L]
        self.acceptance.add(*(column_L[is_sound_L] for column_L in told))
        self.stats.live_row_rounds += int(np.count_nonzero(facts.emitted_L))

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
        self._closing.append(closing(seat, said, finish, self.plan.nodes - 1))
        self._flagged.discard(slot)
        self._homes.give_back(seat.placed)
