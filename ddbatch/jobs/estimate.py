"""job=estimate: what a run will be, from its prompts alone: rows, tokens, disk, time.

Reads the tokenizer and config.json of model.path, no weights, and writes nothing. Prompt text goes
to stdout on purpose: to look at what the model will see is what the job is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ddbatch.config import Config
from ddbatch.core import ExitCode
from ddbatch.data.batching.columns import Columns
from ddbatch.data.batching.encoder import OnLong, PromptEncoder
from ddbatch.data.batching.stop_strings import StopStrings
from ddbatch.data.batching.turns import Turns
from ddbatch.data.source.log import InputLog
from ddbatch.jobs.estimating.costs import ID_BYTES, TEXT_BYTES, Totals, disk_bytes, scale_up
from ddbatch.jobs.estimating.measuring import Bounds, Measured, ShownPrompt, batches, measure
from ddbatch.jobs.generating.opening import look_at_columns, open_encoder, pin_date
from ddbatch.jobs.generating.sampling_options import check_ids, check_stops, run_sampling
from ddbatch.jobs.reading import check_model_folder
from ddbatch.jobs.scanning import scan_input
from ddbatch.jobs.show import (
    clipped,
    clipped_ids,
    counted,
    duration,
    facts,
    number,
    plural,
    ranged,
    size,
    tell,
)
from ddbatch.jobs.ticker import Ticker
from ddbatch.models.families import read_target_dims

_GPUS = 8  # an example


def run(config: Config) -> int:
    """Print the estimate; returns the exit code."""
    bounds = _bounds(config)
    encoder = open_encoder(config, pin_date(config, None))
    finder = StopStrings(encoder.tokenizer, skip_special_tokens=config.output.skip_special_tokens)
    check_stops(config, run_sampling(config).stop, finder)
    check_ids(config, bounds.vocab)
    inputs = scan_input(config)
    columns = look_at_columns(config, inputs)
    num_rows = min(inputs.log.num_rows, config.estimate.rows or inputs.log.num_rows)
    found = Measured()
    with Ticker(num_rows, "rows") as ticker:
        for batch in batches(inputs.rows(0, num_rows)):
            measure(batch, columns, encoder, finder, bounds, found)
            ticker.show(found.rows)
    totals = scale_up(found, inputs.log.num_rows, config.sampling.n, bounds)
    tell(report(config, inputs.log, columns, bounds, found, totals))
    for title, shown in (("first prompt", found.first), ("longest prompt", found.longest)):
        if shown is not None:
            tell("\n" + _show_prompt(title, shown, encoder))
    return ExitCode.DONE


def _bounds(config: Config) -> Bounds:
    """What a prompt must fit, from the model's config.json and the options."""
    check_model_folder("model.path", config.model.path)
    told = config.engine.max_len
    dims = read_target_dims(Path(config.model.path))
    max_len = told if isinstance(told, int) else dims.max_positions
    if not 2 <= max_len <= dims.max_positions:
        raise ValueError(
            f"engine.max_len={max_len}: allowed: 2..{dims.max_positions}, the context of model.path"
        )
    return Bounds(
        vocab=dims.vocab,
        max_len=max_len,
        max_new_tokens=config.sampling.max_new_tokens,
        on_long=cast(OnLong, config.data.on_long),
        turns=cast(Turns, config.data.turns),
        output_tokens=config.estimate.output_tokens,
        samples=config.sampling.n,
    )


def report(
    config: Config,
    log: InputLog,
    columns: Columns,
    bounds: Bounds,
    found: Measured,
    totals: Totals,
) -> str:
    """The figures, a line each, and the histogram of the prompts' lengths."""
    lines = [("data", _data(config, log)), ("columns", _columns(columns))]
    if found.rows < log.num_rows:
        lines.append(
            (
                "looked at",
                f"the first {found.rows:,} of {log.num_rows:,} rows (estimate.rows); what has a ~ "
                "is scaled up from them",
            )
        )
    refused = found.rejected.total()
    codes = (
        f"{refused:,} are rejected ({counted(found.rejected)})" if refused else "none is rejected"
    )
    lines.append(("rows", f"{found.runnable:,} can run, {codes}"))
    if found.lengths.num:
        lines += _prompt_lines(config, bounds, found)
    if found.runnable:
        about = "~" if found.rows < log.num_rows else ""
        lines += _cost_lines(config, columns, found, totals, about)
    text = facts(lines)
    if found.lengths.num:
        text += "\n\n" + "prompt tokens, rows\n" + found.lengths.bars()
    return text


def _data(config: Config, log: InputLog) -> str:
    num_bytes, limit = sum(file.size for file in log.files), config.data.limit
    what = f"{plural(len(log.files), 'file')}, {size(num_bytes)}, {plural(log.num_rows, 'row')}"
    return f"{config.data.path}: {what}" + ("" if limit is None else f" (data.limit={limit})")


def _columns(columns: Columns) -> str:
    named = {
        "id": columns.id_column,
        "tools": columns.tools_column,
        "sampling": columns.sampling_column,
        "kept": ", ".join(column.name for column in columns.keep) or None,
    }
    others = "".join(f"; {use}: {name}" for use, name in named.items() if name is not None)
    return f"{columns.prompt} ({columns.kind}){others}"


