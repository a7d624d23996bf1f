"""What job=generate asks of an engine: two small protocols, so that a run needs no tensors.

The engine of this project meets them in decoding.py; tests and benchmarks of the data path bring an
engine of known speed. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from ddbatch.core import Completion, EngineStats, Rejected, ShapePlan, StopFinder, TokenPrompt
from ddbatch.jobs.generating.trials import Trials


class Decoder(Protocol):
    """A loaded pair with its static batch."""

    @property
    def plan(self) -> ShapePlan:
        """Shapes of the next round."""

    @property
    def about(self) -> dict[str, object]:
        """Facts for the attempt's record that are known once the weights are loaded."""

    @property
    def max_len(self) -> int:
        """Prompt and output tokens that a sequence may have; 0 before the first grow."""

    def grow(self, max_len: int) -> None:
        """Make room for longer sequences; only while nothing is in flight. RunError where no plan
        works."""

    def fill(self, prompts: Iterator[TokenPrompt]) -> None:
        """Take prompts while there are free slots."""

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is in flight or waiting for a slot."""

    def step(self) -> None:
        """Run one round."""

    def collect(self) -> Iterator[Completion | Rejected]:
        """Hand out what has finished; Rejected with code nan_logits. RunError where output cannot
        be trusted."""

    def finish(self) -> None:
        """Nothing more will come: do what was put off. RunError as above."""

    @property
    def seconds_judged(self) -> float:
        """Seconds in which plans were made and judged, and nothing was decoded for the run."""

    @property
    def rounds(self) -> Mapping[ShapePlan, int]:
        """How many there were of each plan."""

    @property
    def choice(self) -> str | None:
        """What chose the plans, and why, in a line; None where nothing was to choose."""

    @property
    def found(self) -> dict[str, object]:
        """Facts for the attempt's record that are known at its end."""

    @property
    def notes(self) -> list[str]:
        """What the summary should say of this engine."""

    @property
    def figures(self) -> EngineStats:
        """Counters so far."""


class Pair(Protocol):
    """Target and drafter before their weights are read."""

    @property
    def vocab(self) -> int:
        """Token ids are 0..vocab - 1."""

    @property
    def context(self) -> int:
        """Tokens that the target can see."""

    @property
    def dtype(self) -> str:
        """The dtype in force."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own ids that end a completion, sorted."""

    @property
    def recommended(self) -> tuple[str, ...]:
        """What the checkpoint's generation_config.json recommends and the run does not use."""

    @property
    def about(self) -> dict[str, object]:
        """Free facts for the attempt's record: device, method, versions."""

    def load(self, num_rows: int, finder: StopFinder, trials: Trials) -> Decoder:
        """Read the weights. num_rows: rows left to decode, where a smaller batch would do. trials:
        of plans, in the run's folder, which may not be there yet."""
