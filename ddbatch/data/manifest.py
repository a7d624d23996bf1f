"""manifest.json: what a run is, decided at its first start; and the data set card.

Knows how both are stored. Knows nothing about how the identity fields are found. Nothing in these
files names a host, a user, a path or the environment.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

import pyarrow as pa

from ddbatch.data.batching.columns import Columns, PromptKind
from ddbatch.data.folder import RunFolder, StateError, write_new
from ddbatch.data.reload_mark import card_configs
from ddbatch.data.schema import kept_columns

VERSION = 1

_ABOUT = {
    "completions": "one row per finished prompt: the conversation, the completion and its ids",
    "acceptance": "the same rows: drafted tokens accepted in each round",
    "logprobs": "the same rows: the most probable tokens at each output token, best first",
    "rejected": "input rows that could not run, each with a code and the reason",
}

_CARD = """---
configs:
{configs}
{front}---

# Completions

Generated offline by ddbatch {ddbatch}. `load_dataset(<this folder>)` reads the completions; the
other tables are configs of their own. `manifest.json` tells how they were made.

{tables}

`row_id` (the row's place in the input, from 0), `turn` and `sample` identify a row in every table.
Rows are sorted by that key inside a file; files are in the order in which rows finished.
"""


@dataclass(frozen=True)
class Manifest:
    """identity: the fields that make another run when they change. columns: how an input row is
    read. schemas: by table. template_date: ISO time that strftime_now tells. card: output.card.
    config: the first start's options, paths by their last name. ddbatch: the version that began it.
    """

    identity: Mapping[str, object]
    columns: Columns
    schemas: Mapping[str, pa.Schema]
    template_date: str
    card: Mapping[str, object]
    config: Mapping[str, object]
    ddbatch: str

    @property
    def has_logprobs(self) -> bool:
        """Whether the run tells the log-probability of each token that it emits."""
        return self.identity.get("sampling.logprobs") is True


def create_manifest(folder: RunFolder, attempt: str, manifest: Manifest) -> Manifest:
    """Make this manifest the run's, with its card; returns the one that holds.

    Of two starts at the same instant one is first, and the other goes on with its manifest.
    """
    write_new(_to_json(manifest), folder.tmp(attempt) / "manifest.json", folder.manifest)
    holds = read_manifest(folder)
    create_card(folder, attempt, holds)
    return holds


def create_card(folder: RunFolder, attempt: str, manifest: Manifest) -> None:
    """Make the card unless there is one, which the user may have edited."""
    if not folder.readme.exists():
        write_new(card(manifest), folder.tmp(attempt) / "README.md", folder.readme)


def read_manifest(folder: RunFolder) -> Manifest:
    """The run's manifest; StateError where it cannot be trusted."""
    try:
        content = json.loads(folder.manifest.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, this ddbatch reads {VERSION}")
        schemas = {
            table: pa.ipc.read_schema(pa.py_buffer(base64.b64decode(schema["arrow"])))
            for table, schema in content["schemas"].items()
        }
        columns = content["columns"]
        return Manifest(
            identity=content["identity"],
            columns=Columns(
                prompt=columns["prompt"],
                kind=cast(PromptKind, columns["kind"]),
                id_column=columns["id_column"],
                tools_column=columns["tools_column"],
                sampling_column=columns["sampling_column"],
                keep=kept_columns(schemas["completions"]),
            ),
            schemas=schemas,
            template_date=content["template_date"],
            card=content["card"],
            config=content["config"],
            ddbatch=content["ddbatch"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise StateError(
            f"{folder.manifest} cannot be read ({type(error).__name__}: {error}); it is written "
            "once and never changed: bring it back from a copy, or choose another output_dir"
        ) from error


def _to_json(manifest: Manifest) -> str:
    columns = {name: value for name, value in asdict(manifest.columns).items() if name != "keep"}
    schemas = {
        table: {
            "fields": {field.name: str(field.type) for field in schema},
            "arrow": base64.b64encode(schema.serialize().to_pybytes()).decode("ascii"),
        }
        for table, schema in manifest.schemas.items()
    }
    content = {
        "version": VERSION,
        "ddbatch": manifest.ddbatch,
        "identity": manifest.identity,
        "columns": columns,
        "template_date": manifest.template_date,
        "config": manifest.config,
        "card": manifest.card,
        "schemas": schemas,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def card(manifest: Manifest) -> str:
    """README.md, a pure function of the manifest."""
    configs = (
        f"- config_name: {config['config_name']}\n  data_files: {config['data_files']}"
        for config in card_configs(manifest.schemas)
    )
    # JSON is YAML: what the user puts into the head of the card needs no YAML writer.
    front = "".join(
        f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in manifest.card.items()
    )
    return _CARD.format(
        configs="\n".join(configs),
        front=front,
        tables="\n".join(f"- `{table}`: {_ABOUT[table]}" for table in manifest.schemas),
        ddbatch=manifest.ddbatch,
    )
