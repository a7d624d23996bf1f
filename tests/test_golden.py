"""The reference DDTree implementation on a real pair (SmolLM2-135M-Instruct with a DFlash drafter
of block 16), greedy, float32: the same output ids, accepted lengths and trees, round by round.

Nine recorded rounds stand in golden_rounds.json with the drafter's scores; the whole set of traces
is compared where it lies beside the checkout.

How the reference differs from us, seen in its traces and reproduced below:
- It counts on past a stop token or the cap in its last round, so the last round is compared by
  what it emits, and it strips mask-token ids.
- Its token buffer ends budget + 1 places after the cap. Where that is less than a block away
  (budgets below the block size only, near the cap) it drafts with a shorter block and reads its
  rows one place early: those trees are worse than ours, and the tokens the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import RealPair
from decoding import decode, make_engine, token_prompts
from runs import key_of
from trees import poisoned_tree

from ddbatch.__main__ import main
from ddbatch.core import Sampling
from ddbatch.engine.oracle import Oracle
from ddbatch.engine.oracle_ddtree import draft_scores, oracle_round, trace
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash, read_drafter_dims
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import load_drafter, load_target, set_numerics
from ddbatch_kernels.accept_tree import accepted_path
from ddbatch_kernels.ancestors import pack_ancestors
from ddbatch_kernels.build_tree import build_tree

ROUNDS = json.loads((Path(__file__).parent / "golden_rounds.json").read_text())
METHODS = [
    ("autoregressive", 0),
    ("dflash chain", 0),
    ("ddtree", 8),
    ("ddtree", 16),
    ("ddtree", 32),
]
CAP, STOP, BLOCK = 96, 2, 16
SHORT = 40  # a cap of ours, where the whole output would show no more
STOPS = Sampling(stop_token_ids=(STOP,))

shared = pytest.mark.shared
Trace = dict[str, Any]


@pytest.mark.parametrize("case", ROUNDS)
def test_the_references_trees_are_built_from_its_drafters_scores(case: Trace) -> None:
    edge = torch.tensor(case["logprobs"])[None, :, None]
    nodes = poisoned_tree(1, case["budget"] + 1)
    candidate, anchor = torch.tensor(case["candidates"])[None], torch.tensor([case["anchor"]])
    build_tree(edge, candidate, anchor, out=nodes)
    assert nodes.token_BN[0].tolist() == [case["anchor"], *case["node_token_ids"]]
    assert nodes.depth_BN[0].tolist() == [0, *case["node_depths"]]
    assert nodes.parent_BN[0].tolist() == case["parents"]


@pytest.mark.parametrize("case", ROUNDS)
def test_the_references_paths_are_walked(case: Trace) -> None:
    parents, num_nodes = case["parents"], len(case["parents"])
    is_ancestor = torch.eye(num_nodes, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        is_ancestor[node] |= is_ancestor[parent]
    # Off the path the target's choice is a token that no node holds.
    choice = torch.full((1, num_nodes), -1)
    choice[0, case["accepted_indices"]] = torch.tensor(case["next_token_ids"])
    found = accepted_path(
        torch.tensor([[case["anchor"], *case["node_token_ids"]]]),
        torch.tensor([parents]),
        torch.tensor([[0, *case["node_depths"]]]),
        pack_ancestors(is_ancestor[None]),
        choice,
        max_depth=min(BLOCK - 1, case["budget"]),
    )
    num_accepted = len(case["accepted_indices"]) - 1
    assert found.num_accepted_B.tolist() == [num_accepted]
    assert found.path_BK[0, : num_accepted + 1].tolist() == case["accepted_indices"]
    assert found.emitted_BK[0, : num_accepted + 1].tolist() == case["next_token_ids"]


@dataclass(frozen=True)
class Loaded:
    """The real pair in float32, on a GPU where there is one, and the traces."""

    target: Target
    drafter: DFlash
    traces: list[Trace]

    def of(self, method: str, budget: int) -> list[Trace]:
        return [t for t in self.traces if (t["method"], t["budget"]) == (method, budget)]


@pytest.fixture(scope="module")
def loaded(real_pair: RealPair) -> Loaded:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_numerics()
    lines = (real_pair.golden / "smollm2_fp32.jsonl").read_text().splitlines()
    return Loaded(
        load_target(real_pair.target, read_target_dims(real_pair.target), "float32", device, 512),
        load_drafter(
            real_pair.drafter, read_drafter_dims(real_pair.drafter), "float32", device, 512
        ),
        [json.loads(line) for line in lines],
    )


def user_turn(trace: Trace) -> str:
    """The user's text of a templated prompt."""
    turn: str = trace["prompt"].split("<|im_start|>user\n")[1]
    return turn.removesuffix("<|im_end|>\n<|im_start|>assistant\n")


