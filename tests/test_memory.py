"""What memory an engine takes, told before anything is allocated, and what is planned to fit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddbatch.core import CachePlan, RunError, ShapePlan
from ddbatch.engine.allocate import allocate_states
from ddbatch.engine.memory import Sizes, memory_need
from ddbatch.engine.plan import Method, plan_cache, plan_prefill
from ddbatch.jobs.generating.planning import SPARE_SHARES, Wish, fit_memory
from ddbatch.models.dims import DrafterDims, ModelDims, Rope

DIMS = ModelDims(
    width=24,
    layers=3,
    heads=4,
    kv_heads=2,
    head_width=10,
    mlp_width=40,
    vocab=97,
    norm_eps=1e-5,
    rope=Rope(1e4),
    max_positions=4096,
    is_tied=True,
    stored_dtype=None,
    eos_token_ids=(),
    windows=(None,) * 3,
)
DRAFTER = DrafterDims(
    decoder=replace(DIMS, layers=2, head_width=8),
    block=16,
    mask_token_id=0,
    tap_layers=(0, 2),
    num_target_layers=3,
)
SIZES = Sizes(DIMS, DRAFTER, torch.bfloat16)
ALL: tuple[Method, ...] = ("ddtree", "chain", "autoregressive")
PLAIN = ShapePlan(rows=5, nodes=1, block=1, draft_depth=0, topk=0)
TREE = ShapePlan(rows=3, nodes=40, block=7, draft_depth=6, topk=4)


def wish(rows: int, *, methods: tuple[Method, ...] = ALL, has_ladder: bool = True) -> Wish:
    return Wish(methods, None, None, rows, 16, DIMS.vocab, None, "cuda", has_ladder=has_ladder)


def need(plans: list[ShapePlan], cache_plan: CachePlan, sizes: Sizes = SIZES) -> int:
    prefill_plan = plan_prefill(max(plan.rows for plan in plans), "cuda")
    return memory_need(plans, cache_plan, prefill_plan, sizes).total


def storages(value: object) -> dict[int, int]:
    """Bytes of all memory that tensors in something lie in, by its place."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()} if storage.nbytes() else {}
    parts: list[object] = []
    if is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, tuple | list):
        parts = [*value]
    return {place: size for part in parts for place, size in storages(part).items()}


shapes = st.builds(
    lambda rows, depth, topk, more: ShapePlan(
        rows=rows, nodes=1 + depth + more, block=depth + 1, draft_depth=depth, topk=topk
    ),
    st.integers(1, 9),
    st.integers(1, 15),
    st.integers(1, 9),
    st.integers(0, 70),
)
plain_shapes = st.builds(lambda rows: replace(PLAIN, rows=rows), st.integers(1, 9))


