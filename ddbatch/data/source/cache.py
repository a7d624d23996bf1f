"""What a run remembers of its input files to start sooner: offset indexes, and verified content.

Nothing here is needed for a right answer: what is missing, cut short, foreign or out of date is
not believed, and what cannot be written is left out.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddbatch.data.folder import RunFolder
from ddbatch.data.source.formats import FileHash, Stamp
from ddbatch.data.source.jsonl import INDEX_STEP, Offsets

_VERIFIED = "verified.json"
# A file that changed just now may change once more within the same tick of the file system's clock.
_SETTLED_NS = 2_000_000_000


def load_index(folder: RunFolder, sha256: str) -> Offsets | None:
    """The offset index of a JSONL file of this content, if a whole one is there."""
    with suppress(OSError, ValueError, EOFError):  # numpy's answers to what is no such file
        stored = np.load(_index_file(folder, sha256), allow_pickle=False)
        head = _head(sha256)
        is_sound = (
            stored.dtype == np.int64
            and stored.ndim == 1
            and len(stored) > len(head)
            and stored[-1] == zlib.crc32(stored[:-1].tobytes())
            and (stored[: len(head)] == head).all()
        )
        return stored[len(head) : -1] if is_sound else None
    return None


def save_index(folder: RunFolder, attempt: str, sha256: str, offsets: Offsets) -> None:
    """Keep the offset index of a JSONL file of this content."""
    body = np.concatenate([_head(sha256), offsets])
    final = _index_file(folder, sha256)
    tmp = folder.tmp(attempt) / final.name
    with suppress(OSError):
        _make_folders(tmp, final)
        np.save(tmp, np.append(body, np.int64(zlib.crc32(body.tobytes()))))
        os.replace(tmp, final)


def _index_file(folder: RunFolder, sha256: str) -> Path:
    return folder.state("index") / f"{sha256[:32]}.npy"


def _head(sha256: str) -> npt.NDArray[np.int64]:
    """What an index must begin with: another step or another content is not ours."""
    return np.append(np.int64(INDEX_STEP), np.frombuffer(bytes.fromhex(sha256), np.int64))


def load_verified(folder: RunFolder) -> dict[str, FileHash]:
    """By name: the content that a file had when it had this stamp."""
    try:
        stored = json.loads((folder.state("index") / _VERIFIED).read_bytes())
        return {
            str(name): FileHash(Stamp(*map(int, stamp)), str(sha256))
            for name, (*stamp, sha256) in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def save_verified(folder: RunFolder, attempt: str, hashes: Mapping[str, FileHash]) -> None:
    """Keep which content was found at which stamp, of files that have not just been changed."""
    latest = time.time_ns() - _SETTLED_NS
    stored = {
        name: [*known.stamp, known.sha256]
        for name, known in hashes.items()
        if max(known.stamp.mtime_ns, known.stamp.ctime_ns) < latest
    }
    final = folder.state("index") / _VERIFIED
    tmp = folder.tmp(attempt) / _VERIFIED
    with suppress(OSError):
        _make_folders(tmp, final)
        tmp.write_text(json.dumps(stored))
        os.replace(tmp, final)


def _make_folders(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
