"""JSON files of a model folder, read with a few verbs: required, optional, positive, only.

Knows nothing about what the keys mean.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value", bool, int, float, str)


class ConfigFile:
    """A JSON file of a model folder; its errors name option, file, key, value and choices."""

    def __init__(self, option: str, folder: Path, name: str = "config.json") -> None:
        self.where = f"{option}={folder}: {name}"
        path = folder / name
        if not path.is_file():
            raise ValueError(
                f"{option}={folder}: no {name} there; a Hugging Face model folder is expected"
            )
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.where}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{self.where}: holds {type(values).__name__}, an object is expected")
        self.values: dict[str, object] = values

    def section(self, key: str) -> ConfigFile:
        """The object under `key`, read with the same verbs."""
        inner = self.values.get(key)
        if not isinstance(inner, dict):
            raise ValueError(f"{self.where}: {key}={inner!r}: an object is required")
        section = object.__new__(ConfigFile)
        section.where, section.values = f"{self.where}: {key}", inner
        return section

    def architecture(self, allowed: tuple[str, ...]) -> str:
        """The only entry of `architectures`, which must be one of these."""
        value = self.values.get("architectures")
        for name in allowed:
            if value == [name]:
                return name
        raise ValueError(
            f"{self.where}: architectures={value!r} is not supported; "
            f"allowed, one of: {', '.join(allowed)}"
        )

    def is_null(self, key: str) -> bool:
        """Whether the key is there with the value null, for families to which that says more than
        its absence.
        """
        return key in self.values and self.values[key] is None

    def unset(self, key: str) -> None:
        """Refuse every value: the key must be absent or null."""
        if self.values.get(key) is not None:
            raise ValueError(
                f"{self.where}: {key}={self.values[key]!r} is not supported; allowed: null"
            )

    def optional(self, key: str, kind: type[Value], default: Value) -> Value:
        """The value under `key`, or `default` where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{self.where}: {key}={value!r}: {kind.__name__} is required")
        return value

    def required(self, key: str, kind: type[Value]) -> Value:
        """The value under `key`, which must be there."""
        if self.values.get(key) is None:
            raise ValueError(f"{self.where}: {key} is missing; {kind.__name__} is required")
        return self.optional(key, kind, kind())

    def positive(self, key: str, default: int | None = None) -> int:
        """A size: an integer of at least 1."""
        value = self.required(key, int) if default is None else self.optional(key, int, default)
        if value < 1:
            raise ValueError(f"{self.where}: {key}={value}: at least 1 is required")
        return value

    def above_zero(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.required(key, float) if default is None else self.optional(key, float, default)
        if not 0 < value < math.inf:
            raise ValueError(f"{self.where}: {key}={value}: a finite number above 0 is required")
        return value

    def only(self, key: str, allowed: Value, default: Value | None = None) -> None:
        """Refuse every value but `allowed`; absent or null means `default` (else `allowed`)."""
        value = self.values.get(key)
        if value is None:
            value = allowed if default is None else default
        if value != allowed:
            raise ValueError(
                f"{self.where}: {key}={value!r} is not supported; allowed: {allowed!r}"
            )

    def int_list(self, key: str) -> tuple[int, ...]:
        """A required list of integers."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ValueError(f"{self.where}: {key}={value!r}: a list of integers is required")
        return tuple(value)
