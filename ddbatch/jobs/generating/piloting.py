"""Along a run: tells the chooser of plans what rounds made, and has the engine change to what it
chooses.

Knows engine and chooser. Knows nothing about text, files or how plans are judged.
"""

from __future__ import annotations

from ddbatch.core import Completion, ShapePlan
from ddbatch.engine.choice import Chooser, Moment
from ddbatch.engine.engine import Engine
from ddbatch.engine.seats import Load

DRY_ROUNDS = 8  # between two looks while rows run dry; a look takes as long as a short round
# Until so many sequences have ended, what their caps allow says how long they are.
MIN_ENDED = 8


class Pilot:
    """One engine's. mean_cap: output tokens that a sequence may have, while none has ended."""

    def __init__(self, chooser: Chooser, mean_cap: float) -> None:
        self.chooser = chooser
        self._usual = mean_cap
        self._num_ended = self._num_tokens = 0
        self._next_look = 0
        self._seen = (0, 0, 0)

    def see(self, done: Completion) -> None:
        """A sequence has ended."""
        self._num_ended += 1
        self._num_tokens += len(done.token_ids)
        if self._num_ended >= MIN_ENDED:
            self._usual = self._num_tokens / self._num_ended

    def look(self, engine: Engine, num_waiting: int) -> None:
        """Before a round. num_waiting: prompts that are still to come, if the engine finds any."""
        if engine.stats.rounds < self._next_look:
            return
        plan, load = engine.plan, engine.load
        if not load.num_live:
            return
        self._tell(engine, plan, load)
        costs = self.chooser.costs
        moment = Moment(
            num_live=load.num_live,
            num_waiting=0 if load.is_dry else max(1, num_waiting),
            context=load.mean_length,
            # How much longer one lives says as little of it as how long it has lived.
            expected_left=load.num_live * self._usual,
            warm=not load.num_untold,
            catch_up_seconds=costs.prefill_seconds(load.num_untold),
        )
        chosen = self.chooser.choose(plan, moment)
        rounds = self.chooser.num_rounds()
        if load.is_dry:  # rows end, and fewer are left to fill them
            rounds = min(rounds, DRY_ROUNDS)
        self._next_look = engine.stats.rounds + rounds
        if chosen != plan:
            engine.change(chosen)
            self._tell(engine, plan, load)  # of the round that was not read before

    def tell(self, engine: Engine) -> None:
        """Before the engine goes: of the rounds since the last look."""
        self._tell(engine, engine.plan, engine.load)

    def _tell(self, engine: Engine, plan: ShapePlan, load: Load) -> None:
        """What was made of this plan since the last time."""
        stats = engine.stats
        now = (stats.rounds, stats.live_row_rounds, stats.round_tokens)
        rounds, row_rounds, tokens = (a - b for a, b in zip(now, self._seen, strict=True))
        self._seen = now
        self.chooser.add(
            plan,
            num_rounds=rounds,
            num_row_rounds=row_rounds,
            num_emitted=tokens,
            context=load.mean_length,
        )
