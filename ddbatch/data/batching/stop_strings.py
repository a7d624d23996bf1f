"""Find stop strings in the text of output tokens, without decoding the text again and again.

Knows the bytes that each token adds to the text. Knows nothing about rows or the engine, which
asks which tokens could complete a string, and shows the output of a sequence that has one of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import AnyStr

import numpy as np
from tokenizers import Tokenizer

from ddbatch.core import StopMatch
from ddbatch.data.batching.pieces import Pieces, read_pieces, special_ids, token_ids

# Of rows with stops of their own; a run has one set.
_MAX_CACHED = 256
# In no UTF-8 text, so no string reaches across it.
_SEPARATOR = b"\xff"
_Utf8 = getincrementaldecoder("utf-8")


class StopStrings:
    """The stop strings of a tokenizer's texts (core.StopFinder).

    Strings are not empty and hold no U+FFFD, which stands for bytes that are no character yet. All
    methods may be called from any thread, a watch from one at a time.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skips_special = tokenizer, skip_special_tokens
        self._skipped = special_ids(tokenizer) if skip_special_tokens else {}
        self._flagged = lru_cache(maxsize=_MAX_CACHED)(self._find_flagged)
        self._flagged_set = lru_cache(maxsize=_MAX_CACHED)(self._find_flagged_set)

    def hidden_id(self, string: str) -> int | None:
        """The token with this text, where it is one that stays out of the text."""
        return self._skipped.get(string)

    def refusal(self, string: str) -> str | None:
        """Why a string can never be found; None if it can."""
        token_id = self.hidden_id(string)
        if token_id is None:
            return None
        return (
            "is a special token, which output.skip_special_tokens=true keeps out of the text; "
            f"allowed: its id, sampling.stop_token_ids=[{token_id}] or a row's own stop_token_ids"
        )

    def flagged(self, stop: tuple[str, ...]) -> Sequence[int]:
        """Ids of all tokens that could complete one of these strings, sorted. The model may know
        fewer ids than the tokenizer."""
        return self._flagged(stop)

    def watch(self, stop: tuple[str, ...]) -> Callable[[Sequence[int]], StopMatch | None]:
        """A function for one sequence: called with its next output tokens, it tells the first match
        in token order among all tokens so far."""
        if self._pieces is None:
            return _SlowWatch(self._tokenizer, self._skips_special, stop)
        return _Watch(self._pieces, self._flagged_set(stop), stop)

    @cached_property
    def _pieces(self) -> Pieces | None:
        return read_pieces(self._tokenizer, skip_special_tokens=self._skips_special)

    @cached_property
    def _table(self) -> _PieceTable | None:
        return None if self._pieces is None else _PieceTable(self._pieces)

    def _find_flagged(self, stop: tuple[str, ...]) -> tuple[int, ...]:
        if self._table is None:
            return tuple(token_ids(self._tokenizer)) if stop else ()
        found: set[int] = set()
        for string in stop:
            found |= self._table.completing(string.encode())
        return tuple(sorted(found))

    def _find_flagged_set(self, stop: tuple[str, ...]) -> frozenset[int]:
        return frozenset(self._flagged(stop))


class _PieceTable:
    """All pieces of a tokenizer in order, and in one text."""

    def __init__(self, pieces: Pieces) -> None:
        # A token's two pieces may each complete a string that the other does not.
        items = {*pieces.rest.items(), *pieces.first.items()}
        entries = sorted((piece, token_id) for token_id, piece in items)
        self._pieces = [piece for piece, _ in entries]
        self._token_ids = [token_id for _, token_id in entries]
        self._longest = max(map(len, self._pieces), default=0)
        self._joined = _SEPARATOR.join(self._pieces)
        lengths = np.array([len(piece) + len(_SEPARATOR) for piece in self._pieces], np.int64)
        self._ends = np.cumsum(lengths)  # int64 [pieces], where each one ends in the joined text

    def completing(self, string: bytes) -> set[int]:
        """Tokens in which a string may end: they begin with an end of it, or hold all of it."""
        found: set[int] = set()
        for length in range(1, min(len(string), self._longest) + 1):
            end = string[-length:]
            low = bisect_left(self._pieces, end)
            high = bisect_right(self._pieces, end, low, key=lambda piece: piece[: len(end)])
            found.update(self._token_ids[low:high])
        starts = [match.start() for match in re.finditer(re.escape(string), self._joined)]
        holding = np.searchsorted(self._ends, np.array(starts, np.int64), side="right")
        return found | {self._token_ids[at] for at in holding}


class _Watch:
    """One sequence: the end of its text as bytes, as long as a string can be."""

    def __init__(self, pieces: Pieces, flagged: frozenset[int], stop: tuple[str, ...]) -> None:
        self._pieces, self._flagged, self._stop = pieces, flagged, stop
        self._strings = [string.encode() for string in stop]
        self._keep = max(map(len, self._strings), default=1)
        self._end = bytearray()
        self._is_first = True
        self._utf8 = _Utf8()  # of the run of byte tokens at the end
        self._in_run = self._is_broken = False
        self._num_tokens = 0
        self._match: StopMatch | None = None

    def __call__(self, output_ids: Sequence[int]) -> StopMatch | None:
        """The first match, with the next output tokens."""
        for token_id in () if self._match else output_ids:
            self._num_tokens += 1
            self._add(token_id)
            if token_id in self._flagged:
                at = earliest(bytes(self._end), self._strings)
                if at is not None:
                    self._match = StopMatch(self._stop[at], self._num_tokens)
                    break
        return self._match

    def _add(self, token_id: int) -> None:
        """Take one token."""
        piece = self._pieces.rest.get(token_id)
        if piece is None:
            return
        if self._is_first:
            piece = self._pieces.first.get(token_id, piece)
            self._is_first = False
        is_byte = token_id in self._pieces.run_ids
        if self._in_run and not is_byte:
            self._utf8.reset()
            self._is_broken = False
        self._in_run = is_byte
        if len(self._end) > 4 * self._keep:
            del self._end[: -self._keep]
        # A character that is not whole does no harm: no string ends within it or reaches across.
        if not is_byte or self._is_text(piece):
            self._end += piece

    def _is_text(self, byte: bytes) -> bool:
        """Whether a run can be text with its next byte. What is none is U+FFFDs, all of it, and no
        string reaches across them."""
        if not self._is_broken:
            try:
                self._utf8.decode(byte)
            except UnicodeDecodeError:
                self._is_broken = True
                self._end.clear()
        return not self._is_broken


class _SlowWatch:
    """One sequence under a decoder that is not known to add piece to piece."""

    def __init__(self, tokenizer: Tokenizer, skips_special: bool, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._skips_special, self._stop = tokenizer, skips_special, stop
        self._token_ids: list[int] = []
        self._match: StopMatch | None = None

    def __call__(self, output_ids: Sequence[int]) -> StopMatch | None:
        """The first match, with the next output tokens."""
        for token_id in () if self._match else output_ids:
            self._token_ids.append(token_id)
            text = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skips_special)
            at = earliest(text, self._stop)
            if at is not None:
                self._match = StopMatch(self._stop[at], len(self._token_ids))
                break
        return self._match


def earliest(text: AnyStr, strings: Sequence[AnyStr]) -> int | None:
    """Position in the list of the string that begins first in a text; at equal begin the first of
    the list. None if there is none."""
    begins = [(text.find(string), at) for at, string in enumerate(strings)]
    return min((item for item in begins if item[0] >= 0), default=(0, None))[1]