@given(
    plans=st.lists(shapes | plain_shapes, min_size=1, max_size=4, unique=True),
    spare=st.integers(0, 9),
    max_len=st.integers(1, 200),
    page=st.none() | st.integers(1, 64),
    device=st.sampled_from(["cpu", "cuda"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    top_logprobs=st.none() | st.integers(0, 5),
)
@settings(max_examples=60)
def test_caches_and_tables_take_what_is_told(
    plans: list[ShapePlan],
    spare: int,
    max_len: int,
    page: int | None,
    device: str,
    dtype: torch.dtype,
    top_logprobs: int | None,
) -> None:
    rows = max(plan.rows for plan in plans)
    cache_plan = plan_cache(rows, max_len=max_len, page=page, device=device, spare=spare)
    prefill_plan = plan_prefill(rows, device)
    sizes = Sizes(DIMS, DRAFTER, dtype, top_logprobs)
    told = memory_need(plans, cache_plan, prefill_plan, sizes)
    is_drafted = any(plan.nodes > 1 for plan in plans)
    states = allocate_states(
        plans,
        cache_plan,
        prefill_plan,
        target=DIMS,
        drafter=DRAFTER.decoder if is_drafted else None,
        num_taps=len(DRAFTER.tap_layers) if is_drafted else 0,
        top_logprobs=top_logprobs,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    caches = storages([(state.target_cache, state.drafter_cache) for state in states])
    assert told.caches == sum(caches.values())
    assert told.caches + told.tables == sum(storages(states).values())


def test_need_grows_with_rows_spare_slots_and_tokens() -> None:
    plans, cache_plan = [PLAIN, TREE], plan_cache(5, max_len=200, page=8, device="cuda", spare=2)
    least = need(plans, cache_plan)
    assert need([replace(PLAIN, rows=6), TREE], cache_plan) > least
    assert need([PLAIN, replace(TREE, rows=4)], cache_plan) > least
    for changed in ({"spare": 3}, {"max_len": 208}):
        options = {"max_len": 200, "spare": 2} | changed
        assert need(plans, plan_cache(5, page=8, device="cuda", **options)) > least
    assert need(plans, cache_plan, SIZES._replace(top_logprobs=3)) > least
    assert need(plans, cache_plan, SIZES._replace(is_audited=False)) < least
    assert need([PLAIN], cache_plan) < least


def test_telling_what_is_needed_loads_no_compiler() -> None:
    """It takes seconds, of every start."""
    code = "import sys, test_memory as t; t.need([t.PLAIN, t.TREE], t.plan_cache("
    code += "5, max_len=64, page=8, device='cuda')); sys.exit('torch._dynamo' in sys.modules)"
    place = Path(__file__).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=place).returncode == 0


def spared(rows: int) -> int:
    return max(1, round(min(SPARE_SHARES) * rows))


@given(
    rows=st.integers(1, 160),
    held=st.floats(0.1, 1.2),
    max_len=st.integers(30, 300),
    methods=st.sampled_from([ALL, ("ddtree",), ("autoregressive",)]),
    vocab=st.sampled_from([97, 150_000]),
)
@settings(max_examples=15, phases=[Phase.generate])  # an example takes long
def test_what_is_planned_fits_and_more_would_not(
    rows: int, held: float, max_len: int, methods: tuple[Method, ...], vocab: int
) -> None:
    """held: memory, as a share of what is between one row and all that is wished."""
    asked, sizes = wish(rows, methods=methods), SIZES._replace(target=replace(DIMS, vocab=vocab))

    def needed(rows: int, spare: int) -> int:
        cache_plan = plan_cache(rows, max_len=max_len, page=None, device="cuda", spare=spare)
        return need(asked.plans(rows), cache_plan, sizes)

    least, most = needed(1, 1), needed(rows, rows)
    free = round(least + held * (most - least))
    plans, cache_plan = fit_memory(asked, sizes, max_len=max_len, page=None, free=free)
    given_rows = max(plan.rows for plan in plans)
    spare = cache_plan.slots - given_rows
    assert plans == asked.plans(given_rows)
    assert need(plans, cache_plan, sizes) <= free
    assert spared(given_rows) <= spare <= max(given_rows, spared(given_rows))
    if given_rows < rows:
        # Beyond 8 rows they are whole tiles.
        more = given_rows + 1 if given_rows < 8 else min(rows, given_rows + 8)
        assert given_rows <= 8 or given_rows % 8 == 0
        assert needed(more, spared(more)) > free
    steps = [max(spared(given_rows), round(given_rows * share)) for share in SPARE_SHARES]
    assert spare in steps
    larger = [step for step in steps if step > spare]
    if larger:
        assert needed(given_rows, min(larger)) > free


def test_whole_tiles_fit_though_fewer_rows_may_take_more() -> None:
    """64 rows are worth trees of 64 nodes, which 65 are not."""
    asked, sizes = wish(130), SIZES._replace(target=replace(DIMS, vocab=150_000))

    def needed(rows: int) -> int:
        cache_plan = plan_cache(rows, max_len=64, page=None, device="cuda", spare=spared(rows))
        return need(asked.plans(rows), cache_plan, sizes)

    free = needed(65)
    assert needed(64) > free
    plans, cache_plan = fit_memory(asked, sizes, max_len=64, page=None, free=free)
    assert need(plans, cache_plan, sizes) <= free


def test_lowered_rows_are_noted_and_none_is_a_failure_that_names_the_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = wish(12, has_ladder=False)

    def fitted(free: int | None) -> tuple[int, int]:
        plans, cache_plan = fit_memory(asked, SIZES, max_len=1000, page=None, free=free)
        assert len(plans) == 1
        return plans[0].rows, cache_plan.slots

    def enough(rows: int, spare: int) -> int:
        cache_plan = plan_cache(rows, max_len=1000, page=None, device="cuda", spare=spare)
        return need(asked.plans(rows), cache_plan)

    assert fitted(None) == fitted(enough(12, 12)) == (12, 24)
    assert fitted(enough(12, 3)) == (12, 15)
    assert capsys.readouterr().err == ""
    assert fitted(enough(3, 1)) == (3, 4)
    said = capsys.readouterr().err
    assert "note: engine.rows=12 is lowered to 3: the " in said
    assert "with room for 1,000 tokens each" in said
    many = replace(asked, rows=10**15)
    plans, _ = fit_memory(many, SIZES, max_len=1000, page=None, free=enough(16, 4))
    assert plans[0].rows == 16
    with pytest.raises(RunError, match=r"engine.rows=12: no memory .*smaller engine.max_len"):
        fitted(enough(1, 1) - 1)
