"""One round: admit -> draft -> build -> verify -> accept -> commit, for all rows at once."""

from ddbatch.engine.accept import accept
from ddbatch.engine.admit import admit
from ddbatch.engine.build import build
from ddbatch.engine.commit import commit
from ddbatch.engine.draft import draft
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.engine.verify import verify
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash


def run_round(target: Target, drafter: DFlash | None, state: RoundState, shape: RoundShape) -> None:
    """Advance every live row by at least one token. Without a drafter it is plain decoding."""
    admit(state)
    if drafter is not None:
        draft(target, drafter, state, shape.num_keys)
    finish_round(target, drafter, state, shape)


def finish_round(
    target: Target, drafter: DFlash | None, state: RoundState, shape: RoundShape
) -> None:
    """What follows when the drafts are there, whoever made them."""
    build(state)
    verify(target, state, () if drafter is None else drafter.dims.tap_layers, shape)
    accept(state)
    commit(drafter, state)
