"""The option tables of README.md and docs/options.md, made from the classes, the rules and a line
about each option: `python -m ddbatch.options` rewrites both in a checkout.

Knows what each option is for. Knows nothing about jobs; a page is text between two marks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

from ddbatch.checks import (
    BUILT_JOBS,
    FILES,
    FREE_DICTS,
    JOBS,
    MISSING,
    NOT_BUILT,
    REQUIRED,
    REQUIRED_BY_JOB,
    RULES,
    Rule,
    option,
    shown,
)
from ddbatch.config import Config, option_types

DESCRIPTIONS: dict[str, str] = {
    "job": "what to do",
    "output_dir": "the folder of the run, and its identity; `outputs/demo` in the demo",
    "model.path": "the target, a Hugging Face checkpoint folder; unset, with `drafter.path` and "
    "`data.path` too: the embedded demo",
    "model.revision": "commit of a target that is a hub id",
    "model.dtype": "precision of target and drafter",
    "model.hash": "how the weights become part of the identity: sampled bytes, or every byte",
    "drafter.path": "the DFlash drafter, a checkpoint folder; unset is plain decoding",
    "drafter.block": "block size that the checkpoint must have; null takes what it has",
    "data.path": "the prompts: files, a folder, a glob, a hub id, or an earlier run",
    "data.name": "config of a hub data set",
    "data.revision": "commit or branch of a hub data set; a run stays at the commit it began with",
    "data.split": "split of a hub data set or of a saved `DatasetDict`",
    "data.prompt_column": "column with a text, one user turn; null finds `prompt`",
    "data.messages_column": "column with a conversation; null finds `messages`",
    "data.token_ids_column": "column with token ids, taken as they are; null finds `token_ids`",
    "data.id_column": "column with your own name of a row, `id` in the output",
    "data.tools_column": "column with the tools of a row, a list or its JSON",
    "data.sampling_column": "column with a row's own sampling options, an object or its JSON",
    "data.keep_columns": "input columns that go to the output",
    "data.system_prompt": "system turn of rows that have none",
    "data.system_prompt_file": "the same from a file",
    "data.template": "chat template: the tokenizer's, none (raw text), or a file",
    "data.chat_template_kwargs": "variables of the template, like `enable_thinking`",
    "data.template_date": "the date that a template is told, ISO; null is the run's first start",
    "data.turns": "regenerate the last assistant turn or all of them, or go on from the last one",
    "data.limit": "only the first so many rows; may grow later",
    "data.grow": "what to do with new files and a larger limit",
    "data.on_long": "a prompt beyond the context is rejected, or loses its beginning",
    "data.select": "rows of an earlier run: its completions, those cut by their cap, or its "
    "rejected ones",
    "sampling.temperature": "0 takes the most probable token",
    "sampling.top_p": "keep the best tokens whose share reaches it; 1 keeps all",
    "sampling.top_k": "keep so many of the best tokens; 0 keeps all",
    "sampling.min_p": "keep tokens of at least this share of the best one's probability",
    "sampling.max_new_tokens": "cap of every row, lowered where the context has less room",
    "sampling.n": "completions a row, which needs a temperature; may grow later",
    "sampling.seed": "another seed draws anew",
    "sampling.stop": "strings that end a completion, as in `'sampling.stop=[\"###\"]'`",
    "sampling.stop_file": "the same from a file, one a line, with escapes",
    "sampling.stop_token_ids": "token ids that end a completion, beside the model's own",
    "sampling.ignore_eos": "do not stop at the model's own stop tokens",
    "sampling.logprobs": "store the log-probability of every output token",
    "sampling.top_logprobs": "and those of so many best tokens, in a table of their own",
    "engine.device": "where to decode; `cuda:1` is the second GPU",
    "engine.method": "draft trees, chains (the drafter's most probable path), or no drafts",
    "engine.budget": "drafted nodes of a row, verified in each round; 0 is plain decoding",
    "engine.topk": "candidates a position of the drafted block",
    "engine.spine": "force the drafter's most probable path into small trees",
    "engine.rows": "sequences decoded side by side, at most; on CUDA lowered to what memory holds",
    "engine.max_len": "prompt and output tokens of a row together; part of the identity",
    "engine.page": "tokens a page of the cache",
    "engine.gemm_limit": "tokens a round (rows x (budget + 1)) that plans keep to; asking for more "
    "is refused",
    "engine.capture": "run each round as one CUDA graph; without, a run has one plan",
    "engine.gate": "on CUDA: hold each plan against plain decoding before it serves rows",
    "engine.on_gate_failure": "where the gate refuses a plan: stop the run, or go on without it",
    "engine.audit_rate": "share of the finished rows (the longest) scored again by plain decoding",
    "engine.reproducible": "on CUDA: equal bits whatever the method, the budget, the rows and the "
    "workers, and one plan for the run; slower",
    "output.part_seconds": "seconds until a part is closed: what a kill -9 costs at most",
    "output.part_rows": "rows after which a part is closed",
    "output.max_error_rate": "more rejected rows than this share end the run with 3",
    "output.resume": "a folder with a run: go on, refuse it, require it, or repair it first",
    "output.grace_seconds": "seconds after a signal until the process ends, whatever it does",
    "output.skip_special_tokens": "leave special tokens out of the text; the ids have them",
    "output.store": "what may be left out: the prompts' ids, and the table `acceptance`",
    "output.card": "more fields for the head of the card, as in `output.card.license=mit`",
    "shards.rows": "input rows a shard",
    "shards.start": "where to begin, so that several workers do not begin in one place",
    "shards.wait": "wait for the shards of other workers",
    "merge.output_dir": "folder of the merged data set",
    "merge.runs": "further runs; the row of a later one wins",
    "merge.format": "form of the rows: all columns, chats, or lines of a batch API",
    "merge.by": "rows of two runs are the same when this is equal: the key, or a column",
    "merge.filter": 'keep rows for which this holds, as in `"output_tokens > 10"`',
    "merge.dedup": "of rows that are equal in these columns keep the first",
    "merge.reasoning": "what stands before `</think>`: keep it, give it a field, or drop it",
    "merge.file_type": "form of the files",
    "merge.file_mb": "size of a file in MB",
    "estimate.rows": "look at the first so many rows only",
    "estimate.tokens_per_second": "speed of a worker, to tell the time",
    "estimate.output_tokens": "mean length of a completion; null takes the cap",
    "status.json": "one JSON object instead of a screen",
    "bench.rows": "numbers of sequences decoded side by side",
    "bench.context": "tokens before a round that is timed, and in a prompt of random ids",
    "bench.arms": "methods, with the nodes of their drafts and the positions that these look at",
    "bench.repeats": "how often each is measured, all in turn",
    "bench.new_tokens": "tokens of each completion of a whole call",
    "bench.prompts": "prompts of a whole call; null is 4 a row, at least 8",
    "bench.acceptance": "share of positions at which a coin, not the target, agrees with the "
    "drafter: synthetic acceptance",
    "bench.peers": "libraries that decode the same prompts beside it, where they are installed",
    "probe.widest": "tokens of the widest round that is tried",
    "probe.step": "tokens of the narrowest round that is tried, and how near the answer comes",
    "probe.timeout": "seconds that a round of one width may take, with its process's start",
}

# What the word auto stands for, where it is the default.
AUTO: dict[str, str] = {
    "model.dtype": "the checkpoint's on CUDA, float32 on a CPU",
    "data.template": "the tokenizer's, or none where it has none",
    "engine.device": "CUDA where there is a device",
    "engine.method": "`autoregressive` without a drafter; with one, and a budget that is chosen "
    "along the run, any method; else `ddtree`",
    "engine.budget": "on CUDA chosen along the run; on a CPU, with `engine.capture=false` or with "
    "`engine.reproducible=true` 16 (a chain: the whole block)",
    "engine.topk": "the budget, at most 64",
    "engine.rows": "8 on a CPU; on CUDA what memory holds, at most 512 (32 with "
    "`engine.capture=false` or `engine.reproducible=true`); no more than there are prompts or fit "
    "the limit",
    "engine.max_len": "the model's context",
    "engine.page": "a whole row on a CPU, 64 on CUDA",
    "engine.gemm_limit": "what `job=probe` found, else what is known of the GPU; mostly no limit",
    "engine.capture": "`true` on CUDA, `false` on a CPU",
    "output.resume": "go on with what is there",
    "shards.start": "from the number of a Slurm array's task",
}

# Values that no type and no single rule can say; checks.py refuses the others.
VALUES: dict[str, str] = {
    "bench.arms": "a list of `autoregressive`, `chain[:BUDGET[/BLOCK]]`, `ddtree[:BUDGET[/BLOCK]]`",
    "data.path": "a path, a glob, or a hub id",
    "data.template": "`auto`, `none`, or a path",
    "engine.device": "`auto`, `cpu`, `cuda`, `cuda:N`",
}

# In the README: what most runs set, in the order in which one meets it.
FIRST = (
    *("model.path", "drafter.path", "data.path", "output_dir"),
    *("data.prompt_column", "data.id_column", "data.keep_columns", "data.system_prompt"),
    "data.limit",
    *("sampling.max_new_tokens", "sampling.temperature", "sampling.top_p", "sampling.n"),
    *("sampling.seed", "sampling.stop", "sampling.logprobs"),
    *("model.dtype", "engine.method", "engine.budget", "engine.rows"),
    *("output.part_seconds", "output.max_error_rate"),
)

BEGIN = "<!-- options: made by `python -m ddbatch.options`, do not edit -->"
END = "<!-- /options -->"


def first_table(config: type[Config] = Config) -> str:
    """The README's table."""
    rows = ((f"`{key}`", _default(key, config), _meaning(key)) for key in FIRST)
    return _table(("option", "default", "meaning"), rows)


