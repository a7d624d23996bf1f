"""The beginning of the residual stream, and of the first layer's norm."""

from torch import Tensor

from ddbatch_kernels.embed_normed.reference import embed_normed_ref
from ddbatch_kernels.normed import Normed

__all__ = ["embed_normed", "embed_normed_ref"]


def embed_normed(
    token_T: Tensor, embed_VD: Tensor, norm_weight_D: Tensor, norm_eps: float
) -> Normed:
    """Embeddings [T, D] of tokens (int64), to be normed like this."""
    if token_T.is_cuda:
        from ddbatch_kernels.embed_normed.kernel import embed_normed_triton

        return embed_normed_triton(token_T, embed_VD, norm_weight_D, norm_eps)
    return embed_normed_ref(token_T, embed_VD, norm_weight_D, norm_eps)
