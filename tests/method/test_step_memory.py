"""What a step with DINOv2's objective allocates: no (rows, prototypes) matrix, only tiles of one."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dino_ds.engine.process import init_distributed
from dino_ds.method import dino
from dino_ds.models import prototypes
from dino_ds.planning.bench.step import LadderStep, all_steps, build_ladder_step
from tests.planning.measure.tiny import tiny_recipe

K = 3001  # a size that nothing else of the step has
BOTTLENECKS = (13, 11)
TILE, PART, KEPT = 20, 2, 40  # rows
RECIPE = {
    "crops__global_size": "64", "crops__mask": "dinov2", "head__prototypes": str(K),
    "head__bottleneck": str(BOTTLENECKS[0]), "ibot_head__prototypes": str(K),
    "ibot_head__bottleneck": str(BOTTLENECKS[1]), "ibot_head__hidden": "48", "objective__centering": "sinkhorn",
    "objective__ibot_weight": "1", "objective__koleo_weight": "0.1",
}  # fmt: skip


class _Watch(TorchDispatchMode):
    """Sees what operators give that has a dimension of K, but is not as large as a vector or a weight of a head:
    the rows of the largest one, and the most rows that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and K in tensor.shape:
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        rows = storage.nbytes() // (4 * K)
        if rows in (1, *BOTTLENECKS):
            return
        self._there = {key: found for key, found in self._there.items() if not found[0].expired()}
        self._there[storage._cdata] = StorageWeakRef(storage), rows
        self.largest = max(self.largest, rows)
        self.most = max(self.most, sum(n for _, n in self._there.values()))


def _watched(step: LadderStep) -> _Watch:
    init_distributed()
    trial = build_ladder_step(step, tiny_recipe(**RECIPE), 8)
    with _Watch() as watch:
        trial.run()
    return watch


@pytest.mark.slow
def test_a_step_holds_only_tiles(monkeypatch):
    """Targets, losses, gradients and the optimizer's step. Sinkhorn: tiles that are kept, one made anew, two parts and
    a temporary of one. A loss: a tile of the teacher's, one of the student's, and a few parts."""
    monkeypatch.setitem(prototypes._TILE, "cpu", TILE * 4 * K)
    monkeypatch.setitem(prototypes._PART, "cpu", PART * 4 * K)
    monkeypatch.setitem(dino._KEPT, "cpu", KEPT * 4 * K)
    exact = [step for step in all_steps() if step.exact]
    lean, plain = _watched(exact[-1]), _watched(exact[0])
    assert lean.largest == TILE
    assert lean.most <= max(KEPT + TILE, 2 * TILE) + 4 * PART
    assert plain.largest > 100 and lean.most <= 0.2 * plain.most
