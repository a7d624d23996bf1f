"""The options: one typed class per group, and how a composed configuration becomes one.

`load` turns what Hydra composed into a plain, checked `Config` tree; from there on nobody else
knows omegaconf. Names and defaults are a public contract. Knows nothing about the command line, and
opens none of the files that it names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddbatch.checks import FILES, REQUIRED, check, check_job, option
from ddbatch.demo import OUTPUT_DIR, demo_paths


@dataclass
class ModelConfig:
    """The target. dtype auto = the checkpoint's on CUDA, float32 on a CPU."""

    path: str = MISSING
    revision: str | None = None
    dtype: str = "auto"
    hash: str = "fast"


@dataclass
class DrafterConfig:
    """The DFlash drafter; without a path every token is decoded by the target alone."""

    path: str | None = None
    block: int | None = None  # checked against the checkpoint, which decides


@dataclass
class DataConfig:
    """Where the prompts are and how a row becomes a prompt."""

    path: str = MISSING
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    prompt_column: str | None = None
    messages_column: str | None = None
    token_ids_column: str | None = None
    id_column: str | None = None
    tools_column: str | None = None
    sampling_column: str | None = None
    keep_columns: list[str] = field(default_factory=list)
    system_prompt: str | None = None
    system_prompt_file: str | None = None
    template: str = "auto"  # auto, none, or a file
    # A free dict or None. Any, because a typed dict would refuse `data.chat_template_kwargs.KEY=`.
    chat_template_kwargs: Any = None
    template_date: str | None = None
    turns: str = "last"
    limit: int | None = None
    grow: str = "append"
    on_long: str = "reject"
    select: str = "all"


@dataclass
class SamplingConfig:
    """How a token is drawn, and when a completion ends."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 1024
    n: int = 1
    seed: int = 0
    stop: list[str] = field(default_factory=list)
    stop_file: str | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass
class EngineConfig:
    """Device, method and sizes; auto is decided by the planner."""

    device: str = "auto"
    method: str = "auto"
    budget: int | str = "auto"
    topk: int | str = "auto"
    spine: str = "off"
    rows: int | str = "auto"
    max_len: int | str = "auto"
    page: int | str = "auto"
    gemm_limit: int | str | None = "auto"  # null = no limit
    capture: bool | str = "auto"
    gate: bool = True
    on_gate_failure: str = "fallback"
    audit_rate: float = 0.005
    reproducible: bool = False


@dataclass
class OutputConfig:
    """What is written, and in how large parts."""

    part_seconds: int = 300
    part_rows: int = 4096
    max_error_rate: float = 0.01
    resume: str = "auto"
    grace_seconds: int = 25
    skip_special_tokens: bool = True
    store: list[str] = field(default_factory=lambda: ["prompt_ids", "acceptance"])
    card: Any = None  # a free dict or None, like data.chat_template_kwargs


@dataclass
class ShardsConfig:
    """How the rows are cut for several workers; start is a hint where to begin claiming."""

    rows: int = 20000
    start: int | str = "auto"
    wait: bool = False


@dataclass
class MergeConfig:
    """job=merge: one clean data set of output_dir and the further runs, as files for training."""

    output_dir: str | None = None  # required by the job
    runs: list[str] = field(default_factory=list)
    format: str = "full"
    by: str = "key"  # rows of several runs that are equal in it: the last run wins
    filter: str | None = None
    dedup: list[str] = field(default_factory=list)
    reasoning: str = "keep"
    file_type: str = "parquet"
    file_mb: int = 300


@dataclass
class EstimateConfig:
    """job=estimate: what a run will cost, from the prompts alone."""

    rows: int | None = None  # look at the first so many
    tokens_per_second: float | None = None
    output_tokens: int | None = None  # mean of a row; unset = its cap


@dataclass
class StatusConfig:
    """job=status: how far a run is, from its records alone."""

    json: bool = False


@dataclass
class BenchConfig:
    """job=bench: how fast this machine decodes with a pair, method by method."""

    rows: list[int] = field(default_factory=lambda: [1, 8, 32])
    context: list[int] = field(default_factory=lambda: [1024])
    arms: list[str] = field(default_factory=lambda: ["autoregressive", "chain", "ddtree:16"])
    repeats: int = 5
    new_tokens: int = 128
    prompts: int | None = None
    acceptance: float | None = None
    peers: list[str] = field(default_factory=list)


@dataclass
class ProbeConfig:
    """job=probe: how many tokens a round may have on this GPU."""

    widest: int = 4096  # tokens
    step: int = 64  # how near the answer comes
    timeout: int = 120


@dataclass
class Config:
    """Everything a job is told. Not frozen: Hydra could not override a frozen class."""

    job: str = "generate"
    output_dir: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    merge: MergeConfig = field(default_factory=MergeConfig)
    estimate: EstimateConfig = field(default_factory=EstimateConfig)
    status: StatusConfig = field(default_factory=StatusConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)


def option_types(group: type = Config, prefix: str = "") -> dict[str, object]:
    """Every dotted option name and its declared type, in the order of declaration."""
    hints = get_type_hints(group)
    types: dict[str, object] = {}
    for item in fields(group):
        hint = hints[item.name]
        if isinstance(hint, type) and is_dataclass(hint):
            types |= option_types(hint, f"{prefix}{item.name}.")
        else:
            types[prefix + item.name] = hint
    return types


def load(composed: Mapping[str, object]) -> Config:
    """The checked configuration of what Hydra composed; `~` is expanded in every path.

    Without a model, a drafter and prompts job=generate gets those of the embedded demo.
    """
    # Hydra's +KEY=VALUE gets past the schema.
    unknown = sorted({str(key) for key in composed} - {item.name for item in fields(Config)})
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such option")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), composed)
        missing = OmegaConf.missing_keys(merged)
        for key in missing & set(REQUIRED):
            OmegaConf.update(merged, key, "")  # reported below, all of them at once
        if missing - set(REQUIRED):
            raise ValueError(f"{', '.join(sorted(missing - set(REQUIRED)))}: a value is needed")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{getattr(error, 'full_key', None) or 'config'}: {reason}") from error
    assert isinstance(config, Config)
    check_job(config.job)
    # An empty path, perhaps of an unset shell variable, is no wish for the demo: it is not missing.
    is_demo = {"model.path", "data.path"} <= missing and config.drafter.path is None
    if config.job == "generate" and is_demo:
        config.model.path, config.drafter.path, config.data.path = demo_paths()
        if "output_dir" in missing:
            config.output_dir = OUTPUT_DIR
    for key in REQUIRED + FILES:
        group, _, name = key.rpartition(".")
        owner = option(config, group) if group else config
        value = getattr(owner, name)
        if isinstance(value, list):
            setattr(owner, name, [os.path.expanduser(item) for item in value])
        elif value is not None:
            setattr(owner, name, os.path.expanduser(value))
    check(config)
    return config
