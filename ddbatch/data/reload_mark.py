"""A mark beside the card that makes `load_dataset` look again after every commit.

datasets keeps what it has loaded from a folder whose card names configs under a digest of the card
alone, by the folder's last name: a later load would get the parts of the first one, or those of
another run in a folder of the same name (seen with 5.2). `.huggingface.yaml` is read as a part of
the card, so a new word in it is a new digest. Knows nothing about what is in a part.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable

from ddbatch.data.folder import STATE, RunFolder


def renew_mark(folder: RunFolder) -> None:
    """Call after parts have become visible, or gone; does nothing before the run's first start."""
    try:
        tables = list(json.loads(folder.manifest.read_bytes())["schemas"])
    except (FileNotFoundError, ValueError, KeyError):
        return  # one that cannot be read is told by who needs it
    word = uuid.uuid4().hex[:12]
    configs = [{**config, "description": f"state {word}"} for config in card_configs(tables)]
    tmp = folder.place / STATE / f".mark-{word}"
    tmp.write_text(json.dumps({"configs": configs}) + "\n", encoding="utf-8")  # JSON is YAML
    os.replace(tmp, folder.place / ".huggingface.yaml")


def card_configs(tables: Iterable[str]) -> list[dict[str, str]]:
    """The `configs` of a card: without them a folder of several tables does not load."""
    return [
        {
            "config_name": "default" if table == "completions" else table,
            "data_files": f"{table}/*.parquet",
        }
        for table in tables
    ]
