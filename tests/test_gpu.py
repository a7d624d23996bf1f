"""The engine on a CUDA device with plain PyTorch ops: what the CPU tests say holds there too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoding import decode, make_engine, random_prompts
from tiny import write_drafter, write_target

from ddbatch.engine import oracle, oracle_ddtree
from ddbatch.models.dflash import DFlash
from ddbatch.models.dims import read_drafter_dims, read_target_dims
from ddbatch.models.llama import Llama
from ddbatch.models.load import load_drafter, load_target, set_numerics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCAB = 13
LENGTHS = (1, 9, 4, 17, 2, 30, 5)
Pair = tuple[Llama, DFlash]


def load_pair(folder: Path, dtype: str) -> Pair:
    """The tiny pair of the CPU tests, on the GPU."""
    set_numerics()
    device = torch.device("cuda")
    target = write_target(folder / "target", vocab=VOCAB)
    drafter = write_drafter(folder / "drafter", target_folder=target, block=5)
    return (
        load_target(target, read_target_dims(target), dtype, device, 600),
        load_drafter(drafter, read_drafter_dims(drafter), dtype, device, 600),
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_pair(tmp_path_factory.mktemp("pair"), "float32")


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("page", [None, 3])
@pytest.mark.parametrize(
    ("method", "budget"),
    [("autoregressive", None), ("chain", None), ("ddtree", 1), ("ddtree", 7), ("ddtree", 33)],
)
def test_every_method_says_what_plain_decoding_says_on_a_gpu(
    pair: Pair, method: str, budget: int | None, page: int | None, rows: int
) -> None:
    engine = make_engine(*pair, method=method, budget=budget, rows=rows, page=page)
    prompts = random_prompts(LENGTHS, VOCAB)
    for prompt, done in zip(prompts, decode(engine, prompts), strict=True):
        steps = oracle.decode(pair[0], tuple(prompt), max_new_tokens=20, stop_token_ids=())
        assert min(step.gap for step in steps) > 1e-4
        assert done.token_ids == tuple(step.token_id for step in steps)
        if method != "autoregressive":
            rounds = oracle_ddtree.trace(
                *pair,
                tuple(prompt),
                done.token_ids,
                budget=engine.plan.nodes - 1,
                topk=engine.plan.topk,
            )
            assert done.accepted == tuple(len(r.accepted_nodes) - 1 for r in rounds)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_parts_from_the_oracle_at_near_ties_only(tmp_path: Path, dtype: str) -> None:
    pair = load_pair(tmp_path, dtype)
    prompts = random_prompts(LENGTHS, VOCAB)
    for prompt, done in zip(prompts, decode(make_engine(*pair), prompts), strict=True):
        steps = oracle.decode(pair[0], tuple(prompt), max_new_tokens=20, stop_token_ids=())
        for token_id, step in zip(done.token_ids, steps, strict=True):
            if token_id != step.token_id:
                # Scores spread by about 2.5; half precision keeps 8 bits of them.
                assert step.gap < 0.15
                break
