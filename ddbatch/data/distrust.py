"""The mark of a failed audit: rows of this run are not the target's own, and nothing says which.

Whoever starts the run again, checks or merges it is refused while a mark is there. Standard library
only.
"""

from __future__ import annotations

import json

from ddbatch.data.folder import RunFolder, StateError, list_names, write_new


def mark_distrust(folder: RunFolder, attempt: str, reason: str) -> None:
    """Leave a mark; an OSError is passed on."""
    place = folder.state("distrust") / f"{attempt}.json"
    text = json.dumps({"reason": reason}) + "\n"
    write_new(text, folder.tmp(attempt) / "distrust.json", place)


def refuse_distrusted(folder: RunFolder) -> None:
    """StateError where an audit of this run has failed."""
    place = folder.state("distrust")
    for name in list_names(place):
        try:
            reason = json.loads((place / name).read_bytes())["reason"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = f"{place / name} cannot be read ({error})"
        raise StateError(
            f"output_dir={folder.place}: an audit of this run has failed, so its rows cannot be "
            f"trusted: {reason}. Use another output_dir; who wants these rows all the same removes "
            f"{place / name}"
        )