def _prompt_lines(config: Config, bounds: Bounds, found: Measured) -> list[tuple[str, str]]:
    """Lengths, what does not fit, and what comes twice."""
    lengths, context = found.lengths, bounds.max_len
    p50, p90, p99 = (lengths.percentile(per_cent) for per_cent in (50, 90, 99))
    fate = "rejected" if bounds.on_long == "reject" else "their head is cut off"
    long = f"none; the context is {context:,} tokens"
    if found.num_long:
        long = (
            f"{plural(found.num_long, 'prompt')} above {context - 1:,} tokens, of a context of "
            f"{context:,}: {fate} (data.on_long={bounds.on_long})"
        )
    lines = [
        (
            "prompts",
            f"{lengths.mean:,.1f} tokens in the mean, p50 {p50:,}, p90 {p90:,}, p99 {p99:,}, max "
            f"{lengths.longest:,}; {lengths.total:,} in all",
        ),
        ("too long", long),
    ]
    if found.num_lowered:
        lowered = (
            f"{plural(found.num_lowered, 'row')}: the context leaves less room after the prompt "
            "than its cap (sampling.max_new_tokens, or the row's own)"
        )
        lines.append(("cap lowered", lowered))
    lines.append(("repeats", _repeats(found, has_ids=config.data.id_column is not None)))
    return lines


def _repeats(found: Measured, *, has_ids: bool) -> str:
    same, most = found.prompts.count()
    text = "no prompt comes twice"
    if same:
        text = f"{plural(same, 'row')} with a prompt that came before (one comes {most:,} times)"
    if has_ids:
        same, _ = found.ids.count()
        text += f"; {plural(same, 'row')} with an id that came before" if same else "; no id does"
    return f"{text}; all are generated"


def _cost_lines(
    config: Config, columns: Columns, found: Measured, totals: Totals, about: str
) -> list[tuple[str, str]]:
    """Completions, tokens, disk and time of the whole run."""
    samples = config.sampling.n
    what = f"{about}{totals.completions:,}"
    if samples > 1:
        what += f", {samples} samples of each row"
    if config.data.turns == "all":
        what += (
            f"; {found.completions / found.runnable:.2f} turns a row (data.turns=all). Lengths and "
            "prompt tokens are those of the first turn; later turns are longer by what is generated"
        )
    most = f"{about}{totals.most_tokens:,} output tokens"
    if totals.expected_tokens is None:
        output = f"at most {most}: every completion at its cap (estimate.output_tokens is not set)"
    else:
        output = (
            f"{about}{totals.expected_tokens:,} output tokens, estimate.output_tokens="
            f"{config.estimate.output_tokens:,} a completion; at most {most}"
        )
    top = config.sampling.top_logprobs if config.sampling.logprobs else None
    disk = disk_bytes(totals, samples, columns.kind, config.output.store, top)
    room = about + ranged(size(disk.low), size(disk.high))
    if totals.expected_tokens is None:
        room = f"at most {about}{size(disk.high)}"
    return [
        ("completions", what),
        ("prefill", f"{about}{totals.prompt_tokens:,} prompt tokens, each prompt once"),
        ("output", output),
        (
            "disk",
            f"{room} (text {TEXT_BYTES[0]:g}-"
            f"{TEXT_BYTES[1]:g} and ids {ID_BYTES[0]:g}-{ID_BYTES[1]:g} bytes a token, as of "
            "English text; kept columns not counted)",
        ),
        ("time", _time(config, totals, about)),
    ]


def _time(config: Config, totals: Totals, about: str) -> str:
    """Hours of one GPU, which are GPU-hours for any number of them."""
    speed = config.estimate.tokens_per_second
    if speed is None:
        return "unknown; estimate.tokens_per_second=N (output tokens of one GPU) tells it"
    most = totals.most_tokens / speed
    if totals.expected_tokens is None:
        seconds, hours = f"at most {about}{duration(most)}", f"at most {about}{number(most / 3600)}"
        several = f"at most {about}{duration(most / _GPUS)}"
    else:
        least = totals.expected_tokens / speed
        seconds = about + ranged(duration(least), duration(most))
        hours = about + ranged(number(least / 3600), number(most / 3600))
        several = about + ranged(duration(least / _GPUS), duration(most / _GPUS))
    return (
        f"{seconds} on one GPU at {number(speed)} tokens/s = {hours} GPU-hours; on {_GPUS} GPUs "
        f"{several}"
    )


def _show_prompt(title: str, shown: ShownPrompt, encoder: PromptEncoder) -> str:
    """A prompt as the model will see it, special tokens included; its middle may be left out."""
    ids, num_dropped = shown.encoded.token_ids, shown.encoded.num_dropped
    cut = f", {num_dropped:,} more cut off at its head" if num_dropped else ""
    text = encoder.decode(ids, skip_special_tokens=False)
    return (
        f"{title}: row_id {shown.row_id}, {plural(len(ids), 'token')}{cut}\n"
        f"{clipped(text, indent=0)}\n"
        f"ids {clipped_ids(ids)}"
    )
