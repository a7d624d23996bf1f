"""Run the engine on a pair in a test: shapes by name, results in the order of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import pytest
import torch

from ddbatch.core import (
    Completion,
    Key,
    PrefillPlan,
    Rejected,
    Sampling,
    StopFinder,
    StopMatch,
    TokenPrompt,
)
from ddbatch.engine.engine import Engine
from ddbatch.engine.plan import choose_methods, plan_cache, plan_shapes
from ddbatch.engine.programs import GraphPool
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

GREEDY = Sampling()
# Where an engine is tried: as parameters of a fixture.
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
CAP = 20


def make_engine(
    target: Target,
    drafter: DFlash | None,
    *,
    method: str = "ddtree",
    budget: int | None = 7,
    topk: int | None = None,
    block: int | None = None,
    rows: int = 3,
    max_len: int = 96,
    page: int | None = None,
    pages: int | None = None,
    prefill_plan: PrefillPlan | None = None,
    is_captured: bool = True,
    finder: StopFinder | None = None,
    top_logprobs: int | None = None,
) -> Engine:
    """An engine for this method, captured on a GPU; the drafter is left out where the method needs
    none."""
    device = target.embed.device.type
    name = choose_methods(method, budget, drafter is not None)[0]
    plan = plan_shapes(
        name,
        budget=budget,
        topk=topk,
        rows=rows,
        block=block or (drafter.dims.block if drafter else 1),
        vocab=target.dims.vocab,
        gemm_limit=None,
    )
    cache_plan = plan_cache(rows, max_len=max_len, page=page, device=device)
    if pages is not None:  # fewer than the slots could fill
        cache_plan = replace(cache_plan, pages=pages)
    return Engine(
        target,
        drafter if plan.nodes > 1 else None,
        plan,
        cache_plan,
        prefill_plan=prefill_plan,
        pool=GraphPool() if is_captured and device == "cuda" else None,
        finder=finder,
        top_logprobs=top_logprobs,
    )


def token_prompts(
    prompts: Sequence[Sequence[int]],
    caps: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling] = GREEDY,
) -> list[TokenPrompt]:
    """Prompts with row_id = place; caps and sampling: one for all, or one each."""
    each = [caps] * len(prompts) if isinstance(caps, int) else caps
    own = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    return [
        TokenPrompt(Key(place, 0, 0), tuple(ids), cap, options)
        for place, (ids, cap, options) in enumerate(zip(prompts, each, own, strict=True))
    ]


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    caps: int | Sequence[int] = CAP,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
) -> list[Completion]:
    """Completions in the order of the prompts."""
    return run_all(engine, token_prompts(prompts, caps, sampling))


def run_all(engine: Engine, prompts: Sequence[TokenPrompt]) -> list[Completion]:
    """Completions of all prompts, by key; none may be rejected."""
    done = list(engine.run(iter(prompts)))
    assert not any(isinstance(item, Rejected) for item in done), done
    return sorted((item for item in done if isinstance(item, Completion)), key=lambda c: c.key)


class NoStops:
    """A StopFinder for prompts without stop strings."""

    def flagged(self, stop: tuple[str, ...]) -> Sequence[int]:
        return ()

    def watch(self, stop: tuple[str, ...]) -> Callable[[Sequence[int]], StopMatch | None]:
        raise AssertionError(stop)


class Driver(Protocol):
    """An engine, or what stands around one."""

    def fill(self, prompts: Iterator[TokenPrompt]) -> None: ...

    @property
    def is_busy(self) -> bool: ...

    def step(self) -> None: ...

    def collect(self) -> Iterator[Completion | Rejected]: ...


def drive(
    driver: Driver,
    prompts: Sequence[TokenPrompt],
    look: Callable[[], object] = lambda: None,
    see: Callable[[Completion], object] = lambda done: None,
) -> list[Completion]:
    """Completions of all prompts, by key; none may be rejected. look: before every round, see: what
    has ended."""
    waiting, done = iter(prompts), list[Completion]()
    while True:
        driver.fill(waiting)
        if not driver.is_busy:
            break
        look()
        driver.step()
        for item in driver.collect():
            assert isinstance(item, Completion), item
            see(item)
            done.append(item)
    assert len(done) == len(prompts)
    return sorted(done, key=lambda item: item.key)


def random_prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
