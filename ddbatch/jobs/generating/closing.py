"""The last words of a run that is complete: what to type next, and for the demo some of its texts.

The texts are read back from the committed parts, by key, so that they do not depend on how the run
was scheduled. Only the demo's are shown: prompts of a user go into no log.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ddbatch.cli import as_typed
from ddbatch.data.commits import recover, shards_with_records
from ddbatch.data.export.merging import places_by_key
from ddbatch.data.export.parts import Part, Rows, describe_part
from ddbatch.data.folder import RunFolder
from ddbatch.data.manifest import read_manifest
from ddbatch.jobs.show import excerpt

_OWN_RUN = "python -m ddbatch model.path=MODEL data.path=prompts.jsonl output_dir=out"
_PROMPT_LINES, _TEXT_LINES = 2, 5


@dataclass(frozen=True)
class Sample:
    """What was asked and what was answered."""

    prompt: str
    text: str


def read_samples(output_dir: str) -> list[Sample]:
    """The first, the middle and the last completion by key of a run that has some, of chats."""
    folder = RunFolder(Path(output_dir))
    schema = read_manifest(folder).schemas["completions"]
    parts = tuple(_parts(folder, schema))
    order = [np.stack([places.part, places.position]) for places in places_by_key(parts)]
    part, position = np.concatenate(order, axis=1)
    chosen = sorted({0, len(part) // 2, len(part) - 1})
    shown = pa.schema([schema.field(name) for name in ("messages", "completion")])
    table = Rows(parts, {"completions": shown}).take(part[chosen], position[chosen])
    return [Sample(_asked(row["messages"]), row["completion"]) for row in table.to_pylist()]


def _parts(folder: RunFolder, schema: pa.Schema) -> list[Part]:
    """The committed completions."""
    return [
        describe_part(0, file.table, folder.place / file.final, file.rows, schema)
        for shard in shards_with_records(folder)
        for record in recover(folder, shard)
        for file in record.files
        if file.table == "completions"
    ]


def _asked(messages: list[Mapping[str, str]]) -> str:
    """What the user said last."""
    return [message["content"] for message in messages if message["role"] == "user"][-1]


def closing_text(output_dir: str, *, is_demo: bool) -> str:
    """What a run that has completions says once it is complete."""
    if not is_demo:
        return after_run_text(output_dir)
    return "\n\n".join([*map(_sample_text, read_samples(output_dir)), after_demo_text()])


def _sample_text(sample: Sample) -> str:
    """A few lines of a prompt and of what was made of it."""
    asked = excerpt(sample.prompt, "prompt", lines=_PROMPT_LINES, indent=8)
    return f"{asked}\n{excerpt(sample.text, 'text', lines=_TEXT_LINES, indent=8)}"


def after_demo_text() -> str:
    """What to type after the demo."""
    return (
        "next, a model (a Hugging Face folder) and prompts of your own:\n"
        f"  {_OWN_RUN}\n"
        'with one {"prompt": "..."} a line in prompts.jsonl'
    )


def after_run_text(output_dir: str) -> str:
    """What to type after a run that is complete."""
    place = os.path.normpath(output_dir)
    if os.path.basename(place) in (".", ".."):
        place = os.path.abspath(place)
    command = [
        "python -m ddbatch job=merge",
        as_typed("output_dir", output_dir),
        as_typed("merge.output_dir", f"{place}-merged"),
    ]
    return f"next, one data set of it in the order of the input:\n  {' '.join(command)}"
