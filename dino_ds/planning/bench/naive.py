"""The losses over prototypes as their formulas stand, the start of the ladder: whole matrices of logits, differentiated
by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.method.dino import dino_loss
from dino_ds.method.ibot import ibot_loss
from dino_ds.models.logits import Compared, Comparison, Logits
from dino_ds.models.network import Network
from dino_ds.models.prototypes import Prototypes


class PlainPrototypes(Prototypes):
    """All logits in one matrix, and `dino_loss` or `ibot_loss` of them; normalizes the whole weight in each pass.
    FP32."""

    def forward(self, z: Tensor, comparison: Comparison | None = None) -> Logits | Compared:
        if comparison is None or not (comparison.exclude_own or comparison.weights is not None):
            return super().forward(z, comparison)
        weight = self.weight if self.free else F.normalize(self.weight, dim=-1)
        weight = weight if self.lengths is None else weight * self.lengths
        logits, how = F.linear(F.normalize(z, dim=-1), weight), comparison
        products = how.teacher.rows @ how.teacher.weight.t() * how.teacher.scale
        targets = F.softmax(products / how.temperature + how.shift, dim=-1).unflatten(0, (how.crops, -1))
        images = targets.shape[1]
        weights = targets.new_ones(images) if how.weights is None else how.weights
        if how.exclude_own:
            loss = dino_loss(logits.unflatten(0, (-1, images)), targets, how.student_temp, how.others)
        else:
            loss = ibot_loss(logits, targets[0], how.student_temp, weights, int(how.divisor or 1))
        entropies = torch.special.entr(targets).sum(dim=-1) * weights
        mean = entropies.sum() / (weights.sum() * how.crops).clamp_min(1e-9)
        return Compared(loss, mean, how.share(len(logits)))


def use_plain_losses(network: Network) -> None:
    """Let the heads of a network compute their losses by the formulas."""
    for head in network.heads().values():
        head.prototypes.__class__ = PlainPrototypes
