"""The keyed draw equals its slow twin, and draws follow softmax over 150,000 tokens."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from keyed_draw_twin import (
    WORD,
    at_least,
    chi_square,
    philox,
    twin_draw,
    twin_gumbel,
    twin_hash,
    twin_kept,
    twin_scaled,
    word_of,
)
from torch import Tensor

from ddbatch.core import Key, Sampling
from ddbatch.engine.sampling import key_hash
from ddbatch_kernels.keyed_draw import (
    Draw,
    DrawParams,
    gumbel,
    keyed_draw,
    philox4x32,
    reference,
)
from ddbatch_kernels.keyed_draw.kernel import keyed_draw_triton

# Of seed 0, output index 0: rows found by search in which one token has an extreme word.
ROW_OF_LARGEST, TOKEN_OF_LARGEST = 30125659, 3  # word 0xffffffa9
ROW_OF_SMALLEST, TOKEN_OF_SMALLEST = 1063849, 2  # word 0x2a
HUGE_VOCAB = 150_000
# The interpreter of kernels warns of log(0), which is meant.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning:triton")
# (seed, (row_id, turn, sample), output index, token id, word). Other words would change the
# completions of every run that is resumed.
WORDS_FOR_EVER = [
    (0, (0, 0, 0), 0, 0, 0xF92390C2),
    (0, (0, 0, 0), 0, 3, 0x5A9CAD5D),
    (0, (0, 0, 0), 1, 0, 0x3D9580B8),
    (0, (1, 0, 0), 0, 0, 0xAF1AF430),
    (7, (123456789012, 2, 31), 1023, 151935, 0xEBF542E7),
    (2**32, (0, 0, 0), 0, 0, 0x375691B8),
    (2**63 - 1, (5, 1, 1), 17, 50257, 0xA9FA8A49),
    (0, (ROW_OF_LARGEST, 0, 0), 0, TOKEN_OF_LARGEST, 0xFFFFFFA9),
    (0, (ROW_OF_SMALLEST, 0, 0), 0, TOKEN_OF_SMALLEST, 0x2A),
]


def params_of(rows: Sequence[tuple[Sampling, int]]) -> DrawParams:
    """Options and key hash of each row as the op takes them."""
    options = [option for option, _ in rows]
    return DrawParams(
        temperature_B=torch.tensor([o.temperature for o in options], dtype=torch.float32),
        top_k_B=torch.tensor([o.top_k for o in options]),
        top_p_B=torch.tensor([o.top_p for o in options], dtype=torch.float64),
        min_p_B=torch.tensor([o.min_p for o in options], dtype=torch.float32),
        seed_B2=torch.tensor([[o.seed & WORD, o.seed >> 32] for o in options]),
        hash_B2=torch.tensor([[key & WORD, key >> 32] for _, key in rows]),
    )


@pytest.fixture(params=["reference", "kernel"])
def either(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel_device: str
) -> None:
    """A test with it holds for the reference and for the kernel."""
    if request.param == "kernel":
        monkeypatch.setattr(sys.modules[__name__], "keyed_draw", on_device(kernel_device))


def on_device(device: str) -> Callable[..., Draw]:
    """The kernel as an op of CPU tensors."""

    def draw(
        logits_BNV: Tensor, depth_BN: Tensor, index_B: Tensor, params: DrawParams, **options: int
    ) -> Draw:
        found = keyed_draw_triton(
            logits_BNV.to(device),
            depth_BN.to(device),
            index_B.to(device),
            DrawParams(*(part.to(device) for part in params)),
            **options,
        )
        return Draw(found.token_BN.cpu(), found.is_finite_BN.cpu())

    return draw


def draw_one(scores: Sequence[float], option: Sampling, key: int = 0, index: int = 0) -> int:
    """One draw of one row of one node."""
    return int(draw_rows(torch.tensor([scores]), [(option, key)], [index]).token_BN)


def draw_rows(scores_BV: Tensor, rows: Sequence[tuple[Sampling, int]], index: list[int]) -> Draw:
    """Draws of rows of one node each."""
    depth_BN = torch.zeros(len(rows), 1, dtype=torch.long)
    return keyed_draw(
        scores_BV[:, None], depth_BN, torch.tensor(index), params_of(rows), num_depths=1
    )


def kept_by_op(scores: Sequence[float], option: Sampling) -> list[bool]:
    scaled_BNV = torch.tensor(scores, dtype=torch.float32)[None, None] / option.temperature
    kept: list[bool] = reference.kept_tokens(scaled_BNV, params_of([(option, 0)]))[0, 0].tolist()
    return kept


# Noise.


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    c, k, expected = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    assert philox(c, k) == expected
    c0, c1, c2, c3 = torch.tensor(c).unbind()
    k0, k1 = torch.tensor(k).unbind()
    assert philox4x32((c0, c1, c2, c3), (k0, k1)).tolist() == expected


@pytest.mark.parametrize(("seed", "key", "index", "token_id", "word"), WORDS_FOR_EVER)
def test_a_tokens_word_is_fixed_for_ever(
    seed: int, key: tuple[int, int, int], index: int, token_id: int, word: int
) -> None:
    key_bits = key_hash(Key(*key))
    assert word_of(seed, key_bits, index, token_id) == word
    params = params_of([(Sampling(seed=seed), key_bits)])
    noise = reference.draw_noise(
        torch.tensor([index]), params.seed_B2, params.hash_B2, 1, token_id + 1
    )
    assert noise[0, 0, token_id] == gumbel(torch.tensor(word))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((0, 0, 0), 0x238275BC38FCBE91),
        ((1, 0, 0), 0xB18A02F46D8D86C3),
        ((0, 1, 0), 0x44E5B98100C67FB0),
        ((0, 0, 1), 0x2F32A78496C67C60),
        ((123456789012, 2, 31), 0xE2D72104AD573EA1),
        ((2**62, 32767, 32767), 0x5D6713DFD796BA7E),
    ],
)
def test_a_keys_hash_is_fixed_for_ever(key: tuple[int, int, int], expected: int) -> None:
    assert key_hash(Key(*key)) == twin_hash(*key) == expected


def test_near_keys_have_different_hashes_in_both_words() -> None:
    keys = list(itertools.product(range(50), range(8), range(8)))
    hashes = [key_hash(Key(*key)) for key in keys]
    assert len(set(hashes)) == len(keys)
    # A word of 32 bits would repeat about once in 1,300 such grids.
    assert len({value & WORD for value in hashes}) == len(keys)
    assert len({value >> 32 for value in hashes}) == len(keys)


def test_noise_of_extreme_words_is_as_defined() -> None:
    words = [0, 1, 2, 0xFF, 2**31, 0xFFFFFE80, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFE, WORD]
    noise = gumbel(torch.tensor(words))
    assert noise.dtype == torch.float32
    assert noise[0].item() == pytest.approx(33 * math.log(2), abs=1e-4)
    assert noise[4].item() == pytest.approx(-math.log(math.log(2)), abs=1e-5)
    assert noise[:7].isfinite().all()
    assert noise[7:].eq(-torch.inf).all()  # v rounds to 1
    assert noise[:7].tolist() == pytest.approx([float(twin_gumbel(w)) for w in words[:7]], rel=1e-6)
    assert [twin_gumbel(word) for word in words[7:]] == [-np.inf] * 3


def test_larger_words_never_have_larger_noise() -> None:
    spread = torch.randint(2**32, (20_000,), generator=torch.Generator().manual_seed(0))
    ends = torch.arange(3000)
    noise = gumbel(torch.cat((spread, ends, WORD - ends)).sort().values)
    assert not noise.isnan().any()
    assert (noise < torch.inf).all()
    assert (noise.diff().nan_to_num(0.0) <= 1e-6).all()  # log may be off by its last bit


@pytest.mark.usefixtures("either")
def test_a_kept_token_whose_noise_is_lowest_loses_to_kept_ones_and_beats_filtered_ones() -> None:
    key, lowest = twin_hash(ROW_OF_LARGEST, 0, 0), TOKEN_OF_LARGEST
    scores = [0.0] * 7
    scores[lowest] = 9.0
    assert draw_one(scores, Sampling(temperature=1.0), key) != lowest
    assert draw_one(scores, Sampling(temperature=1.0, top_k=1), key) == lowest
    assert draw_one(scores, Sampling(temperature=1.0, top_p=0.5), key) == lowest
    assert draw_one(scores, Sampling(temperature=1.0, min_p=0.5), key) == lowest
    scores[5] = -1000.0
    scores[6] = 8.0
    assert draw_one(scores, Sampling(temperature=1.0, top_k=2), key) == 6
    # The only one of its row: nothing to lose to.
    assert draw_one(scores[lowest : lowest + 1], Sampling(temperature=1.0), key) == 0


@pytest.mark.usefixtures("either")
def test_a_token_with_the_highest_noise_is_drawn_from_far_below_unless_it_is_filtered() -> None:
    key, token_id = twin_hash(ROW_OF_SMALLEST, 0, 0), TOKEN_OF_SMALLEST
    scores = [12.0] * 5
    scores[token_id] = 0.0
    assert draw_one(scores, Sampling(temperature=1.0), key) == token_id
    for option in ({"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.1}):
        assert draw_one(scores, Sampling(temperature=1.0, **option), key) != token_id


# The op and its twin.


@pytest.mark.parametrize("kind", ["normal", "integers"])
@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 97, 257])
def test_draws_equal_the_twins(vocab: int, kind: str) -> None:
    """Rows of unequal options and keys in one batch, four nodes of which two have one depth."""
    generator = torch.Generator().manual_seed(vocab)
    rows, index, depth, nodes = [], [], [], 4
    options = list(
        itertools.product(
            (0.0, 0.3, 0.7, 1.0, 1.5), (0, 1, 3, 40), (1.0, 0.95, 0.6, 0.05), (0.0, 0.02, 0.5)
        )
    )
    for place in torch.randperm(len(options), generator=generator)[:60].tolist():
        temperature, top_k, top_p, min_p = options[place]
        seed = place << 30  # reaches the high word
        option = Sampling(temperature, top_p, top_k, min_p, seed)
        rows.append((option, twin_hash(place * 1001, place % 3, place % 7)))
        index.append(place % 1000)
        depth.append([0, 2, 1, 2])
    scores = torch.randn(len(rows), nodes, vocab, generator=generator) * 3
    scores = scores.round() if kind == "integers" else scores
    found = keyed_draw(
        scores, torch.tensor(depth), torch.tensor(index), params_of(rows), num_depths=3
    )
    assert found.token_BN.dtype == torch.long
    assert found.is_finite_BN.all()
    near = []
    for row, (option, key) in enumerate(rows):
        for node in range(nodes):
            token_id = int(found.token_BN[row, node])
            expected = twin_draw(
                scores[row, node].tolist(), option, key, index[row] + depth[row][node]
            )
            if expected.is_near:
                near.append((row, node))
            else:
                assert token_id == expected.token_id, (option, row, node)
    assert len(near) <= 5, near  # of 240: the comparison means something


def test_draws_of_a_huge_vocabulary_equal_the_twins() -> None:
    generator = torch.Generator().manual_seed(0)
    scores_BV = torch.randn(3, HUGE_VOCAB + 3, generator=generator) * 4
    rows = [
        (Sampling(1.0, top_k=200, seed=3), 11),
        (Sampling(0.7, top_p=0.9, min_p=0.001), 2**63 + 5),
        (Sampling(1.5, top_k=1000, top_p=0.8), 13),
    ]
    found = draw_rows(scores_BV, rows, [0, 5, 77])
    for row, (option, key) in enumerate(rows):
        expected = twin_draw(scores_BV[row].tolist(), option, key, [0, 5, 77][row])
        assert not expected.is_near
        assert int(found.token_BN[row]) == expected.token_id


@pytest.mark.parametrize("words", [1, 100, 1000])
def test_the_size_of_a_chunk_changes_no_draw(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(7, 3, 37, generator=torch.Generator().manual_seed(1))
    rows = [(Sampling(1.0, top_p=0.9, seed=place), place) for place in range(7)]
    depth_BN = torch.tensor([[0, 1, 1]]).expand(7, 3)
    index_B = torch.arange(7)
    whole = keyed_draw(scores, depth_BN, index_B, params_of(rows), num_depths=2)
    monkeypatch.setattr(reference, "CHUNK_WORDS", words)
    parts = keyed_draw(scores, depth_BN, index_B, params_of(rows), num_depths=2)
    assert parts.token_BN.tolist() == whole.token_BN.tolist()
    assert parts.is_finite_BN.all()


@pytest.mark.usefixtures("either")
def test_a_filter_that_no_row_uses_may_be_left_out() -> None:
    scores_BNV = torch.randn(6, 1, 37, generator=torch.Generator().manual_seed(2))
    for unused, option in (
        (("has_top_k", "has_top_p"), Sampling(1.0, min_p=0.1)),
        (("has_top_k",), Sampling(1.0, top_p=0.7)),
        (("has_top_p",), Sampling(1.0, top_k=3)),
    ):
        depth_BN, params = torch.zeros(6, 1, dtype=torch.long), params_of([(option, 7)] * 6)
        whole = keyed_draw(scores_BNV, depth_BN, torch.arange(6), params, num_depths=1)
        less = keyed_draw(
            scores_BNV,
            depth_BN,
            torch.arange(6),
            params,
            num_depths=1,
            **dict.fromkeys(unused, False),
        )
        assert less.token_BN.tolist() == whole.token_BN.tolist()


@pytest.mark.usefixtures("either")
def test_nodes_of_one_depth_share_their_noise_and_others_do_not() -> None:
    scores = torch.zeros(1, 40, 101)
    depth_BN = torch.arange(20).repeat(2)[None]
    token_N = keyed_draw(
        scores,
        depth_BN,
        torch.tensor([3]),
        params_of([(Sampling(temperature=1.0), 5)]),
        num_depths=20,
    ).token_BN[0]
    assert token_N[:20].tolist() == token_N[20:].tolist()
    assert len(set(token_N.tolist())) > 10
    # A depth stands for an output index: the later node of one round is the first of another.
    for depth in (0, 1, 19):
        alone = draw_one([0.0] * 101, Sampling(temperature=1.0), key=5, index=3 + depth)
        assert alone == token_N[depth]


# Filters.

SCORES = st.one_of(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=40),
)
OPTIONS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    top_k=st.one_of(st.just(0), st.integers(1, 50)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
)


@given(scores=SCORES, option=OPTIONS)
def test_kept_tokens_are_the_twins_and_the_best_is_among_them(
    scores: list[float], option: Sampling
) -> None:
    kept = kept_by_op(scores, option)
    assert all(kept[place] for place, score in enumerate(scores) if score == max(scores))
    expected = twin_kept(twin_scaled(scores, option.temperature), option)
    assert expected.is_near or kept == expected.flags


@given(scores=SCORES, option=OPTIONS, other=st.floats(1e-6, 1.0), more=st.integers(1, 50))
def test_a_looser_filter_keeps_what_a_stricter_one_keeps(
    scores: list[float], option: Sampling, other: float, more: int
) -> None:
    def kept(**changes: float) -> set[int]:
        values = {"top_p": option.top_p, "top_k": option.top_k, "min_p": option.min_p, **changes}
        flags = kept_by_op(scores, Sampling(temperature=option.temperature, **values))
        return {place for place, is_kept in enumerate(flags) if is_kept}

    low, high = sorted((option.top_p, other))
    assert kept(top_p=low) <= kept(top_p=high) <= kept(top_p=1.0)
    low, high = sorted((option.min_p, other))
    assert kept(min_p=high) <= kept(min_p=low) <= kept(min_p=0.0)
    # The mass of top_p is a part of what top_k left, so with both there is no such order.
    assert kept(top_p=1.0, top_k=more) <= kept(top_p=1.0, top_k=more + 1)
    assert kept(top_p=1.0, top_k=more) <= kept(top_p=1.0, top_k=0)


@given(scores=SCORES, more=st.integers(0, 10))
def test_filters_that_are_off_keep_every_token(scores: list[float], more: int) -> None:
    assert all(kept_by_op(scores, Sampling(temperature=0.7)))
    assert all(kept_by_op(scores, Sampling(temperature=0.7, top_k=len(scores) + more)))
    if more:
        flat = [1.0] * len(scores)  # a tie with the threshold is kept
        assert all(kept_by_op(flat, Sampling(temperature=0.7, top_k=1, top_p=0.1, min_p=1.0)))


@pytest.mark.parametrize(
    ("scores", "option", "kept"),
    [
        # Masses of whole units: scores far below have none.
        ([0, 0, -200, -300], Sampling(1.0, top_p=0.5), "1100"),
        ([-200, 0, -300], Sampling(1.0, top_p=math.nextafter(1.0, 0.0)), "010"),
        ([-200, 0, -300], Sampling(1.0, top_p=1.0), "111"),
        ([0, -200], Sampling(1.0, top_p=1e-300), "10"),
        # exp(-27) is two units of 2^-40: what the best one lacks of the part is rounded up.
        ([0, -27], Sampling(1.0, top_p=(2**40 - 0.5) / (2**40 + 2)), "10"),
        ([0, -27], Sampling(1.0, top_p=(2**40 + 0.5) / (2**40 + 2)), "11"),
        ([0.0, -0.0, -1.0], Sampling(1.0, top_k=1), "110"),  # zeros are equal
        ([-0.0, 0.0, -1.0], Sampling(1.0, top_p=0.1), "110"),
        ([-1.0, -0.0, 0.0], Sampling(1.0, min_p=1.0), "011"),
        ([2, 1, 1, 0], Sampling(1.0, top_k=2), "1110"),
        ([2, 1, 1, 0], Sampling(1.0, top_k=3), "1110"),
        ([-3, -1, -2], Sampling(1.0, top_k=2), "011"),
        # exp(-1) = 0.37 of the best one's probability, exp(-2) = 0.14.
        ([0, -1, -2], Sampling(1.0, min_p=0.36), "110"),
        ([0, -1, -2], Sampling(0.5, min_p=0.36), "100"),
        # 0.67, 0.24, 0.09 of the whole; after top_k=2 the first has 0.73.
        ([0, -1, -2], Sampling(1.0, top_p=0.7), "110"),
        ([0, -1, -2], Sampling(1.0, top_p=0.7, top_k=2), "100"),
        ([5, float("-inf"), 4], Sampling(1.0, top_p=0.9999), "101"),
        ([5, float("-inf"), 4], Sampling(1.0, min_p=0.0001), "101"),
    ],
)
def test_filters_keep_what_arithmetic_says(
    scores: list[float], option: Sampling, kept: str
) -> None:
    assert twin_kept(twin_scaled(scores, option.temperature), option).flags == [
        flag == "1" for flag in kept
    ]
    assert kept_by_op(scores, option) == [flag == "1" for flag in kept]


def test_a_part_of_the_mass_just_below_one_keeps_a_flat_vocabulary_nearly_whole() -> None:
    """The mass of 150,000 tokens exceeds float64's integers: the part must not exceed the whole."""
    scores = torch.rand(HUGE_VOCAB, generator=torch.Generator().manual_seed(0)) * 1e-3
    kept = kept_by_op(scores.tolist(), Sampling(1.0, top_p=math.nextafter(1.0, 0.0)))
    assert sum(kept) >= HUGE_VOCAB - 1
    half = sum(kept_by_op(scores.tolist(), Sampling(1.0, top_p=0.5)))
    assert half == pytest.approx(HUGE_VOCAB / 2, rel=1e-3)


