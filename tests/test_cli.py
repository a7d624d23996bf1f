"""The command line: what is accepted, what is said otherwise, and exit codes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ddbatch.__main__ import config_folder, main
from ddbatch.checks import JOBS
from ddbatch.cli import as_typed
from ddbatch.config import Config

CHECKOUT = Path(__file__).resolve().parent.parent
REQUIRED = ["model.path=/m", "data.path=/d", "output_dir=/o"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """A generate job that only remembers the configurations it was given."""
    seen: list[Config] = []

    def remember(config: Config) -> int:
        seen.append(config)
        return 0

    install(monkeypatch, remember)
    return seen


def install(monkeypatch: pytest.MonkeyPatch, run: Callable[[Config], int]) -> None:
    module = ModuleType("ddbatch.jobs.generate")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def refused(capsys: Captured, *arguments: str) -> list[str]:
    """The lines on stderr of a command line that is refused, without the program's name."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(line.startswith("ddbatch: ") for line in lines)
    assert len(lines) <= 2
    return [line.removeprefix("ddbatch: ") for line in lines]


def spawn(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddbatch", *arguments]
    env = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


def test_a_job_gets_the_configuration(jobs: list[Config]) -> None:
    arguments = [
        "job=generate",
        *REQUIRED,
        "drafter.path=/r",
        "engine.budget=8",
        "sampling.stop_token_ids=[1,2]",
    ]
    assert main(arguments) == 0
    assert jobs[0].engine.budget == 8
    assert jobs[0].engine.rows == "auto"
    assert jobs[0].sampling.stop_token_ids == [1, 2]


def test_nothing_is_created_on_disk(jobs: list[Config], empty_folder: Path) -> None:
    assert main(REQUIRED) == 0
    assert list(empty_folder.iterdir()) == []


def test_the_process_is_left_as_it_was(jobs: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    argv, handler = list(sys.argv), signal.getsignal(signal.SIGTERM)
    assert main(REQUIRED) == 0
    assert sys.argv == argv
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert signal.getsignal(signal.SIGTERM) is handler


def test_every_job_of_the_contract_is_a_choice() -> None:
    assert {file.stem for file in (config_folder() / "job").iterdir()} == set(JOBS)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_chosen_by_name(job: str, capsys: Captured) -> None:
    assert main(["--cfg", "job", f"job={job}"]) == 0
    assert capsys.readouterr().out.startswith(f"job: {job}\noutput_dir: ???\n")


def test_a_job_that_is_not_built_answers_one_line(capsys: Captured) -> None:
    lines = refused(capsys, "job=sweep")
    built = "generate, check, status, merge, estimate, bench, probe"
    assert lines == [f"error: job=sweep is not built yet; built: {built}"]


@pytest.mark.parametrize(
    ("job", "missing"),
    [
        ("generate drafter.path=/r", "model.path, data.path, output_dir"),
        ("generate model.path=/m", "data.path, output_dir"),
        ("generate data.path=/d", "model.path, output_dir"),
        ("generate model.path= data.path=", "model.path, data.path, output_dir"),
        ("generate output_dir=", "output_dir"),
        ("check", "output_dir"),
        ("status", "output_dir"),
        ("merge", "output_dir, merge.output_dir"),
        ("estimate", "model.path, data.path"),
        ("bench", "model.path, output_dir"),
        ("probe", "model.path"),
    ],
)
def test_each_job_names_all_that_it_needs(job: str, missing: str, capsys: Captured) -> None:
    error, hint = refused(capsys, *f"job={job}".split())
    assert error == f"error: required and not set: {missing}"
    assert all(f"{key}=D" in hint for key in missing.split(", "))


@pytest.mark.parametrize(
    ("argument", "error", "hint"),
    [
        ("model=/path", "model is a group of options", "write model.path=/path"),
        ("drafter=/path", "drafter is a group of options", "write drafter.path=/path"),
        ("data=x.jsonl", "data is a group of options", "write data.path=x.jsonl"),
        ("data=a b", "data is a group of options", "write 'data.path=a b'"),
        ("sampling=greedy", "sampling is a group of options", "write sampling.NAME=VALUE"),
        ("generate", "not of the form KEY=VALUE", "write job=generate"),
        ("generat", "not of the form KEY=VALUE", "did you mean job=generate?"),
        ("x.jsonl", "not of the form KEY=VALUE", "did you mean data.path=x.jsonl?"),
        ("+engine.budget=8", "is an option already", "write engine.budget=8 without +"),
        ("++engine.budget=8", "is an option already", "write engine.budget=8 without ++"),
        ("~engine.budget", "cannot be removed", "leave it out"),
        ("~engine.budget=8", "cannot be removed", "leave it out"),
        ("+job=check", "is an option already", "write job=check without +"),
        ("hydra.run.dir=x", "settings of Hydra itself are fixed", "--config-dir"),
        ("sweep.x=1", "job=sweep is not built yet; built: generate", "--cfg job"),
        ("merge.fromat=text", "no such option", "did you mean merge.format?"),
        ("merge.format=alpaca", "full, messages, conversations, text or openai_batch", "--cfg"),
        ("--engine.rows=8", "no such flag", "did you mean engine.rows=VALUE?"),
        ("--frobnicate", "no such flag", "--cfg job"),
        ("engine.rows=8,16", "one value is expected", "-m runs once per value"),
        ("data.keep_columns=a,b", "one value is expected", "'data.keep_columns=[a,b]'"),
        ("engine.budget=1e3", "expected auto or an integer in [0, 1024]", "--cfg job"),
        ("sampling.temperature=hot", "expected 0 or a number >= 1e-06", "--cfg job"),
        ("data.limit=ten", "expected an integer >= 1 or null", "--cfg job"),
        ("engine.gate=maybe", "expected true or false", "--cfg job"),
        ("sampling.stop_token_ids=[a]", "expected a list like [1,2]", "--cfg job"),
        ("data.path=[a,b]", "expected text", "'data.path=\"[a,b]\"'"),
        ("data.path=null", "required and not set: data.path", "data.path=DATA"),
        ("engine.budget=atuo", "did you mean auto?", "--cfg job"),
        ("engine.rows", "not of the form KEY=VALUE", "write engine.rows=VALUE"),
        ("--config-dir=/nowhere", "'/nowhere' not found", "--cfg job"),
    ],
)
def test_a_refusal_says_what_to_write(
    argument: str, error: str, hint: str, capsys: Captured
) -> None:
    required = [text for text in REQUIRED if text.split("=")[0] != argument.split("=")[0]]
    lines = refused(capsys, *required, argument)
    assert error in lines[0]
    assert hint in lines[1]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("sampling.temperatur", "sampling.temperature"),
        ("sampling.budget", "engine.budget"),
        ("budget", "engine.budget"),
        ("engin.rows", "engine.rows"),
        ("engine.max_tokens", "sampling.max_new_tokens"),
        ("output_dri", "output_dir"),
        ("path", "model.path or drafter.path or data.path"),
    ],
)
def test_a_typo_gets_did_you_mean(typed: str, meant: str, capsys: Captured) -> None:
    assert refused(capsys, f"{typed}=1") == [
        f"error: {typed}: no such option",
        f"hint: did you mean {meant}?",
    ]


