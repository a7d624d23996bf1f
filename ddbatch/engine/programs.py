"""The two programs of an engine, a round and a prefill call: run as they are, or as CUDA graphs.

A graph replays the same function on the same static tensors. Knows nothing about what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ddbatch.engine.prefill import prefill
from ddbatch.engine.round import run_round
from ddbatch.engine.state import RoundShape, RoundState
from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash


class Programs(Protocol):
    """What the engine launches."""

    def round(self, shape: RoundShape) -> None:
        """One round over all rows."""

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        """One prefill call over so many pieces."""


class EagerPrograms:
    """Each op is launched by the host."""

    def __init__(self, target: Target, drafter: DFlash | None, state: RoundState) -> None:
        self._parts = (target, drafter, state)

    def round(self, shape: RoundShape) -> None:
        """One round over all rows."""
        run_round(*self._parts, shape)

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        """One prefill call over so many pieces."""
        prefill(*self._parts, shape, num_chunks)


class _Name(NamedTuple):
    shape: RoundShape
    num_chunks: int


class GraphPool:
    """Memory that all graphs of a process share. What is read after a replay lies outside."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # PyTorch closes a pool with its last graph: this one stays while engines come and go.
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._keeper, pool=self.handle):
            torch.zeros(1, device="cuda")


Graphs = dict[_Name, torch.cuda.CUDAGraph]


class CapturedPrograms:
    """A CUDA graph for each shape, captured after the shape's first run, which is eager and loads
    what must be loaded. A closed set captures no more: other shapes run eagerly. calls: graphs of
    prefill calls, which plans of one engine share."""

    def __init__(self, eager: Programs, pool: GraphPool, calls: Graphs | None = None) -> None:
        self._eager, self.pool = eager, pool
        self._rounds: Graphs = {}
        self._calls: Graphs = {} if calls is None else calls
        self._is_closed = False

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._rounds) + len(self._calls)

    def close(self) -> None:
        """Capture no more."""
        self._is_closed = True

    def round(self, shape: RoundShape) -> None:
        """One round over all rows."""
        self._run(self._rounds, _Name(shape, 0), lambda: self._eager.round(shape))

    def prefill(self, shape: RoundShape, num_chunks: int) -> None:
        """One prefill call over so many pieces."""
        name = _Name(shape, num_chunks)
        self._run(self._calls, name, lambda: self._eager.prefill(shape, num_chunks))

    def _run(self, graphs: Graphs, name: _Name, program: Callable[[], None]) -> None:
        graph = graphs.get(name)
        if graph is not None:
            graph.replay()
            return
        program()
        if not self._is_closed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool.handle, capture_error_mode="thread_local"):
                program()
            graphs[name] = graph