def accepted_to_the_end(reference: Trace) -> list[int]:
    """The reference's rounds without the one it may add when its output is already complete."""
    num_out, rounds = 1, []
    for accepted in reference["accepted"]:
        if num_out >= len(reference["output_token_ids"]):
            break
        rounds.append(accepted)
        num_out += accepted + 1
    return rounds


def num_compared(reference: Trace) -> int:
    """Rounds of the reference to compare exactly: all but the last, up to its first short block."""
    num_out = 1
    accepts = accepted_to_the_end(reference)[:-1]
    for place, accepted in enumerate(accepts):
        if slots_left(reference, num_out) < BLOCK:
            return place
        num_out += accepted + 1
    return len(accepts)


def slots_left(reference: Trace, num_out: int) -> int:
    """Block places before the end of the reference's buffer, once num_out tokens are out."""
    if reference["method"] != "ddtree":
        return BLOCK
    return CAP + reference["budget"] + 2 - num_out


def assert_rounds_agree(reference: Trace, accepted: tuple[int, ...], num_output: int) -> None:
    """The last round of an output that was cut short is compared by what it emits."""
    exact = num_compared(reference)
    if num_output < len(reference["output_token_ids"]):
        exact = min(exact, len(accepted) - 1)
    assert accepted[:exact] == tuple(reference["accepted"][:exact])
    emitted = 1 + sum(accepted) + len(accepted)
    assert emitted - num_output in (0, 1)
    whole = accepted_to_the_end(reference)
    is_short = slots_left(reference, 1 + sum(accepted[:exact]) + exact) < BLOCK
    if exact == len(whole) - 1 and not is_short:  # the last round, by its emitted prefix
        assert len(accepted) == len(whole)
        assert accepted[-1] <= whole[-1]


@shared
@pytest.mark.parametrize(("method", "budget"), METHODS)
def test_the_command_reproduces_every_trace(
    loaded: Loaded, real_pair: RealPair, tmp_path: Path, method: str, budget: int
) -> None:
    traces = loaded.of(method, budget)
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"prompt": user_turn(t)}) + "\n" for t in traces))
    choice = {
        "autoregressive": "engine.method=autoregressive",
        "dflash chain": "engine.method=chain",
    }.get(method, f"engine.budget={budget}")
    assert (
        main(
            [
                f"model.path={real_pair.target}",
                f"drafter.path={real_pair.drafter}",
                f"data.path={data}",
                f"output_dir={out}",
                f"sampling.max_new_tokens={CAP}",
                "model.dtype=float32",
                choice,
            ]
        )
        == 0
    )
    # Sorted: a slow machine writes more than one part.
    done, stats = (
        sorted(pq.read_table(out / name).to_pylist(), key=key_of)
        for name in ("completions", "acceptance")
    )
    assert len(done) == len(stats) == len(traces) == 8
    for reference, row, rounds in zip(traces, done, stats, strict=True):
        assert row["prompt_token_ids"] == reference["prompt_token_ids"]
        assert row["output_token_ids"] == reference["output_token_ids"]
        assert row["finish_reason"] == ("stop" if row["output_token_ids"][-1] == STOP else "length")
        assert_rounds_agree(reference, tuple(rounds["accepted"]), row["output_tokens"])


