"""What job=bench is told, checked before a weight is read: arms, sizes, and what does not apply.

Knows the options' names. Imports no torch: models are told by their sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from ddbatch.checks import option, shown
from ddbatch.config import Config
from ddbatch.data.folder import RunFolder
from ddbatch.jobs.benching.arms import Arm, parse_arm
from ddbatch.jobs.generating.opening import refuse_unwritable

TABLE, REPORT = "bench.parquet", "bench.json"

# Options of a run that have no part here -> what to say of them.
INSTEAD = {
    "engine.method": "bench.arms names methods",
    "engine.budget": "bench.arms names budgets, as in ddtree:16",
    "engine.rows": "bench.rows lists them",
    "engine.max_len": "sequences are as long as bench.context and bench.new_tokens make them",
    "sampling.max_new_tokens": "bench.new_tokens is the cap of every prompt",
    "sampling.n": "each prompt is decoded once a call",
    "sampling.logprobs": "calls are measured without log-probabilities",
    "data.sampling_column": "all prompts of a call draw alike",
}


def check_bench(config: Config) -> list[Arm]:
    """The arms, at no number of rows yet (0); ValueError for what job=bench cannot do."""
    default = Config()
    for key, instead in INSTEAD.items():
        if option(config, key) != option(default, key):
            raise ValueError(
                f"{key}={shown(option(config, key))}: has no part in job=bench, where {instead}; "
                f"allowed: {shown(option(default, key))}"
            )
    for key in ("bench.rows", "bench.context", "bench.arms"):
        value = option(config, key)
        assert isinstance(value, list)
        if not value:
            raise ValueError(f"{key}=[]: expected a list of one or more")
        if len(set(value)) < len(value):
            raise ValueError(f"{key}={shown(value)}: expected a list in which nothing comes twice")
    arms = list(_arms(config))
    if config.drafter.path is None:
        _refuse_drafts(config, arms)
    peers = config.bench.peers
    if peers and config.sampling.temperature > 0:
        raise ValueError(
            f"bench.peers={shown(peers)} with sampling.temperature={config.sampling.temperature}: "
            "peers decode greedily; allowed: sampling.temperature=0, or bench.peers=[]"
        )
    if len(set(peers)) < len(peers):
        raise ValueError(
            f"bench.peers={shown(peers)}: expected a list in which nothing comes twice"
        )
    _check_installed(peers)
    return arms


def _check_installed(names: Sequence[str]) -> None:
    """ValueError with what to install where a library is not there."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"bench.peers=[{','.join(names)}]: not installed: {', '.join(missing)} (python -m pip "
            f"install {' '.join(missing)}); allowed without: bench.peers="
            f"[{','.join(name for name in names if name not in missing)}]"
        )


def _arms(config: Config) -> Iterator[Arm]:
    for text in config.bench.arms:
        try:
            yield parse_arm(text, 0)
        except ValueError as error:
            raise ValueError(f"bench.arms={shown(config.bench.arms)}: {text}: {error}") from error


def _refuse_drafts(config: Config, arms: list[Arm]) -> None:
    drafting = [text for text, arm in zip(config.bench.arms, arms, strict=True) if arm.has_drafts]
    if drafting:
        raise ValueError(
            f"bench.arms={shown(config.bench.arms)}: {', '.join(drafting)}: needs drafter.path, "
            "which is not set; allowed without: bench.arms=[autoregressive]"
        )
    if config.bench.acceptance is not None:
        raise ValueError(
            f"bench.acceptance={config.bench.acceptance}: needs drafter.path, which is not set; "
            "allowed without: null"
        )


def check_sizes(
    config: Config, arms: Sequence[Arm], *, positions: int, block: int, steady_room: int
) -> None:
    """ValueError for what does not fit the models. positions: the context of model.path; block: the
    drafter's (1: none); steady_room: tokens beyond its context that a sequence needs."""
    for text, arm in zip(config.bench.arms, arms, strict=True):
        if arm.block is not None and arm.block > block:
            raise ValueError(
                f"bench.arms={shown(config.bench.arms)}: {text}: BLOCK {arm.block} is more than "
                f"the drafter's block of {block}; allowed: 2..{block}"
            )
    room = steady_room
    if not config.data.path:
        room = max(room, config.bench.new_tokens)
    elif config.bench.new_tokens >= positions:
        raise ValueError(
            f"bench.new_tokens={config.bench.new_tokens}: the context of model.path is {positions} "
            f"tokens, prompts included; allowed: 2..{positions - 1}"
        )
    for context in config.bench.context:
        if context + room > positions:
            raise ValueError(
                f"bench.context={shown(config.bench.context)}: {context} and {room} tokens more "
                f"(bench.new_tokens, and room for a steady state) exceed the context of "
                f"model.path, {positions}; allowed: "
                + (f"1..{positions - room}" if positions > room else "fewer bench.new_tokens")
            )


def refuse_taken(output_dir: str) -> None:
    """ValueError where the folder holds a run, or a measurement that came to its end."""
    place = Path(output_dir)
    refuse_unwritable(RunFolder(place))
    held = {"manifest.json": "a run", REPORT: "an earlier measurement"}
    for name, what in held.items():
        if (place / name).exists() and not (name == REPORT and _is_unfinished(place / name)):
            raise ValueError(
                f"output_dir={output_dir} holds {what} ({name}); allowed: another output_dir"
            )


def _is_unfinished(report: Path) -> bool:
    """Whether it is a measurement that was stopped: the same command may make it anew."""
    try:
        told = json.loads(report.read_bytes())
    except ValueError:
        return False
    return isinstance(told, dict) and told.get("is_whole") is False
