"""Canaries meet every shape and every edge, few of them are long, and each slot is refilled."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest

from ddbatch.core import Key, Sampling
from ddbatch.engine.canaries import FAR, MIN_USES, Canaries, edge_lengths, ladder
from ddbatch.engine.plan import plan_cache, plan_shapes

VOCAB = 29
HOT = [Sampling(temperature=0.8, stop=("x",)), Sampling(temperature=1.0, top_k=7, seed=3)]


@pytest.mark.parametrize(("device", "chunk"), [("cpu", 16), ("cuda", 64)])
@pytest.mark.parametrize("max_len", [2, 65, 96, 128, 1000, 2048, FAR, 8192])
def test_the_ladder_and_the_edges_leave_out_no_shape_and_few_are_long(
    device: str, chunk: int, max_len: int
) -> None:
    plan = plan_cache(3, max_len=max_len, page=None, device=device)
    rungs = ladder(plan.key_counts)
    edges = edge_lengths(plan, chunk, rungs)
    assert len(rungs) >= 2
    if device == "cuda":
        assert set(rungs) == set(plan.key_counts)
    for below, count in pairwise(rungs):
        assert count <= max(2 * below, 64, below + 64)
    assert max(edges) == plan.max_len - 1
    for edge in (1, chunk - 1, chunk, chunk + 1, FAR - 1, FAR, FAR + 1):
        assert (edge in edges) == (1 <= edge < plan.max_len)
    assert sum(edges) <= 5 * plan.max_len + 3 * FAR * (max_len > FAR) + 5000


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_canaries_refill_every_slot_twice_with_longer_and_shorter_prompts(rows: int) -> None:
    plan = plan_shapes(
        "autoregressive", budget=0, topk=None, rows=rows, block=1, vocab=VOCAB, gemm_limit=None,
    )  # fmt: skip
    cache_plan = plan_cache(rows, max_len=300, page=None, device="cuda")
    free, lengths = deque(range(cache_plan.slots)), [list[int]() for _ in range(cache_plan.slots)]
    canaries = Canaries(
        plan, cache_plan, next_slot=lambda: free[0], chunk=64, vocab=VOCAB, sampling=HOT, seed=1
    )
    keys = set[Key]()
    for place in range(len(canaries.rungs)):
        in_flight = deque[int]()
        for prompt in canaries.climb(place):
            lengths[free[0]].append(len(prompt.token_ids))
            in_flight.append(free.popleft())
            keys.add(prompt.key)
            assert len(prompt.token_ids) + prompt.max_new_tokens <= cache_plan.max_len
            assert not prompt.sampling.stop
            if not free:  # one ends
                free.append(in_flight.popleft())
        free.extend(in_flight)
    assert len(keys) == canaries.num_prompts == sum(map(len, lengths))
    assert min(map(len, lengths)) >= MIN_USES
    steps = [new - old for line in lengths for old, new in pairwise(line)]
    assert min(sum(step > 0 for step in steps), sum(step < 0 for step in steps)) >= rows
