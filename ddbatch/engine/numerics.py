"""The numerics rule: how far scores are off in the model's dtype, and what that explains.

1. float32: the engine's tokens are the oracle's, but where two perturbed scores are closer than
   FLOAT32_GAP.
2. bfloat16, float16: another token than the oracle's is explained where score errors within `gap`
   could draw it.
3. The engine's own score error is at most MAX_RATIO times that of plain PyTorch.

Knows the oracle and the engine. Knows nothing about text or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.core import CachePlan, Completion, Key, Sampling, ShapePlan, TokenPrompt
from ddbatch.engine.engine import Engine
from ddbatch.engine.oracle import Oracle
from ddbatch.engine.oracle_draw import draw_scores
from ddbatch.engine.plan import plan_cache
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

FLOAT32_GAP = 1e-4
PERCENTILE = 0.999
GAP_FACTOR = 4.0  # of plain PyTorch's error at PERCENTILE
MAX_RATIO = 1.5
# Canaries: text of the model's own, after a few random tokens.
NUM_CANARIES, CANARY_PROMPT, CANARY_TOKENS = 16, 16, 32
NUM_BEST = 64


@dataclass(frozen=True)
class Numerics:
    """Score errors on canaries: the PERCENTILE of |score - float32 oracle's score|.

    Scores are log-probabilities, since no draw sees a shift that all scores share, of the NUM_BEST
    tokens that the oracle finds most probable at each position: others are hardly ever drawn.
    plain: of the oracle's formulas in plain PyTorch in the model's dtype. engine: of the engine's
    verify forward. gap: what explains a parting.
    """

    dtype: str
    plain: float
    engine: float
    gap: float

    @property
    def is_sound(self) -> bool:
        """Whether the engine's error is within MAX_RATIO of plain PyTorch's (FLOAT32_GAP is allowed
        in any case: plain float32 has no error)."""
        return self.engine <= max(MAX_RATIO * self.plain, FLOAT32_GAP)

    def __str__(self) -> str:
        return (
            f"score error in {self.dtype}: {self.engine:.2g}, of plain PyTorch {self.plain:.2g} "
            f"({PERCENTILE:.1%} of canary scores are nearer to float32; at most "
            f"{MAX_RATIO} times as much is expected)"
        )


class Parting(NamedTuple):
    """An emitted token that is not the oracle's draw after the same tokens.

    place: output index. slack: by how much two scores must be off against each other for it.
    """

    place: int
    token_id: int
    oracle_token_id: int
    slack: float


def measure_numerics(
    target: Target, drafter: DFlash | None, plan: ShapePlan, *, seed: int = 0
) -> Numerics:
    """Decode canaries with the engine, and score them with the oracle and in plain PyTorch.

    plan: the run's; with fewer rows than canaries it takes several batches.
    """
    dtype = target.embed.dtype
    plan = replace(plan, rows=min(plan.rows, NUM_CANARIES))
    length = min(CANARY_PROMPT, target.dims.max_positions // 2)
    num_tokens = min(CANARY_TOKENS, target.dims.max_positions - length)
    device = target.embed.device
    cache_plan = plan_cache(plan.rows, max_len=length + num_tokens, page=None, device=device.type)
    generator = torch.Generator().manual_seed(seed)
    prompt_RT = torch.randint(target.dims.vocab, (NUM_CANARIES, length), generator=generator)
    prompts = [
        TokenPrompt(Key(row, 0, 0), tuple(ids), num_tokens, Sampling(temperature=1.0, seed=seed))
        for row, ids in enumerate(prompt_RT.tolist())
    ]
    engine_errors: list[Tensor] = []
    plain_errors: list[Tensor] = []
    scored = [
        scores
        for first in range(0, NUM_CANARIES, plan.rows)
        for scores in engine_scores(
            target, drafter, plan, cache_plan, prompts[first : first + plan.rows]
        )
    ]
    for prompt, found in zip(prompts, scored, strict=True):
        if not len(found.scores_TV):
            continue
        ids = [*prompt.token_ids, *found.token_ids[:-1]]
        first = len(prompt.token_ids)  # the scores after the first output token
        exact_TV = Oracle(target).scores(ids)[first:].log_softmax(dim=1)
        best = exact_TV.topk(min(NUM_BEST, target.dims.vocab), dim=1)
        plain_TV = Oracle(target, dtype=dtype).scores(ids)[first:]
        for errors, scores_TV in ((engine_errors, found.scores_TV), (plain_errors, plain_TV)):
            told = scores_TV.log_softmax(dim=1).gather(1, best.indices)
            errors.append((told - best.values).abs())
    plain, engine = high_percentile(plain_errors), high_percentile(engine_errors)
    gap = FLOAT32_GAP if dtype == torch.float32 else GAP_FACTOR * plain
    return Numerics(str(dtype).removeprefix("torch."), plain, engine, gap)


class EngineScores(NamedTuple):
    """What the engine made of one prompt: its output tokens, and the scores [n - 1, V] that all but
    the first were drawn from."""

    token_ids: tuple[int, ...]
    scores_TV: Tensor


@torch.inference_mode()
def engine_scores(
    target: Target,
    drafter: DFlash | None,
    plan: ShapePlan,
    cache_plan: CachePlan,
    prompts: Sequence[TokenPrompt],
) -> list[EngineScores]:
    """Decode at most plan.rows prompts to their caps and keep the scores of emitted tokens."""
    assert len(prompts) <= plan.rows, (len(prompts), plan)
    engine = Engine(target, drafter, plan, cache_plan, keeps_scores=True)
    state = engine.state
    assert state.scores_BNV is not None
    engine.fill(iter(prompts))
    kept: list[list[Tensor]] = [[] for _ in prompts]
    outputs: dict[Key, tuple[int, ...]] = {}
    while engine.is_busy:
        engine.step()
        for row, count in enumerate(state.num_emitted_B.tolist()):
            if count:  # rows are seated in the order of the prompts and keep their places
                kept[row].append(state.scores_BNV[row, state.path_BK[row, :count]].clone())
        for done in engine.collect():
            outputs[done.key] = done.token_ids if isinstance(done, Completion) else ()
    empty_0V = state.scores_BNV[0, :0].clone()
    return [
        EngineScores(ids, torch.cat(rows) if rows and ids else empty_0V)
        for ids, rows in zip((outputs[prompt.key] for prompt in prompts), kept, strict=True)
    ]


def find_partings(target: Target, prompt: TokenPrompt, token_ids: Sequence[int]) -> list[Parting]:
    """Every output token that is not the oracle's keyed draw after the tokens before it."""
    return list(each_parting(target, prompt, token_ids))