@pytest.mark.parametrize(
    "value",
    [
        *("out", "a b", " a ", "it's", 'say "it\'s"', "both\\", 'q\\"', "${x}", "\\${x} \\\\${"),
        *(
            "a=b,c",
            "[a]",
            "{a: 1}",
            "~x",
            "!x",
            "null",
            "2024_06",
            "new\nline",
            "h\u00e9",
            "$HOME `x`",
        ),
    ],
)
def test_a_text_comes_back_from_how_it_is_typed(jobs: list[Config], value: str) -> None:
    words = shlex.split(as_typed("output_dir", value))
    assert main(["model.path=/m", "data.path=/d", *words]) == 0
    assert jobs[0].output_dir == value


def test_an_unknown_job_gets_did_you_mean(capsys: Captured) -> None:
    assert "(did you mean generate?)" in refused(capsys, "job=generat")[0]


@pytest.mark.parametrize(
    "value",
    [
        "a=b.parquet",
        "it's",
        'say "hi"',
        'it\'s "both"',
        "${oops}",
        "a ${oops b",
        "Hello, world",
        "run(1)",
        "part-[0-9].parquet",
        "{a,b}",
    ],
)
def test_the_quoting_hint_gives_the_value_that_was_meant(
    value: str, capsys: Captured, jobs: list[Config]
) -> None:
    error, hint = refused(capsys, *REQUIRED, f"data.system_prompt={value}")
    assert error.startswith("error: data.system_prompt")
    assert "quote the value" in hint
    (quoted,) = shlex.split(hint.partition("Hydra: ")[2])
    assert main([*REQUIRED, quoted]) == 0
    assert jobs[0].data.system_prompt == value


