"""The Llama target and the oracle, held against transformers on small random models.

The real target is held too where it can be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import RealPair
from tiny import LLAMA3_ROPE, read_target, write_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ddbatch.engine.oracle import Oracle, decode
from ddbatch.models.layers import Planes, Ragged, VisibleKeys
from ddbatch.models.llama import Llama, TargetOutput

TOLERANCE = 1e-4  # largest difference of scores, relative to the largest score
LENGTHS = (1, 2, 7, 33, 65)

VARIANTS = {
    "tied": {},
    "untied, llama3 scaling, new keys, sharded": {
        "tied": False,
        "rope": LLAMA3_ROPE,
        "nested_keys": True,
        "shards": 3,
        "seed": 1,
    },
    "one key head, llama3 scaling, old keys": {
        "heads": 3,
        "kv_heads": 1,
        "head_width": 6,
        "width": 33,
        "layers": 3,
        "rope": LLAMA3_ROPE | {"rope_theta": 500.0},
        "seed": 2,
    },
    "no shared key heads, one layer, large theta": {
        "heads": 2,
        "kv_heads": 2,
        "head_width": 16,
        "width": 14,
        "layers": 1,
        "mlp_width": 9,
        "tied": False,
        "rope": {"rope_theta": 1e6, "rope_type": "default"},
        "seed": 3,
    },
}


@dataclass
class Twins:
    """One checkpoint, read by ddbatch and by transformers."""

    ours: Llama
    theirs: LlamaForCausalLM

    def expected(self, token_ids: list[int]) -> Tensor:
        """Scores [T, V] of transformers after each token of one sequence, without a cache."""
        with torch.inference_mode():
            logits: Tensor = self.theirs(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits


def open_twins(folder: Path) -> Twins:
    theirs = LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return Twins(read_target(folder), theirs.eval())


@pytest.fixture(scope="module", params=VARIANTS)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    folder = tmp_path_factory.mktemp("target")
    return open_twins(write_target(folder, **VARIANTS[request.param]))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """The variant with the most features, where one is enough."""
    folder = tmp_path_factory.mktemp("scaled")
    return open_twins(write_target(folder, **VARIANTS["untied, llama3 scaling, new keys, sharded"]))


def random_ids(length: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert error < TOLERANCE, error


class Runner:
    """Drives a Llama as the engine does: planes of shuffled cells, committed from scratch.

    Cells that nobody owns are NaN; a row's missing keys point at one cell of zeros.
    """

    def __init__(self, model: Llama, rows: int, max_len: int, dtype: torch.dtype) -> None:
        dims = model.dims
        self.model = model
        cells = rows * max_len
        generator = torch.Generator().manual_seed(5)
        self.addr_BS = torch.randperm(cells, generator=generator).view(rows, max_len)
        self.null_cell = cells
        shape = (dims.layers, cells + 1, dims.kv_heads, dims.head_width)
        self.cache = Planes(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
        self.scratch = Planes(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
        for plane in self.cache:
            plane[:, self.null_cell] = 0
        self.length_B = torch.zeros(rows, dtype=torch.long)

    @torch.inference_mode()
    def forward(
        self,
        token_BQ: Tensor,
        pos_BQ: Tensor,
        is_visible_BQQ: Tensor,
        tap_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """All rows at once; a query sees its row's committed keys and those of is_visible_BQQ."""
        return self.model(
            token_BQ.flatten(),
            pos_BQ.flatten(),
            self.cache,
            self.scratch,
            self.keys(is_visible_BQQ),
            tap_layers,
        )

    def keys(self, is_visible_BQQ: Tensor) -> VisibleKeys:
        num_keys = int(self.length_B.max())
        exists_BS = torch.arange(num_keys) < self.length_B[:, None]
        addr_BS = torch.where(exists_BS, self.addr_BS[:, :num_keys], self.null_cell)
        is_visible = torch.cat(
            (exists_BS[:, None].expand(-1, is_visible_BQQ.shape[1], -1), is_visible_BQQ), dim=-1
        )
        bias = torch.zeros(is_visible.shape, dtype=self.cache.k_LXGE.dtype)
        return VisibleKeys(addr_BS, bias.masked_fill(~is_visible, -torch.inf))

    def commit(self, row: int, tokens: list[int]) -> None:
        """Append scratch entries (flat token numbers of the last forward) to a row's cells."""
        start = int(self.length_B[row])
        cells = self.addr_BS[row, start : start + len(tokens)]
        for plane, new in zip(self.cache, self.scratch, strict=True):
            plane[:, cells] = new[:, tokens]
        self.length_B[row] += len(tokens)

    def extend(self, token_ids: list[int]) -> Tensor:
        """Scores of the next tokens of the only row, which are committed: a piece of a prefill."""
        start = int(self.length_B[0])
        pos = torch.arange(start, start + len(token_ids))
        causal = torch.ones(1, len(pos), len(pos), dtype=torch.bool).tril()
        out = self.forward(torch.tensor([token_ids]), pos[None], causal)
        self.commit(0, list(range(len(token_ids))))
        return self.model.logits(out.hidden_TD)


