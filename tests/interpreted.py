"""Engines whose kernels run in Triton's interpreter, where there is no GPU; no test."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import KERNEL_DEVICE
from kernel_errors import mend_interpreter

import ddbatch_kernels


def ops() -> Iterator[tuple[str, Any, Any]]:
    """Name, public function and kernel launcher of each op."""
    for module in pkgutil.iter_modules(ddbatch_kernels.__path__):
        if module.ispkg:
            op = importlib.import_module(f"ddbatch_kernels.{module.name}")
            kernel = importlib.import_module(f"ddbatch_kernels.{module.name}.kernel")
            yield module.name, getattr(op, module.name), getattr(kernel, f"{module.name}_triton")


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test, wherever the package calls an op, its kernel is called; on a GPU it always
    is."""
    if KERNEL_DEVICE != "cpu":
        return
    mend_interpreter(monkeypatch)
    for name, public, launcher in ops():
        for module in [m for key, m in sys.modules.items() if key.startswith("ddbatch.")]:
            for attribute, value in list(vars(module).items()):
                if value is public:
                    monkeypatch.setattr(module, attribute, launcher)
        assert launcher is not public, name
