"""What a prefill call drew is seated and told."""

from torch import Tensor

from ddbatch_kernels.admit.reference import Ready
from ddbatch_kernels.first_tokens.reference import first_tokens_ref
from ddbatch_kernels.rows import Slots


def first_tokens(
    chunk_RX: Tensor,
    token_R: Tensor,
    is_finite_R: Tensor,
    slots: Slots,
    ready: Ready,
    record_BX: Tensor,
    number: Tensor,
) -> None:
    """Write lengths, anchors and counts of slots whose prompts end, queue those that go on, and
    write the record; `number` grows by one.

    chunk_RX: int64, ChunkFact columns and tokens of the call's pieces. token_R, is_finite_R: what
    was drawn after each piece, and whether its scores are numbers. record_BX: int32, Fact columns
    and the token; further pieces of a plan are told as nobody's, and the last line holds `number`.
    """
    arguments = (chunk_RX, token_R, is_finite_R, slots, ready, record_BX, number)
    if chunk_RX.is_cuda:
        from ddbatch_kernels.first_tokens.kernel import first_tokens_triton  # needs Triton

        first_tokens_triton(*arguments)
    else:
        first_tokens_ref(*arguments)


__all__ = ["first_tokens", "first_tokens_ref"]
