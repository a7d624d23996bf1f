"""`python -m ddbatch`: compose the configuration with Hydra, then run one job.

Hydra composes and nothing else: it creates no file, and the job runs after it has returned, so that
exit codes and tracebacks are ours. Knows nothing of what a job does. Imports are late on purpose:
--help, --version and --cfg must not wait for torch, and a job is imported once it is accepted.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ddbatch import __version__
from ddbatch.core import ExitCode, RunError

if TYPE_CHECKING:
    from ddbatch.cli import CommandLine
    from ddbatch.config import Config

HELP = f"""\
ddbatch {__version__}: a dataset of prompts in, a dataset of completions out, offline.
A DFlash drafter and DDTree draft trees make it fast; every completion is what
the target model alone would have said.

usage: python -m ddbatch [job=JOB] KEY=VALUE ...

Jobs
  generate            decode every prompt of a dataset (the default)
  not built yet:      check status merge estimate verify bench sweep probe
                      train report

Required
  model.path=DIR      the target: a Hugging Face checkpoint folder
  data.path=FILES     the prompts: a .jsonl, .jsonl.gz or .parquet file, a
                      folder of such files, or a glob
  output_dir=DIR      where the completions go; it identifies the run

Often used
  drafter.path=DIR    the DFlash drafter; unset = plain decoding
  sampling.max_new_tokens=1024    engine.rows=auto    engine.budget=auto
  data.limit=null     data.prompt_column=null         data.system_prompt=null

Examples
  python -m ddbatch model.path=target data.path=prompts.jsonl output_dir=out
  python -m ddbatch model.path=target drafter.path=drafter \\
      data.path='data/*.parquet' output_dir=out engine.rows=32 engine.budget=16
  python -m ddbatch model.path=target data.path=chats.jsonl output_dir=out \\
      'data.chat_template_kwargs={{enable_thinking: false}}'
  python -m ddbatch --cfg job model.path=target engine.rows=32

All options
  python -m ddbatch --cfg job               every option and its value
  python -m ddbatch --cfg job -p engine     one group of them
  --config-dir=DIR +GROUP=NAME adds your own DIR/GROUP/NAME.yaml (begin it with
  `# @package _global_`), --version prints the version

Exit codes
  0 done, 1 a bug, 2 refused, 3 too many rejected rows,
  4 a failure of the engine or the disk, 75 stopped by a signal
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the return value is the exit code of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return ExitCode.DONE
    if "--version" in arguments:
        print(f"ddbatch {__version__}")
        return ExitCode.DONE
    try:
        config = _configure(arguments)
    except ValueError as error:
        return _refuse(error)
    return ExitCode.DONE if config is None else _run_job(config)


def config_folder() -> Path:
    """`conf` is beside this file in an installed wheel, one level up in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def _configure(arguments: Sequence[str]) -> Config | None:
    """The accepted configuration; None if the command line only asked to show it."""
    from ddbatch import cli
    from ddbatch.checks import check_job
    from ddbatch.config import load

    line = cli.read(arguments)
    try:
        composed = _compose(line)
    except Exception as error:  # whatever Hydra raises here, the cause is a configuration
        raise cli.explain(error, line.overrides) from error
    if not line.is_run:
        return None
    if len(composed) != 1:
        raise cli.UsageError("multirun is not built yet", "run the command once per value")
    check_job(str(composed[0].get("job")))
    try:
        return load(composed[0])
    except ValueError as error:
        raise cli.UsageError(str(error), cli.hint_for(str(error), line.overrides)) from error


def _compose(line: CommandLine) -> list[Mapping[str, object]]:
    """What Hydra composes of a command line: one configuration, or none if it only showed some."""
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
    sys.argv = ["ddbatch", *(override.sent for override in line.overrides), *line.flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
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


def _run_job(config: Config) -> int:
    """Import and run the job; a ValueError is the user's mistake, anything else is a bug."""
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, _stop) for number in signals]
    try:
        code = importlib.import_module(f"ddbatch.jobs.{config.job}").run(config)
        assert isinstance(code, int), f"job={config.job} returned {code!r}, not an exit code"
        return code
    except KeyboardInterrupt as stop:
        print(f"ddbatch: stopped by {str(stop) or 'SIGINT'}", file=sys.stderr)
        return ExitCode.STOPPED
    except RunError as failure:
        print(f"ddbatch: error: {' '.join(str(failure).split())}", file=sys.stderr)
        return ExitCode.ENGINE
    except ValueError as error:
        # A subclass (bad JSON, bad Unicode, Arrow) comes from a library that we forgot to guard.
        if type(error) is not ValueError:
            raise
        return _refuse(error)
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)


def _stop(signum: int, frame: FrameType | None) -> None:
    """The first signal stops the job, which writes what is finished; a second one exits at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_now)
    raise KeyboardInterrupt(signal.Signals(signum).name)


def _exit_now(signum: int, frame: FrameType | None) -> None:
    os._exit(ExitCode.STOPPED_TWICE)


def _refuse(error: ValueError) -> int:
    print(f"ddbatch: error: {' '.join(str(error).split())}", file=sys.stderr)
    hint = getattr(error, "hint", None)
    if hint is not None:
        print(f"ddbatch: hint: {hint}", file=sys.stderr)
    return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main())