def prefilled(model: Llama, texts: list[list[int]], max_len: int) -> Runner:
    """Rows of unequal length, each prefilled alone and moved to its cells."""
    runner = Runner(model, len(texts), max_len, torch.float32)
    for row, ids in enumerate(texts):
        alone = Runner(model, 1, max_len, torch.float32)
        alone.extend(ids)
        for plane, filled in zip(runner.cache, alone.cache, strict=True):
            plane[:, runner.addr_BS[row, : len(ids)]] = filled[:, alone.addr_BS[0, : len(ids)]]
        runner.length_B[row] = len(ids)
    return runner


def pieces(token_ids: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(token_ids), size):
        yield token_ids[start : start + size]


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_in_one_call_gives_transformers_scores(twins: Twins, length: int) -> None:
    ids = random_ids(length, twins.ours.dims.vocab, seed=length)
    ours = Runner(twins.ours, 1, length, torch.float32).extend(ids)
    assert_close(ours, twins.expected(ids))


@pytest.mark.parametrize("size", [1, 5, 32])
def test_prefill_in_pieces_gives_transformers_scores(twins: Twins, size: int) -> None:
    ids = random_ids(33, twins.ours.dims.vocab, seed=size)
    runner = Runner(twins.ours, 1, 40, torch.float32)
    ours = torch.cat([runner.extend(piece) for piece in pieces(ids, size)])
    assert_close(ours, twins.expected(ids))


def test_prompts_packed_in_one_call_do_not_see_each_other(twins: Twins) -> None:
    prompts = [random_ids(length, twins.ours.dims.vocab, seed=length) for length in (7, 1, 12)]
    owner = torch.cat([torch.full((len(ids),), row) for row, ids in enumerate(prompts)])
    pos = torch.cat([torch.arange(len(ids)) for ids in prompts])
    is_visible = (owner[:, None] == owner) & (pos[:, None] >= pos)
    runner = Runner(twins.ours, 1, 20, torch.float32)
    out = runner.forward(
        torch.tensor([[token for ids in prompts for token in ids]]), pos[None], is_visible[None]
    )
    ours = twins.ours.logits(out.hidden_TD).split([len(ids) for ids in prompts])
    for logits, ids in zip(ours, prompts, strict=True):
        assert_close(logits, twins.expected(ids))


def ragged_call(runner: Runner, pieces_of_rows: list[list[int]]) -> tuple[Tensor, ...]:
    """Scores of unequal pieces of all rows in one call of the fewest tokens, per row."""
    sizes = torch.tensor([len(ids) for ids in pieces_of_rows])
    width = int(sizes.max())
    begin_B, index_Q = sizes.cumsum(0) - sizes, torch.arange(width)
    rows = torch.arange(len(sizes)).repeat_interleave(sizes)
    index_T = torch.arange(len(rows)) - begin_B[rows]
    ragged = Ragged(begin_B[:, None] + index_Q.minimum(sizes[:, None] - 1), rows * width + index_T)
    causal = (index_Q[:, None] >= index_Q) & (index_Q < sizes[:, None, None])
    token_T = torch.tensor([token for ids in pieces_of_rows for token in ids])
    pos_T = runner.length_B[rows] + index_T
    with torch.inference_mode():
        keys = runner.keys(causal)._replace(ragged=ragged)
        out = runner.model(token_T, pos_T, runner.cache, runner.scratch, keys)
        return runner.model.logits(out.hidden_TD).split(sizes.tolist())


def test_unequal_pieces_of_several_prompts_share_a_call(twins: Twins) -> None:
    cached, sizes = (5, 1, 3), (4, 1, 7)
    texts = [
        random_ids(sum(pair), twins.ours.dims.vocab, seed=pair[0])
        for pair in zip(cached, sizes, strict=True)
    ]
    runner = prefilled(twins.ours, [ids[:n] for ids, n in zip(texts, cached, strict=True)], 20)
    ours = ragged_call(runner, [ids[n:] for ids, n in zip(texts, cached, strict=True)])
    for logits, ids, size in zip(ours, texts, sizes, strict=True):
        assert_close(logits, twins.expected(ids)[-size:])


