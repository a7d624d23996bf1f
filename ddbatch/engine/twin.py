"""The twin of captured programs: launches are run eagerly too, from the same state, and must leave
the same bits everywhere.

Knows which tensors a program writes. Knows nothing about what they should hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ddbatch.engine.programs import Programs
from ddbatch.engine.state import RoundShape, RoundState, cell_of
from ddbatch_kernels.facts import ChunkFact

# How many launches in all, and of each shape, are held against eager ones.
FIRST_LAUNCHES = 8
LAUNCHES_A_SHAPE = 2
# Written as a whole by a round or a prefill call, before they are read.
ROUND_OUTPUTS = (
    "candidate_BDM",
    "edge_BDM",
    "pos_BN",
    "choice_BN",
    "is_finite_BN",
    "logprobs_BN",
    "scores_BNV",
    "feature_TC",
    "path_BK",
    "num_accepted_B",
    "emitted_BK",
    "num_emitted_B",
    "finish_B",
    "told",
)
CALL_OUTPUTS = ("chunk_told",)


class _Launch(NamedTuple):
    """One launch of a program by both. outputs: names of what it writes as a whole. cells: all
    cells of pages that it may write [X]. has_scratch: it writes the scratch cells too."""

    name: str
    outputs: tuple[str, ...]
    eager: Callable[[], None]
    captured: Callable[[], None]
    cells: Callable[[], Tensor]
    has_scratch: bool


class Twin:
    """Programs that compare: the captured ones go last, and decoding goes on from what they wrote.
    After a fault all is eager.

    Both may be the same eager programs, which must repeat themselves.
    """

    def __init__(self, state: RoundState, *, eager: Programs, captured: Programs) -> None:
        self._state, self._eager, self._captured = state, eager, captured
        is_cache = ("target_cache", "drafter_cache")
        self._small = {
            name: tensor for name, tensor in state.tensors() if not name.startswith(is_cache)
        }
        self._planes = {
            name: tensor for name, tensor in state.tensors() if name.startswith(is_cache)
        }
        self._num_launches: Counter[tuple[RoundShape, int]] = Counter()  # num_chunks 0: a round
        self._num_compared = [0, 0]
        self.fault: str | None = None

    @property
    def summary(self) -> str:
        """How much was compared."""
        rounds, calls = self._num_compared
        return f"{rounds} rounds, {calls} calls, {len(self._num_launches)} shapes"

    def round(self, shape: RoundShape) -> None:
        """One round over all rows."""
        has_tree = self._state.plan.nodes > 1
        launch = _Launch(
            f"a round ({shape.num_keys} keys, {shape.draw.name})",
            (*ROUND_OUTPUTS, *(("tree",) if has_tree else ())),
            lambda: self._eager.round(shape),
            lambda: self._captured.round(shape),
            self._round_cells,
            has_scratch=True,
        )
        self._launch(launch, shape, 0)

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        """One prefill call over so many pieces."""
        launch = _Launch(
            f"a prefill call ({num_chunks} pieces, {shape.num_keys} keys, {shape.draw.name})",
            CALL_OUTPUTS,
            lambda: self._eager.prefill(shape, num_chunks),
            lambda: self._captured.prefill(shape, num_chunks),
            lambda: self._call_cells(num_chunks),
            has_scratch=False,
        )
        self._launch(launch, shape, num_chunks)

    def _launch(self, launch: _Launch, shape: RoundShape, num_chunks: int) -> None:
        count = self._num_launches[shape, num_chunks]
        self._num_launches[shape, num_chunks] += 1
        is_among_first = self._num_launches.total() <= FIRST_LAUNCHES
        if self.fault is None and (count < LAUNCHES_A_SHAPE or is_among_first):
            self._num_compared[num_chunks > 0] += 1
            # The first run of a shape is eager and is captured afterwards; what counts is a replay.
            self._compare(launch, num_runs=1 if count else 2)
        elif self.fault is None:
            launch.captured()
        else:
            launch.eager()

    def _compare(self, launch: _Launch, num_runs: int) -> None:
        """Run both from the same state, where nothing that must be written is right already."""
        page_cell_X = launch.cells()
        before = dict(self._contents(launch, page_cell_X))
        self._spoil(launch)
        launch.eager()
        expected = dict(self._contents(launch, page_cell_X))
        for _ in range(num_runs):
            self._restore(launch, page_cell_X, before)
            self._spoil(launch)
            launch.captured()
        for name, found in self._contents(launch, page_cell_X):
            is_other = _bits(found) != _bits(expected[name])
            if name == "ready_S":
                is_other = is_other[:-1]  # the spare place takes what several lanes do not push
            num_other = int(is_other.sum())
            if num_other:
                self.fault = (
                    f"{launch.name}, {name}: {num_other} of {found.numel()} values are not "
                    "those of the eager program"
                )
                self._restore(launch, page_cell_X, before)
                launch.eager()
                return

    def _contents(self, launch: _Launch, page_cell_X: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Copies of all that a program may write, by name."""
        for name, tensor in self._small.items():
            yield name, tensor.clone()
        for name, plane in self._planes.items():
            yield name, plane.index_select(1, self._cells(launch, page_cell_X, plane))

    def _restore(self, launch: _Launch, page_cell_X: Tensor, before: Mapping[str, Tensor]) -> None:
        for name, tensor in self._small.items():
            tensor.copy_(before[name])
        for name, plane in self._planes.items():
            plane.index_copy_(1, self._cells(launch, page_cell_X, plane), before[name])

    def _spoil(self, launch: _Launch) -> None:
        """What is written as a whole becomes NaN, or a zero: that is a place in every index."""
        for name, tensor in self._small.items():
            if name.split(".")[0] in launch.outputs:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        if launch.has_scratch:
            for plane in self._planes.values():
                plane[:, self._state.scratch_cell :] = torch.nan

    def _cells(self, launch: _Launch, page_cell_X: Tensor, plane: Tensor) -> Tensor:
        first, stop = self._state.scratch_cell, plane.shape[1]
        if not launch.has_scratch:
            return page_cell_X
        return torch.cat((page_cell_X, torch.arange(first, stop, device=plane.device)))

    def _round_cells(self) -> Tensor:
        """Of every slot, those of as many tokens as a round may commit."""
        state = self._state
        room_S = (state.cap_S - state.num_out_S).clamp(0, state.plan.draft_depth + 1)
        slot_S = torch.arange(len(room_S), device=room_S.device)
        return self._page_cells(slot_S, state.length_S, room_S * (state.length_S > 0))

    def _call_cells(self, num_chunks: int) -> Tensor:
        chunk_RX = self._state.chunk_RX[:num_chunks]
        facts = (ChunkFact.SLOT, ChunkFact.START, ChunkFact.SIZE)
        return self._page_cells(*(chunk_RX[:, fact] for fact in facts))

    def _page_cells(self, slot_R: Tensor, start_R: Tensor, size_R: Tensor) -> Tensor:
        """Cells [X] of positions start..start + size of these slots."""
        row_X = torch.arange(len(slot_R), device=slot_R.device).repeat_interleave(size_R)
        before_R = size_R.cumsum(dim=0) - size_R
        place_X = torch.arange(len(row_X), device=slot_R.device) - before_R[row_X]
        return cell_of(self._state, slot_R[row_X], start_R[row_X] + place_X)


def _bits(tensor: Tensor) -> Tensor:
    """Integers that tell one NaN from another and from itself not."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.itemsize]) if tensor.is_floating_point() else tensor
