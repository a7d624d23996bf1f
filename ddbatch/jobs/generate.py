"""job=generate: prompts from files through the engine into Parquet.

The order of things is the order of what can go wrong: configs, tokenizer and every prompt are read
before a weight is loaded or a file is made.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch

from ddbatch import __version__
from ddbatch.config import Config
from ddbatch.core import (
    CachePlan,
    Completion,
    ExitCode,
    Key,
    Prompt,
    Rejected,
    RunError,
    ShapePlan,
    TokenPrompt,
)
from ddbatch.data.batching import OnLong, PromptEncoder
from ddbatch.data.columns import dump_json
from ddbatch.data.schema import SCHEMA_VERSION, FinishedRow
from ddbatch.data.sink import Sink
from ddbatch.data.source import read_prompts
from ddbatch.engine.engine import Engine
from ddbatch.engine.plan import choose_method, plan_cache, plan_shapes
from ddbatch.jobs.progress import Progress
from ddbatch.jobs.summary import RunFigures, print_summary
from ddbatch.models.dims import (
    DrafterDims,
    DtypeName,
    ModelDims,
    read_drafter_dims,
    read_generation_config,
    read_target_dims,
)
from ddbatch.models.load import check_pair, choose_dtype, load_drafter, load_target, set_numerics

# So many rows in a row with scores that are not finite mean a broken engine or model.
MAX_NAN_ROWS = 8


@dataclass(frozen=True)
class Pair:
    """What is known of target and drafter before their weights are read."""

    target: ModelDims
    drafter: DrafterDims | None
    device: torch.device
    dtype: DtypeName
    stop_token_ids: tuple[int, ...]
    recommended: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """All prompts of the run: those to decode, longest first, and those that cannot run."""

    prompts: dict[Key, Prompt]
    tokens: list[TokenPrompt]
    rejected: list[Rejected]
    max_len: int  # prompt and output tokens of the longest


def run(config: Config) -> int:
    """Generate completions for data.path into output_dir; returns the exit code.

    RunError where the engine is broken or the disk refuses.
    """
    for key, folder in (("model.path", config.model.path), ("drafter.path", config.drafter.path)):
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"{key}={folder}: no such folder (hub ids are not built yet)")
    encoder = PromptEncoder.from_folder(
        Path(config.model.path),
        template=config.data.template,
        chat_template_kwargs=config.data.chat_template_kwargs,
        system_prompt=_system_prompt(config),
    )
    pair = _read_pair(config, encoder)
    work = _read_work(config, encoder, pair)
    plan = _plan_shapes(config, pair, len(work.tokens))
    cache_plan = plan_cache(
        plan.rows,
        max_len=work.max_len,
        page=_auto(config.engine.page),
        device=pair.device.type,
    )
    sink = Sink(
        Path(config.output_dir),
        keep_columns=config.data.keep_columns,
        store=config.output.store,
        part_rows=config.output.part_rows,
        manifest=_manifest(config, pair, plan),
    )
    # Weights are read before the folder is made: a broken checkpoint leaves nothing behind.
    engine = _load_engine(config, pair, plan, cache_plan, work) if work.tokens else None
    figures = RunFigures(rows=len(work.tokens) + len(work.rejected))
    try:
        with sink:
            for rejected in work.rejected:
                sink.reject(rejected)
                figures.rejected[rejected.code] += 1
            if engine is not None:
                _decode(config, encoder, engine, work, sink, figures)
    except KeyboardInterrupt:
        print(
            f"{figures.num_finished} of {figures.rows} rows are in {config.output_dir}; resume is "
            "not built yet: start again in another output_dir",
            file=sys.stderr,
        )
        raise
    print_summary(config, figures, plan, pair.recommended)
    if figures.is_engine_broken:
        raise RunError(
            f"the last {MAX_NAN_ROWS} rows all had scores that are not finite; "
            f"model.path={config.model.path} or model.dtype={pair.dtype} is at fault, not the rows"
        )
    limit, num_rejected = config.output.max_error_rate, figures.rejected.total()
    if num_rejected > limit * figures.rows:
        print(
            f"ddbatch: error: {num_rejected} of {figures.rows} rows were rejected, more than "
            f"output.max_error_rate={limit}; reasons are in {config.output_dir}/rejected",
            file=sys.stderr,
        )
        return ExitCode.TOO_MANY_REJECTED
    return ExitCode.DONE


def _read_pair(config: Config, encoder: PromptEncoder) -> Pair:
    device = _device(config.engine.device)
    folder = Path(config.model.path)
    target = read_target_dims(folder)
    drafter = None
    if config.drafter.path is not None:
        drafter = read_drafter_dims(Path(config.drafter.path))
        check_pair(target, drafter, config.drafter.block)
    advice = read_generation_config(folder)
    eos = {*advice.eos_token_ids, *target.eos_token_ids}
    if encoder.eos_token_id is not None:
        eos.add(encoder.eos_token_id)
    extra = config.sampling.stop_token_ids
    for token_id in extra:
        if token_id >= target.vocab:
            raise ValueError(
                f"sampling.stop_token_ids={extra}: {token_id} is outside the "
                f"vocabulary; allowed: 0..{target.vocab - 1}"
            )
    stops = {*extra} if config.sampling.ignore_eos else {*extra, *eos}
    return Pair(
        target,
        drafter,
        device,
        choose_dtype(config.model.dtype, target, device),
        tuple(sorted(stops)),
        advice.recommended,
    )


def _plan_shapes(config: Config, pair: Pair, num_prompts: int) -> ShapePlan:
    engine = config.engine
    budget = _auto(engine.budget)
    method = choose_method(engine.method, budget, pair.drafter is not None)
    if pair.drafter is None:
        print("drafter.path is not set: plain autoregressive decoding", file=sys.stderr)
    return plan_shapes(
        method,
        budget=budget,
        topk=_auto(engine.topk),
        rows=_auto(engine.rows),
        block=pair.drafter.block if pair.drafter is not None else 1,
        vocab=pair.target.vocab,
        gemm_limit=_auto(engine.gemm_limit),
        device=pair.device.type,
        num_prompts=num_prompts,
    )


def _read_work(config: Config, encoder: PromptEncoder, pair: Pair) -> Work:
    """Read, render and tokenise every prompt; a cap that does not fit the context is lowered."""
    context = pair.target.max_positions
    limit = _auto(config.engine.max_len) or context
    if not 2 <= limit <= context:
        raise ValueError(
            f"engine.max_len={limit}: allowed: 2..{context}, the context of model.path"
        )
    source = read_prompts(
        config.data.path,
        prompt_column=config.data.prompt_column,
        messages_column=config.data.messages_column,
        token_ids_column=config.data.token_ids_column,
        id_column=config.data.id_column,
        keep_columns=config.data.keep_columns,
        limit=config.data.limit,
    )
    prompts: dict[Key, Prompt] = {}
    tokens: list[TokenPrompt] = []
    rejected: list[Rejected] = []
    # A prompt that is cut leaves room for the whole completion, one that fits keeps what it has.
    cut_to = max(1, limit - config.sampling.max_new_tokens)
    for prompt in source:
        encoded = (
            prompt
            if isinstance(prompt, Rejected)
            else encoder.encode(
                prompt,
                vocab_size=pair.target.vocab,
                max_prompt_len=limit - 1,
                cut_to=cut_to,
                on_long=cast(OnLong, config.data.on_long),
            )
        )
        if isinstance(encoded, Rejected):
            rejected.append(encoded)
            continue
        assert isinstance(prompt, Prompt)
        cap = min(config.sampling.max_new_tokens, limit - len(encoded))
        prompts[prompt.key] = prompt
        tokens.append(TokenPrompt(prompt.key, encoded, cap))
    ids = Counter(prompt.user_id for prompt in prompts.values() if prompt.user_id is not None)
    num_repeated = sum(count > 1 for count in ids.values())
    if num_repeated:
        print(
            f"note: {num_repeated} values of data.id_column stand in several rows; rows are told "
            "apart by row_id",
            file=sys.stderr,
        )
    # Longest first: what does not fit shows at once, and the drain at the end is short.
    tokens.sort(key=lambda prompt: (-len(prompt.token_ids), prompt.key))
    longest = max((len(p.token_ids) + p.max_new_tokens for p in tokens), default=1)
    return Work(prompts, tokens, rejected, longest)


def _decode(
    config: Config,
    encoder: PromptEncoder,
    engine: Engine,
    work: Work,
    sink: Sink,
    figures: RunFigures,
) -> None:
    tokens = {prompt.key: prompt for prompt in work.tokens}
    progress, num_nan_rows = Progress(len(work.tokens)), 0
    started = time.monotonic()
    for done in engine.run(iter(work.tokens)):
        prompt = work.prompts[done.key]
        if isinstance(done, Rejected):
            sink.reject(replace(done, user_id=prompt.user_id, raw_json=prompt.raw_json))
            figures.rejected[done.code] += 1
            num_nan_rows += 1
            if num_nan_rows == MAX_NAN_ROWS:
                figures.is_engine_broken = True
                break
            continue
        num_nan_rows = 0
        row = _finished_row(config, encoder, prompt, tokens[done.key], done)
        sink.write(row)
        figures.add(row)
        progress.update(len(done.token_ids), len(done.accepted))
    progress.close()
    figures.seconds = time.monotonic() - started
    figures.stats = engine.stats


def _load_engine(
    config: Config, pair: Pair, plan: ShapePlan, cache_plan: CachePlan, work: Work
) -> Engine:
    set_numerics()
    # Drafted nodes may reach a block beyond the last token.
    num_positions = cache_plan.max_len + plan.block
    target = load_target(
        Path(config.model.path), pair.target, pair.dtype, pair.device, num_positions
    )
    drafter = None
    if plan.nodes > 1:
        assert pair.drafter is not None
        drafter = load_drafter(
            Path(str(config.drafter.path)), pair.drafter, pair.dtype, pair.device, num_positions
        )
    return Engine(
        target,
        drafter,
        plan,
        cache_plan,
        max_new_tokens=max(prompt.max_new_tokens for prompt in work.tokens),
        stop_token_ids=pair.stop_token_ids,
    )


def _finished_row(
    config: Config, encoder: PromptEncoder, prompt: Prompt, tokens: TokenPrompt, done: Completion
) -> FinishedRow:
    """Text ends before the stop token, whether it is a special one or not."""
    is_stop = done.finish_reason == "stop"
    visible = done.token_ids[:-1] if is_stop else done.token_ids
    stop_reason = str(done.stop_token_id) if is_stop else None
    if not is_stop and tokens.max_new_tokens < config.sampling.max_new_tokens:
        stop_reason = "context"
    return FinishedRow(
        prompt=prompt,
        conversation_json=None
        if prompt.token_ids is not None
        else dump_json(encoder.conversation(prompt)),
        prompt_token_ids=tokens.token_ids,
        completion=done,
        text=encoder.decode(visible, skip_special_tokens=config.output.skip_special_tokens),
        stop_reason=stop_reason,
        max_new_tokens=tokens.max_new_tokens,
        seed=config.sampling.seed,
    )


def _manifest(config: Config, pair: Pair, plan: ShapePlan) -> str:
    """The run in JSON: versions, options (paths by their last name only), what auto became."""
    options = asdict(config)
    del options["output_dir"]
    for group in ("model", "drafter", "data"):
        path = options[group]["path"]
        options[group]["path"] = None if path is None else Path(path).name
    for group, key in (("data", "system_prompt_file"), ("data", "template")):
        if options[group][key] not in (None, "auto", "none"):
            options[group][key] = Path(options[group][key]).name
    return json.dumps(
        {
            "ddbatch": __version__,
            "schema_version": SCHEMA_VERSION,
            "config": options,
            "dtype": pair.dtype,
            "device": pair.device.type,
            "stop_token_ids": pair.stop_token_ids,
            "plan": asdict(plan),
            "torch": torch.__version__,
        },
        indent=1,
    )


def _system_prompt(config: Config) -> str | None:
    if config.data.system_prompt_file is None:
        return config.data.system_prompt
    file = Path(config.data.system_prompt_file)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.system_prompt_file={file}: {error}; allowed: a UTF-8 text file"
        ) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"engine.device={name}: this machine has {torch.cuda.device_count()} CUDA "
            "devices; allowed: auto, cpu, cuda, cuda:N of an existing device"
        )
    return device


def _auto(value: int | str | None) -> int | None:
    """None where an option is left to the planner; checks.py lets no other word through."""
    return value if isinstance(value, int) else None
