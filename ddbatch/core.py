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

from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Key(NamedTuple):
    """Identity of one output row: position in the input, assistant turn, sample number."""

    row_id: int
    turn: int
    sample: int


@dataclass(frozen=True)
class ShapePlan:
    """Fixed shapes of one round.

    rows: lanes of the static batch. nodes: N = budget + 1 verified tokens a row (1 = plain
    decoding). block: the drafter's block size K (1 without a drafter). draft_depth: block positions
    that get candidates. topk: candidates M per position.
    """

    rows: int
    nodes: int
    block: int
    draft_depth: int
    topk: int


@dataclass(frozen=True)
class CachePlan:
    """The cache pool: `slots` sequences, `pages` pages of `page` tokens, `max_len` a slot."""

    slots: int
    pages: int
    page: int
    max_len: int


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
    """What the engine decodes: ids of one prompt, the cap in force, and the row's own sampling."""

    key: Key
    token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: RowSampling = RowSampling()


@dataclass(frozen=True)
class Completion:
    """What the engine made of one TokenPrompt.

    token_ids include the stop token when finish_reason is "stop". accepted: drafted tokens kept per
    round, bonus excluded. depth: deepest node offered per round. drafted: tree nodes offered in
    every round (the budget in force). seconds: from admission to the last round.
    """

    key: Key
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_token_id: int | None
    accepted: tuple[int, ...]
    depth: tuple[int, ...]
    drafted: int
    seconds: float
    slot: int


@dataclass(frozen=True)
class Rejected:
    """A row that could not run: it keeps its key, the reason, and one code of a closed list."""

    key: Key
    code: RejectCode
    reason: str
    user_id: str | None = None
    raw_json: str = ""
