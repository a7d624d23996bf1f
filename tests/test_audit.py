"""The audit: the longest of a share of the finished rows are judged, and a wrong token stops the
run."""

from __future__ import annotations

import pytest
import torch
from tiny import read_target, write_target

from ddbatch.core import Completion, Key, RunError, Sampling, TokenPrompt
from ddbatch.engine.audit import AuditFigures, Auditor
from ddbatch.engine.numerics import FLOAT32_GAP, ORACLE_PIECE, Parting, find_partings
from ddbatch.engine.oracle import Oracle
from ddbatch.engine.oracle_draw import draw_scores
from ddbatch.models.decoder import Target

VOCAB = 29
HOT = Sampling(temperature=0.8, top_k=9, seed=3)
HUGE = 1e9


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_target(tmp_path_factory.mktemp("target"), vocab=VOCAB, layers=2)
    return read_target(folder)


def prompt_of(row_id: int, length: int, sampling: Sampling = HOT) -> TokenPrompt:
    ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(row_id))
    return TokenPrompt(Key(row_id, 1, 2), tuple(ids.tolist()), 400, sampling)


def decoded(target: Target, prompt: TokenPrompt, count: int) -> list[int]:
    """What the oracle draws, token by token."""
    oracle, fresh, output = Oracle(target), list(prompt.token_ids), list[int]()
    for index in range(count):
        scores_V = oracle.scores(fresh)[-1]
        drawn = draw_scores(scores_V[None], prompt.sampling, prompt.key, index)
        fresh = [int(drawn.tokens)]
        output += fresh
    return output


def completion(prompt: TokenPrompt, token_ids: list[int]) -> Completion:
    return Completion(prompt.key, tuple(token_ids), "length", None, (), (), 0, 0.0, 0)


def partings_at_once(target: Target, prompt: TokenPrompt, token_ids: list[int]) -> list[Parting]:
    """The slow twin: one forward over the whole sequence."""
    scores_TV = Oracle(target).scores([*prompt.token_ids, *token_ids[:-1]])
    drawn = draw_scores(scores_TV[len(prompt.token_ids) - 1 :], prompt.sampling, prompt.key, 0)
    slack_T = drawn.slack(torch.tensor(token_ids)) * (prompt.sampling.temperature or 1.0)
    return [
        Parting(place, token_id, oracle_token_id, float(slack_T[place]))
        for place, (token_id, oracle_token_id) in enumerate(
            zip(token_ids, drawn.tokens.tolist(), strict=True)
        )
        if token_id != oracle_token_id
    ]


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
@pytest.mark.parametrize("length", [1, ORACLE_PIECE - 1, ORACLE_PIECE, ORACLE_PIECE + 1, 300])
def test_pieces_find_what_one_forward_finds(
    target: Target, length: int, sampling: Sampling
) -> None:
    prompt = prompt_of(length, length, sampling)
    output = decoded(target, prompt, 170)
    assert find_partings(target, prompt, output) == []
    for place in (0, 1, *range(5, 169, 41), 169):
        output[place] = (output[place] + 1) % VOCAB
    found, twin = (find(target, prompt, output) for find in (find_partings, partings_at_once))
    assert [part[:3] for part in found] == [part[:3] for part in twin]
    assert {0, 1, 169} <= {part.place for part in found}
    slacks = [part.slack for part in twin]
    assert [part.slack for part in found] == pytest.approx(slacks, abs=1e-4)


def test_the_oracle_never_reads_more_than_a_piece_at_once(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    original = Oracle.scores

    def watched(self: Oracle, token_ids: list[int]) -> torch.Tensor:
        sizes.append(len(token_ids))
        return original(self, token_ids)

    monkeypatch.setattr(Oracle, "scores", watched)
    find_partings(target, prompt_of(0, 301), [1] * 100)
    assert (max(sizes), sum(sizes)) == (ORACLE_PIECE, 400)


def test_the_longest_of_every_window_is_audited(target: Target) -> None:
    lengths = [3, 9, 4, 9, 8, 2, 12, 1, 3, 5, 6]  # prompt and output; windows of 4
    auditor = Auditor(target, rate=0.25, gap=FLOAT32_GAP)
    audited = []
    for row_id, length in enumerate(lengths):
        prompt = prompt_of(row_id, length)
        before = auditor.figures.rows
        # A wrong token would be found: the rows that are not audited have one.
        is_longest = row_id in (1, 6, 10)
        output = decoded(target, prompt, 3) if is_longest else [0, 1, 2]
        auditor.see(prompt, completion(prompt, output))
        audited += [row_id] * (auditor.figures.rows - before)
    assert audited == [3, 7]  # as the windows become full
    auditor.finish()
    auditor.finish()
    figures = auditor.figures
    assert figures[:3] == AuditFigures(3, 9, 0)[:3]
    assert figures.seconds > 0


def test_rate_one_audits_all_and_rate_zero_none(target: Target) -> None:
    for rate, rows in ((1.0, 5), (0.0, 0)):
        auditor = Auditor(target, rate=rate, gap=FLOAT32_GAP)
        for row_id in range(5):
            prompt = prompt_of(row_id, 4)
            auditor.see(prompt, completion(prompt, decoded(target, prompt, 2)))
        auditor.finish()
        assert auditor.figures.rows == rows


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_a_wrong_token_stops_the_run_and_is_named(target: Target, sampling: Sampling) -> None:
    prompt = prompt_of(5, 6, sampling)
    output = decoded(target, prompt, 7)
    right = output[6]
    scores_V = Oracle(target).scores([*prompt.token_ids, *output[:6]])[-1]
    output[6] = int(scores_V.argmin())
    auditor = Auditor(target, rate=0.005, gap=FLOAT32_GAP)
    auditor.see(prompt, completion(prompt, output))
    named = rf"row_id=5 turn=1 sample=2: output token 6 of 7 is {output[6]}, .* draws {right};"
    with pytest.raises(RunError, match=named) as failure:
        auditor.finish()
    for word in ("rounding explains 0.0001", "cannot be trusted", "engine.capture=false", "budget"):
        assert word in str(failure.value)
    assert auditor.figures == AuditFigures()


def test_what_rounding_explains_is_counted(target: Target) -> None:
    prompt = prompt_of(2, 3)
    output = decoded(target, prompt, 9)
    output[4] = (output[4] + 1) % VOCAB
    num_partings = len(find_partings(target, prompt, output))
    auditor = Auditor(target, rate=1.0, gap=HUGE)
    auditor.see(prompt, completion(prompt, output))
    assert auditor.figures.explained == num_partings > 0


def test_a_row_that_was_cut_at_a_stop_string_is_audited_as_far_as_it_goes(target: Target) -> None:
    prompt = prompt_of(3, 5)
    auditor = Auditor(target, rate=1.0, gap=FLOAT32_GAP)
    output = decoded(target, prompt, 9)
    for count in (1, 4, 9):
        auditor.see(prompt, completion(prompt, output[:count]))
    assert auditor.figures[:3] == (3, 14, 0)