@pytest.mark.parametrize(
    "value", ["2024_06_01", "007", "1e3", "true", "~/o!", "a b;c", "two\nlines", "C: &#x", "$5"]
)
def test_a_text_is_taken_as_it_was_typed(
    value: str, jobs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert main([*REQUIRED[:2], f"output_dir={value}"]) == 0
    assert jobs[0].output_dir == value.replace("~", "/home/somebody")


def test_null_is_not_taken_as_text(jobs: list[Config]) -> None:
    assert main([*REQUIRED, "drafter.path=null", "data.limit=null", "engine.gemm_limit=null"]) == 0
    assert jobs[0].drafter.path is None
    assert jobs[0].engine.gemm_limit is None


def test_a_key_given_twice_is_refused(capsys: Captured) -> None:
    assert refused(capsys, "engine.budget=8", "engine.budget=16") == [
        "error: engine.budget is given twice: engine.budget=8 and engine.budget=16",
        "hint: keep one of them",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["data.chat_template_kwargs={enable_thinking: false}"],
        ["data.chat_template_kwargs.enable_thinking=false"],
        ["+data.chat_template_kwargs.enable_thinking=false"],
        ["++data.chat_template_kwargs={enable_thinking: false}"],
    ],
)
def test_every_form_of_chat_template_kwargs_works(arguments: list[str], jobs: list[Config]) -> None:
    assert main([*REQUIRED, *arguments]) == 0
    assert jobs[0].data.chat_template_kwargs == {"enable_thinking": False}


def test_both_forms_of_chat_template_kwargs_add_up(jobs: list[Config]) -> None:
    key = "data.chat_template_kwargs"
    assert main([*REQUIRED, f"{key}.a.b=1", f"{key}={{c: text}}"]) == 0
    assert jobs[0].data.chat_template_kwargs == {"a": {"b": 1}, "c": "text"}


def test_json_chat_template_kwargs_get_a_hint(capsys: Captured) -> None:
    lines = refused(capsys, 'data.chat_template_kwargs={"enable_thinking": false}')
    assert "'data.chat_template_kwargs={enable_thinking: false}'" in lines[1]


@pytest.mark.parametrize("text", ["{a: 1, b: 2}", "{a:1,b:2}", "[1, 2]"])
def test_a_value_that_the_shell_split_gets_a_hint(text: str, capsys: Captured) -> None:
    key = "sampling.stop_token_ids" if text[0] == "[" else "data.chat_template_kwargs"
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {key}={text}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(words) > 1
    assert "quote" in refused(capsys, *words)[1]


def test_own_yaml_files_are_added_by_config_dir(
    jobs: list[Config], empty_folder: Path, capsys: Captured
) -> None:
    (empty_folder / "preset").mkdir()
    head = "# @package _global_\nengine:\n"
    (empty_folder / "preset" / "small.yaml").write_text(head + "  rows: 4\n")
    (empty_folder / "preset" / "typo.yaml").write_text(head + "  bugdet: 4\n")
    assert main([*REQUIRED, "--config-dir", ".", "+preset=small"]) == 0
    assert jobs[0].engine.rows == 4
    assert "did you mean engine.budget?" in refused(capsys, "--config-dir=.", "+preset=typo")[1]
    assert "foo: no such option" in refused(capsys, *REQUIRED, "--config-dir=.", "+foo=1")[0]
    assert "no such option" in refused(capsys, *REQUIRED, "--config-dir=.", "+engine.foo=1")[0]


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_multirun_runs_every_combination_and_leaves_no_file(
    flag: str, jobs: list[Config], empty_folder: Path, capsys: Captured
) -> None:
    arguments = [*REQUIRED[:2], flag, "engine.rows=8,16", "output_dir='o-${engine.rows}'"]
    assert main(arguments) == 0
    assert [(job.engine.rows, job.output_dir) for job in jobs] == [(8, "o-8"), (16, "o-16")]
    assert list(empty_folder.iterdir()) == []
    assert "run 2 of 2: output_dir=o-16" in capsys.readouterr().err


def test_members_of_a_multirun_must_differ_in_output_dir(
    jobs: list[Config], capsys: Captured
) -> None:
    error, hint = refused(capsys, *REQUIRED, "-m", "engine.rows=8,16")
    assert error == "error: -m: 2 runs would share output_dir=/o"
    assert "output_dir=out1,out2" in hint
    assert not jobs


def test_a_multirun_goes_on_after_a_refusal_and_ends_at_a_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def run(config: Config) -> int:
        seen.append(config.output_dir)
        if config.output_dir == "/b":
            raise ValueError("b is refused")
        return 75 if config.output_dir == "/c" else 0

    install(monkeypatch, run)
    assert main([*REQUIRED[:2], "-m", "output_dir=/a,/b,/c,/d"]) == 2
    assert seen == ["/a", "/b", "/c"]


