"""Options become a pair, a plan and, once the weights are read, a decoder (serving.py).

Everything that can be refused is refused in `open_pair`, before a weight is read. Knows nothing
about text, files of prompts or parts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch

from ddbatch import __version__
from ddbatch.config import Config
from ddbatch.core import StopFinder
from ddbatch.data.fingerprint import hash_weights
from ddbatch.engine.curves import AcceptanceCurve, AcceptanceDict
from ddbatch.engine.limits import GemmLimit
from ddbatch.engine.numerics import measure_numerics
from ddbatch.engine.plan import AUTO_PAGE_CUDA, Method, auto_rows, choose_methods
from ddbatch.engine.sampling import DrawKind, draw_kind
from ddbatch.jobs.generating.making import ServeOptions
from ddbatch.jobs.generating.planning import Wish
from ddbatch.jobs.generating.sampling_options import check_ids, run_sampling
from ddbatch.jobs.generating.serving import EngineDecoder
from ddbatch.jobs.generating.trials import Trials
from ddbatch.jobs.probing.answers import facts_of, limit_of
from ddbatch.jobs.reading import check_model_folder
from ddbatch.jobs.show import say
from ddbatch.models.decoder_config import read_generation_config
from ddbatch.models.dflash import read_drafter_dims
from ddbatch.models.dims import DrafterDims, DtypeName, ModelDims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import check_pair, choose_dtype, load_drafter, load_target, set_numerics


def open_pair(config: Config, eos_token_id: int | None) -> EnginePair:
    """Read the configs of target and drafter; eos_token_id: the tokenizer's own."""
    device = choose_device(config.engine.device)
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
    dtype = choose_dtype(config.model.dtype, target, device)
    about = facts_of(target, dtype, device, in_order=config.engine.reproducible)
    pair = EnginePair(
        config=config,
        target=target,
        drafter=drafter,
        device=device,
        dtype=dtype,
        limit=limit_of(config.engine.gemm_limit, about),
        methods=choose_methods(
            config.engine.method, asked(config.engine.budget), drafter is not None
        ),
        eos_token_ids=tuple(sorted(eos)),
        recommended=advice.recommended,
    )
    pair.check_limit()
    check_device_options(config, device)
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
    limit: GemmLimit | None
    methods: tuple[Method, ...]
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
        wish = self.wish(None)
        return {
            "device": name,
            "dtype": self.dtype,
            "method": self.methods[0] if len(self.methods) == 1 else "auto",
            "plan": "auto" if wish.is_measured else asdict(wish.shape(wish.rows)),
            "reproducible": self.config.engine.reproducible,
            "torch": torch.__version__,
        }

    def wish(self, num_rows: int | None) -> Wish:
        """What the options ask for, for so many rows to decode (None: many)."""
        engine = self.config.engine
        is_captured = self.device.type == "cuda" and engine.capture in ("auto", True)
        # One plan for the run where bits must not depend on it.
        has_ladder = is_captured and not engine.reproducible
        rows = asked(engine.rows)
        wish = Wish(
            methods=self.methods,
            budget=asked(engine.budget),
            topk=asked(engine.topk),
            rows=rows or auto_rows(self.device.type, num_rows, has_ladder=has_ladder),
            block=1 if self.drafter is None else self.drafter.block,
            vocab=self.target.vocab,
            limit=self.limit,
            device=self.device.type,
            has_ladder=has_ladder,
        )
        return wish if rows else wish.fitted()

    def check_limit(self) -> None:
        """Refuse rows and a budget that are above the GEMM limit; say where others are lowered."""
        wish, free = self.wish(None), replace(self, limit=None).wish(None)
        wish.check()
        if wish.shape(wish.rows) != free.shape(free.rows):
            say(f"note: the plan is lowered to {self.limit}")

    @property
    def serve_options(self) -> ServeOptions:
        """How the engine serves."""
        config, engine = self.config, self.config.engine
        sampling = run_sampling(config)
        return ServeOptions(
            page=asked(engine.page),
            is_captured=self.device.type == "cuda" and engine.capture in ("auto", True),
            is_gated=engine.gate and self.device.type == "cuda",
            may_fall_back=engine.on_gate_failure == "fallback",
            audit_rate=engine.audit_rate,
            top_logprobs=config.sampling.top_logprobs if config.sampling.logprobs else None,
            sampling=sampling,
            # Rows that choose their own sampling may choose any.
            least_draw=DrawKind.FILTERED if config.data.sampling_column else draw_kind([sampling]),
        )

    def _fingerprint(self) -> dict[str, object]:
        """What a verdict on a plan depends on beside the plan."""
        folders = {"target": self.config.model.path, "drafter": self.config.drafter.path}
        weights = {
            name: None if folder is None else hash_weights(Path(folder), "fast")
            for name, folder in folders.items()
        }
        return {**self.about, **weights, "ddbatch": __version__, "plan": None}

    def load(self, num_rows: int, finder: StopFinder, trials: Trials) -> EngineDecoder:
        """Read the weights."""
        set_numerics()
        wish = self.wish(num_rows)
        plan = wish.shape(wish.rows)
        limit = asked(self.config.engine.max_len) or self.context
        # Caches hold whole pages, and drafted nodes may reach a block beyond the last token.
        num_positions = limit + (asked(self.config.engine.page) or AUTO_PAGE_CUDA) + plan.block
        target = load_target(
            Path(self.config.model.path),
            self.target,
            self.dtype,
            self.device,
            num_positions,
            in_order=self.config.engine.reproducible,
        )
        drafter = None
        if plan.nodes > 1:  # where nothing is measured; what may be measured drafts too
            assert self.drafter is not None
            path = Path(str(self.config.drafter.path))
            drafter = load_drafter(path, self.drafter, self.dtype, self.device, num_positions)
        numerics = None
        if self.dtype != "float32":
            # Not the plan in force: where few rows are left it would take a batch a canary.
            many = self.wish(None)
            numerics = measure_numerics(target, drafter, many.shape(many.rows))
            if not numerics.is_sound:
                say(f"note: {numerics}")
        return EngineDecoder(
            target,
            drafter,
            wish,
            num_rows,
            numerics,
            finder,
            trials,
            self.serve_options,
            self._fingerprint(),
            acceptance_before(trials),
        )


