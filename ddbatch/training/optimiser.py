"""AdamW with warm-up, a cosine down and clipped gradients: what every training here steps with.

Knows nothing about what is learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Schedule:
    """learning_rate: at its peak. warmup: share of the steps that lead to it. final: share of the
    peak that the last step has. clip: largest norm of the gradient."""

    learning_rate: float
    warmup: float = 0.04
    final: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0

    def factor(self, step: int, num_steps: int) -> float:
        """Learning rate of a step (from 0) as a share of the peak."""
        num_warm = max(1, round(self.warmup * num_steps))
        if step < num_warm:
            return (step + 1) / num_warm
        done = (step - num_warm) / max(1, num_steps - 1 - num_warm)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Optimiser:
    """Steps the weights of a model along a schedule of so many steps."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], schedule: Schedule, num_steps: int
    ) -> None:
        self._parameters = list(parameters)
        self._schedule, self._num_steps, self._step = schedule, num_steps, 0
        # Weights of norms are no directions: they do not decay.
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._parameters if p.ndim > 1]},
            {"params": [p for p in self._parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            groups,
            lr=schedule.learning_rate,
            betas=(schedule.beta1, schedule.beta2),
            weight_decay=schedule.weight_decay,
        )

    def step(self, loss: Tensor) -> None:
        """Descend one step; the gradients are gone afterwards."""
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self._schedule.clip)
        rate = self._schedule.learning_rate * self._schedule.factor(self._step, self._num_steps)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._step += 1
