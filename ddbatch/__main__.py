"""`python -m ddbatch`: compose the configuration with Hydra, then run one job.

Hydra composes and nothing else: it creates no file, and the job runs after it has returned, so that
exit codes and tracebacks are ours. Knows nothing of what a job does. Imports are late on purpose:
--help, --version and --cfg must not wait for torch, and a job is imported once it is accepted.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from ddbatch import __version__
from ddbatch.core import ExitCode, RunError
from ddbatch.demo import OUTPUT_DIR, is_demo
from ddbatch.jobs.show import UnheardError, say, tell
from ddbatch.jobs.stopping import impatient

if TYPE_CHECKING:
    from ddbatch.cli import CommandLine
    from ddbatch.config import Config

HELP = f"""\
ddbatch {__version__}: a dataset of prompts in, a dataset of completions out, offline.
A DFlash drafter and DDTree draft trees make it fast; every completion is what
the target model alone would have said.

usage: python -m ddbatch [job=JOB] KEY=VALUE ...
       python -m ddbatch      a demo: a tiny pair and prompts that come with
                              ddbatch; it writes to outputs/demo

Jobs
  generate            decode every prompt of a dataset (the default); the same
                      command again goes on where it stopped
  estimate            what a run will need, from the prompts alone
  status              how far the run in output_dir is
  check               read the run in output_dir again and verify every part
  merge               one clean dataset of it: merge.output_dir=DIR
  bench               how fast this machine decodes with a pair, method by
                      method, and what bounds it; needs no data.path
  probe               how many tokens a round may have on this GPU
  not built yet:      verify sweep train report

Required (the demo is what runs without model, drafter and prompts)
  model.path=DIR      the target: a Hugging Face checkpoint folder
  data.path=DATA      the prompts: .jsonl, .jsonl.gz, .parquet or .arrow files,
                      a folder of them, a glob, a save_to_disk folder, a hub
                      id, or an earlier run (data.select=truncated, rejected)
  output_dir=DIR      where the completions go; it identifies the run

Often used
  drafter.path=DIR    the DFlash drafter; unset = plain decoding
  sampling.max_new_tokens=1024    engine.rows=auto    engine.budget=auto
  data.limit=null     data.prompt_column=null         data.system_prompt=null

Examples
  python -m ddbatch model.path=target data.path=prompts.jsonl output_dir=out
  python -m ddbatch model.path=target drafter.path=drafter \\
      data.path='data/*.parquet' output_dir=out sampling.temperature=0.8
  python -m ddbatch model.path=target data.path=chats.jsonl output_dir=out \\
      'data.chat_template_kwargs={{enable_thinking: false}}'
  python -m ddbatch --cfg job model.path=target engine.rows=32
  python -m ddbatch job=status output_dir=out

All options
  python -m ddbatch --cfg job               every option and its value
  python -m ddbatch --cfg job -p engine     one group of them
  --config-dir=DIR +GROUP=NAME adds your own DIR/GROUP/NAME.yaml (begin it with
  `# @package _global_`), --version prints the version, -m runs every
  combination of values with commas (they must differ in output_dir)

Exit codes
  0 done, or nothing to do, 1 a bug, 2 refused, 3 too many rejected rows,
  4 a failure of the engine, the disk or the run's state, 75 stopped by a
  signal (the same command resumes), 130 by a second one
"""


def main(argv: Sequence[str] | None = None, run_job: Callable[[Config], int] | None = None) -> int:
    """Run one command line; the return value is the exit code of the process.

    run_job: what runs an accepted configuration; None = the job that it names.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Read when torch is imported: its threads sleep while they wait. Those that spin make decoding
    # 20 times slower where other programs use the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal that knows only ASCII must not end a job
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with impatient():
            return _told(_main(arguments, run_job))
    except (BrokenPipeError, UnheardError) as error:
        return _unheard(error)
    except KeyboardInterrupt as stop:
        print(f"ddbatch: stopped by {str(stop) or 'SIGINT'}", file=sys.stderr)
        return ExitCode.STOPPED


def _told(code: int) -> int:
    """The exit code, once what was printed is written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return code or _unheard(error)
    return code


def _unheard(error: OSError | UnheardError) -> int:
    """What is written to stdout from here on goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reason = error.strerror if isinstance(error, OSError) else error
    say(f"ddbatch: error: not everything could be said on stdout: {reason}")
    return ExitCode.ENGINE


def _main(arguments: Sequence[str], run_job: Callable[[Config], int] | None) -> int:
    if {"-h", "--help"} & set(arguments):
        tell(HELP.rstrip())
        return ExitCode.DONE
    if "--version" in arguments:
        tell(f"ddbatch {__version__}")
        return ExitCode.DONE
    missing = [name for name in ("hydra", "ddbatch_kernels") if find_spec(name) is None]
    if missing:
        hint = "in a checkout: python -m pip install ."
        _print_error(ValueError(f"ddbatch is not installed: no {' and no '.join(missing)}"), hint)
        return ExitCode.USAGE
    try:
        with impatient():
            configs = _configure(arguments)
    except ValueError as error:
        _print_error(error, getattr(error, "hint", None))
        return ExitCode.USAGE
    codes = []
    for number, config in enumerate(configs, 1):
        if len(configs) > 1:
            place = f"output_dir={config.output_dir}"
            print(f"ddbatch: run {number} of {len(configs)}: {place}", file=sys.stderr)
        codes.append(_run(config, run_job or _named_job))
        if codes[-1] in (ExitCode.STOPPED, ExitCode.STOPPED_TWICE):
            break
    return next((code for code in codes if code != ExitCode.DONE), ExitCode.DONE)


