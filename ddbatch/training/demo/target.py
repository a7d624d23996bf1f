"""The demo's target: a Qwen3 of four million weights, taught the texts from random weights on.

Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ddbatch.models.decoder import Target
from ddbatch.models.dims import ModelDims, Rope
from ddbatch.training.demo.tokenizer import END, SPECIAL_TOKENS
from ddbatch.training.dense import target_states
from ddbatch.training.optimiser import Optimiser, Schedule
from ddbatch.training.sequences import Batch, Sequences

DIMS = ModelDims(
    width=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_width=64,
    mlp_width=768,
    vocab=4096,
    norm_eps=1e-6,
    rope=Rope(10000.0),
    max_positions=256,
    is_tied=True,
    stored_dtype="bfloat16",
    eos_token_ids=(SPECIAL_TOKENS.index(END),),
    windows=(None,) * 4,
    has_qk_norm=True,
)


@dataclass(frozen=True)
class Lessons:
    """rows: sequences a step. passes: over all texts."""

    passes: int = 12
    rows: int = 128
    schedule: Schedule = field(
        default_factory=lambda: Schedule(learning_rate=2e-3, final=0.05, weight_decay=0.1)
    )
    seed: int = 0


def next_token_loss(target: Target, batch: Batch) -> Tensor:
    """Mean cross-entropy of the response tokens, in nats."""
    hidden_BTD = target_states(target, batch.token_BT).hidden_BTD[:, :-1]
    is_learned_BT = batch.response()[:, 1:]
    logits_XV = target.logits(hidden_BTD[is_learned_BT])
    return F.cross_entropy(logits_XV, batch.token_BT[:, 1:][is_learned_BT])


def train_target(target: Target, sequences: Sequences, lessons: Lessons) -> Iterator[float]:
    """Train in place; the loss of each step."""
    generator = torch.Generator().manual_seed(lessons.seed)
    target.requires_grad_(True)
    num_steps = lessons.passes * sequences.num_batches(lessons.rows)
    optimiser = Optimiser(target.parameters(), lessons.schedule, num_steps)
    for _ in range(lessons.passes):
        for batch in sequences.batches(lessons.rows, generator, target.embed.device):
            loss = next_token_loss(target, batch)
            optimiser.step(loss)
            yield float(loss.detach())
    target.requires_grad_(False)


@torch.no_grad()
def held_out_loss(target: Target, sequences: Sequences) -> float:
    """Mean loss a token over sequences that were not learned."""
    generator = torch.Generator().manual_seed(0)
    total, count = 0.0, 0
    for batch in sequences.batches(64, generator, target.embed.device):
        num_tokens = int(batch.response().sum())
        total += float(next_token_loss(target, batch)) * num_tokens
        count += num_tokens
    return total / count
