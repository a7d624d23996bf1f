"""Central types that cross room borders, and the dimension legend. Standard library only.

Knows nothing about tensors, files, models or options; every other room imports it.

Dimension legend, used as suffixes of tensor names in the whole repository:

    B rows in the static batch     T query tokens in this forward    S cache slots, or keys per row
    K draft block positions        N tree nodes incl. root           M candidates per position
    W mask words of 32 bits        P pages per slot                  D model width
    H query heads                  G kv heads                        E head width
    F mlp width                    L layers                          C tapped layers * D
    V vocabulary                   O output tokens per slot          X cells of a cache plane
    R prompts of a refill          Q query tokens per row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

FinishReason = Literal["stop", "length"]

RejectCode = Literal[
    "bad_json",
    "missing_field",
    "wrong_type",
    "empty_prompt",
    "bad_text",
    "template_error",
    "prompt_too_long",
    "token_out_of_range",
    "bad_sampling",
    "unsupported_content",
    "nan_logits",
]


class ExitCode:
    """Process exit codes of `python -m ddbatch` (a public contract)."""

    DONE = 0
    BUG = 1
    USAGE = 2
    TOO_MANY_REJECTED = 3
    ENGINE = 4
    STOPPED = 75
    STOPPED_TWICE = 130


class RunError(Exception):
    """The run cannot go on: engine, disk or state. Its text is for the user; exit code ENGINE."""


class AuditError(RunError):
    """A finished row is not what the target alone would have said: no row of the run can be
    trusted."""


class Key(NamedTuple):
    """Identity of one output row: position in the input, assistant turn, sample number."""

    row_id: int
    turn: int
    sample: int


@dataclass(frozen=True)
class ShapePlan:
    """Fixed shapes of one round.

    rows: lanes of the static batch. nodes: N = budget + 1 verified tokens a row (1 = plain
    decoding). block: positions K of a drafted block, at most the drafter's block size (1 without a
    drafter). draft_depth: block positions that get candidates. topk: candidates M per position.
    """

    rows: int
    nodes: int
    block: int
    draft_depth: int
    topk: int


@dataclass(frozen=True)
class CachePlan:
    """The cache pool: `slots` sequences, `pages` pages of `page` tokens, `max_len` a slot.

    key_counts: rising, up to max_len: attention looks at one of these counts of keys, the first
    that no live sequence exceeds.
    """

    slots: int
    pages: int
    page: int
    max_len: int
    key_counts: tuple[int, ...]

    def num_keys(self, length: int) -> int:
        """Keys that attention looks at for sequences of up to so many tokens; no sequence has more
        than the last count."""
        counts = self.key_counts
        return next((count for count in counts if count >= length), counts[-1])


@dataclass(frozen=True)
class PrefillPlan:
    """Shapes of one prefill call: `chunks` pieces of prompts, each `chunk` tokens that begin at a
    multiple of `chunk`. is_fixed: calls that are not full are padded to that size."""

    chunks: int
    chunk: int
    is_fixed: bool


@dataclass(frozen=True)
class Shard:
    """A range of row_ids: a unit of work and of file names, nothing else. It may span files."""

    index: int
    first_row: int
    num_rows: int

    @property
    def stop_row(self) -> int:
        """One beyond the last row_id."""
        return self.first_row + self.num_rows


@dataclass(frozen=True)
class RowSampling:
    """Sampling options that one row sets for itself; None = as the run has it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one sequence are drawn and what ends it; every value is in force.

    temperature 0 = the most probable token. top_k 0, top_p 1 and min_p 0 keep every token. stop:
    strings that end the text. stop_token_ids: the model's own among them unless they are ignored.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One input row that can be rendered: exactly one of messages_json, text, token_ids is set.

    JSON strings hold nested values untouched: messages_json a list of chat messages, tools_json a
    list of tools, raw_json the whole input row. kept: the values of data.keep_columns, in their
    order, as the run's schema has them. is_continued: the last message is an assistant's, and the
    completion goes on from its text (data.turns=continue).
    """

    key: Key
    user_id: str | None = None
    messages_json: str | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    tools_json: str | None = None
    kept: tuple[object, ...] = ()
    sampling: RowSampling = RowSampling()
    is_continued: bool = False
    raw_json: str = ""


@dataclass(frozen=True)
class TokenPrompt:
    """What the engine decodes: ids of one prompt, and the cap and the sampling in force."""

    key: Key
    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()


class StopMatch(NamedTuple):
    """A stop string was found. num_tokens: output tokens up to the one that completed it, which is
    the last that counts."""

    string: str
    num_tokens: int


class StopFinder(Protocol):
    """Finds stop strings in the text of output tokens. The engine, which knows no text, is given
    one."""

    def flagged(self, stop: tuple[str, ...]) -> Sequence[int]:
        """Ids of all tokens that could complete one of these strings; more do no harm."""

    def watch(self, stop: tuple[str, ...]) -> Callable[[Sequence[int]], StopMatch | None]:
        """A function for one sequence: called with its next output tokens, it tells the first match
        in token order among all tokens so far."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities of output tokens under the target's raw softmax (before temperature and
    filters), one entry per output token.

    token: of the emitted token. top_ids, top: the most probable tokens and their log-probabilities,
    best first, ties by lower id; empty lists where sampling.top_logprobs is 0.
    """

    token: Sequence[float]
    top_ids: Sequence[Sequence[int]]
    top: Sequence[Sequence[float]]

    def first(self, count: int) -> TokenLogprobs:
        """Those of the first `count` tokens."""
        return TokenLogprobs(self.token[:count], self.top_ids[:count], self.top[:count])


@dataclass(frozen=True)
class Completion:
    """What the engine made of one TokenPrompt.

    token_ids include the stop token, or the token that completed a stop string, when finish_reason
    is "stop"; one of stop_token_id and stop_string says which it was. logprobs: None where
    sampling.logprobs is off. accepted: drafted tokens kept per round, bonus excluded. depth:
    deepest node offered per round. drafted: tree nodes offered per round (the budget in force, 0 of
    plain decoding). seconds: from admission to the last round.
    """

    key: Key
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_token_id: int | None
    accepted: tuple[int, ...]
    depth: tuple[int, ...]
    drafted: tuple[int, ...]
    seconds: float
    slot: int
    stop_string: str | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Rejected:
    """A row that could not run: it keeps its key, the reason, and one code of a closed list."""

    key: Key
    code: RejectCode
    reason: str
    user_id: str | None = None
    raw_json: str = ""


@dataclass
class EngineStats:
    """Counters of an engine, since the weights were loaded. row_rounds: rounds x rows;
    live_row_rounds: those that emitted tokens; output_tokens: of finished sequences and of those in
    flight; round_tokens: those that rounds emitted, not prefill; prefill_seconds: of the device, in
    prefill calls whose record was read."""

    rounds: int = 0
    row_rounds: int = 0
    live_row_rounds: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    round_tokens: int = 0
    prefill_seconds: float = field(default=0.0, compare=False)  # a time is no fact of a run
