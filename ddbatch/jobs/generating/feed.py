"""From shards to prompts for the engine, and from completions back to units that can be committed.

Knows shards, rows and prompts; knows nothing about the engine's state or about parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddbatch.core import Completion, Key, Prompt, RejectCode, Rejected, Shard, TokenPrompt
from ddbatch.data.batching.columns import BadRow, Columns, Row
from ddbatch.data.batching.encoder import PromptEncoder
from ddbatch.data.batching.prompts import to_prompt
from ddbatch.data.batching.stop_strings import StopStrings
from ddbatch.data.batching.turns import num_turns, prompt_for_turn
from ddbatch.data.export.reasoning import reasoning_end
from ddbatch.data.schema import FinishedRow
from ddbatch.data.source.inputs import Inputs
from ddbatch.jobs.generating.decoder import Pair
from ddbatch.jobs.generating.sampling_options import row_refusal
from ddbatch.jobs.generating.units import Limits, Prepared, Ready, Unit, sampling_in_force

# Units that are read, tokenised and sorted by length at a time: many static batches, little memory.
WINDOW_UNITS = 2048
# A straggler holds its shard open; so many may be, before the worker waits for the oldest.
MAX_OPEN_SHARDS = 3
# Ids that are remembered to warn of repeated ones.
_MAX_IDS = 1_000_000


@dataclass
class _OpenShard:
    """A shard that is read: its rows still to come, and its units without a committed result."""

    rows: Iterator[tuple[int, Row | BadRow]]
    unfinished: NDArray[np.bool_]  # bool [num_rows, samples]
    first_row: int
    num_pending: int
    is_read: bool = False


class Feed:
    """Prompts of the shards that are opened, longest first within a window; later turns first."""

    def __init__(
        self,
        inputs: Inputs,
        columns: Columns,
        encoder: PromptEncoder,
        pair: Pair,
        limits: Limits,
        finder: StopStrings,
    ) -> None:
        self._inputs, self._columns, self._encoder = inputs, columns, encoder
        self._pair, self._limits, self._finder = pair, limits, finder
        self._shards: dict[int, _OpenShard] = {}
        self._later_turns: deque[Ready] = deque()
        self._window: deque[Ready] = deque()
        self._in_flight: dict[Key, Ready] = {}
        self._whole: deque[Unit] = deque()
        self._ids: set[int] = set()
        self.num_repeated_ids = 0

    def open_shard(self, shard: Shard, finished: NDArray[np.bool_]) -> None:
        """Feed a shard's units that are not finished; finished: bool [num_rows, samples]."""
        unfinished = ~finished
        self._shards[shard.index] = _OpenShard(
            rows=self._read(shard, np.any(unfinished, axis=1)),
            unfinished=unfinished,
            first_row=shard.first_row,
            num_pending=int(unfinished.sum()),
        )

    def drop_shard(self, shard: int) -> None:
        """Forget a shard that another worker has; what is in flight for it will be ignored."""
        del self._shards[shard]
        self._window = deque(item for item in self._window if item.unit.shard != shard)
        self._later_turns = deque(item for item in self._later_turns if item.unit.shard != shard)
        self._whole = deque(unit for unit in self._whole if unit.shard != shard)

    @property
    def num_open(self) -> int:
        """Shards with rows to read or units in flight."""
        return len(self._shards)

    @property
    def has_rows(self) -> bool:
        """Whether an open shard has rows that were not read yet."""
        return any(not shard.is_read for shard in self._shards.values())

    @property
    def num_waiting(self) -> int:
        """Turns that were read and have no result yet."""
        return len(self._later_turns) + len(self._window) + len(self._in_flight)

    def ready(self, max_len: int) -> Iterator[TokenPrompt]:
        """Prompts that can be decoded now and fit; ends, for now, at the first that does not."""
        while True:
            queue = self._later_turns or self._window
            if not queue:
                if not self.has_rows:
                    return
                self._read_window()
                if not self._window:
                    return
                continue
            item = queue[0]
            if item.num_tokens > max_len:
                return
            queue.popleft()
            self._in_flight[item.tokens.key] = item
            yield item.tokens

    def next_size(self) -> int | None:
        """Sequence length that the next prompt needs; None if none can be had now."""
        queue = self._later_turns or self._window
        if not queue and self.has_rows:
            self._read_window()
            queue = self._window
        return queue[0].num_tokens if queue else None

    def take_whole(self) -> Iterator[Unit]:
        """Units whose every turn has a result, each once."""
        while self._whole:
            yield self._whole.popleft()

    def settle(self, unit: Unit) -> None:
        """A unit is in a part now."""
        shard = self._shards[unit.shard]
        shard.num_pending -= 1
        assert shard.num_pending >= 0, unit.shard

    def is_done(self, shard: int) -> bool:
        """Whether every unit of an open shard is in a part."""
        return self._shards[shard].num_pending == 0

    def close_shard(self, shard: int) -> None:
        """A shard is done."""
        del self._shards[shard]

    def finish(self, done: Completion) -> None:
        """Take a completion: the unit is whole, or its next turn becomes ready."""
        item = self._in_flight.pop(done.key)
        unit = item.unit
        if unit.shard not in self._shards:
            return
        unit.results.append(self._finished_row(item, done))
        if unit.is_whole:
            self._whole.append(unit)
            return
        earlier = [row.text for row in unit.results if isinstance(row, FinishedRow)]
        turn = len(unit.results)
        prompt = prompt_for_turn(unit.prompt, turn, earlier, unit.sample, self._limits.turns)
        (prepared,) = self._prepare([prompt])
        if isinstance(prepared, Rejected):
            self._reject_rest(unit, prepared.code, prepared.reason)
        else:
            self._later_turns.append(prepared.of(unit))

    def reject(self, rejected: Rejected) -> None:
        """The engine could not decode a turn; those that follow from it cannot be made either."""
        item = self._in_flight.pop(rejected.key)
        if item.unit.shard in self._shards:
            self._reject_rest(item.unit, rejected.code, rejected.reason)

    def _read(self, shard: Shard, wanted: NDArray[np.bool_]) -> Iterator[tuple[int, Row | BadRow]]:
        """The rows of a shard that have something to do, of which there are some."""
        at = np.flatnonzero(wanted)
        # In one go: to begin anew behind each gap would unpack a .gz file from its start each time.
        start, stop = shard.first_row + int(at[0]), shard.first_row + int(at[-1]) + 1
        for row_id, row in self._inputs.rows(start, stop):
            if wanted[row_id - shard.first_row]:
                yield row_id, row

    def _read_window(self) -> None:
        """Read, render and tokenise the next rows, and put them in order of length."""
        index, shard = next(
            (index, shard) for index, shard in self._shards.items() if not shard.is_read
        )
        prompts: list[Prompt] = []
        for _ in range(max(1, WINDOW_UNITS // shard.unfinished.shape[1])):
            entry = next(shard.rows, None)
            if entry is None:
                shard.is_read = True
                break
            row_id, row = entry
            prompt = to_prompt(row, Key(row_id, 0, 0), self._columns, turns=self._limits.turns)
            if isinstance(prompt, Rejected):
                blank = Prompt(prompt.key, user_id=prompt.user_id, raw_json=prompt.raw_json)
                for unit in self._new_units(index, shard, blank, 1):
                    self._reject_rest(unit, prompt.code, prompt.reason)
            else:
                self._note_id(prompt.user_id)
                prompts.append(prompt)
        turns = self._limits.turns
        firsts = self._prepare([prompt_for_turn(prompt, 0, [], 0, turns) for prompt in prompts])
        found: list[Ready] = []
        for prompt, first in zip(prompts, firsts, strict=True):
            for unit in self._new_units(index, shard, prompt, num_turns(prompt, turns)):
                if isinstance(first, Rejected):
                    self._reject_rest(unit, first.code, first.reason)
                else:
                    found.append(first.of(unit))
        # Longest first: what does not fit shows at once, and the drain at the end is short.
        found.sort(key=lambda item: (-len(item.tokens.token_ids), item.tokens.key))
        self._window.extend(found)

    def _new_units(
        self, index: int, shard: _OpenShard, prompt: Prompt, turns: int
    ) -> Iterator[Unit]:
        """The units of a row that are left to do."""
        for sample in np.flatnonzero(shard.unfinished[prompt.key.row_id - shard.first_row]):
            yield Unit(index, prompt, int(sample), turns)

    def _prepare(self, prompts: Sequence[Prompt]) -> list[Prepared | Rejected]:
        """Render and tokenise turns; a cap that does not fit the context is lowered."""
        limits = self._limits
        wanted = [prompt.sampling.max_new_tokens or limits.max_new_tokens for prompt in prompts]
        encoded = self._encoder.encode_many(
            prompts,
            vocab_size=self._pair.vocab,
            max_prompt_len=limits.max_len - 1,
            # A prompt that is cut leaves room for its completion, one that fits keeps what it has.
            cut_to=[max(1, limits.max_len - cap) for cap in wanted],
            on_long=limits.on_long,
        )
        prepared: list[Prepared | Rejected] = []
        for prompt, ids, cap in zip(prompts, encoded, wanted, strict=True):
            refusal = row_refusal(prompt.sampling, self._inputs.log.samples, self._finder)
            if isinstance(ids, Rejected):
                prepared.append(ids)
            elif refusal is not None:
                prepared.append(Rejected(prompt.key, "bad_sampling", refusal))
            else:
                room = limits.max_len - len(ids.token_ids)
                own = sampling_in_force(limits, prompt.sampling, self._pair.eos_token_ids)
                prepared.append(Prepared(prompt, ids, min(cap, room), own))
        return prepared

    def _finished_row(self, item: Ready, done: Completion) -> FinishedRow:
        """A completion with its text, which ends before what stopped it. A character that the cap
        has cut is U+FFFD in the text, and whole or not in the ids."""
        own, limits = item.prompt.sampling, self._limits
        # A stop token is no text, whether it is a special one or not.
        visible = done.token_ids if done.stop_token_id is None else done.token_ids[:-1]
        text = self._encoder.decode(visible, skip_special_tokens=limits.skip_special_tokens)
        stop_reason = None if done.stop_token_id is None else str(done.stop_token_id)
        if done.stop_string is not None:
            text, stop_reason = text[: text.index(done.stop_string)], done.stop_string
        elif done.finish_reason == "length" and item.tokens.max_new_tokens < (
            own.max_new_tokens or limits.max_new_tokens
        ):
            stop_reason = "context"
        return FinishedRow(
            prompt=item.prompt,
            conversation_json=self._encoder.conversation_json(item.prompt),
            prompt_token_ids=item.tokens.token_ids,
            num_dropped=item.encoded.num_dropped,
            completion=done,
            text=text,
            stop_reason=stop_reason,
            max_new_tokens=item.tokens.max_new_tokens,
            seed=item.tokens.sampling.seed,
            reasoning_end=reasoning_end(text, visible, self._finder),
        )

    def _reject_rest(self, unit: Unit, code: RejectCode, reason: str) -> None:
        """Every turn from the next one on is rejected for the same reason."""
        prompt = unit.prompt
        for turn in range(len(unit.results), unit.num_turns):
            key = Key(prompt.key.row_id, turn, unit.sample)
            unit.results.append(Rejected(key, code, reason, prompt.user_id, prompt.raw_json))
        self._whole.append(unit)

    def _note_id(self, user_id: str | None) -> None:
        """Remember ids, to tell of repeated ones; rows are told apart by row_id in any case."""
        if user_id is None or len(self._ids) >= _MAX_IDS:
            return
        digest = hash(user_id)
        self.num_repeated_ids += digest in self._ids
        self._ids.add(digest)
