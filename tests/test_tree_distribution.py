"""What trees emit follows the target's distribution: sequences of one prompt are counted and held
against the oracle's softmax, and the counts would tell the textbook acceptance rule from ours."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from decoding import make_engine, random_prompts
from keyed_draw_twin import WORD, chi_square, twin_draw, twin_hash, twin_probabilities
from tiny import load_tiny_pair

from ddbatch.core import Completion, Key, PrefillPlan, Sampling, TokenPrompt
from ddbatch.engine.oracle import Oracle
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch_kernels.accept_tree import accepted_path
from ddbatch_kernels.keyed_draw import DrawParams, keyed_draw

VOCAB = 13  # small, so that a random drafter is often right
LEAST_P = 1e-4
PROMPT = (3, 1, 4, 1, 5)
DRAWS = 3000
OPTIONS = {
    "plain": Sampling(temperature=1.0),
    "filtered": Sampling(temperature=0.7, top_p=0.9, top_k=8, min_p=0.02, seed=2**40 + 7),
}
METHODS: dict[str, dict[str, object]] = {
    "tree": {"method": "ddtree", "budget": 7},
    "narrow tree": {"method": "ddtree", "budget": 11, "topk": 2},
    "chain": {"method": "chain", "budget": None},
    "plain decoding": {"method": "autoregressive", "budget": None},
}
Pair = tuple[Target, DFlash]
Scores = dict[tuple[int, int], list[list[float]]]
Sequences = Callable[[str, str], list[Completion]]  # of a method and of options


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Scores flattened, so that no token is sure; a drafter that is often right, also twice."""
    target, drafter = load_tiny_pair(
        tmp_path_factory.mktemp("pair"), vocab=VOCAB, block=5, drafter_seed=36
    )
    with torch.no_grad():
        target.norm.weight.mul_(0.5)
    return target, drafter


@pytest.fixture(scope="module")
def sequences(pair: Pair) -> Sequences:
    """Completions of DRAWS rows of one prompt, three tokens each; made once."""

    @functools.cache
    def made(method: str, options: str) -> list[Completion]:
        prompts = [
            TokenPrompt(Key(row_id, 0, 0), PROMPT, 3, OPTIONS[options]) for row_id in range(DRAWS)
        ]
        return decoded(pair, prompts, method, rows=64)

    return made


def decoded(
    pair: Pair, prompts: Sequence[TokenPrompt], method: str, *, rows: int
) -> list[Completion]:
    """Completions in the order of their keys."""
    calls = PrefillPlan(chunks=64, chunk=8, is_fixed=False)
    engine = make_engine(*pair, **METHODS[method], rows=rows, prefill_plan=calls)
    done = [item for item in engine.run(iter(prompts)) if isinstance(item, Completion)]
    assert len(done) == len(prompts)
    return sorted(done, key=lambda completion: completion.key)


@pytest.fixture(scope="module")
def oracle_scores(pair: Pair) -> Scores:
    """Scores of the first three output tokens by the first two, one sequence at a time."""
    return {
        (first, second): Oracle(pair[0]).scores([*PROMPT, first, second])[-3:].tolist()
        for first in range(VOCAB)
        for second in range(VOCAB)
    }


def triples_of(oracle_scores: Scores, option: Sampling) -> dict[tuple[int, int, int], float]:
    """Probability of each three first output tokens."""
    found = {}
    for first in range(VOCAB):
        for second in range(VOCAB):
            scores = oracle_scores[first, second]
            p, p_next, p_last = (twin_probabilities(row, option) for row in scores)
            for third in range(VOCAB):
                found[first, second, third] = p[first] * p_next[second] * p_last[third]
    return found


def fit(
    outputs: Sequence[tuple[int, ...]],
    triples: dict[tuple[int, int, int], float],
    places: tuple[int, ...],
) -> float:
    """chi_square of the tokens at these places of the outputs, all other places summed over."""
    probability: Counter[tuple[int, ...]] = Counter()
    for tokens, value in triples.items():
        probability[tuple(tokens[place] for place in places)] += value
    count = Counter(tuple(tokens[place] for place in places) for tokens in outputs)
    cells = sorted(probability)
    return chi_square([count[cell] for cell in cells], [probability[cell] for cell in cells])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_outputs_follow_the_oracles_distribution(
    oracle_scores: Scores, sequences: Sequences, method: str, options: str
) -> None:
    """The first token is the prefill's, those at places 1 and 2 are of rounds."""
    done = sequences(method, options)
    if method != "plain decoding":  # rounds that keep and rounds that miss, many of both
        num_kept = sum(completion.accepted[0] > 0 for completion in done)
        assert 0.1 * DRAWS < num_kept < 0.9 * DRAWS, num_kept
        assert method == "chain" or sum(completion.accepted[0] > 1 for completion in done) > 50
    triples = triples_of(oracle_scores, OPTIONS[options])
    outputs = [completion.token_ids for completion in done]
    for places in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)):
        assert fit(outputs, triples, places) > LEAST_P, places


