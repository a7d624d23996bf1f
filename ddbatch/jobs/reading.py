"""Find what a job wants to read: a run, a model. Knows what makes a folder one."""

from __future__ import annotations

from pathlib import Path

from ddbatch.data.folder import RunFolder


def check_model_folder(key: str, path: str) -> None:
    """ValueError where the checkpoint folder that the option `key` names is not there."""
    if not Path(path).is_dir():
        raise ValueError(
            f"{key}={path}: no such folder; allowed: a Hugging Face checkpoint folder on this "
            "machine (ids of the hub are not built yet)"
        )


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