def config_folder() -> Path:
    """`conf` is beside this file in an installed wheel, one level up in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def _configure(arguments: Sequence[str]) -> list[Config]:
    """The accepted configurations: one, several for a multirun, none if they are only shown."""
    from ddbatch import cli
    from ddbatch.checks import check_job
    from ddbatch.config import load

    line = cli.read(arguments)
    try:
        composed = _compose(line)
    except BrokenPipeError:  # Hydra prints what --cfg shows
        raise
    except Exception as error:  # whatever Hydra raises here, the cause is a configuration
        raise cli.explain(error, line.overrides) from error
    if not line.is_run:
        return []
    for configuration in composed:
        check_job(str(configuration.get("job")))
    try:
        configs = [load(configuration) for configuration in composed]
    except ValueError as error:
        raise cli.UsageError(str(error), cli.hint_for(str(error), line.overrides)) from error
    places = [os.path.abspath(config.output_dir) for config in configs]
    shared = sorted({place for place in places if places.count(place) > 1})
    if shared:
        raise cli.UsageError(
            f"-m: {len(configs)} runs would share output_dir={shared[0]}",
            "name a folder for each: output_dir=out1,out2, or output_dir='out/${sampling.seed}'",
        )
    return configs


def _compose(line: CommandLine) -> list[Mapping[str, object]]:
    """What Hydra composes of a command line: one configuration, several under -m, or none if it
    only showed some."""
    import hydra

    composed: list[Mapping[str, object]] = []

    def keep(configuration: Mapping[str, object]) -> None:
        composed.append(configuration)

    _store_schema()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*version_base")  # 1.3 asks for it, 1.4 warns
        decorate = hydra.main(
            version_base="1.3", config_path=str(config_folder()), config_name="config"
        )
    saved_argv, saved_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # Hydra reads its arguments from sys.argv only, and raises instead of printing and exiting only
    # under this variable.
    sent = [override.sent for override in line.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        # A sweep leaves a multirun.yaml in its folder, whatever it is told.
        with tempfile.TemporaryDirectory() as swept:
            sweep = ["--multirun", f"hydra.sweep.dir='{swept}'"] if line.is_multirun else []
            sys.argv = ["ddbatch", *line.flags, *sweep, *sent]
            decorate(keep)()
    finally:
        sys.argv = saved_argv
        del os.environ["HYDRA_FULL_ERROR"]
        if saved_flag is not None:
            os.environ["HYDRA_FULL_ERROR"] = saved_flag
    return composed


@cache
def _store_schema() -> None:
    """Make the classes of config.py known to Hydra; once, a second time draws a warning."""
    from hydra.core.config_store import ConfigStore

    from ddbatch.config import Config

    ConfigStore.instance().store(name="ddbatch_schema", node=Config)


def _named_job(config: Config) -> int:
    _keep_triton_local()
    code = importlib.import_module(f"ddbatch.jobs.{config.job}").run(config)
    assert isinstance(code, int), f"job={config.job} returned {code!r}, not an exit code"
    return code


def _keep_triton_local() -> None:
    """Have Triton keep what it compiles on this machine, unless it was told a place: home folders
    of clusters are on network file systems, where its renames and locks fail."""
    if {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys():
        return
    place = Path(tempfile.gettempdir(), f"ddbatch-triton-{os.getuid()}")
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    # What is compiled is run: nobody else may have made the folder, or write into it.
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o022:
        place = Path(tempfile.mkdtemp(prefix=f"{place.name}-"))
    os.environ["TRITON_CACHE_DIR"] = str(place)


def _run(config: Config, run_job: Callable[[Config], int]) -> int:
    """Run a job; a ValueError is the user's mistake, a RunError the world's, all else is a bug."""
    try:
        with impatient():
            return run_job(config)
    except UnheardError as error:
        return _unheard(error)
    except RunError as failure:
        _print_error(failure, _place_hint(config, failure))
        return ExitCode.ENGINE
    except ValueError as error:
        # A subclass (bad JSON, bad Unicode, Arrow) comes from a library that we forgot to guard.
        if type(error) is not ValueError:
            raise
        _print_error(error, _place_hint(config, error))
        return ExitCode.USAGE


def _place_hint(config: Config, error: Exception) -> str | None:
    """Who runs the demo may never have heard of output_dir."""
    if config.output_dir != OUTPUT_DIR or not is_demo(config) or OUTPUT_DIR not in str(error):
        return None
    return f"the demo writes to {OUTPUT_DIR} unless it is told another place: add output_dir=DIR"


def _print_error(error: Exception, hint: str | None) -> None:
    print(f"ddbatch: error: {' '.join(str(error).split())}", file=sys.stderr)
    if hint is not None:
        print(f"ddbatch: hint: {hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