# Greedy rows, and scores that are no numbers.


@pytest.mark.usefixtures("either")
def test_temperature_zero_takes_the_first_best_score_whatever_else_is_set() -> None:
    scores = [1.0, 3.0, 2.0, 3.0, -5.0]
    for option in (
        Sampling(),
        Sampling(top_k=1, top_p=0.1, min_p=0.9, seed=5),
        Sampling(top_k=50, seed=2**60),
    ):
        for index in range(20):
            assert draw_one(scores, option, key=index, index=index) == 1


@pytest.mark.usefixtures("either")
def test_scores_that_are_no_numbers_touch_no_other_node_and_are_told() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(6, 2, 11, generator=generator)
    rows = [(Sampling(temperature=place % 2 * 0.8, top_p=0.9), place) for place in range(6)]
    depth_BN, index_B = torch.zeros(6, 2, dtype=torch.long), torch.arange(6)
    sound = keyed_draw(scores, depth_BN, index_B, params_of(rows), num_depths=1)
    assert sound.is_finite_BN.all()
    broken = scores.clone()
    for row, value in ((0, math.nan), (1, math.nan), (2, math.inf), (3, math.inf)):
        broken[row, 1, 4] = value
    broken[4, 1] = -math.inf
    broken[5, 1, int(broken[5, 1].argmin())] = -math.inf  # the rest are numbers: nothing is wrong
    found = keyed_draw(broken, depth_BN, index_B, params_of(rows), num_depths=1)
    assert found.is_finite_BN[:, 1].tolist() == [False] * 5 + [True]
    assert found.is_finite_BN[:, 0].all()
    assert found.token_BN[:, 0].tolist() == sound.token_BN[:, 0].tolist()
    assert found.token_BN[5].tolist() == sound.token_BN[5].tolist()
    assert found.token_BN.ge(0).all()
    assert found.token_BN.lt(11).all()


