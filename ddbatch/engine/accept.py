"""Accept stage: walk each tree along the target's choices; decide in token order where rows end.

In: tree, choice_BN, is_finite_BN, caps, is_cancelled_S. Out: path_BK, num_accepted_B, emitted_BK,
num_emitted_B, finish_B. Knows nothing about caches.
"""

import torch
from torch import Tensor

from ddbatch.engine.facts import Finish
from ddbatch.engine.state import RoundState
from ddbatch_kernels.accept_tree import accept_tree


def accept(state: RoundState) -> None:
    """Emit the accepted tokens and the bonus, cut after the first stop token, at the cap and before
    the first draw from scores that are no numbers. A cancelled row emits nothing and ends.
    """
    tree, plan = state.tree, state.plan
    found = accept_tree(
        tree.token_BN,
        tree.parent_BN,
        tree.depth_BN,
        tree.ancestor_BNW,
        state.choice_BN,
        max_depth=plan.draft_depth,
    )
    is_cancelled_B = state.is_cancelled_S[state.slot_B]
    room_B = state.cap_S[state.slot_B] - state.num_out_S[state.slot_B]
    most_B = torch.minimum(found.num_accepted_B + 1, room_B)
    place_K = torch.arange(plan.draft_depth + 1, device=room_B.device)
    # In token order: what comes first of a score that is no number, a stop token and the cap.
    is_bad_BK = ~state.is_finite_BN.gather(1, found.path_BK)
    num_good_B = first_place(is_bad_BK & (place_K < most_B[:, None]), most_B)
    stops_BK = state.sampling.is_stop(state.slot_B[:, None], found.emitted_BK)
    stops_BK &= place_K < num_good_B[:, None]
    num_kept_B = first_place(stops_BK, num_good_B - 1) + 1
    finish_B = torch.where(num_kept_B >= room_B, int(Finish.LENGTH), int(Finish.LIVE))
    finish_B = torch.where(num_good_B < most_B, int(Finish.NAN_LOGITS), finish_B)
    finish_B = torch.where(stops_BK.any(dim=1), int(Finish.STOP), finish_B)
    finish_B = torch.where(is_cancelled_B, int(Finish.CANCELLED), finish_B)
    state.path_BK.copy_(found.path_BK)
    state.emitted_BK.copy_(found.emitted_BK)
    state.num_emitted_B.copy_(torch.where(state.active_B & ~is_cancelled_B, num_kept_B, 0))
    # A drafted token beyond the cut was not kept.
    state.num_accepted_B.copy_(torch.minimum(found.num_accepted_B, state.num_emitted_B))
    state.finish_B.copy_(torch.where(state.active_B, finish_B, int(Finish.LIVE)))


def first_place(is_there_BK: Tensor, otherwise_B: Tensor) -> Tensor:
    """int64 [B]: the first True of each row, or `otherwise`."""
    return torch.where(is_there_BK.any(dim=1), is_there_BK.int().argmax(dim=1), otherwise_B)