def acceptance_before(trials: Trials) -> AcceptanceCurve | None:
    """What the last attempt that noted it saw of this run's text; None too where that is another
    version's note, which may tell of other shapes."""
    match trials.found_before("planner"):
        case {"acceptance": {"counts": [*counts]} as told} if all(map(_is_count, counts)):
            return AcceptanceCurve.from_dict(cast(AcceptanceDict, told))
    return None


def _is_count(told: object) -> bool:
    """Whether it is a shape with its row-rounds and tokens."""
    match told:
        case [[int(), int(), int(), int(), int()], [float() | int() as row_rounds, emitted]]:
            return isinstance(emitted, float | int) and 0 < row_rounds <= emitted
    return False


def check_device_options(config: Config, device: torch.device) -> None:
    """Refuse what a CPU has no graphs and no kernels for."""
    if config.engine.capture is True and device.type == "cpu":
        raise ValueError(
            "engine.capture=true: CUDA graphs need a CUDA device, and the run decodes on the CPU; "
            "allowed: auto, false"
        )
    if config.engine.reproducible and device.type == "cpu":
        raise ValueError(
            "engine.reproducible=true: sums are kept in order by kernels of a CUDA device, and the "
            "run decodes on the CPU; allowed: false"
        )


def choose_device(name: str) -> torch.device:
    """What engine.device means on this machine; ValueError where there is no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"engine.device={name}: this machine has {torch.cuda.device_count()} CUDA "
            "devices; allowed: auto, cpu, cuda, cuda:N of an existing device"
        )
    return device


def asked(value: int | str | None) -> int | None:
    """None where an option is left to the planner; checks.py lets no other word through."""
    return value if isinstance(value, int) else None
