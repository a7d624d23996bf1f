"""The keyed draw's kernels equal its reference: words, noise, what filters keep, draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from keyed_draw_twin import NEAR_SCORE, WORD, philox, twin_hash, twin_kept, twin_scaled
from made_rounds import assert_same, copied
from test_keyed_draw import HUGE_VOCAB, WORDS_FOR_EVER, on_device, params_of
from torch import Tensor

from ddbatch.core import Key, Sampling
from ddbatch.engine.sampling import key_hash
from ddbatch_kernels.best_token.kernel import best_of_chunks, split_vocab
from ddbatch_kernels.keyed_draw import Draw, DrawParams, keyed_draw_ref, reference
from ddbatch_kernels.keyed_draw import kernel as draw_kernel
from ddbatch_kernels.keyed_draw.filter_bar import filter_bar
from ddbatch_kernels.keyed_draw.noise import gumbel, noise_ceiling, uniform, words_of_quads

# The interpreter of kernels warns of log(0), which is meant.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning:triton")

MIXED = [
    Sampling(temperature, top_p, top_k, min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.0, 0.3, 1.0, 1.5), (0, 1, 3, 40), (1.0, 0.95, 0.6, 0.05), (0.0, 0.02, 0.5)
    )
]


class Case(NamedTuple):
    """Arguments of one call of the op."""

    logits_BNV: Tensor
    depth_BN: Tensor
    index_B: Tensor
    params: DrawParams


def make_case(B: int, N: int, V: int, seed: int = 0, kind: str = "normal") -> Case:
    """Rows of unequal options; the depths of a row's nodes leave gaps, and one repeats."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        (replace(MIXED[place], seed=place << 30), twin_hash(place * 1001, place % 3, place % 7))
        for place in torch.randint(len(MIXED), (B,), generator=generator).tolist()
    ]
    scores = torch.randn(B, N, V, generator=generator) * {"normal": 3, "equal": 0}.get(kind, 2)
    return Case(
        scores if kind == "normal" else scores.round(),
        torch.tensor([0, 5, 2, 2, 9, 6, 3])[torch.arange(N) % 7].expand(B, N),
        torch.randint(1000, (B,), generator=generator),
        params_of(rows),
    )


def assert_equal_draws(case: Case, device: str, **filters: bool) -> Draw:
    """Equal but where the two best perturbed scores are nearly equal."""
    found = on_device(device)(*case, num_depths=10, **filters)
    expected = keyed_draw_ref(*case, num_depths=10, **filters)
    assert found.is_finite_BN.tolist() == expected.is_finite_BN.tolist()
    V = case.logits_BNV.shape[-1]
    for row, node in (found.token_BN != expected.token_BN).nonzero().tolist():
        token_id = int(found.token_BN[row, node])
        assert 0 <= token_id < V
        if not expected.is_finite_BN[row, node]:
            continue
        assert case.params.temperature_B[row] > 0
        own = case.params.of(torch.tensor([row]))
        scaled_V = case.logits_BNV[row, node] / own.temperature_B
        index = case.index_B[row : row + 1] + case.depth_BN[row, node]
        noise_V = reference.draw_noise(index, own.seed_B2, own.hash_B2, 1, V)[0, 0]
        kept_V = reference.kept_tokens(scaled_V[None, None], own)[0, 0]
        assert kept_V[token_id], (row, node, token_id)
        pair = (scaled_V + noise_V)[[token_id, int(expected.token_BN[row, node])]]
        assert abs(float(pair[0] - pair[1])) < NEAR_SCORE, (row, node, token_id)
    return found


# Words and noise.


