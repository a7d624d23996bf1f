"""Open a run: is the folder a place for it, is it the same run, and what is its input.

Everything that can be refused is refused here, before a weight is read or a file is made. Knows the
options and the order of the checks; how things are stored is told by the data room.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import cast

import pyarrow as pa

from ddbatch import __version__
from ddbatch.checks import option
from ddbatch.config import Config
from ddbatch.core import Key, Prompt, Sampling
from ddbatch.data.batching.columns import Columns, choose_columns
from ddbatch.data.batching.encoder import PromptEncoder
from ddbatch.data.batching.prompts import to_prompt
from ddbatch.data.batching.stop_strings import StopStrings
from ddbatch.data.batching.template import parse_template_date
from ddbatch.data.batching.turns import Turns
from ddbatch.data.fingerprint import HashMode, differences, hash_files, hash_text, hash_weights
from ddbatch.data.folder import TABLES, RunFolder
from ddbatch.data.manifest import Manifest, read_manifest
from ddbatch.data.schema import (
    MESSAGE_FIELDS,
    SCHEMA_VERSION,
    acceptance_schema,
    completions_schema,
    logprobs_schema,
    rejected_schema,
)
from ddbatch.data.source.inputs import Inputs
from ddbatch.jobs.generating.decoder import Pair

# How a token is drawn; a change of it changes every completion that is not greedy.
DRAW_VERSION = 1

_LOOKED_AT = 1000  # rows that tell which fields messages have

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_PROMPT_OPTIONS = {"text": "prompt", "messages": "messages", "token_ids": "token_ids"}
_ADVICE = "choose another output_dir"
_OWN_NAMES = {*TABLES, "rounds", "README.md", "manifest.json", "lost+found"}


def open_folder(config: Config) -> tuple[RunFolder, Manifest | None]:
    """The run's folder, with its manifest if a run is there; nothing is made."""
    folder = RunFolder(Path(config.output_dir))
    refuse_unwritable(folder)
    found = None if folder.manifest.exists() else _not_a_runs(folder)
    # Asked again: what was found may be of a run that another worker began meanwhile, and its
    # manifest was there first.
    if folder.manifest.exists():
        if config.output.resume == "never":
            raise ValueError(
                f"output_dir={folder.place} holds a run and output.resume=never; allowed: another "
                "output_dir, or output.resume=auto to go on with it"
            )
        return folder, read_manifest(folder)
    if found is not None:
        raise ValueError(f"output_dir={folder.place} holds {found}")
    if config.output.resume in ("require", "repair"):
        raise ValueError(
            f"output_dir={folder.place} holds no run and output.resume={config.output.resume}; "
            "allowed: the output_dir of a run, or output.resume=auto to begin one"
        )
    return folder, None


def refuse_unwritable(folder: RunFolder) -> None:
    """ValueError where no run can be made or go on."""
    place = folder.place
    refused = f"output_dir={place}"
    if place.exists() and not place.is_dir():
        raise ValueError(f"{refused} is no folder; {_ADVICE}")
    base = next(found for found in (place, *place.parents) if found.exists())
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        raise ValueError(f"{refused}: {base} is no folder that can be written to; {_ADVICE}")


def _not_a_runs(folder: RunFolder) -> str | None:
    """What stands in a folder without a manifest that no new run may join, None if nothing does."""
    if not folder.place.exists():
        return None
    held = [folder.place / table for table in TABLES if (folder.place / table).exists()]
    if any(os.listdir(table) for table in held):
        return (  # another run would hide what is there
            "parts of a run whose manifest.json is gone; allowed: another output_dir, or bring the "
            "file back from a copy"
        )
    foreign = sorted(
        name
        for name in os.listdir(folder.place)
        if name not in _OWN_NAMES and not name.startswith(".")
    )
    if foreign:
        return f"{foreign[0]}, which is no part of a run; {_ADVICE}"
    # It is no card of ours, which is made after the manifest.
    return f"a README.md of something else; {_ADVICE}" if folder.readme.exists() else None


def open_encoder(config: Config, template_date: str) -> PromptEncoder:
    """The tokenizer with its template. template_date: ISO time that strftime_now tells."""
    return PromptEncoder.from_folder(
        Path(config.model.path),
        template=config.data.template,
        chat_template_kwargs=config.data.chat_template_kwargs,
        system_prompt=_system_prompt(config),
        template_date=datetime.fromisoformat(template_date),
    )


def pin_date(config: Config, manifest: Manifest | None) -> str:
    """The moment that templates are told: data.template_date, else the run's first start."""
    given = parse_template_date(config.data.template_date)
    if given is not None:
        return given.isoformat()
    return datetime.now().isoformat() if manifest is None else manifest.template_date


def look_at_columns(config: Config, inputs: Inputs, manifest: Manifest | None = None) -> Columns:
    """The columns that this start would read; ValueError where a file lacks one of them.

    What is not named is chosen from what the files have, once: a run that goes on keeps its choice
    and its types.
    """
    data = config.data
    prompt = {
        "text": data.prompt_column,
        "messages": data.messages_column,
        "token_ids": data.token_ids_column,
    }
    if manifest is not None and not any(prompt.values()):
        prompt[manifest.columns.kind] = manifest.columns.prompt
    columns = choose_columns(
        inputs.tables,
        inputs.columns,
        prompt_column=prompt["text"],
        messages_column=prompt["messages"],
        token_ids_column=prompt["token_ids"],
        id_column=data.id_column,
        tools_column=data.tools_column,
        sampling_column=data.sampling_column,
        keep_columns=data.keep_columns,
    )
    return columns if manifest is None else replace(columns, keep=manifest.columns.keep)


