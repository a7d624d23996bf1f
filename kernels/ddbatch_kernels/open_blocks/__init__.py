"""What a drafter of blocks is asked: the tokens of each row's block and where they stand."""

from torch import Tensor

from ddbatch_kernels.open_blocks.reference import Blocks, open_blocks_ref


def open_blocks(
    slot_B: Tensor, anchor_S: Tensor, length_S: Tensor, size: int, mask_token: int
) -> Blocks:
    """The anchor of each row's slot and size - 1 mask tokens behind it, from position length_S on;
    all int64."""
    if slot_B.is_cuda:
        from ddbatch_kernels.open_blocks.kernel import open_blocks_triton  # only a GPU needs Triton

        return open_blocks_triton(slot_B, anchor_S, length_S, size, mask_token)
    return open_blocks_ref(slot_B, anchor_S, length_S, size, mask_token)


__all__ = ["Blocks", "open_blocks", "open_blocks_ref"]
