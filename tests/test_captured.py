"""The captured round on a GPU: the eager one bit for bit, whatever else is in the batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from decoding import make_engine, random_prompts, run_all, token_prompts
from test_gpu import MIXED, VOCAB, Even, Pair, load_pair

from ddbatch.core import Completion, Sampling, TokenPrompt
from ddbatch.engine.audit import Auditor
from ddbatch.engine.engine import Engine
from ddbatch.engine.numerics import find_partings, measure_numerics
from ddbatch.engine.programs import CapturedPrograms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ARMS = [("autoregressive", None), ("chain", None), ("ddtree", 7), ("ddtree", 33)]
HOT = Sampling(temperature=1.0, top_p=0.95)
# Wide enough for the attention backend that real heads take.
SIZES = {"head_width": 32, "width": 64, "mlp_width": 96, "max_positions": 1024}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_pair(tmp_path_factory.mktemp("pair"), request.param, **SIZES)


class Bits(NamedTuple):
    """What must not change with the batch: tokens, rounds and the log-probs to the last bit."""

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    depth: tuple[int, ...]
    logprobs: tuple[float, ...]


def bits(done: Completion) -> Bits:
    assert done.logprobs is not None
    return Bits(done.token_ids, done.accepted, done.depth, tuple(done.logprobs.token))


def skewed(count: int, seed: int = 0, longest: int = 300) -> list[int]:
    """Many short lengths, few long ones."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(count, generator=generator)
    return [1 + int(longest * value**4) for value in drawn.tolist()]


@pytest.mark.parametrize(("method", "budget"), ARMS)
def test_captured_rounds_are_the_eager_ones_bit_for_bit(
    pair: Pair, method: str, budget: int | None
) -> None:
    """Draws, filters, log-probs, stop ids and stop strings among them, with refills."""
    prompts = token_prompts(random_prompts(skewed(21), VOCAB), 24, [*MIXED, *MIXED, *MIXED])
    found = []
    for is_captured in (True, False):
        engine = make_engine(
            *pair,
            method=method,
            budget=budget,
            rows=5,
            max_len=384,
            finder=Even(),
            top_logprobs=3,
            is_captured=is_captured,
        )
        found.append(run_all(engine, prompts))
    for captured, eager in zip(*found, strict=True):
        assert bits(captured) == bits(eager)
        assert captured.logprobs == eager.logprobs
        assert captured.stop_string == eager.stop_string


