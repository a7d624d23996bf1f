"""The beginning of the residual stream. T tokens, V vocabulary, D width."""

from torch import Tensor

from ddbatch_kernels.normed import Normed


def embed_normed_ref(
    token_T: Tensor, embed_VD: Tensor, norm_weight_D: Tensor, norm_eps: float
) -> Normed:
    """Embeddings [T, D] of tokens, to be normed like this."""
    return Normed(embed_VD[token_T], norm_weight_D, norm_eps)
