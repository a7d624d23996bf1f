"""The embedded demo: what `python -m ddbatch` runs without a model and prompts of one's own.

Knows where the package keeps its pair and prompts and where their run goes; reads none of them.
Standard library only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ddbatch.config import Config

OUTPUT_DIR = "outputs/demo"

_FILES = (
    "target/config.json",
    "target/model.safetensors",
    "target/tokenizer.json",
    "target/tokenizer_config.json",
    "drafter/config.json",
    "drafter/model.safetensors",
    "prompts.parquet",
)


class DemoPaths(NamedTuple):
    """model.path, drafter.path and data.path of the demo."""

    model: str
    drafter: str
    data: str


def demo_folder() -> Path:
    """Where the package keeps the demo, in a checkout and in an installed wheel."""
    return Path(__file__).resolve().parent / "assets" / "demo"


def demo_paths() -> DemoPaths:
    """The options that make a run the demo."""
    folder = demo_folder()
    return DemoPaths(
        str(folder / "target"), str(folder / "drafter"), str(folder / "prompts.parquet")
    )


def is_demo(config: Config) -> bool:
    """Whether pair and prompts are the demo's."""
    return (config.model.path, config.drafter.path, config.data.path) == demo_paths()


def check_demo() -> None:
    """ValueError where the installation lacks some of it."""
    folder = demo_folder()
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"the embedded demo is not whole in this installation: {folder} lacks "
            f"{', '.join(missing)}; install ddbatch again, or name a model.path and a data.path"
        )
