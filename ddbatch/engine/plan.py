"""Plan shapes: the only place where sizes of a round and of the cache are decided.

Knows nothing about tensors, models or text.
"""

from __future__ import annotations

from typing import Literal

from ddbatch.core import CachePlan, PrefillPlan, ShapePlan
from ddbatch.engine.limits import GemmLimit
from ddbatch_kernels.build_tree import tree_capacity

Method = Literal["ddtree", "chain", "autoregressive"]

AUTO_BUDGET = 16  # as wide a verify as the usual block, and already ahead of the chain
AUTO_ROWS = {"cpu": 8, "cuda": 32}
MAX_AUTO_ROWS = 512  # twice as many add little: all weights are busy, and the host is
AUTO_PAGE_CUDA = 64  # the key tile of the attention kernels
MAX_TOPK = 64
# Attention is told a bound of the keys that it looks at, a multiple of this. A GPU captures a graph
# for each bound and its kernel stops where a row's keys end, so bounds are powers of two there.
KEY_STEP = 64
MIN_KEYS_CUDA = 1024
# Prompt tokens in a piece, and pieces in a prefill call: large enough for matrix products. A GPU's
# calls are of one size, whatever waits; few rows make few tokens between calls, so theirs are
# smaller, and hundreds end and begin at a rate that keeps larger ones full. A CPU's shrink to what
# waits.
CHUNK = {"cpu": 16, "cuda": 64}
MAX_CHUNKS = {"cpu": 32, "cuda": 64}
MIN_CHUNKS, USUAL_CHUNKS, ROWS_A_CHUNK = 4, 16, 4


def choose_methods(method: str, budget: int | None, has_drafter: bool) -> tuple[Method, ...]:
    """What engine.method lets serve, the first where nothing is measured; None stands for auto in
    every option of this file."""
    if budget == 0 or (method == "auto" and not has_drafter):
        return ("autoregressive",)
    if method == "auto":
        return ("ddtree", "chain", "autoregressive") if budget is None else ("ddtree",)
    names: dict[str, Method] = {
        "ddtree": "ddtree",
        "chain": "chain",
        "autoregressive": "autoregressive",
    }
    return (names[method],)


def auto_rows(device: str, num_prompts: int | None, *, has_ladder: bool) -> int:
    """Rows where none are asked for: no more than there are prompts to fill them. With a ladder
    they are many, since they shrink as prompts run out, and as memory asks."""
    rows = MAX_AUTO_ROWS if has_ladder else AUTO_ROWS[device]
    return rows if num_prompts is None else max(1, min(rows, num_prompts))


def rows_under(limit: GemmLimit | None, rows: int, nodes: int) -> int:
    """Rows that are the planner's, lowered to what a limit leaves with so many nodes each."""
    return rows if limit is None else max(1, min(rows, limit.tokens // nodes))


def plan_shapes(
    method: Method,
    *,
    budget: int | None,
    topk: int | None,
    rows: int,
    block: int,
    vocab: int,
    gemm_limit: GemmLimit | None,
) -> ShapePlan:
    """Shapes of one round. block: the drafter's block size, or less: a shorter block costs less and
    is accepted a little less (unused for autoregressive).

    A budget beyond what a tree of this depth and branching can hold is cut to it. A budget
    that is the planner's is lowered to gemm_limit. ValueError where rows x nodes exceeds it all the
    same.
    """
    if method == "autoregressive":
        plan = ShapePlan(rows=rows, nodes=1, block=1, draft_depth=0, topk=0)
    else:
        depth = block - 1
        if budget is None:
            budget = depth if method == "chain" else AUTO_BUDGET
            if gemm_limit is not None:  # at least one draft, as the method asks for
                budget = max(1, min(budget, gemm_limit.tokens // rows - 1))
        if method == "chain":  # the top-1 path is the tree with one candidate a position
            budget, topk = min(budget, depth), 1
        elif topk is None:
            topk = min(budget, MAX_TOPK)
        depth, topk = min(depth, budget), min(topk, budget, vocab)
        budget = tree_capacity(depth, topk, budget)
        plan = ShapePlan(rows=rows, nodes=budget + 1, block=block, draft_depth=depth, topk=topk)
    if gemm_limit is not None:
        _check_limit(plan, gemm_limit)
    return plan


def _check_limit(plan: ShapePlan, limit: GemmLimit) -> None:
    tokens = plan.rows * plan.nodes
    if tokens <= limit.tokens:
        return
    most_rows, most_nodes = limit.tokens // plan.nodes, limit.tokens // plan.rows
    allowed = f"at most {most_rows} row{'s' * (most_rows > 1)} for this budget"
    if not most_rows and most_nodes > 1:
        allowed = f"a budget of at most {most_nodes - 1} for this many rows"
    elif not most_rows:
        allowed = f"engine.budget=0 with at most {limit.tokens} row{'s' * (limit.tokens > 1)}"
    raise ValueError(
        f"engine.rows={plan.rows} x (engine.budget={plan.nodes - 1} + 1) = {tokens} tokens exceed "
        f"{limit}; allowed: {allowed}"
    )


def plan_cache(
    rows: int, *, max_len: int, page: int | None, device: str, spare: int | None = None
) -> CachePlan:
    """Cache pool for `rows` live sequences and `spare` ready ones, None = as many: a finished row
    never waits.

    page None: contiguous slots on the CPU, the kernels' key tile on CUDA. max_len is rounded up to
    whole pages.
    """
    if page is None:
        page = max_len if device == "cpu" else AUTO_PAGE_CUDA
    pages_per_slot = -(-max_len // page)
    slots, max_len = rows + (rows if spare is None else spare), pages_per_slot * page
    return CachePlan(
        slots=slots,
        pages=slots * pages_per_slot,
        page=page,
        max_len=max_len,
        key_counts=_key_counts(max_len, device),
    )


def plan_prefill(rows: int, device: str) -> PrefillPlan:
    """Calls that keep up with `rows` rows."""
    is_fixed, chunks = device == "cuda", MAX_CHUNKS[device]
    if is_fixed:
        usual = max(MIN_CHUNKS, min(USUAL_CHUNKS, rows))
        chunks = max(usual, min(chunks, rows // ROWS_A_CHUNK))
    return PrefillPlan(chunks=chunks, chunk=CHUNK[device], is_fixed=is_fixed)


def _key_counts(max_len: int, device: str) -> tuple[int, ...]:
    if device == "cpu":
        return (*range(KEY_STEP, max_len, KEY_STEP), max_len)
    counts, count = [], MIN_KEYS_CUDA
    while count < max_len:
        counts.append(count)
        count *= 2
    return (*counts, max_len)
