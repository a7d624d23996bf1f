"""What every figure must name: hardware, versions, models, and the command without its places.

Knows devices and options. Knows nothing about what was measured.
"""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from ddbatch import __version__
from ddbatch.checks import FILES, REQUIRED, option, shown
from ddbatch.config import Config, option_types


def machine_of(device: torch.device) -> str:
    """A processor by name, with the driver of a GPU or the threads of a CPU."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, driver {_driver() or 'unknown'}"
    return f"{_processor()}, {torch.get_num_threads()} threads"


def versions(peers: Sequence[str] = ()) -> dict[str, str]:
    """Of what rounds are made of, and of libraries that were measured beside them."""
    found = {"ddbatch": __version__, "torch": torch.__version__}
    if find_spec("triton") is not None:
        import triton

        found["triton"] = triton.__version__
    return found | {name: version(name) for name in peers}


def command_of(config: Config) -> str:
    """The options that are not the defaults; of a path its last name alone."""
    default, words = Config(), ["python", "-m", "ddbatch"]
    for key in option_types():
        value = option(config, key)
        if value == option(default, key) or value == "":
            continue
        if key in (*REQUIRED, *FILES):
            value = _last_names(value)
        words.append(f"{key}={shown(value)}")
    return shlex.join(words)


def _last_names(value: object) -> object:
    if isinstance(value, list):
        return [Path(str(item)).name for item in value]
    return Path(str(value)).name


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    except FileNotFoundError:
        said = []
    return said[0] if said else ""


def _processor() -> str:
    """Linux tells it in a file; other systems may."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
