"""What makes two starts the same run: identity fields, their digests, and the difference in words.

A change of an identity field is another run and is refused; everything else is extendable (samples,
data.limit, new input files) or free (drafter, plan, device, versions). Knows nothing about where
the fields are kept. Standard library only: job=status must not wait for a tensor library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

HashMode = Literal["fast", "full"]

# A fast digest reads this much at this many places of a weight file, its head and its end included.
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20


def hash_weights(folder: Path, mode: HashMode) -> str:
    """Digest of the safetensors files of a checkpoint: names, sizes, headers and content.

    mode "fast" samples the content of each file (64 places of 64 KiB) beside the whole header;
    "full" reads every byte.
    """
    digest = hashlib.sha256(mode.encode())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if mode == "full":
                while block := content.read(_BLOCK_BYTES):
                    digest.update(block)
                continue
            header = int.from_bytes(content.read(8), "little")
            digest.update(content.read(min(header, size)))
            last = max(0, size - _SAMPLE_BYTES)
            for number in range(_SAMPLES):
                content.seek(last * number // (_SAMPLES - 1))
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def hash_files(folder: Path, names: tuple[str, ...]) -> str:
    """Digest of small files; one that is absent counts as such."""
    digest = hashlib.sha256()
    for name in names:
        file = folder / name
        content = file.read_bytes() if file.is_file() else None
        digest.update(f"{name} {None if content is None else len(content)}\n".encode())
        digest.update(content or b"")
    return digest.hexdigest()


def hash_text(text: str | None) -> str | None:
    """Digest of a text that is long or private: a template, a system prompt."""
    return None if text is None else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def differences(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """One line a field that changed: "sampling.seed: 0 in the run, 1 now"."""
    return [
        f"{name}: {_shown(then.get(name))} in the run, {_shown(now.get(name))} now"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    is_digest = isinstance(value, str) and len(value) == 64 and value.isalnum()
    return f"digest {text[1:13]}" if is_digest else text
