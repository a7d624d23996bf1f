"""job=bench: how fast this machine decodes with this pair, by which method, and what bounds it.

Everything that can be refused is refused before a weight is read, and what the options alone tell
before torch is imported. jobs/benching/ has one question a file.
"""

from __future__ import annotations

from ddbatch.checks import check_built
from ddbatch.config import Config
from ddbatch.core import ExitCode
from ddbatch.jobs.benching.options import check_bench, refuse_taken
from ddbatch.jobs.reading import check_model_folder


def run(config: Config) -> int:
    """Measure, print tables and write both files; returns the exit code."""
    check_built(config)
    arms = check_bench(config)
    refuse_taken(config.output_dir)
    check_model_folder("model.path", config.model.path)
    if config.drafter.path is not None:
        check_model_folder("drafter.path", config.drafter.path)
    # Late: a refusal need not wait for torch.
    from ddbatch.jobs.benching.running import bench

    bench(config, arms)
    return ExitCode.DONE
