"""The gate on a CUDA device: captured engines pass, and a graph that reads what it should not does
not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RealPair
from decoding import decode, make_engine, random_prompts
from tiny import write_drafter, write_target
from torch import Tensor

import ddbatch.engine.verify as verify_module
from ddbatch.core import Sampling
from ddbatch.engine.engine import Engine
from ddbatch.engine.gate import judge
from ddbatch.engine.numerics import FLOAT32_GAP, measure_numerics
from ddbatch.engine.programs import CapturedPrograms
from ddbatch.engine.sampling import draw_kind
from ddbatch.engine.state import RoundState
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash, read_drafter_dims
from ddbatch.models.dims import DtypeName
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import load_drafter, load_target, set_numerics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCAB = 29
HOT = Sampling(temperature=0.8, top_k=9, seed=5)
Pair = tuple[Target, DFlash]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_target(folder / "target", vocab=VOCAB, head_width=16, scale=1.0)
    write_drafter(folder / "drafter", target_folder=folder / "target", block=6, head_width=16)
    return folder


def load_pair(target: Path, drafter: Path, dtype: DtypeName, num_positions: int) -> Pair:
    set_numerics()
    device = torch.device("cuda")
    return (
        load_target(target, read_target_dims(target), dtype, device, num_positions),
        load_drafter(drafter, read_drafter_dims(drafter), dtype, device, num_positions),
    )


def load(folder: Path, dtype: DtypeName) -> Pair:
    return load_pair(folder / "target", folder / "drafter", dtype, 600)


def gap_of(engine: Engine) -> float:
    if engine.target.embed.dtype == torch.float32:
        return FLOAT32_GAP
    return measure_numerics(engine.target, engine.drafter, engine.plan).gap


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("method", "budget", "rows", "page"),
    [
        ("autoregressive", 0, 3, None),
        ("chain", None, 2, None),
        ("ddtree", 7, 1, 3),
        ("ddtree", 16, 7, None),
        ("ddtree", 33, 3, 64),
    ],
)
@pytest.mark.parametrize("own", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_a_sound_captured_engine_passes_and_holds_every_graph_that_it_needs(
    folder: Path,
    dtype: DtypeName,
    method: str,
    budget: int,
    rows: int,
    page: int | None,
    own: Sampling,
) -> None:
    pair = load(folder, dtype)
    options: dict[str, Any] = {"method": method, "budget": budget, "rows": rows, "page": page}
    engine = make_engine(*pair, max_len=400, **options)
    verdict = judge(engine, sampling=[own], gap=gap_of(engine))
    assert verdict.reason == ""
    assert isinstance(engine.programs, CapturedPrograms)
    graphs = {"round": engine.programs._rounds, "prefill": engine.programs._calls}
    held = {(program, *name.shape) for program, names in graphs.items() for name in names}
    kind = draw_kind([own])
    assert held >= {
        (program, count, kind)
        for program in ("round", "prefill")
        for count in engine.cache_plan.key_counts
    }
    num_graphs = engine.programs.num_graphs
    prompts = random_prompts([1, 64, 300, 7, 129, 65, 380], VOCAB)
    ours = decode(engine, prompts, sampling=own)
    eager = make_engine(*pair, max_len=400, is_captured=False, **options)
    alone = decode(eager, prompts, sampling=own)
    assert [(c.token_ids, c.accepted) for c in ours] == [(c.token_ids, c.accepted) for c in alone]
    assert engine.programs.num_graphs == num_graphs


@pytest.mark.parametrize("method", ["autoregressive", "ddtree"])
def test_positions_that_stay_as_captured_are_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The graph reads a tensor that was made for its first run and that nobody writes again."""
    original = Target.forward
    kept: dict[int, Tensor] = {}

    def forward(self: Target, token_T: Tensor, pos_T: Tensor, *rest: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            pos_T = kept[len(pos_T)]
        else:
            kept.setdefault(len(pos_T), pos_T.clone())
        return original(self, token_T, pos_T, *rest)

    monkeypatch.setattr(Target, "forward", forward)
    engine = make_engine(*load(folder, "float32"), method=method)
    verdict = judge(engine, sampling=[], gap=FLOAT32_GAP)
    assert verdict.reason.startswith("captured == eager: ")


def test_a_mask_that_stays_as_captured_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = verify_module.row_keys
    kept: list[Tensor] = []

    def row_keys(state: RoundState, pos: Tensor, own_BNW: Tensor, *args: Any, **own: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return original(state, pos, kept[0], *args, **own)
        kept.append(own_BNW.clone())
        return original(state, pos, own_BNW, *args, **own)

    monkeypatch.setattr(verify_module, "row_keys", row_keys)
    engine = make_engine(*load(folder, "float32"), budget=16)
    verdict = judge(engine, sampling=[], gap=FLOAT32_GAP)
    assert verdict.reason.startswith("captured == eager: a round ")


@pytest.mark.shared
@pytest.mark.parametrize(
    ("dtype", "budget", "rows", "max_len"),
    [("float32", 16, 8, 512), ("bfloat16", 16, 128, 2048), ("bfloat16", 33, 3, 4224)],
)
def test_a_real_pair_passes(
    real_pair: RealPair, dtype: DtypeName, budget: int, rows: int, max_len: int
) -> None:
    pair = load_pair(real_pair.target, real_pair.drafter, dtype, max_len + 64)
    engine = make_engine(*pair, budget=budget, rows=rows, max_len=max_len)
    verdict = judge(engine, sampling=[Sampling(temperature=1.0)], gap=gap_of(engine))
    print(f"{dtype}, {rows} rows, budget {budget}: {verdict.seconds:.1f} s, {verdict.checks}")
    assert verdict.reason == ""
    assert verdict.seconds < 70
