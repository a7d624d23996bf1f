"""Small copies between host and device that wait for nothing: pinned memory and events.

Knows nothing about what is copied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RING_SIZE = 4  # copies that may be under way: the host reads one round late


def upload(
    values: Sequence[object] | NDArray[np.int64], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Numbers as a tensor on the device. PyTorch keeps pinned memory until the copy is done."""
    staged = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        staged = staged.pin_memory()  # torch.tensor pins nothing that comes from numpy
    return staged.to(device, non_blocking=True)


class Mark(NamedTuple):
    """A moment: when the device has done what was queued before it, or, without one, now."""

    event: torch.cuda.Event | None
    now: float  # seconds

    def wait(self) -> None:
        """Until it has come."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, before: Mark) -> float:
        """Between two moments that have come."""
        if self.event is None or before.event is None:
            return self.now - before.now
        return float(before.event.elapsed_time(self.event)) / 1000


def mark(device: torch.device) -> Mark:
    """This moment of the device."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return Mark(event, time.perf_counter())


class Ticket(NamedTuple):
    """A copy on its way to the host: which place of the ring it takes, and when it is there."""

    place: int
    there: Mark


class Ring:
    """Pinned host copies of some static tensors, taken over and over.

    A place is taken again only after its last copy has been read: `push` asserts it.
    """

    def __init__(self, tensors: Sequence[Tensor], size: int = RING_SIZE) -> None:
        self._tensors = list(tensors)
        self._device = self._tensors[0].device
        self._copies = [
            [
                torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda"
                )
                for tensor in self._tensors
            ]
            for _ in range(size)
        ]
        self._unread = [False] * size
        self._next = 0

    @property
    def is_full(self) -> bool:
        """Whether the next place holds a copy that was not read."""
        return self._unread[self._next]

    def push(self) -> Ticket:
        """Copy the tensors as they will be when the work queued so far is done."""
        assert not self.is_full, "a copy that was not read would be overwritten"
        place, self._next = self._next, (self._next + 1) % len(self._copies)
        self._unread[place] = True
        for copy, tensor in zip(self._copies[place], self._tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return Ticket(place, mark(self._device))

    def read(self, ticket: Ticket) -> list[Tensor]:
        """The copies, once they are there; they hold until the next push to their place."""
        ticket.there.wait()
        self._unread[ticket.place] = False
        return self._copies[ticket.place]
