"""The engine as job=generate uses it: options become a pair, a plan and a state that can grow.

Everything that can be refused is refused in `open_pair`, before a weight is read. Knows nothing
about text, files of prompts or parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from ddbatch.config import Config
from ddbatch.core import Completion, Rejected, RunError, ShapePlan, StopFinder, TokenPrompt
from ddbatch.engine.engine import Engine, EngineStats
from ddbatch.engine.numerics import Numerics, measure_numerics
from ddbatch.engine.plan import AUTO_PAGE_CUDA, Method, choose_method, plan_cache, plan_shapes
from ddbatch.jobs.generating.decoder import DecoderFigures
from ddbatch.jobs.generating.sampling_options import check_ids
from ddbatch.jobs.reading import check_model_folder
from ddbatch.jobs.show import say
from ddbatch.models.decoder import Target
from ddbatch.models.decoder_config import read_generation_config
from ddbatch.models.dflash import DFlash, read_drafter_dims
from ddbatch.models.dims import DrafterDims, DtypeName, ModelDims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import check_pair, choose_dtype, load_drafter, load_target, set_numerics


def open_pair(config: Config, eos_token_id: int | None) -> EnginePair:
    """Read the configs of target and drafter; eos_token_id: the tokenizer's own."""
    device = _device(config.engine.device)
    folder = Path(config.model.path)
    target = read_target_dims(folder)
    drafter = None
    if config.drafter.path is not None:
        check_model_folder("drafter.path", config.drafter.path)
        drafter = read_drafter_dims(Path(config.drafter.path))
        check_pair(target, drafter, config.drafter.block)
    advice = read_generation_config(folder)
    eos = {*advice.eos_token_ids, *target.eos_token_ids}
    if eos_token_id is not None:
        eos.add(eos_token_id)
    check_ids(config, target.vocab)
    pair = EnginePair(
        config=config,
        target=target,
        drafter=drafter,
        device=device,
        dtype=choose_dtype(config.model.dtype, target, device),
        method=choose_method(
            config.engine.method, _auto(config.engine.budget), drafter is not None
        ),
        eos_token_ids=tuple(sorted(eos)),
        recommended=advice.recommended,
    )
    pair.plan(None)  # a plan above a limit is refused now
    if drafter is None:
        say("drafter.path is not set: plain autoregressive decoding")
    return pair