ORACLE_PIECE = 128  # tokens that the oracle reads at a time: memory for scores [piece, V]


@torch.inference_mode()
def each_parting(
    target: Target, prompt: TokenPrompt, token_ids: Sequence[int]
) -> Iterator[Parting]:
    """The same in order, as the oracle comes to them: it reads the sequence piece by piece."""
    oracle, first_place = Oracle(target), len(prompt.token_ids) - 1
    ids = [*prompt.token_ids, *token_ids[:-1]]
    for start in range(0, len(ids), ORACLE_PIECE):
        scores_TV = oracle.scores(ids[start : start + ORACLE_PIECE])
        scores_TV = scores_TV[max(0, first_place - start) :]  # none inside the prompt
        yield from partings_of(scores_TV, prompt, token_ids, max(0, start - first_place))


def partings_of(
    scores_TV: Tensor, prompt: TokenPrompt, token_ids: Sequence[int], first: int = 0
) -> Iterator[Parting]:
    """Output tokens from the first-th on that are not the keyed draws of the oracle's scores."""
    emitted = token_ids[first : first + len(scores_TV)]
    drawn = draw_scores(scores_TV, prompt.sampling, prompt.key, first)
    emitted_T = torch.tensor(emitted, dtype=torch.int64, device=scores_TV.device)
    slack_T = drawn.slack(emitted_T) * (prompt.sampling.temperature or 1.0)
    for at in (emitted_T != drawn.tokens).nonzero().flatten().tolist():
        yield Parting(first + at, emitted[at], int(drawn.tokens[at]), float(slack_T[at]))


def high_percentile(errors: Sequence[Tensor]) -> float:
    """The PERCENTILE of all of them."""
    if not errors:
        return 0.0
    flat = torch.cat([part.flatten() for part in errors])
    return float(flat.kthvalue(max(1, int(PERCENTILE * len(flat)))).values)
