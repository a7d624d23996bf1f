"""What job=probe found on this machine, kept for the plans of later runs.

An answer is a small JSON file in the user's cache folder, named after all that it depends on: GPU,
model sizes, dtype, order of sums, versions. The file repeats them, and is believed only where all
are the same; a damaged or a foreign file is no answer. Knows nothing about how one is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from re import fullmatch
from tempfile import NamedTemporaryFile

import torch

from ddbatch import __version__
from ddbatch.core import RunError
from ddbatch.engine.limits import GemmLimit, ProbeAnswer, resolve_limit
from ddbatch.jobs.show import say
from ddbatch.models.dims import DtypeName, ModelDims


@dataclass(frozen=True)
class Facts:
    """What a limit depends on. capability: of a GPU, None for a CPU."""

    device: str
    capability: tuple[int, int] | None
    dtype: DtypeName
    in_order: bool
    dims: ModelDims
    torch: str
    triton: str | None
    ddbatch: str

    @property
    def text(self) -> str:
        """All of it as JSON, the same text for the same facts."""
        return json.dumps(asdict(self), sort_keys=True)


def facts_of(dims: ModelDims, dtype: DtypeName, device: torch.device, *, in_order: bool) -> Facts:
    """The facts of this machine."""
    is_gpu = device.type == "cuda"
    triton = None
    with suppress(PackageNotFoundError):  # a CPU needs none
        triton = version("triton")
    return Facts(
        device=torch.cuda.get_device_name(device) if is_gpu else f"a CPU ({platform.machine()})",
        capability=torch.cuda.get_device_capability(device) if is_gpu else None,
        dtype=dtype,
        in_order=in_order,
        dims=dims,
        torch=torch.__version__,
        triton=triton,
        ddbatch=__version__,
    )


def limit_of(option: int | str | None, facts: Facts) -> GemmLimit | None:
    """What engine.gemm_limit means for a run on this machine."""
    # No family of today has an absorb step of MLA.
    return resolve_limit(option, read_answer(facts), facts.capability, has_mla=False)


def read_answer(facts: Facts) -> ProbeAnswer | None:
    """What was found under these facts, if anything was."""
    file = _file_of(facts)
    try:
        held = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        say(f"note: {file} tells of no limit: {error}; job=probe makes it anew")
        return None
    match held:
        case {"facts": told} if told != json.loads(facts.text):
            return None
        case {"tokens": int() | None as tokens, "tried": int() as tried, "date": str() as date} if (
            1 <= (tried if tokens is None else tokens) <= tried
            and fullmatch(r"\d{4}-\d\d-\d\d", date)
        ):
            return ProbeAnswer(tokens, tried, facts.device, date)
    say(f"note: {file} tells of no limit: a field is missing or wrong; job=probe makes it anew")
    return None


def keep_answer(facts: Facts, answer: ProbeAnswer) -> Path:
    """Write an answer in the place of an earlier one; the file. RunError where the disk refuses."""
    file = _file_of(facts)
    held = {
        "facts": json.loads(facts.text),
        "tokens": answer.tokens,
        "tried": answer.tried,
        "date": answer.date,
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, prefix=".", delete=False) as new:
            new.write(json.dumps(held, indent=1) + "\n")
        try:
            os.replace(new.name, file)
        except OSError:
            os.unlink(new.name)
            raise
    except OSError as error:
        raise RunError(f"job=probe: what was found cannot be kept in {file}: {error}") from error
    return file


def _file_of(facts: Facts) -> Path:
    """XDG_CACHE_HOME counts where it is a whole path, as its specification says."""
    place = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(place) if os.path.isabs(place) else Path("~/.cache").expanduser()
    name = hashlib.sha256(facts.text.encode()).hexdigest()[:32]
    return base / "ddbatch" / "limits" / f"{name}.json"
