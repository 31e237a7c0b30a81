"""The projection head: MLP, L2 normalization, prototypes.

Source: facebookresearch/dino `DINOHead`; its `weight_norm` layer is `Prototypes` here, because torch's weight_norm
can't be deep-copied and sees no weights under ZeRO 3.
"""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from dino_ds.models.batch_norm import use_own_batch_norm
from dino_ds.models.initialization import init_weights
from dino_ds.models.logits import Compared, Comparison, Logits
from dino_ds.models.prototypes import Prototypes


class DinoHead(nn.Module):
    """Features (n, width) -> logits over the prototypes, as factors and before any temperature; with a `Comparison`,
    their loss against a teacher's logits.

    learned_lengths: whether the prototypes' lengths are trained (facebookresearch/dinov2) or are 1.
    """

    def __init__(
        self, width: int, hidden: int, bottleneck: int, prototypes: int, layers: int, learned_lengths: bool = False
    ) -> None:
        super().__init__()
        sizes = [width] + [hidden] * (layers - 1) + [bottleneck]
        modules: list[nn.Module] = []
        for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
            if i:
                modules.append(nn.GELU())
            modules.append(nn.Linear(n_in, n_out))
        self.mlp = nn.Sequential(*modules)
        self.prototypes = Prototypes(bottleneck, prototypes, learned_lengths)
        init_weights(self)

    def free_prototypes(self) -> DinoHead:
        """Replace the prototypes by those of a plain linear layer, of any length (facebookresearch/dinov3)."""
        prototypes, bottleneck = self.prototypes.weight.shape
        self.prototypes = Prototypes(bottleneck, prototypes, free=True)
        return self

    def add_batch_norm(self, synced: bool) -> DinoHead:
        """Put BatchNorm after each of the hidden layers (`use_bn` of the reference); `synced`: over all ranks."""
        modules: list[nn.Module] = []
        for module in self.mlp:
            if isinstance(module, nn.GELU):
                width = modules[-1].out_features
                assert isinstance(width, int)
                modules.append(nn.BatchNorm1d(width))
            modules.append(module)
        self.mlp = nn.Sequential(*modules)
        use_own_batch_norm(self, synced)
        return self

    def forward(self, features: Tensor, comparison: Comparison | None = None) -> Logits | Compared:
        """features (n, width) -> logits, or the loss of the comparison."""
        found: Logits | Compared = self.prototypes(self.mlp(features), comparison)
        return found


class RegressionHead(nn.Linear):
    """Features (..., width) -> a teacher's features (..., its width): one linear layer, for distillation."""

    def forward(self, features: Tensor, comparison: Comparison | None = None) -> Tensor:
        return super().forward(features)