def test_not_a_number_in_one_row_reaches_no_other(scaled: Twins) -> None:
    texts = [random_ids(9, scaled.ours.dims.vocab, seed) for seed in (1, 2)]
    runner = prefilled(scaled.ours, [ids[:6] for ids in texts], 20)
    runner.cache.v_LXGE[:, runner.addr_BS[0, :6]] = torch.nan
    broken, sound = ragged_call(runner, [texts[0][6:8], texts[1][6:]])
    assert broken.isnan().all()
    assert_close(sound, scaled.expected(texts[1])[-3:])


def test_decoding_unequal_rows_through_the_cache_gives_transformers_scores(twins: Twins) -> None:
    texts = [random_ids(length, twins.ours.dims.vocab, seed=9 + length) for length in (2, 33, 7)]
    # A token's own forward gives its scores, so the last one is not prefilled.
    runner = prefilled(twins.ours, [ids[:-1] for ids in texts], 50)
    for _ in range(9):
        last = torch.tensor([[ids[-1]] for ids in texts])
        out = runner.forward(last, runner.length_B[:, None], torch.ones(3, 1, 1).bool())
        logits = twins.ours.logits(out.hidden_TD)
        for row, ids in enumerate(texts):
            assert_close(logits[row], twins.expected(ids)[-1])
            runner.commit(row, [row])
            ids.append(int(logits[row].argmax()))


class Trees(NamedTuple):
    """Trees of one shape. paths: for each node, the nodes from the root to it."""

    token_BN: Tensor
    depth_N: Tensor
    is_ancestor_NN: Tensor
    paths: list[list[int]]


def grow(rows: int, vocab: int, seed: int) -> Trees:
    """7 nodes down to depth 3, two siblings at each of the first depths."""
    parents = [-1, 0, 0, 1, 1, 2, 5]
    paths: list[list[int]] = []
    is_ancestor = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        paths.append([*([] if parent < 0 else paths[parent]), node])
        is_ancestor[node, paths[node]] = True
    token = torch.tensor(random_ids(rows * len(parents), vocab, seed)).view(rows, -1)
    depth = torch.tensor([len(path) - 1 for path in paths])
    return Trees(token, depth, is_ancestor, paths)


def test_a_tree_gives_every_path_the_scores_of_its_own_sequence(twins: Twins) -> None:
    vocab = twins.ours.dims.vocab
    prompts = [random_ids(length, vocab, seed=20 + length) for length in (33, 1, 9)]
    trees = grow(3, vocab, seed=7)
    runner = prefilled(twins.ours, prompts, 40)
    out = runner.forward(
        trees.token_BN,
        runner.length_B[:, None] + trees.depth_N,
        trees.is_ancestor_NN.expand(3, 7, 7),
    )
    logits_BNV = twins.ours.logits(out.hidden_TD).unflatten(0, (3, 7))
    for row, ids in enumerate(prompts):
        for node, path in enumerate(trees.paths):
            expected = twins.expected(ids + trees.token_BN[row, path].tolist())[-1]
            assert_close(logits_BNV[row, node], expected)


def test_a_committed_path_of_a_tree_is_a_prefix_like_any_other(scaled: Twins) -> None:
    vocab = scaled.ours.dims.vocab
    prompt = random_ids(9, vocab, seed=30)
    trees = grow(1, vocab, seed=8)
    runner = prefilled(scaled.ours, [prompt], 40)
    runner.forward(trees.token_BN, 9 + trees.depth_N[None], trees.is_ancestor_NN[None])
    path = trees.paths[6]
    runner.commit(0, path)
    after = random_ids(3, vocab, seed=31)
    text = prompt + trees.token_BN[0, path].tolist() + after
    assert_close(runner.extend(after), scaled.expected(text)[-3:])