@shared
@pytest.mark.parametrize("budget", [8, 16, 32])
def test_every_tree_is_the_references(loaded: Loaded, budget: int) -> None:
    for reference in [t for t in loaded.of("ddtree", budget) if "trees" in t]:
        engine = make_engine(
            loaded.target,
            loaded.drafter,
            budget=budget,
            rows=1,
            max_len=192,
        )
        engine.fill(iter(token_prompts([reference["prompt_token_ids"]], CAP, STOPS)))
        for recorded in reference["trees"][: num_compared(reference)]:
            engine.step()
            tree, expected = engine.state.tree, recorded["tree"]
            assert tree.token_BN[0, 1:].tolist() == expected["node_token_ids"]
            assert tree.depth_BN[0, 1:].tolist() == expected["node_depths"]
            assert tree.parent_BN[0].tolist() == expected["parents"]
            nodes = recorded["accepted_indices"]
            assert engine.state.path_BK[0, : len(nodes)].tolist() == nodes


@shared
def test_rounds_that_differ_come_from_the_references_short_block(loaded: Loaded) -> None:
    """The oracle with the reference's short block gives the reference's rounds to the end, and with
    the whole block gives ours."""
    references, num_short = loaded.of("ddtree", 8), 0
    engine = make_engine(
        loaded.target,
        loaded.drafter,
        budget=8,
        rows=8,
        max_len=192,
    )
    done = decode(engine, [r["prompt_token_ids"] for r in references], CAP, STOPS)
    for reference, completion in zip(references, done, strict=True):
        prompt, output = reference["prompt_token_ids"], tuple(reference["output_token_ids"])
        ours = trace(loaded.target, loaded.drafter, tuple(prompt), output, budget=8, topk=8)
        oracle = Oracle(loaded.target, loaded.drafter.dims.tap_layers)
        oracle.scores([*prompt, *output])
        num_out = 1
        for place, accepted in enumerate(accepted_to_the_end(reference)[:-1]):
            slots = slots_left(reference, num_out)
            if slots >= BLOCK:
                found = ours[place]
            else:
                num_short += 1
                scores = draft_scores(
                    loaded.target,
                    loaded.drafter,
                    oracle.features[0][: len(prompt) + num_out - 1],
                    output[num_out - 1],
                    slots,
                )
                found = oracle_round(scores, output[num_out:], budget=8, topk=8)
            assert len(found.accepted_nodes) - 1 == accepted
            if "trees" in reference:
                expected = reference["trees"][place]["tree"]["node_token_ids"]
                assert found.token_ids == expected
            num_out += accepted + 1
        assert completion.accepted == tuple(len(r.accepted_nodes) - 1 for r in ours)
    assert num_short == 7


@shared
@pytest.mark.parametrize(
    ("rows", "step", "cap"),
    [(8, 1, SHORT), (8, -1, CAP), (1, 1, CAP), (2, 1, SHORT), (3, 1, SHORT), (7, 1, SHORT)],
)
def test_golden_prompts_together_reversed_and_in_any_number_of_rows(
    loaded: Loaded, rows: int, step: int, cap: int
) -> None:
    """rows=1 decodes each prompt alone."""
    traces = loaded.of("ddtree", 16)[::step]
    engine = make_engine(
        loaded.target,
        loaded.drafter,
        budget=16,
        rows=rows,
        max_len=192,
    )
    done = decode(engine, [t["prompt_token_ids"] for t in traces], cap, STOPS)
    assert [list(c.token_ids) for c in done] == [t["output_token_ids"][:cap] for t in traces]
    for reference, completion in zip(traces, done, strict=True):
        assert_rounds_agree(reference, completion.accepted, len(completion.token_ids))