@pytest.mark.parametrize("own", [Sampling(), HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize(("method", "budget"), [("autoregressive", None), ("ddtree", 16)])
def test_a_row_alone_is_the_row_among_2_3_and_64(
    pair: Pair, method: str, budget: int | None, own: Sampling
) -> None:
    """Within a plan (64 rows): other neighbours, another row, slot and order of refill."""
    engine = make_engine(*pair, method=method, budget=budget, rows=64, max_len=384, top_logprobs=0)
    prompts = token_prompts(random_prompts(skewed(64, seed=1), VOCAB), 24, own)
    together = [bits(done) for done in run_all(engine, prompts)]
    for count in (1, 2, 3):
        for first in (0, 17, 61):
            few = prompts[first : first + count]
            assert [bits(done) for done in run_all(engine, few)] == together[first : first + count]
    again = run_all(engine, [*reversed(prompts), *prompts[:9]][:64])
    assert [bits(done) for done in again] == together


def test_a_slot_that_had_a_long_sequence_is_as_good_as_a_fresh_one(pair: Pair) -> None:
    long, short = random_prompts([340, 3], VOCAB, seed=5)
    engine = make_engine(*pair, rows=1, max_len=384, top_logprobs=0)
    (fresh,) = run_all(
        make_engine(*pair, rows=1, max_len=384, top_logprobs=0), token_prompts([short], 20)
    )
    for order in ([long, short, long, short], [short, short, long, short]):
        assert bits(run_all(engine, token_prompts(order, 20))[-1]) == bits(fresh)


@pytest.mark.parametrize("width", [9, 17, 33])
def test_every_prompt_length_up_to_300_says_what_the_oracle_says(pair: Pair, width: int) -> None:
    target = pair[0]
    engine = make_engine(*pair, budget=width - 1, rows=32, max_len=320)
    gap = measure_numerics(*pair, engine.plan).gap
    prompts = token_prompts(random_prompts(range(1, 301), VOCAB), 20)
    for prompt, done in zip(prompts, run_all(engine, prompts), strict=True):
        for parting in find_partings(target, prompt, done.token_ids):
            assert parting.slack <= gap, (len(prompt.token_ids), parting)


def test_2000_prompts_of_skewed_lengths_are_audited_and_rows_are_useful(pair: Pair) -> None:
    engine = make_engine(*pair, budget=16, rows=32, max_len=384)
    gap = measure_numerics(*pair, engine.plan).gap
    auditor = Auditor(pair[0], rate=1.0, gap=gap)
    caps = [1 + cap // 10 for cap in skewed(2000, seed=3, longest=600)]
    prompts = token_prompts(random_prompts(skewed(2000, seed=2), VOCAB), caps, HOT)
    waiting = WhileWaiting(engine, prompts)
    done = [item for item in engine.run(waiting.prompts()) if isinstance(item, Completion)]
    assert sorted(item.key.row_id for item in done) == list(range(2000))
    for item in done:
        auditor.see(prompts[item.key.row_id], item)
    assert auditor.figures.rows == 2000
    assert waiting.useful >= 0.97


class WhileWaiting:
    """How much of the row-rounds was useful up to the moment when no prompt was left."""

    def __init__(self, engine: Engine, prompts: list[TokenPrompt]) -> None:
        self._engine, self._prompts = engine, prompts
        self.useful = 0.0

    def prompts(self) -> Iterator[TokenPrompt]:
        yield from self._prompts
        stats = self._engine.stats
        read = stats.rounds - 1  # the last launched round is not read yet
        self.useful = stats.live_row_rounds / (read * self._engine.plan.rows)


def test_the_loop_waits_for_nothing_but_the_record_of_the_round_before(pair: Pair) -> None:
    """No call of the loop synchronizes the device: PyTorch raises where one would."""
    engine = make_engine(*pair, rows=4, max_len=384, finder=Even(), top_logprobs=2)
    prompts = token_prompts(random_prompts(skewed(40), VOCAB), 24, [*MIXED * 6][:40])
    run_all(engine, prompts)  # all shapes are captured now
    torch.cuda.set_sync_debug_mode("error")
    try:
        done = run_all(engine, prompts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(done) == 40


def test_what_the_host_reads_lies_outside_the_graphs_memory(pair: Pair) -> None:
    """Graphs of all shapes share one pool, and a replay may use what another left there."""
    engine = make_engine(*pair, rows=3, max_len=384)
    run_all(engine, token_prompts(random_prompts(skewed(20), VOCAB), 20))
    assert isinstance(engine.programs, CapturedPrograms)
    assert engine.programs.num_graphs >= 2
    pooled = [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] != (0, 0)
    ]
    assert pooled
    weights = [*pair[0].named_parameters(), *pair[1].named_parameters()]
    for name, tensor in [*engine.state.tensors(), *weights]:
        assert not any(tensor.data_ptr() in memory for memory in pooled), name


def test_a_pool_outlives_its_graphs(pair: Pair) -> None:
    """An engine makes way for a larger one: all its graphs go before the next are captured."""
    prompts = token_prompts(random_prompts(skewed(9), VOCAB), 20)
    engine = make_engine(*pair, rows=2, max_len=384)
    expected = [done.token_ids for done in run_all(engine, prompts)]
    assert isinstance(engine.programs, CapturedPrograms)
    pool, plan, cache_plan = engine.programs.pool, engine.plan, engine.cache_plan
    for _ in range(2):
        del engine
        gc.collect()
        engine = Engine(*pair, plan, cache_plan, pool=pool)
        assert [done.token_ids for done in run_all(engine, prompts)] == expected


def test_graphs_of_another_plan_take_the_same_memory(pair: Pair) -> None:
    """One pool for all plans of a process: a second plan adds little to it."""
    engine = make_engine(*pair, rows=8, max_len=384)
    prompts = token_prompts(random_prompts(skewed(20), VOCAB), 20)
    run_all(engine, prompts)
    assert isinstance(engine.programs, CapturedPrograms)
    before = torch.cuda.memory_reserved()
    plan, cache_plan = replace(engine.plan, rows=4), replace(engine.cache_plan, slots=8)
    smaller = Engine(*pair, plan, cache_plan, pool=engine.programs.pool)
    run_all(smaller, prompts)
    state_bytes = sum(t.numel() * t.element_size() for _, t in smaller.state.tensors())
    assert torch.cuda.memory_reserved() - before <= 2 * state_bytes + (64 << 20)