@dataclass(frozen=True)
class Setting:
    """What decides a completion beside the options: pair, encoder, columns, template date.

    sampling: the run's, without the model's own stop ids. finder: of its stop strings and rows'.
    """

    pair: Pair
    encoder: PromptEncoder
    columns: Columns
    template_date: str
    max_len: int
    sampling: Sampling
    finder: StopStrings


def identity(config: Config, setting: Setting) -> dict[str, object]:
    """The fields that make another run when they change."""
    model, data, columns = config.model, config.data, setting.columns
    folder = Path(model.path)
    fields: dict[str, object] = {
        "model weights": hash_weights(folder, cast(HashMode, model.hash)),
        "model.hash": model.hash,
        "model config.json": hash_files(folder, ("config.json",)),
        "tokenizer": hash_files(folder, _TOKENIZER_FILES),
        "data.template": hash_text(setting.encoder.template_text),
        "data.chat_template_kwargs": data.chat_template_kwargs,
        "data.template_date": setting.template_date,
        "data.system_prompt": hash_text(_system_prompt(config)),
        "model.dtype": setting.pair.dtype,
        "engine.max_len": setting.max_len,
        "stop token ids": list(setting.pair.eos_token_ids),
        "draw version": DRAW_VERSION,
        "schema version": SCHEMA_VERSION,
    }
    for kind, option_name in _PROMPT_OPTIONS.items():
        fields[f"data.{option_name}_column"] = columns.prompt if columns.kind == kind else None
    for name in ("id_column", "tools_column", "sampling_column"):
        fields[f"data.{name}"] = getattr(columns, name)
    for name in ("keep_columns", "turns", "on_long", "select", "name", "split"):
        fields[f"data.{name}"] = option(config, f"data.{name}")
    for name, value in asdict(config.sampling).items():
        if name not in ("n", "stop", "stop_file"):
            fields[f"sampling.{name}"] = value
    fields["sampling.stop"] = list(setting.sampling.stop)  # wherever they come from
    fields["output.store"] = sorted(config.output.store)
    fields["output.skip_special_tokens"] = config.output.skip_special_tokens
    return fields


def refuse_another_run(config: Config, manifest: Manifest, now: Mapping[str, object]) -> None:
    """ValueError with every identity field that has changed."""
    changed = differences(manifest.identity, now)
    if changed:
        raise ValueError(
            f"output_dir={config.output_dir} holds another run: {'; '.join(changed)}. Allowed: the "
            "same values, or another output_dir (sampling.n and data.limit may grow, input files "
            "may be added, and drafter, engine, part and shard options may change)"
        )


def new_manifest(
    config: Config, setting: Setting, inputs: Inputs, now: Mapping[str, object]
) -> Manifest:
    """What the run is, at its first start."""
    message_fields = _message_fields(inputs, setting.columns, config.data.turns)
    schemas: dict[str, pa.Schema] = {
        "completions": completions_schema(
            keep=setting.columns.keep,
            store=config.output.store,
            message_fields=message_fields,
        )
    }
    if "acceptance" in config.output.store:
        schemas["acceptance"] = acceptance_schema()
    if config.sampling.top_logprobs:
        schemas["logprobs"] = logprobs_schema(config.sampling.top_logprobs)
    schemas["rejected"] = rejected_schema()
    return Manifest(
        identity=now,
        columns=setting.columns,
        schemas=schemas,
        template_date=setting.template_date,
        card=config.output.card or {},
        config=_public_options(config),
        ddbatch=__version__,
    )


def _message_fields(inputs: Inputs, columns: Columns, turns: str) -> set[str]:
    """What the messages of the first rows have beside role and content."""
    found: set[str] = set()
    stop = min(_LOOKED_AT, inputs.log.num_rows) if columns.kind == "messages" else 0
    for row_id, row in inputs.rows(0, stop):
        prompt = to_prompt(row, Key(row_id, 0, 0), columns, turns=cast(Turns, turns))
        if isinstance(prompt, Prompt) and prompt.messages_json is not None:
            found.update(*json.loads(prompt.messages_json))
    return found & set(MESSAGE_FIELDS)


def _public_options(config: Config) -> dict[str, object]:
    """The options without anything that names a place: paths by their last name only."""
    options = asdict(config)
    for name in ("output_dir", "merge", "estimate", "status", "bench", "probe"):
        del options[name]
    for group, key in (
        ("model", "path"),
        ("drafter", "path"),
        ("data", "path"),
        ("data", "system_prompt_file"),
        ("data", "template"),
        ("sampling", "stop_file"),
    ):
        if options[group][key] not in (None, "auto", "none"):
            options[group][key] = Path(options[group][key]).name
    return options


def _system_prompt(config: Config) -> str | None:
    if config.data.system_prompt_file is None:
        return config.data.system_prompt
    file = Path(config.data.system_prompt_file)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.system_prompt_file={file}: {error}; allowed: a UTF-8 text file"
        ) from error
