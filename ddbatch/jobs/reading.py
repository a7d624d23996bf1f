"""Find a run that a job wants to read. Knows what makes a folder a run."""

from __future__ import annotations

from pathlib import Path

from ddbatch.data.folder import RunFolder


def existing_run(output_dir: str) -> RunFolder:
    """The run in output_dir; ValueError where there is none."""
    folder = RunFolder(Path(output_dir))
    if not folder.manifest.is_file():
        what = "holds no run" if folder.place.is_dir() else "does not exist"
        raise ValueError(
            f"output_dir={output_dir} {what}; allowed: the output_dir of a job=generate, a folder "
            "with its manifest.json"
        )
    return folder
