"""The summary of a run: what was made, how fast, and where it is. Text for people, on stdout."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ddbatch.config import Config
from ddbatch.core import ShapePlan
from ddbatch.data.schema import FinishedRow
from ddbatch.engine.engine import EngineStats


@dataclass
class RunFigures:
    """Counters of a run. seconds: decoding only, without loading weights."""

    rows: int
    rejected: Counter[str] = field(default_factory=Counter)  # by code
    seconds: float = 0.0
    output_tokens: int = 0
    rounds: int = 0
    is_engine_broken: bool = False
    finish_reasons: Counter[str] = field(default_factory=Counter)
    stats: EngineStats | None = None

    @property
    def num_finished(self) -> int:
        """Rows with a completion."""
        return self.finish_reasons.total()

    def add(self, row: FinishedRow) -> None:
        """Count one finished row."""
        self.output_tokens += len(row.completion.token_ids)
        self.rounds += len(row.completion.accepted)
        self.finish_reasons[row.completion.finish_reason] += 1


def print_summary(
    config: Config, figures: RunFigures, plan: ShapePlan, recommended: tuple[str, ...]
) -> None:
    """Print rows, tokens, speed, acceptance length, finish reasons and the place of the files."""
    finished = figures.num_finished
    reasons, codes = _counts(figures.finish_reasons), _counts(figures.rejected)
    lines = [
        f"rows       {finished} finished ({reasons}), {figures.rejected.total()} rejected ({codes})"
    ]
    if finished:
        rate = figures.output_tokens / max(figures.seconds, 1e-9)
        lines.append(
            f"tokens     {figures.output_tokens} in {figures.seconds:.1f} s, {rate:.0f} tokens/s"
        )
    if figures.rounds:
        # The first token of a row comes from its prompt's forward, not from a round.
        emitted = figures.output_tokens - finished
        lines.append(
            f"acceptance length {emitted / figures.rounds:.2f} (tokens per round; plain "
            f"decoding makes 1.00)"
        )
    if figures.stats is not None and figures.stats.row_rounds:
        share = figures.stats.live_row_rounds / figures.stats.row_rounds
        lines.append(
            f"plan       {plan.rows} rows x {plan.nodes} nodes, {figures.stats.rounds} "
            f"rounds, {share:.0%} of row-rounds useful"
        )
    if finished and figures.finish_reasons["length"] * 5 > finished:
        lines.append(
            f"note       {figures.finish_reasons['length']} of {finished} rows were cut by "
            "their token cap (sampling.max_new_tokens or the context)"
        )
    if recommended:
        lines.append(
            f"note       the model recommends {', '.join(recommended)}; this run decoded "
            "greedily (temperature 0)"
        )
    lines.append(f"written to {config.output_dir}")
    if finished:
        lines.append(f'read it    datasets.load_dataset("{config.output_dir}")')
    print("\n".join(lines))


def _counts(counter: Counter[str]) -> str:
    """ "6 length, 2 stop", or "none"."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "none"
