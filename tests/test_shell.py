"""Command lines as people type them into a shell, and what they are answered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent

# What is typed behind `ddbatch`, and a part of the error and of the hint.
TYPED = [
    ("model=/models/target", "model is a group of options", "write model.path=/models/target"),
    ("data=x.jsonl", "data is a group of options", "write data.path=x.jsonl"),
    ("generate model.path=/m", "generate: not of the form KEY=VALUE", "write job=generate"),
    ("data.path=s3://b/a=b.parquet", "Hydra cannot read", """'data.path="s3://b/a=b.parquet"'"""),
    ("""data.system_prompt="it's" """, "Hydra cannot read", "quote the value"),
    ("data.system_prompt='${name}'", "data.system_prompt", "quote the value"),
    ("data.limit=5 data.limit=6", "data.limit is given twice", "keep one of them"),
    ("sampling.temprature=1", "no such option", "did you mean sampling.temperature?"),
    ("job=generat", "job=generat", "did you mean generate?"),
    (
        "job=chek",
        "expected generate, check, status, merge, estimate, bench or probe",
        "did you mean check?",
    ),
    ("help", "help: not of the form KEY=VALUE", "write --help"),
    ("'sampling.stop=[###]'", "Hydra cannot read", """'sampling.stop=["a","b"]'"""),
    ("output.store=all", "a list like [a,b] of prompt_ids or acceptance", ""),
    ("engine.budget=atuo", "engine.budget=atuo: expected auto or an integer", "did you mean auto"),
    ("+engine.budget=8", "engine.budget is an option already", "without +"),
    ("data.chat_template_kwargs={a: 1, b: 2}", "", "quote"),
    ('data.chat_template_kwargs={"a": 1}', "", "quote"),
    ("sampling.stop_token_ids=[1, 2]", "", "quote"),
    ("data.keep_columns=a,b", "one value is expected", "'data.keep_columns=[a,b]'"),
    ("--model.path=/m", "no such flag", "did you mean model.path=VALUE?"),
    ("model.path = /m", "", "model.path=VALUE, without spaces"),
    ("output_dir=out drafter.path=r", "not set: model.path, data.path", "model.path=DIR"),
    ("-m output_dir=a,a model.path=m data.path=d", "runs would share output_dir=", "out1,out2"),
    ("job=sweep", "job=sweep is not built yet", "built: generate"),
    ("job=merge output_dir=o", "required and not set: merge.output_dir", ""),
    ("output.resume=yes", "expected auto, never, require or repair", ""),
    ("data.path=~/nowhere.jsonl model.path=~/m output_dir=o", "/home/somebody/m", ""),
]


@pytest.mark.parametrize(("typed", "error", "hint"), TYPED, ids=[typed for typed, _, _ in TYPED])
def test_a_mistake_in_a_shell_is_answered_in_two_lines(
    tmp_path: Path, typed: str, error: str, hint: str
) -> None:
    line = f"{sys.executable} -m ddbatch {typed}"
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "HOME": "/home/somebody"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) <= 2
    assert error in done.stderr
    assert hint in done.stderr
    assert not list(tmp_path.iterdir())


def test_threads_of_torch_sleep_while_they_wait_unless_the_user_says_otherwise() -> None:
    """Spinning ones made decoding 20 times slower on cores that others used too."""
    code = "from ddbatch.__main__ import main; main(['--version']); import torch"
    env = {name: text for name, text in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {"PYTHONPATH": str(CHECKOUT), "OMP_DISPLAY_ENV": "TRUE"}
    for chosen, in_force in ((None, "PASSIVE"), ("active", "ACTIVE")):
        if chosen is not None:
            env["OMP_WAIT_POLICY"] = chosen
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
        )
        assert f"OMP_WAIT_POLICY = '{in_force}'" in done.stderr, done.stderr


def test_what_is_shown_to_a_reader_that_has_left_ends_with_4(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    line = f"{sys.executable} -m ddbatch --cfg job | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 4, done.stderr
    assert b"not everything could be said on stdout: Broken pipe" in done.stderr


def test_a_checkout_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['hydra'] = None; sys.modules['ddbatch_kernels'] = None; "
        "from ddbatch.__main__ import main; sys.exit(main([]))"
    )
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == (
        "ddbatch: error: ddbatch is not installed: no hydra and no ddbatch_kernels\n"
        "ddbatch: hint: in a checkout: python -m pip install .\n"
    )
    assert not list(tmp_path.iterdir())