# Independence.


@pytest.mark.usefixtures("either")
def test_a_row_does_not_depend_on_its_place_or_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(4)
    scores_BV = torch.randn(9, 23, generator=generator)
    rows = [(Sampling(1.0, top_k=place, seed=place), twin_hash(place, 0, 0)) for place in range(9)]
    whole = draw_rows(scores_BV, rows, list(range(9))).token_BN[:, 0].tolist()
    order = torch.randperm(9, generator=generator).tolist()
    mixed = draw_rows(scores_BV[order], [rows[p] for p in order], order).token_BN[:, 0].tolist()
    assert mixed == [whole[place] for place in order]
    alone = [int(draw_rows(scores_BV[p : p + 1], rows[p : p + 1], [p]).token_BN) for p in range(9)]
    assert alone == whole


OTHERS = [
    ("row", 0, Key(1, 0, 0), 0),
    ("turn", 0, Key(0, 1, 0), 0),
    ("sample", 0, Key(0, 0, 1), 0),
    ("seed", 1, Key(0, 0, 0), 0),
    ("high word of the seed", 2**32, Key(0, 0, 0), 0),
    ("output index", 0, Key(0, 0, 0), 1),
]


@pytest.mark.parametrize(("seed", "key", "shift"), [case[1:] for case in OTHERS])
def test_draws_of_another_key_are_independent(seed: int, key: Key, shift: int) -> None:
    """Pairs of draws from one flat distribution fill all cells alike; one key repeats itself."""
    vocab, draws = 5, 3000

    def sequence(seed: int, key: Key, shift: int) -> Tensor:
        row = (Sampling(temperature=1.0, seed=seed), key_hash(key))
        index = list(range(shift, draws + shift))
        return draw_rows(torch.zeros(draws, vocab), [row] * draws, index).token_BN[:, 0]

    first, second = sequence(0, Key(0, 0, 0), 0), sequence(seed, key, shift)
    counts = (first * vocab + second).bincount(minlength=vocab**2)
    assert chi_square(counts.tolist(), [1 / vocab**2] * vocab**2) > 1e-4
    assert first.tolist() == sequence(0, Key(0, 0, 0), 0).tolist()


