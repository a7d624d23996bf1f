"""The DFlash recipe: teach a drafter to propose what its target says next.

Source: DFlash (z-lab) and the settings its reproductions publish (SpecForge, NeMo Automodel).
Responses are the target's own. Anchors are drawn at random in a response and anew in every pass;
behind each stands a block [anchor, MASK x (K - 1)] that sees the target's tapped states before the
anchor. The loss is cross-entropy on slots 1..K-1, weighted by exp(-(k - 1) / gamma): an early miss
costs the whole tail. Target, embedding and head are frozen. Knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ddbatch.models.decoder import Target
from ddbatch.models.dflash import DFlash
from ddbatch.training.dense import block_states, target_states
from ddbatch.training.optimiser import Optimiser, Schedule
from ddbatch.training.sequences import Batch, Sequences

# gamma of the paper by block size; between and beyond them it grows with the block.
_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


@dataclass(frozen=True)
class Recipe:
    """Published settings; rows: sequences a step. num_anchors: at most so many a sequence.
    gamma None: by block size."""

    passes: int = 6
    rows: int = 32
    num_anchors: int = 512
    gamma: float | None = None
    schedule: Schedule = field(default_factory=lambda: Schedule(learning_rate=6e-4))
    seed: int = 0

    def gamma_of(self, block: int) -> float:
        """How slowly the weight of a slot falls, in slots."""
        return self.gamma or _GAMMA.get(block, 0.45 * block)


class Anchors(NamedTuple):
    """pos_BA: int64, positions of the anchors. is_real_BA: False where a response had too few."""

    pos_BA: Tensor
    is_real_BA: Tensor


class Progress(NamedTuple):
    """Where a training stands. loss: of this step. chain_length: tokens a round that a chain of
    this step's blocks would have made, the bonus included, of blocks that are wholly in a response;
    nan where there is none.
    """

    step: int
    num_steps: int
    loss: float
    chain_length: float


def draw_anchors(batch: Batch, num_anchors: int, generator: torch.Generator) -> Anchors:
    """Random distinct anchors: tokens of the response that another token of it follows."""
    is_response_BT = batch.response()
    can_be_BT = is_response_BT & F.pad(is_response_BT[:, 1:], (0, 1))
    noise_BT = torch.rand(can_be_BT.shape, generator=generator).to(can_be_BT.device)
    noise_BT = noise_BT.masked_fill(~can_be_BT, -1.0)
    most = int(can_be_BT.sum(dim=1).max())
    found = noise_BT.topk(max(1, min(num_anchors, most)), dim=1)
    return Anchors(found.indices, found.values >= 0)


def block_loss(
    drafter: DFlash, target: Target, batch: Batch, anchors: Anchors, gamma: float
) -> tuple[Tensor, Tensor]:
    """The weighted mean cross-entropy, and the chain length (see Progress), both scalars."""
    K = drafter.dims.block
    with torch.no_grad():
        feature_BTC = target_states(target, batch.token_BT, drafter.dims.tap_layers).feature_BTC
    hidden_BAKD = block_states(drafter, target.embed, feature_BTC, batch.token_BT, anchors.pos_BA)[
        :, :, 1:
    ]
    slot_K = torch.arange(1, K, device=batch.token_BT.device)
    pos_BAK = anchors.pos_BA[..., None] + slot_K
    is_learned_BAK = (pos_BAK < batch.length_B[:, None, None]) & anchors.is_real_BA[..., None]
    inside_BAK = pos_BAK.clamp(max=batch.token_BT.shape[1] - 1)
    wanted_BAK = batch.token_BT.gather(1, inside_BAK.flatten(1)).view_as(pos_BAK)

    logits_XV = target.logits(hidden_BAKD[is_learned_BAK])
    wanted_X = wanted_BAK[is_learned_BAK]
    weight_X = torch.exp(-(slot_K - 1) / gamma).expand_as(pos_BAK)[is_learned_BAK]
    loss_X = F.cross_entropy(logits_XV, wanted_X, reduction="none")
    loss = (loss_X * weight_X).sum() / weight_X.sum()

    is_hit_BAK = torch.zeros_like(is_learned_BAK)
    is_hit_BAK[is_learned_BAK] = logits_XV.argmax(dim=-1) == wanted_X
    run_BA = is_hit_BAK.long().cumprod(dim=-1).sum(dim=-1)
    run_X = run_BA[is_learned_BAK.all(dim=-1)].float()
    return loss, 1 + run_X.mean()


def train_drafter(
    drafter: DFlash, target: Target, sequences: Sequences, recipe: Recipe
) -> Iterator[Progress]:
    """Train in place, a step at a time; the weights are whole after each item.

    sequences: prompts and the target's own responses to them.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    drafter.requires_grad_(True)
    gamma = recipe.gamma_of(drafter.dims.block)
    num_steps = recipe.passes * sequences.num_batches(recipe.rows)
    optimiser = Optimiser(drafter.parameters(), recipe.schedule, num_steps)
    step = 0
    for _ in range(recipe.passes):
        for batch in sequences.batches(recipe.rows, generator, target.embed.device):
            step += 1
            anchors = draw_anchors(batch, recipe.num_anchors, generator)
            if not bool(anchors.is_real_BA.any()):  # responses of one token have none
                continue
            loss, chain_length = block_loss(drafter, target, batch, anchors, gamma)
            optimiser.step(loss)
            yield Progress(step, num_steps, float(loss.detach()), float(chain_length))
    drafter.requires_grad_(False)
