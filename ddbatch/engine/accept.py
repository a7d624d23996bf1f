"""Accept stage: walk each tree along the target's choices; decide in token order where rows end.

In: tree, choice_BN, is_finite_BN, caps. Out: path_BK, num_accepted_B, emitted_BK, num_emitted_B,
finish_B. Knows nothing about caches.
"""

import torch

from ddbatch.engine.state import Finish, RoundState, is_stop
from ddbatch_kernels.accept_tree import accept_tree


def accept(state: RoundState) -> None:
    """Emit the accepted tokens and the bonus, cut after the first stop token and at the cap."""
    tree, plan = state.tree, state.plan
    found = accept_tree(
        tree.token_BN,
        tree.parent_BN,
        tree.depth_BN,
        tree.ancestor_BNW,
        state.choice_BN,
        max_depth=plan.draft_depth,
    )
    room_B = state.cap_S[state.slot_B] - state.num_out_S[state.slot_B]
    num_emitted_B = torch.minimum(found.num_accepted_B + 1, room_B)
    place_K = torch.arange(plan.draft_depth + 1, device=room_B.device)
    stops_BK = is_stop(state, found.emitted_BK) & (place_K < num_emitted_B[:, None])
    has_stop_B = stops_BK.any(dim=1)
    num_emitted_B = torch.where(has_stop_B, stops_BK.int().argmax(dim=1) + 1, num_emitted_B)
    finish_B = torch.where(num_emitted_B >= room_B, int(Finish.LENGTH), int(Finish.LIVE))
    finish_B = torch.where(has_stop_B, int(Finish.STOP), finish_B)
    # Only draws that were emitted count: what stands beside the path changed nothing.
    is_finite_B = state.is_finite_BN.gather(1, found.path_BK).all(dim=1)
    finish_B = torch.where(is_finite_B, finish_B, int(Finish.NAN_LOGITS))
    state.path_BK.copy_(found.path_BK)
    state.emitted_BK.copy_(found.emitted_BK)
    state.num_emitted_B.copy_(torch.where(state.active_B, num_emitted_B, 0))
    # A drafted token beyond the cut was not kept.
    state.num_accepted_B.copy_(torch.minimum(found.num_accepted_B, state.num_emitted_B))
    state.finish_B.copy_(torch.where(state.active_B, finish_B, int(Finish.LIVE)))
