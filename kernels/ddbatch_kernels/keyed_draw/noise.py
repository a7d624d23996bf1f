"""The words of a draw and their noise, in Triton: Philox4x32-10 and Gumbel as in the reference.

Q quads: four tokens share one counter.
"""

import triton
import triton.language as tl

from ddbatch_kernels.keyed_draw.reference import MULTIPLIERS, ROUNDS, WEYL

_ROUNDS = tl.constexpr(ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_WEYL_0, _WEYL_1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])

# No noise is larger: the smallest word gives 33 log(2) = 22.87.
MOST_NOISE = tl.constexpr(23.0)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four uint32 words of a counter and a key of uint32."""
    for _ in tl.static_range(_ROUNDS):
        high_0, high_1 = tl.umulhi(c0, _MULTIPLIER_0), tl.umulhi(c2, _MULTIPLIER_1)
        low_0, low_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 += _WEYL_0
        k1 += _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def words_of_quads(quad_Q, index, hash_low, hash_high, seed_low, seed_high):
    """[Q, 4] words; token t has word t mod 4 of quad t div 4."""
    w0, w1, w2, w3 = philox4x32(quad_Q, index, hash_low, hash_high, seed_low, seed_high)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(quad_Q.shape[0], 4)


@triton.jit
def uniform(word):
    """v in (0, 1]; 1 only for the 128 largest words."""
    return (word.to(tl.float32) + 0.5) * 2.0**-32


@triton.jit
def gumbel(v):
    """-log(-log1p(-v)); -inf of 1."""
    u = 1.0 - v
    # log1p after Kahan: the factor takes back what was lost when u was rounded.
    exponential = tl.where(u == 1.0, v, tl.log(u) * (v / (u - 1.0)))
    return -tl.log(exponential)


@triton.jit
def noise_ceiling(v):
    """A number that gumbel(v) does not exceed, by few instructions.

    -log1p(-v) >= v, so the noise is at most -log(v), and the bits of a float, as an integer, are
    its log2 by chords: never above it, and at most 0.09 below. The last term covers rounding.
    """
    log2_v = v.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-23 - 127.0
    return 0.001 - 0.6931472 * log2_v
