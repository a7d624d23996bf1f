"""What an engine has for each of its plans: rows, programs, and what is seen of their rounds.

Caches, slots and the sequences in them are common to all. Knows nothing about sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddbatch.core import ShapePlan
from ddbatch.engine.acceptance import AcceptanceTable
from ddbatch.engine.programs import CapturedPrograms, EagerPrograms, GraphPool, Graphs, Programs
from ddbatch.engine.state import RoundState
from ddbatch.engine.transfer import Ring
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash


@dataclass
class Layout:
    """One plan's. drafter: None of plain decoding. ring: of its rounds' records; it and acceptance
    are there after the first reset."""

    state: RoundState
    drafter: DFlash | None
    programs: Programs
    ring: Ring = field(init=False)
    acceptance: AcceptanceTable = field(init=False)

    @property
    def plan(self) -> ShapePlan:
        """Its shapes."""
        return self.state.plan

    def reset(self) -> None:
        """As if just made, but for graphs."""
        self.state.reset()
        self.ring = Ring(self.state.told.tensors())
        self.acceptance = AcceptanceTable(self.plan, self.state.cache_plan.max_len)


def make_layouts(
    target: Target, drafter: DFlash | None, states: Sequence[RoundState], pool: GraphPool | None
) -> dict[ShapePlan, Layout]:
    """One for each state, by its plan; pool: what graphs are captured into, None = eager."""
    calls: tuple[Graphs, Graphs] = ({}, {})  # without and with the drafter's context
    layouts = {}
    for state in states:
        own = drafter if state.plan.nodes > 1 else None
        programs: Programs = EagerPrograms(target, own, state)
        if pool is not None:
            programs = CapturedPrograms(programs, pool, calls[own is not None])
        layouts[state.plan] = Layout(state, own, programs)
    return layouts
