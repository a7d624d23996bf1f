"""What values an option may have, alone and together, and which are not built yet.

Each refusal names the key, its value and what is expected. Knows the options by their dotted names;
config.py declares them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddbatch.config import Config

MISSING = "???"  # how Hydra writes a required value that is not set

JOBS: tuple[str, ...] = ("generate", "check", "status", "merge", "estimate", "verify", "bench")
JOBS += ("sweep", "probe", "train", "report")
BUILT_JOBS = ("generate", "check", "status", "merge", "estimate", "bench", "probe")

LARGEST = sys.float_info.max  # no limit, but neither inf nor nan passes


@dataclass(frozen=True)
class Rule:
    """Allowed values of an option: some words, or a number from `low` to `high`, or both."""

    words: tuple[str, ...] = ()
    low: float | None = None
    high: float = LARGEST
    is_open: bool = False  # low itself is refused
    or_zero: bool = False  # 0 is allowed although it is below low
    is_whole: bool = True

    def allows(self, value: object) -> bool:
        kinds = int if self.is_whole else (int, float)
        if self.low is None or isinstance(value, bool) or not isinstance(value, kinds):
            return shown(value) in self.words
        if self.or_zero and value == 0:
            return True
        return self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        choices = [*self.words, *(["0"] if self.or_zero else [])]
        if self.low is not None:
            kind = "an integer" if self.is_whole else "a number"
            bounds = f">{'' if self.is_open else '='} {self.low}"
            if self.high != LARGEST:
                bounds = f"in {'(' if self.is_open else '['}{self.low}, {self.high}]"
            choices.append(f"{kind} {bounds}")
        return " or ".join([", ".join(choices[:-1]), choices[-1]] if choices[1:] else choices)


AUTO_OR_COUNT = Rule(("auto",), low=1)
COUNT = Rule(low=1)
MILLION = Rule(low=1, high=10**6)
FRACTION = Rule(low=0, high=1, is_whole=False)

# Only what the types cannot say. A rule of a list holds for each of its items.
RULES: dict[str, Rule] = {
    "model.dtype": Rule(("auto", "float32", "bfloat16", "float16")),
    "model.hash": Rule(("fast", "full")),
    "drafter.block": Rule(low=2),
    "data.turns": Rule(("last", "all", "continue")),
    "data.limit": COUNT,
    "data.grow": Rule(("append", "refuse")),
    "data.on_long": Rule(("reject", "truncate_left")),
    "data.select": Rule(("all", "truncated", "rejected")),
    # Scores divided by less overflow float32.
    "sampling.temperature": Rule(low=1e-6, or_zero=True, is_whole=False),
    "sampling.top_p": Rule(low=0, high=1, is_open=True, is_whole=False),
    "sampling.top_k": Rule(low=0, high=2**31 - 1),
    "sampling.min_p": FRACTION,
    "sampling.max_new_tokens": COUNT,
    "sampling.n": Rule(low=1, high=2**15 - 1),  # the type of the column `sample`
    "sampling.seed": Rule(low=0, high=2**63 - 1),
    "sampling.stop_token_ids": Rule(low=0),
    "sampling.top_logprobs": Rule(low=0, high=1024),  # 6 KiB a token
    "engine.method": Rule(("auto", "ddtree", "chain", "autoregressive")),
    "engine.budget": Rule(("auto",), low=0, high=1024),  # the largest that DDTree was measured with
    "engine.topk": Rule(("auto",), low=1, high=1024),
    "engine.spine": Rule(("off", "on", "auto")),
    "engine.rows": AUTO_OR_COUNT,
    "engine.max_len": AUTO_OR_COUNT,
    "engine.page": AUTO_OR_COUNT,
    "engine.gemm_limit": Rule(("null", "auto"), low=1),
    "engine.capture": Rule(("auto", "true", "false")),
    "engine.on_gate_failure": Rule(("stop", "fallback")),
    "engine.audit_rate": FRACTION,
    "output.part_seconds": COUNT,
    "output.part_rows": COUNT,
    "output.max_error_rate": FRACTION,
    "output.resume": Rule(("auto", "never", "require", "repair")),
    "output.grace_seconds": Rule(low=0),
    "output.store": Rule(("prompt_ids", "acceptance")),
    "shards.rows": COUNT,
    "shards.start": Rule(("auto",), low=0),
    "merge.format": Rule(("full", "messages", "conversations", "text", "openai_batch")),
    "merge.reasoning": Rule(("keep", "split", "drop")),
    "merge.file_type": Rule(("parquet", "jsonl")),
    "merge.file_mb": COUNT,
    "estimate.rows": COUNT,
    "estimate.tokens_per_second": Rule(low=0, is_open=True, is_whole=False),
    "estimate.output_tokens": COUNT,
    "bench.rows": MILLION,
    "bench.context": MILLION,
    "bench.repeats": MILLION,
    "bench.new_tokens": Rule(low=2, high=10**6),  # the first comes from the prompt, without a round
    "bench.prompts": MILLION,
    "bench.acceptance": Rule(low=0, high=1, is_open=True, is_whole=False),
    "bench.peers": Rule(("transformers", "vllm")),
    "probe.widest": COUNT,
    "probe.step": COUNT,
    "probe.timeout": COUNT,
}

# Options of the engine's later releases: nothing but the default is accepted.
NOT_BUILT: dict[str, str] = {
    "model": "revision",
    "engine": "spine",
    "shards": "wait",
}

REQUIRED = ("model.path", "data.path", "output_dir")
# What a job cannot do without; the others need what generate needs.
REQUIRED_BY_JOB: dict[str, tuple[str, ...]] = {
    "check": ("output_dir",),
    "status": ("output_dir",),
    "merge": ("output_dir", "merge.output_dir"),
    "estimate": ("model.path", "data.path"),
    "bench": ("model.path", "output_dir"),
    "probe": ("model.path",),
}
FILES = (
    "drafter.path",
    "data.system_prompt_file",
    "data.template",
    "sampling.stop_file",
    "merge.output_dir",
    "merge.runs",
)
STOPS = "text, not empty, without lone surrogates and without U+FFFD (bytes that are no character)"
FREE_DICTS = ("data.chat_template_kwargs", "output.card")


def option(config: Config, key: str) -> object:
    """The value of a dotted option name."""
    value: object = reduce(getattr, key.split("."), config)
    return value


def is_stop(item: object) -> bool:
    """Whether a value can be a stop string: what no text holds can stop none."""
    if not isinstance(item, str) or item == "" or "\ufffd" in item:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in item)


def shown(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(shown, value)) + "]"
    if value is None:
        return "null"
    if value == "":
        return '""'
    return str(value).lower() if isinstance(value, bool) else str(value)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The close word as an addition to a message, or nothing."""
    close = get_close_matches(word, words, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_job(job: str) -> None:
    """Refuse a job that does not exist, or not yet."""
    if job not in JOBS:
        raise ValueError(f"job={job}: expected {Rule(BUILT_JOBS)}{did_you_mean(job, JOBS)}")
    if job not in BUILT_JOBS:
        raise ValueError(f"job={job} is not built yet; built: {', '.join(BUILT_JOBS)}")


def check(config: Config) -> None:
    """Refuse values that are out of range, contradict each other or are not built yet."""
    for key, rule in RULES.items():
        value = option(config, key)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and not rule.allows(item):
                guess = did_you_mean(shown(item), rule.words)
                raise ValueError(f"{key}={shown(value)}: expected {rule}{guess}")
    _check_together(config)
    required = REQUIRED_BY_JOB.get(config.job, REQUIRED)
    unset = [key for key in required if option(config, key) in (None, "", MISSING)]
    if unset:
        raise ValueError(f"required and not set: {', '.join(unset)}")


def check_built(config: Config) -> None:
    """Refuse what the engine cannot do yet."""
    defaults = type(config)()
    later = [f"{group}.{name}" for group, names in NOT_BUILT.items() for name in names.split()]
    refused = [
        f"{key}={shown(option(config, key))} is not built yet"
        for key in later
        if option(config, key) != option(defaults, key)
    ]
    if refused:
        raise ValueError("; ".join(refused))


def _check_together(config: Config) -> None:
    """Rules that one row of a table cannot say."""
    data, sampling, engine = config.data, config.sampling, config.engine
    for key in FREE_DICTS:
        value = option(config, key)
        if value is not None and not (isinstance(value, dict) and set(map(type, value)) <= {str}):
            raise ValueError(f"{key}={shown(value)}: expected a dict like {{name: value}}")
    for key in FILES:
        if option(config, key) == "":
            raise ValueError(f"{key} is empty (an unset shell variable?): expected a path")
    if not fullmatch(r"auto|cpu|cuda(:\d+)?", engine.device):
        guess = did_you_mean(engine.device, ("auto", "cpu", "cuda"))
        raise ValueError(f"engine.device={engine.device}: expected auto, cpu, cuda, cuda:N{guess}")
    if config.probe.step > config.probe.widest:
        raise ValueError(
            f"probe.step={config.probe.step} with probe.widest={config.probe.widest}: "
            "allowed: a step that is no more than that"
        )
    _check_method(config)
    _check_stops(config)
    if sampling.n > 1 and sampling.temperature == 0:
        text = f"sampling.n={sampling.n} with sampling.temperature=0: all samples would be equal; "
        text += "allowed: sampling.n=1, or a temperature above 0"
        raise ValueError(text)
    if sampling.top_logprobs > 0 and not sampling.logprobs:
        raise ValueError(
            f"sampling.top_logprobs={sampling.top_logprobs} with sampling.logprobs=false: allowed: "
            "sampling.logprobs=true, or sampling.top_logprobs=0"
        )
    if data.system_prompt == "":
        raise ValueError("data.system_prompt is empty (an unset shell variable?): expected a text")
    if data.system_prompt is not None and data.system_prompt_file is not None:
        raise ValueError("data.system_prompt and data.system_prompt_file: set one, not both")
    columns = ("data.prompt_column", "data.messages_column", "data.token_ids_column")
    named = [f"{key}={option(config, key)}" for key in columns if option(config, key) is not None]
    if len(named) > 1:
        raise ValueError(f"{', '.join(named)}: a prompt comes from one column, name one")
    if data.template not in ("auto", "none") and not Path(data.template).is_file():
        guess = did_you_mean(data.template, ("auto", "none"))
        raise ValueError(f"data.template={data.template}: expected auto, none or a file{guess}")
    if data.system_prompt_file is not None and not Path(data.system_prompt_file).is_file():
        raise ValueError(f"data.system_prompt_file={data.system_prompt_file}: no such file")


def _check_stops(config: Config) -> None:
    """Stop strings come from one place, as text."""
    stop, stop_file = config.sampling.stop, config.sampling.stop_file
    if not all(map(is_stop, stop)):
        raise ValueError(f"sampling.stop={shown(stop)}: expected a list, each item {STOPS}")
    if stop and stop_file is not None:
        raise ValueError("sampling.stop and sampling.stop_file: set one, not both")
    if stop_file is not None and not Path(stop_file).is_file():
        raise ValueError(f"sampling.stop_file={stop_file}: no such file (expected a text file)")


def _check_method(config: Config) -> None:
    """Method, budget and drafter must say the same thing: none of them is silently ignored."""
    method, budget = config.engine.method, config.engine.budget
    if config.drafter.path is None:
        block = config.drafter.block
        wanted = [
            (f"engine.method={method}", method in ("ddtree", "chain"), "auto, autoregressive"),
            (f"engine.budget={budget}", budget not in ("auto", 0), "auto, 0"),
            (f"drafter.block={block}", block is not None, "null"),
        ]
        for choice, is_wanted, allowed in wanted:
            if is_wanted:
                raise ValueError(
                    f"{choice}: needs drafter.path, which is not set; allowed without: {allowed}"
                )
    if budget == 0 and method in ("ddtree", "chain"):
        raise ValueError(
            f"engine.budget=0 is plain decoding, engine.method={method} is not; allowed with it: "
            "auto, autoregressive"
        )
    if budget not in ("auto", 0) and method == "autoregressive":
        raise ValueError(
            f"engine.budget={budget}: engine.method=autoregressive has no drafts; allowed with it: "
            "auto, 0"
        )
    if config.engine.topk != "auto" and method in ("chain", "autoregressive"):
        raise ValueError(
            f"engine.topk={config.engine.topk}: engine.method={method} has no tree; allowed with "
            "it: auto"
        )
