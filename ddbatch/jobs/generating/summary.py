"""The summary of a run: what was made, how fast, and where it is. Text for people, on stdout."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from ddbatch.core import ShapePlan
from ddbatch.jobs.generating.decoder import Decoder
from ddbatch.jobs.generating.tally import Counts, Tally
from ddbatch.jobs.show import counted, duration, facts, plural, share, tell

# More truncated rows than this deserve a word.
_MANY_TRUNCATED = 0.2
_SHOWN_PLANS = 4


def print_summary(
    output_dir: str,
    tally: Tally,
    decoder: Decoder,
    seconds: float,
    notes: Sequence[str],
) -> None:
    """Rows, tokens, speed, acceptance length, and the place of the files.

    seconds: decoding, without loading weights. notes: more to be said, a line each.
    """
    own, run, figures = tally.own, tally.committed, decoder.figures
    lines = [("rows", _rows(own))]
    if own.num_rows != run.num_rows:
        lines.append(("whole run", f"{_rows(run)}; {tally.num_left:,} of {tally.num_units:,} left"))
    if own.completions:
        rate = figures.output_tokens / max(seconds, 1e-9)
        lines.append(
            (
                "tokens",
                f"{own.output_tokens:,} in {own.completions:,} completions, {seconds:.1f} s, "
                f"{rate:,.0f} tokens/s",
            )
        )
    if own.rounds:
        # The first token of a row comes from its prompt's forward, not from a round.
        length = (own.output_tokens - own.completions) / own.rounds
        lines.append(
            ("acceptance length", f"{length:.2f} tokens a round (plain decoding makes 1.00)")
        )
    if figures.row_rounds:
        useful = share(figures.live_row_rounds, figures.row_rounds)
        lines.append(("plan", f"{_plans(decoder.rounds)}, {useful} of row-rounds useful"))
        if decoder.choice is not None:
            lines.append(("chosen last", decoder.choice))
    if figures.prefill_seconds:
        lines.append(
            (
                "prefill",
                f"{figures.prompt_tokens:,} prompt tokens in {figures.prefill_seconds:.1f} s, "
                f"{share(figures.prefill_seconds, seconds)} of the time",
            )
        )
    if run.completions and run.truncated > _MANY_TRUNCATED * run.completions:
        lines.append(
            (
                "note",
                f"{run.truncated:,} of {run.completions:,} completions were cut by their token cap "
                "(sampling.max_new_tokens or the context)",
            )
        )
    if own.dropped_prompts:
        lines.append(
            ("note", f"{plural(own.dropped_prompts, 'prompt')} cut at the beginning (data.on_long)")
        )
    lines += [("note", note) for note in notes]
    lines.append(("written to", output_dir))
    if run.completions:
        place = json.dumps(output_dir, ensure_ascii=False)
        lines.append(("read it", f"datasets.load_dataset({place})"))
    tell(facts(lines))


def done_text(output_dir: str, tally: Tally) -> str:
    """What a start on a complete run says."""
    return f"nothing to do: {output_dir} is complete, {_rows(tally.committed)}"


def _plans(rounds: Mapping[ShapePlan, int]) -> str:
    """ "32 rows x 1 node in 1,204 rounds, 8 x 5 in 77, 2 more in 12", by rounds."""
    most = sorted(rounds.items(), key=lambda item: -item[1])
    shown, others = most[:_SHOWN_PLANS], most[_SHOWN_PLANS:]
    texts = [
        f"{plural(plan.rows, 'row')} x {plural(plan.nodes, 'node')} in {plural(count, 'round')}"
        if place == 0
        else f"{plan.rows} x {plan.nodes} in {count:,}"
        for place, (plan, count) in enumerate(shown)
    ]
    if others:
        texts.append(f"{len(others)} more in {sum(count for _, count in others):,}")
    return ", ".join(texts)


def _rows(counts: Counts) -> str:
    """ "6 finished (5 length, 1 stop), 2 rejected (1 bad_json, 1 wrong_type)"."""
    reasons = Counter(length=counts.truncated, stop=counts.completions - counts.truncated)
    return (
        f"{counts.completions:,} finished ({counted(+reasons)}), "
        f"{counts.rejected.total():,} rejected ({counted(counts.rejected)})"
    )


def left_text(tally: Tally, seconds: float) -> str:
    """What a stopped run says: how much is safe, and how much is left."""
    return (
        f"{tally.committed.units:,} of {tally.num_units:,} rows are committed after "
        f"{duration(seconds)}; the same command resumes"
    )