# Frequencies over a huge vocabulary. The usual noise of 24 bits is planted as a fault.

TAIL_MASS = 1e-4
BEST_TOKEN = 77_777
HEAD_STEP = 150  # every 150th token is of the head: 1,000 tokens


def peaked_scores() -> Tensor:
    """Half of the mass on one token, nearly all the rest on 1,000 others, TAIL_MASS on the rest."""
    mass_V = torch.full((HUGE_VOCAB,), TAIL_MASS / (HUGE_VOCAB - 1001), dtype=torch.float64)
    mass_V[::HEAD_STEP] = (0.5 - TAIL_MASS) / 1000
    mass_V[BEST_TOKEN] = 0.5
    return mass_V.log().float()


def tail_hits(token_ids: Sequence[int]) -> int:
    return sum(token_id % HEAD_STEP != 0 and token_id != BEST_TOKEN for token_id in token_ids)


def test_draws_over_a_huge_vocabulary_have_the_right_frequencies() -> None:
    draws = 1200
    scores_V, quad = peaked_scores(), torch.arange(HUGE_VOCAB // 4)
    flat, peaked = [], []
    for place in range(draws):
        row_id, index = divmod(place, 50)
        key = (
            torch.tensor(twin_hash(row_id, 0, 0) & WORD),
            torch.tensor(twin_hash(row_id, 0, 0) >> 32),
        )
        zero = torch.tensor(0)
        noise_V = gumbel(philox4x32((quad, torch.tensor(index), *key), (zero, zero)).flatten())
        flat.append(int(noise_V.argmax()))
        peaked.append(int((scores_V + noise_V).argmax()))
    for place in (0, 1, 51):  # the op draws just these
        row_id, index = divmod(place, 50)
        row = [(Sampling(temperature=1.0), twin_hash(row_id, 0, 0))]
        assert draw_rows(scores_V[None], row, [index]).token_BN.item() == peaked[place]
        assert draw_rows(torch.zeros(1, HUGE_VOCAB), row, [index]).token_BN.item() == flat[place]

    token_F, token_P = torch.tensor(flat), torch.tensor(peaked)
    by_place = (token_F * 40 // HUGE_VOCAB).bincount(minlength=40).tolist()
    assert chi_square(by_place, [1 / 40] * 40) > 1e-4
    assert chi_square((token_F % 4).bincount(minlength=4).tolist(), [1 / 4] * 4) > 1e-4
    assert chi_square((token_F // 4 % 16).bincount(minlength=16).tolist(), [1 / 16] * 16) > 1e-4
    assert len(set(flat)) > draws * 0.98  # about 5 repeats are chance

    num_best = peaked.count(BEST_TOKEN)
    assert abs(num_best - draws / 2) < 4 * math.sqrt(draws / 4)
    is_head_P = (token_P % HEAD_STEP == 0) & (token_P != BEST_TOKEN)
    head = (token_P[is_head_P] * 20 // HUGE_VOCAB).bincount(minlength=20).tolist()
    assert chi_square([num_best, *head], [0.5, *[0.5 / 20] * 20]) > 1e-4
    assert at_least(tail_hits(peaked), draws, TAIL_MASS) > 1e-4


def test_noise_of_24_bits_would_be_caught() -> None:
    """It rounds to 1 once in 2^24 words, and the token with that word wins whatever its score."""
    draws = 600
    scores_V, generator = peaked_scores(), torch.Generator().manual_seed(0)
    faulty, sound = [], []
    for _ in range(draws):
        word_V = torch.randint(2**32, (HUGE_VOCAB,), generator=generator)
        uniform_V = ((word_V >> 8).float() + 0.5) * 2.0**-24
        faulty.append(int((scores_V - uniform_V.log().neg().log()).argmax()))
        sound.append(int((scores_V + gumbel(word_V)).argmax()))
    assert at_least(tail_hits(faulty), draws, TAIL_MASS) < 1e-6
    assert at_least(tail_hits(sound), draws, TAIL_MASS) > 1e-4
