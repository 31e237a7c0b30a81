"""Builds the 7B student at full size as one of 64 ranks, without memory, and counts the bytes that would be live.

With the tier config for 8 nodes of 8 GPUs of 80 GB.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RANK, RANKS = 3, 64
TIERS = "ds_configs/tiers/80gb_64gpu_vit7b16_zero3_bf16"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False  # trunc_normal_ asks whether values remain to be drawn again; fake ones have no values
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        if reference.cdata in self._alive:
            return
        self._alive[reference.cdata] = (reference, storage.nbytes())
        self._bytes += storage.nbytes()
        if self._bytes > self.peak:
            for key, (known, size) in list(self._alive.items()):
                if known.expired():
                    del self._alive[key]
                    self._bytes -= size
            self.peak = max(self.peak, self._bytes)


def main() -> None:
    os.environ.update(
        RANK=str(RANK), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(RANK), MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu"
    )
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    deepspeed.init_distributed("fake", verbose=False)

    from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
    from dino_ds.config.ds_values import DsConfig
    from dino_ds.config.loading import load_recipe
    from dino_ds.costs.step_costs import count_parameters
    from dino_ds.engine.engine import Engine
    from dino_ds.engine.placement import Placement
    from dino_ds.method.build import build_network

    recipe = load_recipe("vit7b16", {})

    def resolved(path: str) -> DsConfig:
        weights = count_parameters(recipe)
        return resolve_ds_config(load_ds_config(path, {}), path, recipe.data.global_batch, RANKS, True, weights)

    config = resolved(f"{TIERS}_hpz.json")
    # Its kernels need CUDA; the config is DeepSpeed's to accept.
    assert deepspeed.DeepSpeedConfig(resolved(f"{TIERS}_zeropp.json").raw).zero_config.zero_quantized_gradients
    largest = 0

    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        placement = Placement(config)

        def place(module: torch.nn.Module) -> None:
            nonlocal largest
            largest = max(largest, sum(p.numel() * p.element_size() for p in module.parameters(recurse=False)))
            placement(module)

        network = build_network(recipe, config.performance, place)
        network_bytes = live.peak
        Engine(network, config)
    found = {
        "weights": sum(p.ds_numel for p in network.parameters()),
        "largest_module_bytes": largest,
        "network_bytes": network_bytes,
        "engine_bytes": live.peak,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
