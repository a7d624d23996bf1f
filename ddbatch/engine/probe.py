"""One verify of so many tokens, by random weights in a model's sizes, held against the oracle.

What job=probe runs in a process of its own: prompts are prefilled, trees made of random drafts and
built, and the target's forward over all nodes is captured and replayed as an engine's round is.
Every node's scores are judged, by the numerics rule and one by one: a product that breaks beyond a
number of tokens may break in few of its rows. Knows nothing about processes, candidates or limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddbatch.core import Key, ShapePlan, TokenPrompt
from ddbatch.engine.allocate import allocate_states
from ddbatch.engine.build import build
from ddbatch.engine.numerics import (
    FLOAT32_GAP,
    GAP_FACTOR,
    MAX_RATIO,
    NUM_BEST,
    high_percentile,
)
from ddbatch.engine.oracle import Oracle
from ddbatch.engine.plan import AUTO_PAGE_CUDA, plan_cache, plan_prefill
from ddbatch.engine.prefill import open_slots, pieces_of, prefill, put_pieces
from ddbatch.engine.programs import CapturedPrograms, GraphPool, Programs
from ddbatch.engine.sampling import DrawKind, TokenFlags
from ddbatch.engine.seats import Homes
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.engine.verify import verify
from ddbatch.models.decoder import Target
from ddbatch.models.dims import ModelDims

LAYERS = 2
# Rows share some texts (prompt, anchor, drafts), so that the oracle reads no more sequences however
# many rows there are.
NUM_TEXTS = 32
LENGTHS = range(3, 39, 5)  # of prompts, in turn
SEED = 0


@dataclass(frozen=True)
class WidthErrors:
    """Score errors of a verify's nodes against the float32 oracle, of the scores that
    engine/numerics.py looks at.

    plain, engine: root mean square, of plain PyTorch and of the engine; the positions are few, and
    would leave a high percentile to chance. gap: GAP_FACTOR times plain PyTorch's high percentile.
    worst: the engine's largest at any node; infinite where rows of one text have other trees.
    """

    is_float32: bool
    plain: float
    engine: float
    gap: float
    worst: float

    @property
    def allowed(self) -> float:
        """What the engine's error may be: the numerics rule."""
        return max(MAX_RATIO * self.plain, FLOAT32_GAP)

    @property
    def allowed_worst(self) -> float:
        """What any score may be off: what explains a parting."""
        return FLOAT32_GAP if self.is_float32 else self.gap

    @property
    def is_sound(self) -> bool:
        """Whether both hold; never where an error is no number."""
        return self.engine <= self.allowed and self.worst <= self.allowed_worst


def reduced(dims: ModelDims) -> ModelDims:
    """The same model of two layers, one of each kind where only some slide."""
    kinds = tuple(dict.fromkeys(dims.windows))
    return replace(dims, layers=LAYERS, windows=(kinds * LAYERS)[:LAYERS])


@torch.inference_mode()
def random_target(
    dims: ModelDims, dtype: torch.dtype, device: torch.device, *, in_order: bool = False
) -> Target:
    """A target of seeded random weights, made on the device: sums are of the size of their
    terms."""
    reach = LENGTHS[-1] + dims.layers + AUTO_PAGE_CUDA
    target = Target(dims, dtype, device, max(reach, dims.max_positions), in_order=in_order)
    generator = torch.Generator(device).manual_seed(SEED)
    for weight in target.parameters():
        if weight.ndim == 1:  # of a norm, or a bias
            weight.normal_(1.0, 0.1, generator=generator)
        else:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    return target


@torch.inference_mode()
def measure_width(target: Target, plan: ShapePlan, *, is_captured: bool) -> WidthErrors:
    """Score errors of a verify of plan.rows x plan.nodes tokens."""
    texts = _texts(target.dims, plan)
    state, shape = _allocate(target, plan)
    programs: Programs = _Verify(target, state)
    if is_captured:
        programs = CapturedPrograms(programs, GraphPool())
    _seat(state, texts, programs, shape)
    programs.round(shape)
    assert state.scores_BNV is not None
    if is_captured:  # the first one was eager
        state.scores_BNV.fill_(torch.nan)
        programs.round(shape)
    return _judge(target, state, texts)


@dataclass(frozen=True)
class _Text:
    """What a row decodes. candidate_DM, edge_DM: its drafts."""

    prompt_ids: tuple[int, ...]
    anchor: int
    candidate_DM: Tensor
    edge_DM: Tensor


class _Verify:
    """The programs that are probed: a round is what an engine does between draft and accept, and
    may be run again."""

    def __init__(self, target: Target, state: RoundState) -> None:
        self._target, self._state = target, state

    def round(self, shape: RoundShape) -> None:
        """Build the trees and verify them."""
        build(self._state)
        verify(self._target, self._state, (), shape)

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        """One prefill call over so many pieces."""
        prefill(self._target, None, self._state, shape, num_chunks)


