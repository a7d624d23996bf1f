"""The gate: before an engine gets real rows it decodes canaries, and the oracle judges them.

Checks, by the names that a verdict uses:

    captured == eager   launches leave the same bits everywhere, run as they are and eagerly from
                        the same state (engine/twin.py)
    record              the host refuses no record: round, sequence, length and tokens are its own
    tokens              every token is the oracle's keyed draw, or explained by rounding
    accepted            rounds keep what the oracle's trees keep: in float32 all but near ties, in a
                        short dtype on average; forced accepts keep what they must
    state               the keys that a sequence leaves are those that the oracle computes afresh
    memory              cells that no sequence committed to are as they were, the null cell is zero

    change of plan      sequences that change to another of the engine's plans and back are as all
                        others

An engine's plans are judged one by one. Knows nothing about what becomes of a plan that fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from ddbatch.core import Completion, Key, RunError, Sampling, ShapePlan, TokenPrompt
from ddbatch.engine.canaries import Canaries, Noted
from ddbatch.engine.engine import Engine
from ddbatch.engine.findings import Decoded, Findings, committed_cells
from ddbatch.engine.forced import ForcedPrograms
from ddbatch.engine.prefill import Placed
from ddbatch.engine.programs import CapturedPrograms, EagerPrograms
from ddbatch.engine.state import RoundState
from ddbatch.engine.twin import Twin

NUM_OTHERS = 16  # canaries of a rung that are judged, besides those at edges
# Forced accepts: different canaries, and how often some are decoded at least and at most, until
# every node of the tree was accepted.
NUM_FORCED = 16
MIN_WAVE, MAX_WAVES, MAX_LATER_WAVES = 8, 12, 3
# Canaries that another plan begins, and the rounds after which they change.
NUM_CHANGING, CHANGES = 16, (2, 4, 6)
ELEMENTS_AT_ONCE = 1 << 26  # of a plane, that are looked at together


@dataclass(frozen=True)
class Verdict:
    """Whether an engine may serve real rows. reason: "", or the checks that failed and what they
    saw, in one line. checks: what each check looked at. seconds: that it took."""

    is_sound: bool
    reason: str
    checks: dict[str, str]
    seconds: float


@torch.inference_mode()
def judge(
    engine: Engine,
    *,
    sampling: Sequence[Sampling],
    gap: float,
    seconds: float = 20.0,
    seed: int = 0,
    is_first: bool = True,
) -> Verdict:
    """Judge the plan in force of a fresh engine. Afterwards it is fresh again and the plan captures
    no more graphs; its caches hold anything, but for the null cell.

    sampling: options of the run. gap: what explains another token (engine/numerics.py). seconds:
    all canaries are decoded, and as many judged as there is time for. is_first: no plan of the
    engine was judged before; later ones need not fill every slot. A CUDA error passes through.
    """
    started, programs = time.monotonic(), engine.programs
    hearing = _Hearing(engine, gap, started + seconds)
    hearing.hold(sampling, seed, is_first=is_first)
    engine.programs = programs
    if isinstance(programs, CapturedPrograms):
        programs.close()
    engine.reset()
    if engine.state.slot_B.is_cuda:
        torch.cuda.synchronize()  # a fault is told late
    faults = hearing.findings.faults
    return Verdict(
        is_sound=not faults,
        reason="; ".join(f"{check}: {text}" for check, text in faults.items()),
        checks=hearing.checks,
        seconds=time.monotonic() - started,
    )


class _Hearing:
    """One judgement under way. checks: what each looked at."""

    def __init__(self, engine: Engine, gap: float, end: float) -> None:
        self._engine, self._end = engine, end
        self.findings, self.checks = Findings(engine, gap), dict[str, str]()
        device = engine.state.slot_B.device
        self._is_committed_X = torch.zeros(engine.state.null_cell, dtype=torch.bool, device=device)
        self._knows_all = True  # that was committed

    def hold(self, sampling: Sequence[Sampling], seed: int, *, is_first: bool) -> None:
        """Run the checks, as far as the faults that they find allow."""
        engine, findings = self._engine, self.findings
        for _, plane in _planes(engine.state):
            plane.fill_(torch.nan)
            plane[:, engine.state.null_cell] = 0.0
        canaries = Canaries(
            engine.plan,
            engine.cache_plan,
            next_slot=lambda: engine.next_slot,
            chunk=engine.state.prefill_plan.chunk,
            vocab=engine.target.dims.vocab,
            sampling=sampling,
            seed=seed,
            fills_slots=is_first,
        )
        programs = engine.programs
        own = self._climb(canaries)
        if not is_first and not findings.faults:
            engine.programs = programs
            self._change(own, next(plan for plan in engine.plans if plan != engine.plan))
        if engine.drafter is not None and not findings.faults:
            self._force(own, seed, MAX_WAVES if is_first else MAX_LATER_WAVES)
        self.checks |= findings.texts()
        if self._knows_all:
            self.checks["memory"] = self._look_at_memory()

    def _climb(self, canaries: Canaries) -> list[Decoded]:
        """Decode canaries with the engine as it is."""
        engine, findings, rungs = self._engine, self.findings, canaries.rungs
        eager = EagerPrograms(engine.target, engine.drafter, engine.state)
        twin = Twin(engine.state, eager=eager, captured=engine.programs)
        noted = Noted(engine, twin)
        found: list[Decoded] = []
        for place in range(len(rungs)):
            decoded = self._decode(noted, canaries.climb(place))
            found += decoded
            if twin.fault is not None:
                findings.fault("captured == eager", twin.fault)
                self._knows_all = False
            # The longest at an edge first. At the end every slot is looked at.
            decoded.sort(
                key=lambda item: (
                    item.done.key not in canaries.edge_keys,
                    not item.is_held,
                    -item.length,
                )
            )
            num_others = engine.cache_plan.slots if place == len(rungs) - 1 else 0
            num_edges = sum(item.done.key in canaries.edge_keys for item in decoded)
            # What follows gets as much time, and so do forced accepts.
            self._judge(
                decoded[: num_edges + max(NUM_OTHERS, num_others)],
                share=1 / (len(rungs) + 1 - place),
            )
            if findings.faults:
                break
        findings.judge_means()
        self.checks |= {"captured == eager": twin.summary, "canaries": noted.summary}
        return found

    def _change(self, own: Sequence[Decoded], other: ShapePlan) -> None:
        """Decode canaries again, which change to and fro between the plan and another one."""
        engine, plan, done = self._engine, self._engine.plan, list[Completion]()
        known = self.findings.outputs
        prompts = [item.placed.prompt for item in own if item.done.key in known]
        prompts.sort(key=lambda prompt: (-prompt.max_new_tokens, len(prompt.token_ids), prompt.key))
        waiting, placed = iter(prompts[:NUM_CHANGING]), dict[Key, Placed]()
        number = 0
        with self._guarded():
            while number == 0 or engine.is_busy:
                engine.fill(waiting)
                placed |= {s.placed.prompt.key: s.placed for s in engine.seats.values()}
                is_other = sum(number >= change for change in CHANGES) % 2 == 0
                engine.change(other if is_other else plan)
                engine.step()
                done += [item for item in engine.collect() if isinstance(item, Completion)]
                number += 1
        engine.change(plan)
        decoded = self._note(done, list(placed.values()))
        # Plain decoding tells the drafter nothing of what ends under it.
        decoded = [
            item._replace(is_held=item.is_held and item.done.drafted[-1:] == (plan.nodes - 1,))
            for item in decoded
        ]
        for item in decoded:
            if item.done.token_ids != known[item.done.key]:
                self._judge([item], share=0.5, is_forced=True)
        self._judge(decoded, share=0.5, is_forced=True)
        self.checks["change of plan"] = f"{len(decoded)} canaries, {number} rounds"

    def _force(self, own: Sequence[Decoded], seed: int, most: int) -> None:
        """Decode canaries again, with drafts that must be accepted."""
        engine, findings = self._engine, self.findings
        forced, num_slots = ForcedPrograms(engine, seed), engine.cache_plan.slots
        known = dict(findings.outputs)
        prompts = [item.placed.prompt for item in own if item.done.key in known]
        # Many rounds of short prompts.
        prompts.sort(key=lambda prompt: (-prompt.max_new_tokens, len(prompt.token_ids), prompt.key))
        turns = cycle(prompts[: max(num_slots, NUM_FORCED)])
        # No more than there are slots: what they leave is still there at the end.
        num_prompts = min(num_slots, max(engine.plan.rows, MIN_WAVE), len(prompts))
        num_waves, num_left = 0, engine.plan.nodes
        while not findings.faults and num_waves < most and 0 < forced.num_left < num_left:
            num_waves, num_left = num_waves + 1, forced.num_left
            wave = {prompt.key: prompt for prompt in islice(turns, num_prompts)}
            forced.begin(known)
            decoded = self._decode(Noted(engine, forced), iter(wave.values()))
            for item in decoded:
                findings.judge_forced(item, known[item.done.key], forced.accepted[item.done.key])
            decoded.sort(key=lambda item: item.done.token_ids == known[item.done.key])
            self._judge(decoded, share=0.5, is_forced=True)
        num_nodes = engine.plan.nodes - 1
        self.checks["forced accepts"] = (
            f"{num_nodes - forced.num_left} of {num_nodes} nodes, siblings of {len(forced.kinds)} "
            f"kinds, {num_waves} times {num_prompts} canaries"
        )

    def _decode(self, noted: Noted, prompts: Iterator[TokenPrompt]) -> list[Decoded]:
        """Decode prompts until the engine is idle; nothing where its host stopped it."""
        engine, findings = self._engine, self.findings
        num_before, done = len(noted.placed), list[Completion]()
        engine.programs = noted
        with self._guarded():
            for item in engine.run(prompts):
                if not isinstance(item, Completion):
                    findings.fault("tokens", f"canary {item.key.row_id}: {item.reason}")
                    self._knows_all = False
                    return []
                done.append(item)
        return self._note(done, noted.placed[num_before:]) if self._knows_all else []

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Where its host stops the engine, that is a fault."""
        try:
            yield
        except (RunError, AssertionError) as error:
            self.findings.fault("record", str(error) or repr(error))
            self._knows_all = False

    def _note(self, done: Sequence[Completion], placed: Sequence[Placed]) -> list[Decoded]:
        """What was decoded, and which cells it committed to. placed: all that took a slot since the
        engine was idle, in order."""
        engine, findings = self._engine, self.findings
        last_of_slot = {item.slot: item for item in placed}
        owner = {page: item for item in placed for page in item.pages}
        by_key = {item.prompt.key: item for item in placed}
        decoded = []
        for item in done:
            own = by_key[item.key]
            is_held = last_of_slot[own.slot] is own and all(owner[p] is own for p in own.pages)
            decoded.append(Decoded(own, item, is_held))
            cell_T = committed_cells(own, item, engine.cache_plan.page, self._is_committed_X.device)
            self._is_committed_X[cell_T] = True
        findings.num_decoded += len(decoded)
        return decoded

    def _judge(self, decoded: Sequence[Decoded], *, share: float, is_forced: bool = False) -> None:
        """Judge one, and more within this share of the time that is left, up to a fault."""
        now = time.monotonic()
        end = now + share * (self._end - now)
        for place, item in enumerate(decoded):
            if self.findings.faults or (place and time.monotonic() > end):
                return
            self.findings.judge(item, is_forced=is_forced)

    def _look_at_memory(self) -> str:
        state, is_free_X = self._engine.state, ~self._is_committed_X
        for name, plane_LXGE in _planes(state):
            if plane_LXGE[:, state.null_cell].ne(0).any():
                self.findings.fault("memory", f"the null cell of {name} is not zero")
            num_written = _count_written(plane_LXGE, is_free_X)
            if num_written:
                self.findings.fault(
                    "memory", f"{num_written} cells of {name} were written that nobody committed to"
                )
        return f"{int(is_free_X.sum())} of {state.null_cell} cells that nobody committed to"


def _planes(state: RoundState) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.tensors():
        if name.startswith(("target_cache", "drafter_cache")):
            yield name, tensor


def _count_written(plane_LXGE: Tensor, is_free_X: Tensor) -> int:
    """Layers' cells that hold a number though they should not."""
    num_cells, per_cell = len(is_free_X), plane_LXGE[0, 0].numel()
    step = max(1, ELEMENTS_AT_ONCE // per_cell)
    num_written = torch.zeros((), dtype=torch.long, device=is_free_X.device)
    for plane_XGE in plane_LXGE:
        for start in range(0, num_cells, step):
            part = slice(start, min(start + step, num_cells))
            is_number_X = ~plane_XGE[part].isnan().flatten(1).all(dim=1)
            num_written += (is_number_X & is_free_X[part]).sum()
    return int(num_written)
