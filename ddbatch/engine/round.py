"""One round: admit -> draft -> build -> verify -> accept -> commit, for all rows at once."""

from collections.abc import Callable

from ddbatch.engine.accept import accept
from ddbatch.engine.admit import admit
from ddbatch.engine.build import build
from ddbatch.engine.commit import commit
from ddbatch.engine.draft import draft
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.engine.verify import verify
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash

Stage = Callable[[], None]
STAGES = ("admit", "draft", "build", "verify", "accept", "commit")


def run_round(target: Target, drafter: DFlash | None, state: RoundState, shape: RoundShape) -> None:
    """Advance every live row by at least one token. Without a drafter it is plain decoding."""
    for stage in stages_of(target, drafter, state, shape).values():
        stage()


def finish_round(
    target: Target, drafter: DFlash | None, state: RoundState, shape: RoundShape
) -> None:
    """What follows when the drafts are there, whoever made them."""
    for stage in _last_stages(target, drafter, state, shape).values():
        stage()


def stages_of(
    target: Target, drafter: DFlash | None, state: RoundState, shape: RoundShape
) -> dict[str, Stage]:
    """The stages of a round by name (of STAGES), in order, each ready to be called."""
    stages: dict[str, Stage] = {"admit": lambda: admit(state)}
    if drafter is not None:
        stages["draft"] = lambda: draft(target, drafter, state, shape.num_keys)
    return stages | _last_stages(target, drafter, state, shape)


def _last_stages(
    target: Target, drafter: DFlash | None, state: RoundState, shape: RoundShape
) -> dict[str, Stage]:
    taps = () if drafter is None else drafter.dims.tap_layers
    return {
        "build": lambda: build(state),
        "verify": lambda: verify(target, state, taps, shape),
        "accept": lambda: accept(state),
        "commit": lambda: commit(drafter, state),
    }