def test_the_count_tells_near_distributions_apart(
    oracle_scores: Scores, sequences: Sequences
) -> None:
    """Else a fit would mean nothing: another temperature, and one filter less, do not fit."""
    option = OPTIONS["filtered"]
    outputs = [completion.token_ids for completion in sequences("tree", "filtered")]
    for other in (
        Sampling(0.85, option.top_p, option.top_k, option.min_p),
        Sampling(0.7, 1.0, option.top_k, option.min_p),
        Sampling(0.7, option.top_p, option.top_k + 3, 0.0),
    ):
        assert fit(outputs, triples_of(oracle_scores, other), (1, 2)) < LEAST_P


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", ["tree", "narrow tree", "chain"])
def test_trees_say_what_plain_decoding_says_token_for_token(
    sequences: Sequences, method: str, options: str
) -> None:
    plain = sequences("plain decoding", options)
    assert [c.token_ids for c in sequences(method, options)] == [c.token_ids for c in plain]


def unlike_prompts() -> list[TokenPrompt]:
    """Rows with options, lengths and caps of their own, turns and samples among them."""
    options = [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.8, seed=5),
        Sampling(temperature=1.5, top_k=4),
        Sampling(temperature=1.0, min_p=0.1, seed=2**63 - 1),
    ]
    lengths = [1 + place * 7 % 23 for place in range(20)]
    return [
        TokenPrompt(
            Key(place // 3, place % 3, place % 2), tuple(ids), 10 + place, options[place % 5]
        )
        for place, ids in enumerate(random_prompts(lengths, VOCAB))
    ]


@pytest.mark.parametrize("method", ["tree", "narrow tree", "chain"])
def test_unlike_rows_in_any_order_say_what_plain_decoding_says(pair: Pair, method: str) -> None:
    prompts = unlike_prompts()
    plain = decoded(pair, prompts, "plain decoding", rows=4)
    for order in (1, -1):
        done = decoded(pair, prompts[::order], method, rows=7)
        assert [c.token_ids for c in done] == [c.token_ids for c in plain]


@pytest.mark.parametrize("method", METHODS)
def test_every_token_is_the_twins_draw_from_the_oracles_scores(pair: Pair, method: str) -> None:
    prompts = unlike_prompts()
    near = []
    for prompt, done in zip(prompts, decoded(pair, prompts, method, rows=5), strict=True):
        output = done.token_ids
        scores = Oracle(pair[0]).scores([*prompt.token_ids, *output[:-1]])[-len(output) :]
        for index, (token_id, row) in enumerate(zip(output, scores.tolist(), strict=True)):
            expected = twin_draw(row, prompt.sampling, twin_hash(*prompt.key), index)
            if token_id != expected.token_id:
                assert expected.is_near, (prompt.key, index)
                near.append((prompt.key, index))
    assert len(near) <= 1, near


def test_rows_turns_samples_and_seeds_of_one_prompt_differ(pair: Pair) -> None:
    keys = [Key(0, 0, 0), Key(1, 0, 0), Key(0, 1, 0), Key(0, 0, 1), Key(2, 0, 0)]
    seeds = [0, 0, 0, 0, 9]
    outputs = []
    for key, seed in [*zip(keys, seeds, strict=True), (Key(2, 0, 0), 0)]:
        prompt = TokenPrompt(key, PROMPT, 30, Sampling(temperature=1.0, seed=seed))
        outputs.append(decoded(pair, [prompt], "tree", rows=1)[0].token_ids)
    assert len(set(outputs)) == len(outputs)


# The textbook rule on a toy: two drafted tokens after the root, and one below the first of them.

TOY_P = [0.3, 0.25, 0.2, 0.15, 0.1]  # target, after the root
TOY_Q = [0.5, 0.3, 0.1, 0.06, 0.04]  # draft
TOY_NEXT = [  # target, after each first token
    [0.1, 0.2, 0.4, 0.2, 0.1],
    [0.2, 0.2, 0.2, 0.2, 0.2],
    [0.6, 0.1, 0.1, 0.1, 0.1],
    [0.05, 0.05, 0.1, 0.3, 0.5],
    [0.3, 0.3, 0.2, 0.1, 0.1],
]
TOY_DRAWS = 20_000


def textbook(candidates: Sequence[int], rng: random.Random) -> int:
    """Keep a candidate with probability min(1, p/q), else go on with what p has beyond q."""
    p = list(TOY_P)
    for token_id in candidates:
        if rng.random() < p[token_id] / TOY_Q[token_id]:
            return token_id
        p = [max(0.0, own - draft) for own, draft in zip(p, TOY_Q, strict=True)]
        p = [own / sum(p) for own in p]
    return rng.choices(range(len(p)), p)[0]


def test_the_textbook_rule_on_a_fixed_tree_would_be_caught() -> None:
    """min(1, p/q) is exact where candidates are drawn from q. A tree's are the most probable ones,
    always the same, so they would be emitted too often."""
    rng = random.Random(0)
    vocab = len(TOY_P)

    def fit_of(tokens: list[int]) -> float:
        return chi_square([tokens.count(token_id) for token_id in range(vocab)], TOY_P)

    drawn = [textbook(rng.choices(range(vocab), TOY_Q, k=2), rng) for _ in range(TOY_DRAWS)]
    assert fit_of(drawn) > LEAST_P
    fixed = [textbook((0, 1), rng) for _ in range(TOY_DRAWS)]
    assert fit_of(fixed) < 1e-10


def test_the_keyed_walk_of_a_fixed_tree_is_exact() -> None:
    """The same toy by the ops of the engine, all rows in one batch."""
    B, V = TOY_DRAWS, len(TOY_P)
    token_N, parent_N, depth_N = [4, 0, 1, 2], [-1, 0, 0, 1], [0, 1, 1, 2]
    tree = [torch.tensor(part).expand(B, 4) for part in (token_N, parent_N, depth_N)]
    ancestor_BNW = torch.tensor([[1], [3], [5], [11]], dtype=torch.int32).expand(B, 4, 1)
    # The scores of the deepest node change nothing here.
    scores_NV = torch.tensor([TOY_P, TOY_NEXT[0], TOY_NEXT[1], TOY_P]).log()
    hashes = [twin_hash(row_id, 0, 0) for row_id in range(B)]
    params = DrawParams(
        temperature_B=torch.ones(B),
        top_k_B=torch.zeros(B, dtype=torch.long),
        top_p_B=torch.ones(B, dtype=torch.float64),
        min_p_B=torch.zeros(B),
        seed_B2=torch.zeros(B, 2, dtype=torch.long),
        hash_B2=torch.tensor([[value & WORD, value >> 32] for value in hashes]),
    )
    index_B = torch.zeros(B, dtype=torch.long)
    choice_BN = keyed_draw(
        scores_NV.expand(B, 4, V),
        tree[2],
        index_B,
        params,
        num_depths=3,
        has_top_k=False,
        has_top_p=False,
    ).token_BN
    found = accepted_path(*tree, ancestor_BNW, choice_BN, max_depth=2)
    first_B = found.emitted_BK[:, 0]
    # The next round's first token, where this one emitted no second.
    next_BN = keyed_draw(
        torch.tensor(TOY_NEXT).log()[first_B][:, None],
        tree[2][:, :1],
        index_B + 1,
        params,
        num_depths=1,
        has_top_k=False,
        has_top_p=False,
    ).token_BN
    has_second_B = found.num_accepted_B > 0
    assert 0.4 < has_second_B.float().mean().item() < 0.7
    second_B = torch.where(has_second_B, found.emitted_BK[:, 1], next_BN[:, 0])
    assert second_B.equal(next_BN[:, 0])  # whoever draws it, it is the same token
    counts = (first_B * V + second_B).bincount(minlength=V * V).tolist()
    assert chi_square(first_B.bincount(minlength=V).tolist(), TOY_P) > LEAST_P
    cells = [p * p_next for p, after in zip(TOY_P, TOY_NEXT, strict=True) for p_next in after]
    assert chi_square(counts, cells) > LEAST_P
