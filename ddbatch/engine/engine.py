"""The engine: prompts in, completions out, over a static batch with refill from the first commit.

Three doors join host and device: load (prefill), poll and collect. Knows nothing about text, files
or options.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ddbatch.core import (
    CachePlan,
    Completion,
    FinishReason,
    Rejected,
    ShapePlan,
    StopFinder,
    TokenLogprobs,
    TokenPrompt,
)
from ddbatch.engine.plan import PREFILL_TOKENS
from ddbatch.engine.prefill import Placed, load
from ddbatch.engine.round import run_round
from ddbatch.engine.sampling import TokenFlags
from ddbatch.engine.state import Finish, allocate_state
from ddbatch.engine.stop_watch import StopWatch, Watched, cut
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

# Attention looks at a multiple of this many keys, so that shapes change rarely as sequences grow.
KEY_STEP = 64


@dataclass
class EngineStats:
    """Counters of a run. row_rounds: rounds x rows; live_row_rounds: those that emitted tokens;
    output_tokens: of finished sequences and of those in flight."""

    rounds: int = 0
    row_rounds: int = 0
    live_row_rounds: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0


@dataclass
class _Seat:
    """What the host knows of a slot in flight."""

    prompt: TokenPrompt
    pages: list[int]
    started: float
    length: int  # committed tokens at the last poll
    watched: Watched | None  # where the prompt has stop strings


@dataclass
class _Closing:
    """A sequence that has ended on the device; its text may still be looked at."""

    result: Completion
    is_nan: bool  # without a match it is to be rejected
    watched: Watched | None


class Engine:
    """A pair, its state and the slots in flight.

    drafter None = plain decoding. max_new_tokens bounds every prompt's cap. finder: for prompts
    with stop strings. top_logprobs: how many of the best tokens are told beside each emitted one;
    None = no log-probs. keeps_scores: state.scores_BNV holds the last round's, to be measured.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlash | None,
        plan: ShapePlan,
        cache_plan: CachePlan,
        *,
        max_new_tokens: int,
        finder: StopFinder | None = None,
        top_logprobs: int | None = None,
        keeps_scores: bool = False,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        assert (plan.nodes == 1) == (drafter is None), (plan, drafter is None)
        self.target, self.drafter = target, drafter
        self.plan, self.cache_plan = plan, cache_plan
        self.prefill_tokens = prefill_tokens
        self.stats = EngineStats()
        self.state = allocate_state(
            plan,
            cache_plan,
            target=target.dims,
            drafter=None if drafter is None else drafter.dims.decoder,
            num_taps=0 if drafter is None else len(drafter.dims.tap_layers),
            max_new_tokens=max_new_tokens,
            prefill_tokens=prefill_tokens,
            top_logprobs=top_logprobs,
            keeps_scores=keeps_scores,
            dtype=target.embed.dtype,
            device=target.embed.device,
        )
        self._free_slots = deque(range(cache_plan.slots))
        self._free_pages = deque(range(cache_plan.pages))
        self._flags = TokenFlags(target.dims.vocab, finder, target.embed.device)
        self._stop_watch = StopWatch(finder)
        self._seats: dict[int, _Seat] = {}
        self._closing: list[_Closing] = []
        self._longest = 0  # no sequence in flight has more committed tokens
        self._waiting: TokenPrompt | None = None

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

    @torch.inference_mode()
    def fill(self, prompts: Iterator[TokenPrompt]) -> None:
        """Reserve a slot and pages for as many prompts as fit, and prefill them."""
        placed: list[Placed] = []
        while self._free_slots:
            prompt = self._waiting or next(prompts, None)
            self._waiting = prompt
            if prompt is None:
                break
            length = len(prompt.token_ids) + prompt.max_new_tokens
            num_pages = -(-length // self.cache_plan.page)
            assert min(len(prompt.token_ids), prompt.max_new_tokens) >= 1, prompt.key
            assert length <= self.cache_plan.max_len, (prompt.key, length, self.cache_plan)
            assert prompt.max_new_tokens <= self.state.output_SO.shape[1], prompt.key
            if num_pages > len(self._free_pages):
                break
            self._waiting = None
            slot = self._free_slots.popleft()
            pages = [self._free_pages.popleft() for _ in range(num_pages)]
            row = torch.tensor(pages, device=self.state.page_table_SP.device)
            self.state.page_table_SP[slot, :num_pages] = row
            self._seats[slot] = _Seat(
                prompt,
                pages,
                time.monotonic(),
                len(prompt.token_ids),
                self._stop_watch.open(prompt.sampling.stop),
            )
            placed.append(Placed(slot, prompt))
            self._longest = max(self._longest, len(prompt.token_ids))
            self.stats.prompt_tokens += len(prompt.token_ids)
            self.stats.output_tokens += 1  # the prompt's forward gives the first token
        if placed:
            self._note_draws()
            load(self.target, self.drafter, self.state, self._flags, placed, self.prefill_tokens)

    @torch.inference_mode()
    def step(self) -> None:
        """Run one round over the rows."""
        rounded = -(-self._longest // KEY_STEP) * KEY_STEP
        self.state.num_keys = min(rounded, self.cache_plan.max_len)
        run_round(self.target, self.drafter, self.state)
        self._longest += self.plan.draft_depth + 1  # at most; the next poll says exactly
        self.stats.rounds += 1
        self.stats.row_rounds += self.plan.rows

    @torch.inference_mode()
    def collect(self) -> Iterator[Completion | Rejected]:
        """Poll finish codes and lengths in one copy; hand out and free the finished slots."""
        state = self.state
        polled = torch.stack((state.finish_S, state.length_S, state.flag_end_S)).tolist()
        codes, lengths, flag_ends = polled
        for slot, seat in list(self._seats.items()):
            num_emitted, seat.length = lengths[slot] - seat.length, lengths[slot]
            self.stats.output_tokens += num_emitted
            self.stats.live_row_rounds += num_emitted > 0
            if codes[slot] != Finish.LIVE:
                self._close(slot, Finish(codes[slot]), flag_ends[slot])
            elif seat.watched is not None:
                self._look(slot, seat.watched, flag_ends[slot])
        self._longest = max((lengths[slot] for slot in self._seats), default=0)
        # While rows are live nobody waits for a look; afterwards there is nothing else to do.
        waits = not self._seats
        closing, self._closing = self._closing, []
        for item in closing:
            if waits or item.watched is None or item.watched.is_settled:
                yield self._settled(item)
            else:
                self._closing.append(item)

    def _note_draws(self) -> None:
        """What a draw must compute for the sequences in flight."""
        own = [seat.prompt.sampling for seat in self._seats.values()]
        drawn = [item for item in own if item.temperature > 0]
        sampling = self.state.sampling
        sampling.has_noise = bool(drawn)
        sampling.has_top_k = any(item.top_k > 0 for item in drawn)
        sampling.has_top_p = any(item.top_p < 1 for item in drawn)

    def _look(self, slot: int, watched: Watched, flag_end: int) -> None:
        """Have flagged text looked at; end a live sequence in which a string was found."""
        if flag_end > watched.num_fed:
            num_out = int(self.state.num_out_S[slot])
            self._stop_watch.feed(watched, self._tokens(slot, watched.num_fed, num_out))
        if not watched.is_settled or watched.match() is None:
            return
        is_own_B = (self.state.slot_B == slot) & self.state.active_B
        if not is_own_B.any():
            return  # it waits for a row: the ring of ready slots still names it
        self.state.active_B &= ~is_own_B
        self.state.slot_B.masked_fill_(is_own_B, self.state.nobody)
        self._close(slot, Finish.LENGTH, flag_end)  # the match says how it ends

    def _close(self, slot: int, finish: Finish, flag_end: int) -> None:
        """Free a slot whose sequence has ended. What it was waits until its text is looked at."""
        state, seat = self.state, self._seats.pop(slot)
        num_out, rounds = int(state.num_out_S[slot]), int(state.num_rounds_S[slot])
        token_ids = self._tokens(slot, 0, num_out)
        reason: FinishReason = "stop" if finish is Finish.STOP else "length"
        done = Completion(
            key=seat.prompt.key,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=token_ids[-1] if reason == "stop" else None,
            accepted=tuple(state.accepted_SO[slot, :rounds].tolist()),
            depth=tuple(state.depth_SO[slot, :rounds].tolist()),
            drafted=self.plan.nodes - 1,
            seconds=time.monotonic() - seat.started,
            slot=slot,
            logprobs=self._logprobs(slot, num_out),
        )
        watched = seat.watched
        text_end = num_out - (finish is Finish.STOP)  # a stop token is no text
        if watched is not None and min(flag_end, text_end) > watched.num_fed:
            self._stop_watch.feed(watched, token_ids[watched.num_fed : text_end])
        self._closing.append(_Closing(done, finish is Finish.NAN_LOGITS, watched))
        self._free_slots.append(slot)
        self._free_pages.extend(seat.pages)
        # The finish code and length of a free slot must not be taken for a sequence's.
        state.finish_S[slot] = int(Finish.LIVE)
        state.length_S[slot] = 0

    def _settled(self, item: _Closing) -> Completion | Rejected:
        """What became of a sequence, now that its text is known."""
        done, match = item.result, None if item.watched is None else item.watched.match()
        if match is not None:
            self.stats.output_tokens -= len(done.token_ids) - match.num_tokens
            return cut(done, match)
        if item.is_nan:
            return Rejected(
                done.key,
                "nan_logits",
                f"a score is not finite after {len(done.token_ids)} output tokens",
            )
        return done

    def _tokens(self, slot: int, start: int, stop: int) -> tuple[int, ...]:
        return tuple(self.state.output_SO[slot, start:stop].tolist())

    def _logprobs(self, slot: int, num_out: int) -> TokenLogprobs | None:
        if self.state.logprobs_SO is None:
            return None
        parts = (part[slot, :num_out].tolist() for part in self.state.logprobs_SO)
        return TokenLogprobs(*parts)
