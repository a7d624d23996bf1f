"""What job=generate works on: units, and their turns on the way to the engine.

A unit is all turns of one sample of one row: they depend on each other and are committed together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ddbatch.core import Prompt, Rejected, TokenPrompt
from ddbatch.data.batching.encoder import Encoded, OnLong
from ddbatch.data.batching.turns import Turns
from ddbatch.data.schema import FinishedRow


@dataclass(frozen=True)
class Limits:
    """Bounds of a prompt. max_len: prompt and output tokens together. The rest: the run's options
    (max_new_tokens, seed, data.on_long, data.turns, output.skip_special_tokens)."""

    max_len: int
    max_new_tokens: int
    seed: int
    on_long: OnLong
    turns: Turns
    skip_special_tokens: bool


@dataclass
class Unit:
    """One sample of one row, with a result for each of its turns so far."""

    shard: int
    prompt: Prompt
    sample: int
    num_turns: int
    results: list[FinishedRow | Rejected] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether every turn has its result."""
        return len(self.results) == self.num_turns


@dataclass(frozen=True)
class Ready:
    """A turn that can be decoded."""

    unit: Unit
    prompt: Prompt
    encoded: Encoded
    tokens: TokenPrompt

    @property
    def num_tokens(self) -> int:
        """Length of the sequence when its cap is used up."""
        return len(self.tokens.token_ids) + self.tokens.max_new_tokens


@dataclass(frozen=True)
class Prepared:
    """A turn's prompt and its ids, for any sample."""

    prompt: Prompt
    encoded: Encoded
    max_new_tokens: int

    def of(self, unit: Unit) -> Ready:
        """The same for one unit."""
        key = self.prompt.key._replace(sample=unit.sample)
        tokens = TokenPrompt(key, self.encoded.token_ids, self.max_new_tokens, self.prompt.sampling)
        return Ready(unit, replace(self.prompt, key=key), self.encoded, tokens)
