"""Data sets of the Hugging Face hub: a snapshot at one commit, and the files of one split in it.

Knows the two libraries of the hub, which are imported only here and only when asked for. Knows
nothing about what is in the files.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddbatch.data.source.formats import SUFFIXES

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# What a snapshot must hold besides the data: the card and the files that `datasets` looks for.
_METADATA = ("README.md", "dataset_infos.json", "dataset_info.json")


@dataclass(frozen=True)
class Snapshot:
    """A data set at one commit, on this machine, and its files of one split in their order."""

    root: Path
    revision: str
    files: tuple[Path, ...]


def is_hub_id(path: str) -> bool:
    """Whether a path that is nowhere on the disk may be `org/name` or `name` on the hub."""
    return _ID.fullmatch(path) is not None and not path.endswith(SUFFIXES)


def fetch(path: str, *, name: str | None, revision: str | None, split: str) -> Snapshot:
    """Resolve a data set to a commit, download what is not in the cache, and find its files.

    name: the data set's config. Without a network the cache decides.
    """
    root = _download(path, revision)
    files = _files_of_split(path, root, name, split)
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise ValueError(
                f"data.path={path}: {file.name} of data.split={split} is not of a format that is "
                f"read; allowed: {', '.join(SUFFIXES)}"
            )
    return Snapshot(root, root.name, files)


def _download(path: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            path,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[*_METADATA, *(f"*{suffix}" for suffix in SUFFIXES)],
        )
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"data.path={path}: no such file or folder, and as a data set of the Hugging Face hub "
            "it is not in the cache, and there is no network; allowed: a local path, or a hub id "
            "whose snapshot is cached or can be downloaded"
        ) from error
    except Exception as error:  # whatever HTTP library is beneath: the answer is about data.path
        raise ValueError(
            f"data.path={path}: no such file or folder, and the Hugging Face hub refuses it as a "
            f"data set (data.revision={'null' if revision is None else revision}): "
            f"{type(error).__name__}: {_first_line(error)}; allowed: a local path, or a data set "
            "that you may read"
        ) from error
    return Path(folder)


def _files_of_split(path: str, root: Path, name: str | None, split: str) -> tuple[Path, ...]:
    from datasets import get_dataset_config_names, load_dataset_builder

    # The builder makes a lock file in its cache; nothing else is written.
    with tempfile.TemporaryDirectory() as cache:
        try:
            names = get_dataset_config_names(str(root))
        except Exception as error:  # a broken card, no files: whatever it is, the data set has it
            raise ValueError(
                f"data.path={path}: `datasets` finds no data files in it: {_first_line(error)}; "
                f"allowed: data sets of {', '.join(SUFFIXES)} files"
            ) from error
        if name is not None and name not in names:
            raise ValueError(f"data.name={name}: {path} has no such config; {_allowed(names)}")
        try:
            splits = load_dataset_builder(str(root), name, cache_dir=cache).config.data_files
        except Exception as error:
            raise ValueError(
                f"data.path={path}, data.name={'null' if name is None else name}: "
                f"{_first_line(error)}; {_allowed(names)} for data.name"
            ) from error
    if not splits or split not in splits:
        raise ValueError(f"data.split={split}: {path} has no such split; {_allowed(splits or ())}")
    return tuple(Path(file) for file in splits[split])


def _allowed(names: Iterable[str]) -> str:
    return f"allowed: {', '.join(map(str, names)) or 'none'}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
