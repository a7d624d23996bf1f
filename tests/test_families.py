"""Every target family and the oracle, held against transformers on small random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    VARIANTS,
    Runner,
    Twins,
    assert_close,
    grow,
    open_twins,
    pieces,
    prefilled,
    random_ids,
)
from tiny import LLAMA3_ROPE, read_target, write_target
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from ddbatch.engine.oracle import Oracle, decode

LENGTHS = (1, 2, 7, 33, 65)
SCALED = "llama, untied, llama3 scaling, new keys, sharded"


@pytest.fixture(scope="module", params=VARIANTS)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    folder = tmp_path_factory.mktemp("target")
    return open_twins(write_target(folder, **VARIANTS[request.param]))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """The variant with the most features, where one is enough."""
    return open_twins(write_target(tmp_path_factory.mktemp("scaled"), **VARIANTS[SCALED]))


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


def test_unequal_pieces_of_several_prompts_share_a_call(twins: Twins) -> None:
    cached, sizes = (5, 1, 3), (4, 1, 7)
    texts = [
        random_ids(sum(pair), twins.ours.dims.vocab, seed=pair[0])
        for pair in zip(cached, sizes, strict=True)
    ]
    runner = prefilled(twins.ours, [ids[:n] for ids, n in zip(texts, cached, strict=True)], 20)
    ours = runner.shared_call([(row, texts[row][n:]) for row, n in enumerate(cached)])
    for logits, ids, size in zip(ours, texts, sizes, strict=True):
        assert_close(logits, twins.expected(ids)[-size:])


def test_pieces_of_one_prompt_share_a_call_and_see_each_other(twins: Twins) -> None:
    """A layer's keys of all pieces are written before any of them is looked at."""
    texts = [random_ids(length, twins.ours.dims.vocab, seed=length) for length in (13, 7)]
    runner = Runner(twins.ours, 2, 20, torch.float32)
    ours = runner.shared_call(
        [
            *((0, piece) for piece in pieces(texts[0][:10], 5)),
            (1, texts[1]),
            (0, texts[0][10:]),
        ]
    )
    assert_close(torch.cat([ours[0], ours[1], ours[3]]), twins.expected(texts[0]))
    assert_close(ours[2], twins.expected(texts[1]))


def test_not_a_number_in_one_row_reaches_no_other(scaled: Twins) -> None:
    texts = [random_ids(9, scaled.ours.dims.vocab, seed) for seed in (1, 2)]
    runner = prefilled(scaled.ours, [ids[:6] for ids in texts], 20)
    runner.cache.v_LXGE[:, runner.addr_BS[0, :6]] = torch.nan
    broken, sound = runner.shared_call([(0, texts[0][6:8]), (1, texts[1][6:])])
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
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (LlamaConfig, {"rope_parameters": dict(LLAMA3_ROPE)}),
        (Qwen2Config, {}),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        (Qwen3Config, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
        (
            Qwen3Config,
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        (MistralConfig, {"sliding_window": None}),
        (MistralConfig, {"sliding_window": 9}),
    ],
)
def test_a_folder_saved_by_transformers_gives_its_scores(
    tmp_path: Path, kind: type[PretrainedConfig], own: dict[str, Any], tied: bool
) -> None:
    config = kind(
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
        attn_implementation="eager",
        **own,
    )
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in theirs.named_parameters():
        if name.endswith((".bias", "_norm.weight")):  # made as zeros and ones
            torch.nn.init.normal_(weight, mean=1.0)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    twins = Twins(read_target(tmp_path), theirs)
    ids = random_ids(33, 53, seed=50)
    assert_close(Runner(twins.ours, 1, 33, torch.float32).extend(ids), twins.expected(ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "variant",
    [
        SCALED,
        "qwen2, window 7 from layer 1, old keys",
        "qwen3, window 7 from layer 2, new keys",
        "mistral, window 7, new keys",
    ],
)
def test_half_scores_are_no_worse_than_those_of_transformers(
    tmp_path: Path, variant: str, dtype: str
) -> None:
    folder = write_target(tmp_path, **VARIANTS[variant])
    torch_dtype: torch.dtype = getattr(torch, dtype)
    model = read_target(folder, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch_dtype
    ).eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype).float().eval()
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