def test_features_are_the_outputs_of_the_tapped_layers(twins: Twins) -> None:
    layers = twins.ours.dims.layers
    tap_layers = tuple(sorted({0, max(0, layers - 2)}))
    ids = random_ids(7, twins.ours.dims.vocab, seed=40)
    causal = torch.ones(1, 7, 7, dtype=torch.bool).tril()
    runner = Runner(twins.ours, 1, 7, torch.float32)
    out = runner.forward(torch.tensor([ids]), torch.arange(7)[None], causal, tap_layers)
    with torch.inference_mode():
        states = twins.theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
    if layers == 1:  # its only layer is the last, whose entry there is taken after the final norm
        with torch.inference_mode():
            assert_close(twins.ours.norm(out.feature_TC), states[1][0])
    else:
        expected = torch.cat([states[layer + 1][0] for layer in tap_layers], dim=-1)
        assert_close(out.feature_TC, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_saved_by_transformers_gives_its_scores(tmp_path: Path, tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=53,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.4,
        tie_word_embeddings=tied,
        rope_parameters=dict(LLAMA3_ROPE),
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    twins = Twins(read_target(tmp_path), theirs)
    ids = random_ids(33, 53, seed=50)
    assert_close(Runner(twins.ours, 1, 33, torch.float32).extend(ids), twins.expected(ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_scores_are_no_worse_than_those_of_transformers(tmp_path: Path, dtype: str) -> None:
    folder = write_target(tmp_path, **VARIANTS["untied, llama3 scaling, new keys, sharded"])
    torch_dtype: torch.dtype = getattr(torch, dtype)
    model = read_target(folder, dtype)
    theirs = LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch_dtype
    ).eval()
    rounded = LlamaForCausalLM.from_pretrained(folder, dtype=torch_dtype).float().eval()
    ours_error, theirs_error = 0.0, 0.0
    for seed in range(4):
        ids = random_ids(65, model.dims.vocab, seed)
        exact = Twins(model, rounded).expected(ids)
        logits = Runner(model, 1, 65, torch_dtype).extend(ids)
        assert logits.dtype == torch.float32
        ours_error += (logits - exact).square().mean().item()
        theirs_error += (Twins(model, theirs).expected(ids).float() - exact).square().mean().item()
    assert ours_error**0.5 <= 1.5 * theirs_error**0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_of_a_half_model_are_not_rounded_to_half(tmp_path: Path, dtype: str) -> None:
    model = read_target(write_target(tmp_path), dtype)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    hidden = torch.randn(9, 24, generator=torch.Generator().manual_seed(55)).to(torch_dtype)
    logits = model.logits(hidden)
    assert_close(logits, (hidden.double() @ model.head.double().T).float())
    assert (logits != logits.to(torch_dtype).float()).float().mean() > 0.9


@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_the_oracle_decodes_as_transformers_generates(twins: Twins, length: int) -> None:
    ids = random_ids(length, twins.ours.dims.vocab, seed=60 + length)
    steps = decode(twins.ours, tuple(ids), max_new_tokens=40, stop_token_ids=())
    assert min(step.gap for step in steps) > 1e-4, "a near-tie: choose another seed"
    theirs = twins.theirs.generate(
        torch.tensor([ids]),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert [step.token_id for step in steps] == theirs[0, length:].tolist()


def test_the_oracle_stops_after_a_stop_token(scaled: Twins) -> None:
    ids = tuple(random_ids(5, scaled.ours.dims.vocab, seed=70))
    free = [s.token_id for s in decode(scaled.ours, ids, max_new_tokens=30, stop_token_ids=())]
    stop = free[12]
    steps = decode(scaled.ours, ids, max_new_tokens=30, stop_token_ids=(stop, 96))
    assert [step.token_id for step in steps] == free[: free.index(stop) + 1]


def test_the_oracles_scores_and_gaps_are_those_of_transformers(twins: Twins) -> None:
    ids = random_ids(33, twins.ours.dims.vocab, seed=80)
    expected = twins.expected(ids)
    assert_close(Oracle(twins.ours).scores(ids), expected)
    oracle = Oracle(twins.ours)
    assert_close(torch.cat([oracle.scores(piece) for piece in pieces(ids, 5)]), expected)
    best = expected[-1].topk(2).values
    step = decode(twins.ours, tuple(ids), max_new_tokens=1, stop_token_ids=())[0]
    assert step.gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)


@pytest.fixture(scope="module")
def smollm2(real_pair: RealPair) -> Twins:
    return open_twins(real_pair.target)


@pytest.mark.shared
@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_smollm2_gives_transformers_scores(smollm2: Twins, length: int) -> None:
    ids = random_ids(length, smollm2.ours.dims.vocab, seed=length)
    runner = Runner(smollm2.ours, 1, length, torch.float32)
    ours = torch.cat([runner.extend(piece) for piece in pieces(ids, 16)])
    assert_close(ours, smollm2.expected(ids))


@pytest.mark.shared
def test_smollm2_decodes_as_transformers_generates(smollm2: Twins) -> None:
    ids = random_ids(7, smollm2.ours.dims.vocab, seed=1)
    steps = decode(smollm2.ours, tuple(ids), max_new_tokens=24, stop_token_ids=())
    theirs = smollm2.theirs.generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert min(step.gap for step in steps) > 1e-4, "a near-tie: choose another seed"
    assert [step.token_id for step in steps] == theirs[0, 7:].tolist()
    runner = Runner(smollm2.ours, 1, 64, torch.float32)
    scores = runner.extend(ids)[-1]
    text = list(ids)
    for step in steps:  # token by token through the cache
        assert int(scores.argmax()) == step.token_id
        text.append(step.token_id)
        scores = runner.extend([step.token_id])[-1]
    assert_close(scores, smollm2.expected(text)[-1])
