"""Accept stage: walk each tree along the target's choices; decide in token order where rows end.

In: tree, choice_BN, is_finite_BN, caps, is_cancelled_S. Out: path_BK, num_accepted_B, emitted_BK,
num_emitted_B, finish_B. Knows nothing about caches.
"""

from ddbatch.engine.state import RoundState
from ddbatch_kernels.accept_tree import accept_tree


def accept(state: RoundState) -> None:
    """Emit the accepted tokens and the bonus, cut after the first stop token, at the cap and before
    the first draw from scores that are no numbers. A cancelled row emits nothing and ends.
    """
    accept_tree(state.nodes, state.rows, state.slots, state.accepted)