def test_a_bad_member_of_a_multirun_is_refused_before_any_runs(
    jobs: list[Config], capsys: Captured
) -> None:
    refused(capsys, *REQUIRED[:2], "-m", "output_dir=/a,/b", "engine.rows=0,8")
    assert not jobs


def test_the_exit_code_of_the_job_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda config: 3)
    assert main(REQUIRED) == 3


def test_a_value_error_of_the_job_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def run(config: Config) -> int:
        raise ValueError("model.path=/m:\nno such folder")

    install(monkeypatch, run)
    assert refused(capsys, *REQUIRED) == ["error: model.path=/m: no such folder"]


@pytest.mark.parametrize("error", [KeyError("x"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")])
def test_any_other_error_of_the_job_is_a_bug(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: Config) -> int:
        raise error

    install(monkeypatch, run)
    with pytest.raises(type(error)):  # Python prints the traceback and exits with 1
        main(REQUIRED)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_stops_the_job_with_75(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def run(config: Config) -> int:
        signal.raise_signal(signal.Signals[name])
        time.sleep(5)
        return 0

    install(monkeypatch, run)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup would keep it from us
    assert main(REQUIRED) == 75
    signal.signal(signal.SIGHUP, before)
    assert capsys.readouterr().err == f"ddbatch: stopped by {name}\n"


@pytest.mark.parametrize("flags", [["--help"], ["-h", "job=check"], ["--version"]])
def test_help_and_version_import_no_hydra(flags: list[str]) -> None:
    code = f"import sys; from ddbatch.__main__ import main; main({flags!r}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT, check=True
    )
    page, _, modules = done.stdout.rstrip("\n").rpartition("\n")
    assert page.startswith("ddbatch 0.1.0")
    assert not {"hydra", "omegaconf", "torch", "datasets", "transformers"} & set(modules.split())
    assert max(map(len, page.splitlines())) < 80
    assert page.isascii()


def test_help_names_every_job_and_required_option(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    for word in (*JOBS, "model.path=", "data.path=", "output_dir=", "--cfg job"):
        assert word in page
    assert page.count("  python -m ddbatch model.path") == 3
    assert "python -m ddbatch --cfg job model.path" in page


def test_cfg_job_imports_no_torch() -> None:
    code = (
        "import sys; from ddbatch.__main__ import main; "
        "code = main(['--cfg', 'job', 'engine.rows=3']); print(*sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT, check=True
    )
    assert "rows: 3" in done.stdout
    assert not {"torch", "datasets", "transformers"} & set(done.stdout.split())
    assert done.stderr == ""


def test_a_group_is_shown_alone(capsys: Captured) -> None:
    assert main(["--cfg", "job", "-p", "shards"]) == 0
    assert capsys.readouterr().out == "# @package shards\nrows: 20000\nstart: auto\nwait: false\n"


def test_a_refusal_in_a_pipe_is_two_plain_lines() -> None:
    done = spawn("sampling.budget=3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "ddbatch: error: sampling.budget: no such option\n"
        "ddbatch: hint: did you mean engine.budget?\n"
    )


def test_an_installed_wheel_finds_its_configuration(tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(CHECKOUT / "ddbatch", site / "ddbatch", ignore=shutil.ignore_patterns("__py*"))
    shutil.copytree(CHECKOUT / "conf", site / "ddbatch" / "conf")
    done = subprocess.run(
        [sys.executable, "-m", "ddbatch", "--cfg", "job", "job=check"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(site)},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("job: check\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """The job takes the first signal and then hangs in its clean-up."""
    code = f"""
import sys, time, types
job = types.ModuleType("ddbatch.jobs.generate")
def run(config):
    try:  # the signal may come as soon as the word is out
        print("running", flush=True)
        time.sleep(60)
    finally:
        print("stopping", flush=True)
        time.sleep(60)
job.run = run
sys.modules[job.__name__] = job
from ddbatch.__main__ import main
sys.exit(main({REQUIRED!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for said in ("running", "stopping"):
        assert process.stdout.readline().strip() == said
        process.send_signal(number)
    assert process.wait(timeout=20) == 130


def test_a_group_that_does_not_exist_cannot_be_shown(capsys: Captured) -> None:
    error, hint = refused(capsys, "--cfg", "job", "-p", "nothing")
    assert error == "error: -p nothing: no such group"
    assert "engine" in hint