@dataclass(frozen=True)
class EnginePair:
    """Target and drafter before their weights are read (the protocol Pair)."""

    config: Config
    target: ModelDims
    drafter: DrafterDims | None
    device: torch.device
    dtype: DtypeName
    method: Method
    eos_token_ids: tuple[int, ...]
    recommended: tuple[str, ...]

    @property
    def vocab(self) -> int:
        """Token ids are 0..vocab - 1."""
        return self.target.vocab

    @property
    def context(self) -> int:
        """Tokens that the target can see."""
        return self.target.max_positions

    @property
    def about(self) -> dict[str, object]:
        """Device, method and versions."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "device": name,
            "dtype": self.dtype,
            "method": self.method,
            "plan": asdict(self.plan(None)),
            "torch": torch.__version__,
        }

    @property
    def top_logprobs(self) -> int | None:
        """How many of the best tokens are told beside the emitted one; None = no log-probs."""
        sampling = self.config.sampling
        return sampling.top_logprobs if sampling.logprobs else None

    def plan(self, num_rows: int | None) -> ShapePlan:
        """Shapes of a round for so many rows to decode (None: many)."""
        engine = self.config.engine
        return plan_shapes(
            self.method,
            budget=_auto(engine.budget),
            topk=_auto(engine.topk),
            rows=_auto(engine.rows),
            block=1 if self.drafter is None else self.drafter.block,
            vocab=self.target.vocab,
            gemm_limit=_auto(engine.gemm_limit),
            device=self.device.type,
            num_prompts=num_rows,
        )

    def load(self, num_rows: int, finder: StopFinder) -> EngineDecoder:
        """Read the weights."""
        set_numerics()
        plan = self.plan(num_rows)
        limit = _auto(self.config.engine.max_len) or self.context
        page = _auto(self.config.engine.page)
        # Caches hold whole pages, and drafted nodes may reach a block beyond the last token.
        num_positions = limit + (page or AUTO_PAGE_CUDA) + plan.block
        target = load_target(
            Path(self.config.model.path), self.target, self.dtype, self.device, num_positions
        )
        drafter = None
        if plan.nodes > 1:
            assert self.drafter is not None
            path = Path(str(self.config.drafter.path))
            drafter = load_drafter(path, self.drafter, self.dtype, self.device, num_positions)
        numerics = None
        if self.dtype != "float32":
            # Not the plan in force: where few rows are left it would take a batch a canary.
            numerics = measure_numerics(target, drafter, self.plan(None))
            if not numerics.is_sound:
                say(f"note: {numerics}")
        return EngineDecoder(
            target,
            drafter,
            plan,
            numerics,
            page=page,
            finder=finder,
            top_logprobs=self.top_logprobs,
        )


class EngineDecoder:
    """An engine whose state is made anew for longer sequences (the protocol Decoder)."""

    def __init__(
        self,
        target: Target,
        drafter: DFlash | None,
        plan: ShapePlan,
        numerics: Numerics | None,
        *,
        page: int | None,
        finder: StopFinder,
        top_logprobs: int | None,
    ) -> None:
        self._target, self._drafter, self._plan = target, drafter, plan
        self._numerics = numerics
        self._page, self._finder, self._top_logprobs = page, finder, top_logprobs
        self._engine: Engine | None = None
        self._max_len = self._max_new_tokens = 0
        self._past = EngineStats()  # of the states before this one

    @property
    def plan(self) -> ShapePlan:
        """Shapes of a round."""
        return self._plan

    @property
    def about(self) -> dict[str, object]:
        """The score errors of the model's dtype (engine/numerics.py); float32 has none."""
        return {} if self._numerics is None else {"numerics": asdict(self._numerics)}

    @property
    def max_len(self) -> int:
        """Prompt and output tokens that a sequence may have."""
        return self._max_len

    @property
    def max_new_tokens(self) -> int:
        """Output tokens that a sequence may have."""
        return self._max_new_tokens

    def grow(self, *, max_len: int, max_new_tokens: int) -> None:
        """Replace the empty state by a larger one; the weights stay."""
        assert not self.is_busy
        self._past = self._stats()
        self._engine = None  # its memory first
        try:
            self._engine = self._new_engine(max_len, max_new_tokens)
        except RuntimeError as error:  # a CPU's has no class of its own
            if not re.search("allocate memory|out of memory", str(error)):
                raise
            raise RunError(
                f"engine.rows={self._plan.rows}: no memory for so many rows with room for "
                f"{max_len} tokens each ({str(error).splitlines()[0]}); choose fewer rows or a "
                "smaller engine.max_len"
            ) from error
        self._max_len, self._max_new_tokens = max_len, max_new_tokens

    def _new_engine(self, max_len: int, max_new_tokens: int) -> Engine:
        return Engine(
            self._target,
            self._drafter,
            self._plan,
            plan_cache(
                self._plan.rows,
                max_len=max_len,
                page=self._page,
                device=self._target.embed.device.type,
            ),
            max_new_tokens=max_new_tokens,
            finder=self._finder,
            top_logprobs=self._top_logprobs,
        )

    def fill(self, prompts: Iterator[TokenPrompt]) -> None:
        """Take prompts while there are free slots."""
        if self._engine is not None:
            self._engine.fill(prompts)

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is in flight or waits for pages."""
        return self._engine is not None and self._engine.is_busy

    def step(self) -> None:
        """Run one round."""
        assert self._engine is not None
        self._engine.step()

    def collect(self) -> Iterator[Completion | Rejected]:
        """Hand out what has finished."""
        assert self._engine is not None
        return self._engine.collect()

    @property
    def figures(self) -> DecoderFigures:
        """Counters over all states."""
        stats = self._stats()
        return DecoderFigures(
            stats.rounds, stats.row_rounds, stats.live_row_rounds, stats.output_tokens
        )

    def _stats(self) -> EngineStats:
        now = EngineStats() if self._engine is None else self._engine.stats
        return EngineStats(
            *(getattr(self._past, f.name) + getattr(now, f.name) for f in fields(EngineStats))
        )


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
