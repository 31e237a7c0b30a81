"""Starting a student from weights that exist: taken module by module, while the network is being built."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dino_ds.models.network import Network
from dino_ds.models.weights import Placer
from dino_ds.weights.fit import fit_tensors
from dino_ds.weights.read import Weights


class InitialWeights:
    """A `Place` that puts the tensors of `weights` over what was drawn, then hands the module on to `place`.

    The backbone must be there whole, in its shapes, and nothing more of one; a position embedding of another size is
    resized as the network does. The head is taken where there is one of the same shapes, and stays as drawn where not.
    """

    def __init__(self, network: Network, weights: Weights, source: str, place: Placer, interpolation: str) -> None:
        self._prefix = {module: name for name, module in network.named_modules()}
        self._place, self._source, self._kind, self._notes = place, source, weights.kind, weights.notes
        self._resized: list[str] = []
        own = {name: tuple(p.shape) for name, p in network.named_parameters()}
        self._head = {f"head.{name}": t for name, t in weights.head.items()}
        self._head_note = self._fit_head(own)
        backbone = {f"backbone.{name}": t for name, t in weights.backbone.items()}
        self._backbone = self._fit_backbone(backbone, own, interpolation)
        self._tensors = self._backbone | self._head

    def _fit_head(self, own: dict[str, tuple[int, ...]]) -> str:
        wanted = {name: shape for name, shape in own.items() if name.startswith("head.")}
        if not self._head:
            return "there is no head in it: the head starts anew"
        found = {name: tuple(t.shape) for name, t in self._head.items()}
        if found == wanted:
            return f"the head too ({len(wanted)} tensors)"
        other = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        self._head = {}
        return f"its head does not fit ({other} {found.get(other)} vs {wanted.get(other)}): the head starts anew"

    def _fit_backbone(
        self, theirs: dict[str, Tensor], own: dict[str, tuple[int, ...]], interpolation: str
    ) -> dict[str, Tensor]:
        shapes = {name: shape for name, shape in own.items() if name.startswith("backbone.")}
        start = f"model.init_from {self._source}"
        fitting = fit_tensors(theirs, shapes, interpolation, f"{start} lacks", f"{start} is")
        place = "backbone.pos_embed"
        if fitting[place].shape != theirs[place].shape:
            self._resized.append(f"position embedding resized to {shapes[place][1]} places")
        return fitting

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        prefix = self._prefix[module]
        for name, parameter in module.named_parameters(recurse=False):
            tensor = self._tensors.get(f"{prefix}.{name}")
            if tensor is not None:
                parameter.copy_(tensor.to(parameter.dtype))
        self._place(module)

    def __str__(self) -> str:
        """What was taken and what not, for people."""
        what = f"{self._source} ({self._kind}): {len(self._backbone)} tensors of the backbone"
        return "; ".join([what, *self._resized, self._head_note, *self._notes])
