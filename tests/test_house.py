"""The house: which room may import what, and that the checkout's folders shadow nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STDLIB = set(sys.stdlib_module_names)
# Room -> what it may import besides the standard library and itself. None: everything.
ALLOWED: dict[str, set[str] | None] = {
    "ddbatch_kernels": {"torch", "triton"},
    "ddbatch.core": set(),
    "ddbatch.checks": {"ddbatch.config"},  # the type only
    "ddbatch.config": {"omegaconf", "ddbatch.checks", "ddbatch.demo"},
    "ddbatch.demo": {"ddbatch.config"},  # the type only
    "ddbatch.models": {"ddbatch.core", "ddbatch_kernels", "torch", "safetensors"},
    "ddbatch.engine": {"ddbatch.core", "ddbatch.models", "ddbatch_kernels", "torch", "numpy"},
    "ddbatch.data": {
        "ddbatch.core",
        "ddbatch.checks",
        "datasets",
        "huggingface_hub",
        "pyarrow",
        "tokenizers",
        "jinja2",
        "numpy",
    },
    "ddbatch.jobs": None,
    "ddbatch.training": None,
    "ddbatch.__main__": {
        "ddbatch",
        "ddbatch.checks",
        "ddbatch.cli",
        "ddbatch.config",
        "ddbatch.core",
        "ddbatch.demo",
        "ddbatch.jobs",
        "hydra",
        "omegaconf",
    },
    "ddbatch.cli": {
        "ddbatch",
        "ddbatch.checks",
        "ddbatch.config",
        "ddbatch.core",
        "ddbatch.demo",
        "hydra",
        "omegaconf",
    },
    "ddbatch.options": {"ddbatch.checks", "ddbatch.config"},
    "ddbatch": set(),
}


def modules() -> dict[str, Path]:
    found = {}
    for base in (ROOT, ROOT / "kernels"):
        for package in ("ddbatch", "ddbatch_kernels"):
            for path in (base / package).rglob("*.py"):
                parts = list(path.relative_to(base).with_suffix("").parts)
                if parts[-1] == "__init__":
                    parts.pop()
                found[".".join(parts)] = path
    return found


def room_of(module: str) -> str:
    """The longest entry of ALLOWED that is the module or one of its packages."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in ALLOWED:
            return ".".join(parts[:count])
    return module


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_room_imports_only_what_the_house_allows(module: str) -> None:
    room = room_of(module)
    assert room in ALLOWED, f"{module}: no rule for {room}"
    allowed = ALLOWED[room]
    for name in sorted(imports(modules()[module])):
        top, target = name.split(".")[0], room_of(name)
        if target == "ddbatch.jobs":
            assert room in ("ddbatch.jobs", "ddbatch.__main__"), f"{module} imports {name}"
        if allowed is None or top in STDLIB or target == room:
            continue
        own = top in ("ddbatch", "ddbatch_kernels")
        assert (target if own else top) in allowed, f"{module} ({room}) imports {name}"


def test_engine_and_data_do_not_know_each_other() -> None:
    for module, path in modules().items():
        names = imports(path)
        if module.startswith("ddbatch.engine"):
            assert not any(name.startswith("ddbatch.data") for name in names), module
        if module.startswith("ddbatch.data"):
            assert not any(name.startswith(("ddbatch.engine", "torch")) for name in names), module


def test_top_level_folders_are_no_packages() -> None:
    """`kernels` is the import name of a library that transformers loads."""
    for folder in ("kernels", "conf", "jobs", "tests"):
        assert not (ROOT / folder / "__init__.py").exists(), folder


def test_transformers_imports_from_the_root_of_the_checkout() -> None:
    pytest.importorskip("transformers")
    code = "import transformers; transformers.LlamaForCausalLM"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_files_are_short_and_ascii() -> None:
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        assert text.isascii(), module
        if not module.endswith("kernel"):
            assert text.count("\n") <= 400, f"{module}: {text.count(chr(10))} lines"