@triton.jit
def _words_kernel(place_ptr, hash_ptr, seed_ptr, out_ptr, QUADS: tl.constexpr):
    """The words of QUADS quads; place: first quad, output index."""
    quad_Q = tl.load(place_ptr).to(tl.uint32) + tl.arange(0, QUADS).to(tl.uint32)
    word_Q4 = words_of_quads(
        quad_Q,
        tl.load(place_ptr + 1).to(tl.uint32),
        tl.load(hash_ptr).to(tl.uint32),
        tl.load(hash_ptr + 1).to(tl.uint32),
        tl.load(seed_ptr).to(tl.uint32),
        tl.load(seed_ptr + 1).to(tl.uint32),
    )
    out_Q4 = tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + out_Q4, word_Q4.to(tl.int64))


@triton.jit
def _noise_kernel(word_ptr, noise_ptr, ceiling_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = uniform(tl.load(word_ptr + place, mask=place < size, other=0).to(tl.uint32))
    tl.store(noise_ptr + place, gumbel(v), mask=place < size)
    tl.store(ceiling_ptr + place, noise_ceiling(v), mask=place < size)


@pytest.mark.parametrize(("seed", "key", "index", "token_id", "word"), WORDS_FOR_EVER)
def test_a_tokens_word_is_fixed_for_ever(
    seed: int,
    key: tuple[int, int, int],
    index: int,
    token_id: int,
    word: int,
    kernel_device: str,
) -> None:
    bits, quads = key_hash(Key(*key)), 4
    place = torch.tensor([token_id // 4, index], device=kernel_device)
    hash_2 = torch.tensor([bits & WORD, bits >> 32], device=kernel_device)
    seed_2 = torch.tensor([seed & WORD, seed >> 32], device=kernel_device)
    out = torch.full((quads * 4,), -1, device=kernel_device)
    _words_kernel[(1,)](place, hash_2, seed_2, out, QUADS=quads)
    assert out[token_id % 4] == word
    expected = [
        philox((token_id // 4 + quad, index, bits & WORD, bits >> 32), (seed & WORD, seed >> 32))
        for quad in range(quads)
    ]
    assert out.view(quads, 4).tolist() == expected


def test_noise_is_the_references_and_below_its_ceiling(kernel_device: str) -> None:
    spread = torch.randint(2**32, (20_000,), generator=torch.Generator().manual_seed(0))
    ends, powers = torch.arange(3000), 2 ** torch.arange(32)
    word = torch.cat((spread, ends, WORD - ends, powers, powers - 1, WORD - powers))
    noise, ceiling = torch.full((2, len(word)), math.nan, device=kernel_device)
    grid = (triton.cdiv(len(word), 1024),)
    _noise_kernel[grid](word.to(kernel_device), noise, ceiling, len(word), BLOCK=1024)
    noise, ceiling = noise.cpu(), ceiling.cpu()
    expected = reference.gumbel(word)
    assert (noise == -torch.inf).tolist() == (expected == -torch.inf).tolist()
    is_number = expected.isfinite()
    assert (noise - expected)[is_number].abs().max() < 5e-6
    assert (ceiling > noise).all()
    assert (ceiling < noise + 0.1)[word < 2**24].all()  # where draws are won
    assert noise.max() < draw_kernel.MOST_NOISE.value


# Filters.


def bars_of(scores_RV: Tensor, options: list[Sampling], device: str, max_list: int) -> Tensor:
    """The bar of each row of one node."""
    logits = scores_RV[:, None].to(device)
    best_TC = best_of_chunks(logits, split_vocab(len(options), logits.shape[-1], 264))
    params = DrawParams(*(part.to(device) for part in params_of([(o, 0) for o in options])))
    return filter_bar(
        logits, best_TC, params, None, has_top_k=True, has_top_p=True, max_list=max_list
    ).cpu()


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda scores: scores * 3,
    "integers": lambda scores: (scores * 2).round(),
    "deep": lambda scores: scores * 30,
    "near": lambda scores: scores * 1e-6,
    "equal": torch.zeros_like,
    "few": lambda scores: torch.where(scores > 0.5, scores, -torch.inf),
}


@pytest.mark.parametrize("max_list", [8192, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bar_keeps_what_the_twin_keeps(kind: str, max_list: int, kernel_device: str) -> None:
    """Lists too short for the tokens of a bracket included: then all passes are over all scores."""
    generator = torch.Generator().manual_seed(len(kind))
    options = [
        Sampling(temperature, top_p, top_k)
        for temperature, top_k, top_p in [
            (1.0, 5, 1.0), (0.7, 0, 0.9), (1.0, 40, 0.53), (1.5, 1, 1.0), (1.0, 0, 0.05),
            (1.0, 0, math.nextafter(1.0, 0.0)), (1.0, 96, 1.0), (1.0, 97, 0.999),
            (1.0, 4, 0.9), (1.0, 10, 0.77),
        ]
    ]  # fmt: skip
    V = 97
    scores_RV = KINDS[kind](torch.randn(len(options), V, generator=generator))
    bar_R = bars_of(scores_RV, options, kernel_device, max_list)
    num_near = 0
    for row, option in enumerate(options):
        scaled = twin_scaled(scores_RV[row].tolist(), option.temperature)
        expected = twin_kept(scaled, option)
        num_near += expected.is_near
        kept = (scores_RV[row] / option.temperature >= bar_R[row]).tolist()
        assert expected.is_near or kept == expected.flags, option
    assert num_near <= 2


def test_rows_without_a_filter_have_no_bar(kernel_device: str) -> None:
    options = [Sampling(1.0), Sampling(0.0, 0.5, 3), Sampling(1.0, top_k=7), Sampling(1.0, 0.5, 9)]
    scores_RV = torch.arange(28.0).view(4, 7)
    scores_RV[3, 2] = math.nan
    bar_R = bars_of(scores_RV, options, kernel_device, 8192)
    assert bar_R.tolist() == [-math.inf] * 4


# Draws.


@pytest.mark.parametrize("filters", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("B", "N", "V"), [(1, 1, 1), (1, 3, 6), (2, 3, 97), (3, 1, 1000), (3, 3, 61)]
)
def test_draws_equal_the_references(
    B: int, N: int, V: int, filters: tuple[bool, bool], kernel_device: str
) -> None:
    kinds = {"has_top_k": filters[0], "has_top_p": filters[1]}
    for seed, kind in enumerate(("normal", "integers", "equal")[: 3 if V < 10 else 2]):
        assert_equal_draws(make_case(B, N, V, 10 * V + seed, kind), kernel_device, **kinds)


def test_draws_of_many_rows_equal_the_references(kernel_device: str) -> None:
    """Without thresholds, which the interpreter is slow at: many draws, min_p included."""
    case = make_case(40, 3, 131)
    assert_equal_draws(case, kernel_device, has_top_k=False, has_top_p=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "N", "V"), [(1, 1, 151_936), (3, 17, 50_257), (61, 9, 49_152), (2, 65, 49_152)]
)
def test_draws_of_a_real_vocabulary_equal_the_references(
    B: int, N: int, V: int, kernel_device: str
) -> None:
    if kernel_device == "cpu":
        pytest.skip("too large for the interpreter")
    case = make_case(B, N, V, seed=V)
    assert_equal_draws(case, kernel_device)
    assert_equal_draws(case, kernel_device, has_top_k=False, has_top_p=False)


@pytest.mark.gpu
def test_flat_scores_of_a_huge_vocabulary_overflow_the_list_and_draw_the_same(
    kernel_device: str,
) -> None:
    if kernel_device == "cpu":
        pytest.skip("too large for the interpreter")
    for scale in (0.0, 1e-6, 1.0):
        case = make_case(9, 2, HUGE_VOCAB + 3)
        assert_equal_draws(case._replace(logits_BNV=case.logits_BNV * scale), kernel_device)


@pytest.mark.parametrize("place", [0, 511, 512, 1020, 1021])
def test_a_token_at_the_edge_of_a_chunk_is_drawn(place: int, kernel_device: str) -> None:
    case = make_case(2, 2, 1022)
    scores = torch.zeros_like(case.logits_BNV)
    scores[..., place] = 40.0 * 1.5
    options = [(Sampling(1.5), 1), (Sampling(1.0, 0.9), 2)]
    case = case._replace(logits_BNV=scores, params=params_of(options))
    found = assert_equal_draws(case, kernel_device)
    assert found.token_BN.eq(place).all()


def test_scores_of_minus_infinity_are_no_hindrance(kernel_device: str) -> None:
    case = make_case(3, 3, 50)
    for row in range(3):  # one number, few numbers, none
        case.logits_BNV[row, :, [0, 3, 0][row] + 1 :] = -math.inf
    case.logits_BNV[2] = -math.inf
    options = [(Sampling(1.0), 1), (Sampling(0.7, 0.9, 3, 0.1), 2), (Sampling(1.0), 3)]
    case = case._replace(params=params_of(options))
    found = assert_equal_draws(case, kernel_device)
    assert found.is_finite_BN.tolist() == [[True] * 3, [True] * 3, [False] * 3]
    assert found.token_BN[0].tolist() == [0] * 3


def test_scores_that_are_no_numbers_touch_no_other_node(kernel_device: str) -> None:
    case = make_case(3, 4, 97, seed=5)
    options = [(Sampling(1.0, 0.9), 1), (Sampling(1.0, top_k=5), 2), (Sampling(0.0), 3)]
    case = case._replace(params=params_of(options))
    sound = assert_equal_draws(case, kernel_device)
    case.logits_BNV[:, 1, 60] = math.nan
    case.logits_BNV[:, 2, [3, 96]] = math.inf
    found = assert_equal_draws(case, kernel_device)
    assert found.is_finite_BN.tolist() == [[True, False, False, True]] * 3
    assert found.token_BN[:, [0, 3]].tolist() == sound.token_BN[:, [0, 3]].tolist()


def test_how_the_vocabulary_is_split_changes_no_draw(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(2, 2, 1500, seed=7)
    whole = on_device(kernel_device)(*case, num_depths=10)
    monkeypatch.setattr(draw_kernel, "DRAWERS", 1)
    monkeypatch.setattr(draw_kernel, "READERS", 1)
    monkeypatch.setattr(draw_kernel, "TILE", 256)
    parts = on_device(kernel_device)(*case, num_depths=10)
    assert parts.token_BN.tolist() == whole.token_BN.tolist()


@pytest.mark.parametrize("has_filters", [False, True])
def test_rows_draw_as_their_slots_do_into_the_place_that_is_given(
    kernel_device: str, has_filters: bool
) -> None:
    filters = {"has_top_k": has_filters, "has_top_p": has_filters}
    slots = make_case(6, 3, 97, seed=8)
    slot_B = torch.tensor([4, 0, 4, 2])
    logits_BNV, depth_BN = slots.logits_BNV[slot_B], slots.depth_BN[slot_B]
    tables = slots.index_B, slots.params
    own = Case(logits_BNV, depth_BN, slots.index_B[slot_B], slots.params.of(slot_B))
    expected = keyed_draw_ref(*own, num_depths=10, **filters)
    garbage = Draw(torch.full((4, 3), -77), torch.zeros(4, 3, dtype=torch.bool))
    found = keyed_draw_ref(
        logits_BNV, depth_BN, *tables, num_depths=10, slot_B=slot_B, out=garbage, **filters
    )
    assert found is garbage
    assert_same(found, expected)
    alone = on_device(kernel_device)(*own, num_depths=10, **filters)
    for given, out in ((slot_B, True), (slot_B.repeat_interleave(2)[::2], False)):
        poisoned = draw_kernel.Draw(*(part.to(kernel_device) for part in garbage))
        poisoned.token_BN.fill_(-77)
        drawn = draw_kernel.keyed_draw_triton(
            *copied((logits_BNV, depth_BN, *tables), kernel_device),
            num_depths=10,
            slot_B=given.to(kernel_device),
            out=poisoned if out else None,
            **filters,
        )
        assert (drawn is poisoned) == out
        assert_same(drawn, alone)
