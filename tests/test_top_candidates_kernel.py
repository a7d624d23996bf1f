"""The kernel of top_candidates finds the reference's tokens in the reference's order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddbatch_kernels.top_candidates import top_candidates_ref
from ddbatch_kernels.top_candidates.kernel import top_candidates_triton

IS_NATIVE = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy counts infinities
KINDS = ("normal", "bf16", "three_valued", "equal", "one_hot", "sorted", "wild", "masked")
# Both sides of a chunk's and a tile's end; several blocks of tokens and of chunks need a GPU.
SIZES = [(1, 1), (5, 5), (63, 7), (64, 64), (65, 3), (97, 97), (1000, 5), (4096, 16), (4097, 64)]
if IS_NATIVE:
    SIZES += [(49_152, 1), (49_152, 16), (151_936, 16), (151_936, 64), (151_937, 33), (300_007, 8)]
    SIZES += [(2_000, 1024), (49_152, 1024), (151_936, 200)]


def scores(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """float32, tie-heavy but for "normal" and "sorted"."""
    normal = torch.randn(shape, generator=generator) * 3
    match kind:
        case "normal":
            return normal
        case "bf16":
            return normal.bfloat16().float()
        case "three_valued":
            return torch.randint(-1, 2, shape, generator=generator).float()
        case "equal":
            return torch.full(shape, -7.25)
        case "one_hot":
            hot = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
            return torch.zeros(shape).scatter(-1, hot, 40.0)
        case "sorted":  # the best tokens are neighbours
            return normal.sort(dim=-1, descending=True).values
        case "wild":  # each of these is among the scores, and no number among them
            odd = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, 3e38, -3e38, -torch.inf, 1.0, -1.0])
            return odd[torch.randint(len(odd), shape, generator=generator)]
        case "masked":
            return normal.masked_fill(torch.rand(shape, generator=generator) < 0.97, -torch.inf)
    raise AssertionError(kind)


def assert_same_candidates(logits_BDV: Tensor, num_candidates: int, device: str) -> None:
    token, logprob = top_candidates_ref(logits_BDV, num_candidates)
    found_token, found_logprob = top_candidates_triton(logits_BDV.to(device), num_candidates)
    assert found_token.dtype == torch.int64
    assert torch.equal(found_token.cpu(), token), (logits_BDV.shape, num_candidates)
    # Sums of exp are taken in another order, and those of a GPU are not exact.
    torch.testing.assert_close(found_logprob.cpu(), logprob, rtol=1e-6, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize(("vocab", "topk"), SIZES)
def test_kernel_finds_the_reference_candidates(vocab: int, topk: int, kernel_device: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for kind in KINDS:
        assert_same_candidates(scores(kind, (2, 1, vocab), generator), topk, kernel_device)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 700),
    topk=st.integers(1, 70),
    kind=st.sampled_from(KINDS),
)
@settings(
    max_examples=300 if IS_NATIVE else 40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it is a word
)
def test_kernel_finds_the_reference_candidates_of_any_sizes(
    seed: int, vocab: int, topk: int, kind: str, kernel_device: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    assert_same_candidates(scores(kind, (1, 3, vocab), generator), min(topk, vocab), kernel_device)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_numbers_give_distinct_tokens_and_leave_neighbours_alone(
    bad: float, kernel_device: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 2, 300, generator=generator)
    _, sound = top_candidates_triton(logits.to(kernel_device), 7)
    logits[1, 0] = bad
    logits[1, 1, ::3] = bad
    token, logprob = top_candidates_triton(logits.to(kernel_device), 7)
    assert all(len(set(names)) == 7 for names in token.flatten(0, 1).tolist())
    assert torch.equal(logprob[::2], sound[::2])
    assert_same_candidates(logits, 7, kernel_device)


def test_a_position_does_not_depend_on_how_many_there_are(kernel_device: str) -> None:
    logits = torch.randn(3, 2, 4500, generator=torch.Generator().manual_seed(4))
    token, logprob = top_candidates_triton(logits.to(kernel_device), 9)
    alone = logits[2:, 1:].contiguous().to(kernel_device)
    token_alone, logprob_alone = top_candidates_triton(alone, 9)
    assert torch.equal(token[2:, 1:], token_alone)
    assert torch.equal(logprob[2:, 1:], logprob_alone)


def test_no_positions_have_no_candidates(kernel_device: str) -> None:
    token, logprob = top_candidates_triton(torch.zeros(0, 3, 50, device=kernel_device), 4)
    assert token.shape == logprob.shape == (0, 3, 4)


@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("logprob_dtype", [torch.float16, torch.float32])
def test_candidates_go_to_the_place_that_is_given_in_its_dtypes(
    token_dtype: torch.dtype, logprob_dtype: torch.dtype, kernel_device: str
) -> None:
    logits = scores("normal", (2, 3, 300), torch.Generator().manual_seed(5))
    for op, device in ((top_candidates_ref, "cpu"), (top_candidates_triton, kernel_device)):
        token, logprob = op(logits.to(device), 7)
        out = torch.full_like(token, -77).to(token_dtype), torch.full_like(logprob, torch.nan)
        out = out[0], out[1].to(logprob_dtype)
        assert op(logits.to(device), 7, out=out) is out
        assert torch.equal(out[0], token.to(token_dtype))
        assert torch.equal(out[1], logprob.to(logprob_dtype))


def test_no_rounding_lifts_a_candidate_above_certainty(kernel_device: str) -> None:
    logits = torch.full((64, 1, 70), -torch.inf)
    logits[..., 3] = torch.linspace(-90, 90, 64)[:, None]
    logits[..., 4] = logits[..., 3] - 18
    for found in (
        top_candidates_ref(logits, 2),
        top_candidates_triton(logits.to(kernel_device), 2),
    ):
        assert (found[1] <= 0).all()


@pytest.mark.parametrize("vocab", [1, 70, 9000])
def test_the_log_of_all_weights_is_told_beside_the_candidates(
    vocab: int, kernel_device: str
) -> None:
    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    expected = logits.double().logsumexp(dim=-1)
    for op, device in ((top_candidates_triton, kernel_device), (top_candidates_ref, "cpu")):
        total = torch.full((2, 3), torch.nan, device=device)
        op(logits.to(device), 1, log_total_BD=total)
        torch.testing.assert_close(total.double().cpu(), expected, rtol=1e-6, atol=1e-5)
