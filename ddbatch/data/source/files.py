"""Which files are the input: every form of data.path becomes a list of files in a fixed order.

Knows folders, globs, `save_to_disk` folders, hub ids and the folder of an earlier run. Opens no
data file and knows nothing about rows.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddbatch.data.commits import recover, shards_with_records
from ddbatch.data.folder import RunFolder
from ddbatch.data.source import hub
from ddbatch.data.source.formats import SUFFIXES, Select

ALLOWED = (
    f"a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, a folder of such files, a glob, "
    "a folder made by save_to_disk, the id of a data set on the Hugging Face hub, or the "
    "output_dir of an earlier run"
)
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Listing:
    """The input files in the order of their rows. path: data.path as it was given. root: what the
    names of the files are relative to. is_run: they are a table of an earlier run. revision: the
    commit of a hub data set."""

    path: str
    root: Path
    files: tuple[Path, ...]
    select: Select
    is_run: bool
    revision: str | None

    def name_of(self, file: Path) -> str:
        """A file's name in the input log, unique in the listing."""
        return file.relative_to(self.root).as_posix()


def list_inputs(
    path: str, *, name: str | None, revision: str | None, split: str, select: Select
) -> Listing:
    """The files behind data.path; ValueError for what is not there or has another form.

    name, revision: a hub data set's config and commit (or branch). A run's parts that are committed
    but have no final name yet get it.
    """
    place = Path(path).absolute()
    is_run = _is_run(place)
    if select != "all" and not is_run:
        raise ValueError(
            f"data.select={select}: data.path={path} is not the folder of a ddbatch run; "
            "allowed: all, or the output_dir of an earlier run as data.path"
        )
    is_glob = not place.exists() and _MAGIC.search(path) is not None
    if not place.exists() and not is_glob and hub.is_hub_id(path):
        snapshot = hub.fetch(path, name=name, revision=revision, split=split)
        return Listing(path, snapshot.root, snapshot.files, select, False, snapshot.revision)
    for key, value in (("data.name", name), ("data.revision", revision)):
        if value is not None:
            raise ValueError(f"{key}={value}: data.path={path} is no hub id; allowed: null")
    if (place / "dataset_dict.json").is_file():
        return _local(path, place, _saved_files(path, _split_folder(path, place, split)))
    if split != "train":
        raise ValueError(f"data.split={split}: data.path={path} has no splits; allowed: train")
    if is_run:
        return Listing(path, place, _run_files(path, place, select), select, True, None)
    if _is_saved(place):
        return _local(path, place, _saved_files(path, place))
    if is_glob:
        return _local(path, _glob_root(path), _glob_files(path))
    if place.is_dir():
        return _local(path, place, _folder_files(path, place))
    if not place.exists():
        raise ValueError(f"data.path={path}: no such file or folder; allowed: {ALLOWED}")
    return _local(path, place.parent, [place])


def _local(path: str, root: Path, files: Iterable[Path]) -> Listing:
    listing = Listing(path, root, tuple(files), "all", False, None)
    if not listing.files:
        raise ValueError(
            f"data.path={path}: no input file found (subfolders are not searched); "
            f"allowed: {ALLOWED}"
        )
    for file in listing.files:
        if not file.name.endswith(SUFFIXES):
            raise ValueError(
                f"data.path={path}: {file.name} is not of a format that is read; allowed: {ALLOWED}"
            )
    return listing


def _folder_files(path: str, place: Path) -> list[Path]:
    try:
        found = list(place.iterdir())
    except OSError as error:
        raise ValueError(f"data.path={path}: the folder cannot be read ({error})") from error
    # By name alone: a broken link must fail when it is opened, not be passed over.
    names = (file for file in found if not file.name.startswith("."))
    return _in_order(file for file in names if file.name.endswith(SUFFIXES))


def _glob_files(path: str) -> list[Path]:
    found = {Path(file).absolute() for file in glob.glob(path, recursive=True)}
    return _in_order(file for file in found if not file.is_dir())


def _glob_root(path: str) -> Path:
    """The folder above the first part of a pattern that is one."""
    parts = Path(path).absolute().parts
    first = next(at for at, part in enumerate(parts) if _MAGIC.search(part))
    return Path(*parts[:first])


def _in_order(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=_natural)


def _natural(file: Path) -> tuple[tuple[str | int, ...], str]:
    """Natural order: 2 before 10."""
    # Text and digits alternate after the split, so equal places hold equal types.
    parts = re.split("([0-9]+)", file.as_posix())
    return tuple(int(part) if at % 2 else part for at, part in enumerate(parts)), file.as_posix()


def _is_saved(place: Path) -> bool:
    return (place / "state.json").is_file() and (place / "dataset_info.json").is_file()


def _saved_files(path: str, place: Path) -> list[Path]:
    """The files of a data set made by save_to_disk, in the order that it has noted."""
    state = _read_json(path, place / "state.json")
    files = state.get("_data_files")
    if state.get("_indices_data_files"):
        raise ValueError(
            f"data.path={path}: saved by an old release of `datasets`, with its rows in another "
            "order than in its files; allowed: the data set saved again by a newer release"
        )
    if not isinstance(files, list) or not all(
        isinstance(file, dict) and isinstance(file.get("filename"), str) for file in files
    ):
        raise ValueError(f"data.path={path}: state.json names no data files; allowed: {ALLOWED}")
    return [place / file["filename"] for file in files]


def _split_folder(path: str, place: Path, split: str) -> Path:
    splits = _read_json(path, place / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or split not in splits:
        known = ", ".join(map(str, splits)) if isinstance(splits, list) else "none"
        raise ValueError(f"data.split={split}: {path} has no such split; allowed: {known}")
    return place / split


def _read_json(path: str, file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"data.path={path}: {file.name} cannot be read ({error})") from error
    return value if isinstance(value, dict) else {}


def _is_run(place: Path) -> bool:
    folder = RunFolder(place)
    return folder.manifest.is_file() and folder.state("").is_dir()


def _run_files(path: str, place: Path, select: Select) -> tuple[Path, ...]:
    """The committed files of one table of an earlier run."""
    folder = RunFolder(place)
    table = "rejected" if select == "rejected" else "completions"
    files = [
        place / file.final
        for shard in shards_with_records(folder)
        for record in recover(folder, shard)
        for file in record.files
        if file.table == table
    ]
    if not files:
        raise ValueError(
            f"data.path={path}, data.select={select}: this run has no {table}; "
            "allowed: a run with such rows"
        )
    return tuple(_in_order(files))
