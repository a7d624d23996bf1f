"""The layout of a run's folder, and the two ways in which a file gets into it.

Knows names and places, and how to make a file that is whole and never replaces another. Knows
nothing about what is in the files. Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from ddbatch.core import RunError

STATE = ".ddbatch"  # a dot-folder: datasets does not look into it
TABLES = ("completions", "acceptance", "logprobs", "rejected")  # that a run may have

_LINK_REFUSED = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)


@dataclass(frozen=True)
class RunFolder:
    """Where everything of a run is; `place` is output_dir, made absolute: Arrow would take a
    relative name with a colon for the address of a file system."""

    place: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", self.place.absolute())

    @property
    def manifest(self) -> Path:
        """What makes the folder a run: made last at the first start, never changed."""
        return self.place / "manifest.json"

    @property
    def readme(self) -> Path:
        """The data set card."""
        return self.place / "README.md"

    def state(self, name: str) -> Path:
        """A folder of the run's state: inputs, commits, attempts, gates, trying, distrust,
        tmp, index, aside or logs."""
        return self.place / STATE / name

    def records(self, shard: int) -> Path:
        """The folder of a shard's commit records."""
        return self.state("commits") / f"shard-{shard:05d}"

    def record(self, shard: int, number: int) -> Path:
        """The commit record of one part."""
        return self.records(shard) / f"{number:06d}.json"

    def part(self, table: str, shard: int, number: int) -> Path:
        """The final name of one table of a part."""
        return self.place / table / f"shard-{shard:05d}-part-{number:06d}.parquet"

    def tmp(self, attempt: str) -> Path:
        """Where one attempt writes what is not committed yet."""
        return self.state("tmp") / attempt

    def relative(self, file: Path) -> str:
        """A file's name as records hold it: below output_dir, with slashes."""
        return file.relative_to(self.place).as_posix()


def sync(path: Path) -> None:
    """Have the disk keep a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_names(place: Path) -> list[str]:
    """The names in a folder, none if there is no folder; a network file system makes dot-files."""
    try:
        names = os.listdir(place)
    except FileNotFoundError:
        return []
    return [name for name in names if not name.startswith(".")]


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, of which the disk keeps the names."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def link_new(tmp: Path, final: Path) -> bool:
    """Give the whole file `tmp` the name `final` unless that name is taken; then `tmp` is gone.

    True if the name is ours. The link is a compare-and-swap: of several callers exactly one gets
    the name. A network file system may report EEXIST for a link that it has made itself: the inode
    decides. ValueError where the file system has no hard links.
    """
    sync(tmp)
    make_folder(final.parent)
    is_ours = True
    try:
        os.link(tmp, final)
    except FileExistsError:
        is_ours = os.path.samefile(tmp, final)
    except OSError as error:
        if error.errno not in _LINK_REFUSED:
            raise
        raise ValueError(
            f"output_dir: the file system of {final.parent} has no hard links, which keep a file "
            f"from being overwritten ({error}); choose another output_dir"
        ) from error
    sync(final.parent)
    tmp.unlink(missing_ok=True)
    return is_ours


def write_new(text: str, tmp: Path, final: Path) -> bool:
    """Make `final` with this text through `tmp`; False if the name was taken."""
    tmp.parent.mkdir(parents=True, exist_ok=True)
    tmp.unlink(missing_ok=True)  # after a failure it may be another name of a file that is final
    tmp.write_text(text, encoding="utf-8")
    return link_new(tmp, final)


def check_hard_links(folder: RunFolder, attempt: str) -> None:
    """Refuse a file system without hard links before anything depends on them."""
    probe = folder.tmp(attempt) / "probe"
    linked = probe.with_name("probe-linked")
    write_new("", probe, linked)
    linked.unlink()


def hash_file(file: Path) -> str:
    """The sha256 of a file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


class StateError(RunError):
    """State of the run that cannot be trusted: a record or a committed file, named in the text."""