def _texts(dims: ModelDims, plan: ShapePlan) -> list[_Text]:
    generator = torch.Generator().manual_seed(SEED)
    texts = []
    for number in range(min(NUM_TEXTS, plan.rows)):
        length = min(LENGTHS[number % len(LENGTHS)], dims.max_positions // 2)
        *ids, anchor = torch.randint(dims.vocab, (length + 1,), generator=generator).tolist()
        D, M = plan.draft_depth, plan.topk
        order_DV = torch.rand(D, dims.vocab, generator=generator).argsort(dim=1)
        # Falling in every depth; every other text is drafted with more doubt.
        cost_DM = torch.rand(D, M, generator=generator) * (0.2 + number % 2)
        texts.append(_Text(tuple(ids), anchor, order_DV[:, :M], -cost_DM.cumsum(dim=1)))
    return texts


def _allocate(target: Target, plan: ShapePlan) -> tuple[RoundState, RoundShape]:
    """An empty state, and the shape of a round in it. Prefill calls have no more tokens than the
    round, where a piece allows."""
    device, tokens = target.embed.device, plan.rows * plan.nodes
    max_len = LENGTHS[-1] + _num_new(plan)
    cache_plan = plan_cache(plan.rows, max_len=max_len, page=None, device=device.type, spare=0)
    usual = plan_prefill(plan.rows, device.type)
    (state,) = allocate_states(
        [plan],
        cache_plan,
        replace(usual, chunks=max(1, min(usual.chunks, tokens // usual.chunk))),
        target=target.dims,
        drafter=None,
        num_taps=0,
        top_logprobs=None,
        keeps_scores=True,
        dtype=target.embed.dtype,
        device=device,
    )
    return state, RoundShape(cache_plan.key_counts[0], DrawKind.GREEDY)


def _num_new(plan: ShapePlan) -> int:
    """A cap that neither a prompt's first token reaches nor a round."""
    return plan.draft_depth + 3


def _seat(state: RoundState, texts: Sequence[_Text], programs: Programs, shape: RoundShape) -> None:
    """Give every row its text: prompts through prefill calls, then anchors and drafts."""
    rows, device, plan = state.plan.rows, state.slot_B.device, state.prefill_plan
    homes = Homes(state.cache_plan)
    placed = []
    for row in range(rows):
        ids = texts[row % len(texts)].prompt_ids
        home = homes.take(TokenPrompt(Key(row, 0, 0), ids, _num_new(state.plan)))
        assert home is not None
        placed.append(home)
    vocab = state.sampling.token_flag_SV.shape[1]
    open_slots(state, TokenFlags(vocab, None, device), placed)
    pieces = [piece for home in placed for piece in pieces_of(home, plan.chunk)]
    for first in range(0, len(pieces), plan.chunks):
        call = pieces[first : first + plan.chunks]
        put_pieces(state, call)
        programs.prefill(shape, plan.chunks if plan.is_fixed else len(call))
    # The ready ring is left out: it has no place for prompts whose first scores are no numbers.
    state.slot_B.copy_(torch.arange(rows, device=device))
    state.active_B.fill_(True)
    text_B = state.slot_B % len(texts)
    anchors = torch.tensor([text.anchor for text in texts], device=device)
    state.anchor_S[:rows] = anchors[text_B]
    for place_BDM, parts in (
        (state.candidate_BDM, [text.candidate_DM for text in texts]),
        (state.edge_BDM, [text.edge_DM for text in texts]),
    ):
        place_BDM.copy_(torch.stack(parts).to(device)[text_B])


def _judge(target: Target, state: RoundState, texts: Sequence[_Text]) -> WidthErrors:
    """Hold the scores of every node against those of the oracle."""
    assert state.scores_BNV is not None
    plain: list[Tensor] = []
    engine: list[Tensor] = []
    is_same = True
    for number, text in enumerate(texts):
        own = slice(number, None, len(texts))
        token_RN, parent_RN = state.tree.token_BN[own], state.tree.parent_BN[own]
        is_same &= bool((token_RN == token_RN[:1]).all() and (parent_RN == parent_RN[:1]).all())
        tokens, parents = token_RN[0].tolist(), parent_RN[0].tolist()
        scores_TV = {
            dtype: _node_scores(Oracle(target, dtype=dtype), text.prompt_ids, tokens, parents)
            for dtype in {torch.float32, target.embed.dtype}
        }
        exact_TV, rounded_TV = scores_TV[torch.float32], scores_TV[target.embed.dtype]
        plain.append(_errors(rounded_TV[None], exact_TV))
        engine.append(_errors(state.scores_BNV[own], exact_TV[-len(tokens) :]))
    worst = float(torch.stack([errors.max() for errors in engine]).max())
    return WidthErrors(
        target.embed.dtype == torch.float32,
        _mean(plain),
        _mean(engine),
        GAP_FACTOR * high_percentile(plain),
        worst if is_same else torch.inf,
    )


def _mean(errors: Sequence[Tensor]) -> float:
    """Root mean square."""
    return float(torch.cat([part.flatten() for part in errors]).square().mean().sqrt())


def _errors(scores_RTV: Tensor, exact_TV: Tensor) -> Tensor:
    """|log-probability - the exact one| [R, T, M] of the best tokens of each place."""
    best_TM = exact_TV.log_softmax(dim=1).topk(min(NUM_BEST, exact_TV.shape[1]), dim=1)
    index_RTM = best_TM.indices.expand(len(scores_RTV), -1, -1)
    told_RTM = scores_RTV.gather(2, index_RTM) - scores_RTV.logsumexp(2, keepdim=True)
    return (told_RTM - best_TM.values).abs()


def _node_scores(
    oracle: Oracle, prompt_ids: tuple[int, ...], tokens: Sequence[int], parents: Sequence[int]
) -> Tensor:
    """A fresh oracle's scores [T, V] at the prompt's tokens and then at the nodes of a tree, read
    path by path."""
    prompt_TV = oracle.scores(list(prompt_ids))
    prompt_cache = list(oracle.cache)
    found: dict[int, Tensor] = {}
    for leaf in range(len(tokens) - 1, -1, -1):  # the last nodes are the deepest
        if leaf in found:
            continue
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        oracle.cache, oracle.length = list(prompt_cache), len(prompt_ids)
        scores_TV = oracle.scores([tokens[node] for node in path])
        for node, scores_V in zip(path, scores_TV, strict=True):
            found.setdefault(node, scores_V)
    return torch.cat((prompt_TV, torch.stack([found[node] for node in range(len(tokens))])))