def all_tables(config: type[Config] = Config) -> str:
    """The tables of docs/options.md, one a group, each below what its class says of itself."""
    types = option_types(config)
    parts = [_group([key for key in types if "." not in key], config)]
    default = config()
    for item in fields(config):
        group = getattr(default, item.name)
        if is_dataclass(group):
            about = " ".join((inspect.getdoc(type(group)) or "").split()).split(". ")[0]
            keys = [key for key in types if key.startswith(f"{item.name}.")]
            parts.append(f"## {item.name}\n\n{about.removesuffix('.')}.\n\n{_group(keys, config)}")
    return "\n\n".join(parts)


def replaced(page: str, body: str, name: str) -> str:
    """The page with `body` between its marks; ValueError where they are not there once each."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"{name}: expected one line {BEGIN!r} and below it one {END!r}")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"


def rewrite(root: Path) -> list[str]:
    """Bring the tables of a checkout up to date; the names of the pages that have changed."""
    changed = []
    for name, body in (("README.md", first_table()), ("docs/options.md", all_tables())):
        page = root / name
        if not page.is_file():
            raise ValueError(f"{page}: no such file; the option tables are made in a checkout")
        old = page.read_text(encoding="utf-8")
        new = replaced(old, body, name)
        if new != old:
            page.write_text(new, encoding="utf-8")
            changed.append(name)
    return changed


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _group(keys: Iterable[str], config: type[Config]) -> str:
    rows = (
        (f"`{key}`", _default(key, config), _values(key, config), _meaning(key)) for key in keys
    )
    return _table(("option", "default", "values", "meaning"), rows)


def _default(key: str, config: type[Config]) -> str:
    if _is_required(key, config):
        return "required"
    value = option(config(), key)
    return f"`{shown(value)}`" + (f": {AUTO[key]}" if value == "auto" and key in AUTO else "")


def _is_required(key: str, config: type[Config]) -> bool:
    """Whether it has no default of its own, for all jobs or for one."""
    is_needed = any(key in keys for keys in REQUIRED_BY_JOB.values())
    return option(config(), key) in (MISSING, *([None] if is_needed else []))


def _is_built(key: str) -> bool:
    group, _, name = key.rpartition(".")
    return name not in NOT_BUILT.get(group, "").split()


def _meaning(key: str) -> str:
    if key == "job":
        later = ", ".join(f"`{job}`" for job in JOBS if job not in BUILT_JOBS)
        return f"{DESCRIPTIONS[key]}; not built yet: {later}"
    return DESCRIPTIONS[key] if _is_built(key) else f"**not built yet**: {DESCRIPTIONS[key]}"


def _values(key: str, config: type[Config]) -> str:
    """The values that are accepted, in words."""
    if not _is_built(key):
        return f"only `{shown(option(config(), key))}`"
    if key == "job":
        return _either(BUILT_JOBS)
    if key in VALUES or key in FREE_DICTS:
        return VALUES.get(key, "`{name: value}`")
    kind = option_types(config)[key]
    if key in RULES:
        values = _rule(RULES[key])
    elif kind is bool:
        values = _either(("true", "false"))
    else:
        values = "a path" if key in (*FILES, *REQUIRED) or key.endswith("_file") else "text"
    if kind in (list[str], list[int]):
        return f"a list of {values.replace('a path', 'paths').replace('an integer', 'integers')}"
    has_null = type(None) in getattr(kind, "__args__", ()) and not _is_required(key, config)
    is_told = key in RULES and "null" in RULES[key].words
    return f"{values}, or `null`" if has_null and not is_told else values


def _rule(rule: Rule) -> str:
    choices = [_either(rule.words)] if rule.words else []
    if rule.low is not None:
        choices.append(str(replace(rule, words=())))
    text = ", or ".join(choices)
    for power in (31, 63):  # limits of number types, which nobody reads as digits
        text = text.replace(str(2**power - 1), f"2^{power} - 1")
    return text


def _either(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    try:
        changed = rewrite(Path(__file__).resolve().parents[1])
    except ValueError as error:
        print(f"ddbatch: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"rewritten: {', '.join(changed)}" if changed else "all option tables are up to date")
