"""What job=generate works on: units, and their turns on the way to the engine.

A unit is all turns of one sample of one row: they depend on each other and are committed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from ddbatch.core import Prompt, Rejected, RowSampling, Sampling, TokenPrompt
from ddbatch.data.batching.encoder import Encoded, OnLong
from ddbatch.data.batching.turns import Turns
from ddbatch.data.schema import FinishedRow


@dataclass(frozen=True)
class Limits:
    """What holds for a row that says nothing else. max_len: prompt and output tokens together.
    sampling: the run's, without the model's own stop ids. The rest: the run's options
    (sampling.max_new_tokens, sampling.ignore_eos, data.on_long, data.turns,
    output.skip_special_tokens)."""

    max_len: int
    max_new_tokens: int
    sampling: Sampling
    ignore_eos: bool
    on_long: OnLong
    turns: Turns
    skip_special_tokens: bool


def sampling_in_force(
    limits: Limits, own: RowSampling, eos_token_ids: Sequence[int] = ()
) -> Sampling:
    """The run's sampling with what a row sets for itself, and the model's own stop ids unless they
    are ignored. A row's stop and stop_token_ids take the place of the run's."""
    names = (item.name for item in fields(Sampling))
    chosen = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    merged = replace(limits.sampling, **chosen)
    ignores_eos = limits.ignore_eos if own.ignore_eos is None else own.ignore_eos
    stop_ids = {*merged.stop_token_ids, *(() if ignores_eos else eos_token_ids)}
    return replace(merged, stop_token_ids=tuple(sorted(stop_ids)))


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
    """A turn's prompt, its ids and what is in force for it, for any sample."""

    prompt: Prompt
    encoded: Encoded
    max_new_tokens: int
    sampling: Sampling

    def of(self, unit: Unit) -> Ready:
        """The same for one unit."""
        key = self.prompt.key._replace(sample=unit.sample)
        tokens = TokenPrompt(key, self.encoded.token_ids, self.max_new_tokens, self.sampling)
        return Ready(unit, replace(self.prompt, key=key), self.encoded, tokens)
