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

from ddbatch.core import CachePlan, Completion, FinishReason, Rejected, ShapePlan, TokenPrompt
from ddbatch.engine.plan import PREFILL_TOKENS
from ddbatch.engine.prefill import Placed, load
from ddbatch.engine.round import run_round
from ddbatch.engine.state import Finish, allocate_state
from ddbatch.models.dflash import DFlash
from ddbatch.models.llama import Llama

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


class Engine:
    """A pair, its state and the slots in flight.

    drafter None = plain decoding. max_new_tokens bounds every prompt's cap.
    """

    def __init__(
        self,
        target: Llama,
        drafter: DFlash | None,
        plan: ShapePlan,
        cache_plan: CachePlan,
        *,
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
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
            stop_token_ids=stop_token_ids,
            dtype=target.embed.dtype,
            device=target.embed.device,
        )
        self._free_slots = deque(range(cache_plan.slots))
        self._free_pages = deque(range(cache_plan.pages))
        self._seats: dict[int, _Seat] = {}
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
        """Whether a prompt is in flight or waits for pages."""
        return bool(self._seats) or self._waiting is not None

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
            self._seats[slot] = _Seat(prompt, pages, time.monotonic(), len(prompt.token_ids))
            placed.append(Placed(slot, prompt))
            self._longest = max(self._longest, len(prompt.token_ids))
            self.stats.prompt_tokens += len(prompt.token_ids)
            self.stats.output_tokens += 1  # the prompt's forward gives the first token
        if placed:
            load(self.target, self.drafter, self.state, placed, self.prefill_tokens)

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
        codes, lengths = torch.stack((self.state.finish_S, self.state.length_S)).tolist()
        for slot, seat in self._seats.items():
            num_emitted, seat.length = lengths[slot] - seat.length, lengths[slot]
            self.stats.output_tokens += num_emitted
            self.stats.live_row_rounds += num_emitted > 0
        for slot in [slot for slot in self._seats if codes[slot] != Finish.LIVE]:
            yield self._take(slot, Finish(codes[slot]))
        self._longest = max((lengths[slot] for slot in self._seats), default=0)

    def _take(self, slot: int, finish: Finish) -> Completion | Rejected:
        state, seat = self.state, self._seats.pop(slot)
        num_out, rounds = int(state.num_out_S[slot]), int(state.num_rounds_S[slot])
        token_ids = tuple(state.output_SO[slot, :num_out].tolist())
        self._free_slots.append(slot)
        self._free_pages.extend(seat.pages)
        # The finish code and length of a free slot must not be taken for a sequence's.
        state.finish_S[slot] = int(Finish.LIVE)
        state.length_S[slot] = 0
        if finish is Finish.NAN_LOGITS:
            return Rejected(
                seat.prompt.key,
                "nan_logits",
                f"a score is not finite after {num_out} output tokens",
            )
        reason: FinishReason = "stop" if finish is Finish.STOP else "length"
        return Completion(
            key=seat.prompt.key,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=token_ids[-1] if reason == "stop" else None,
            accepted=tuple(state.accepted_SO[slot, :rounds].tolist()),
            depth=tuple(state.depth_SO[slot, :rounds].tolist()),
            drafted=self.plan.nodes - 1,
            seconds=time.monotonic() - seat.started,
            slot=slot,
        )
