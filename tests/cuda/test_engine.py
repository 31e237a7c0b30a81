"""What DeepSpeed adds to a step, counted as operators of the CPU: launches, copies to the device, waits for it."""

from __future__ import annotations

import pytest

from dino_ds.basics.ranges import listen
from dino_ds.config.ds_config import load_ds_config
from dino_ds.config.recipe import Recipe
from dino_ds.planning.measure.trial import build_trial, join, resolve
from tests.fake_cuda import Counter

pytestmark = pytest.mark.slow

SMALL = {
    "model": {"width": 32, "heads": 2, "drop_path": 0.0},  # 12 blocks, 157 parameters as ViT-S has
    "crops": {"global_size": 32, "local_size": 16, "num_local": 8},
    "head": {"prototypes": 512, "hidden": 64, "bottleneck": 16},
}


@pytest.mark.parametrize(
    "ds, ceilings",
    [
        ("zero1_bf16", {"optimizer": 36, "backward": 449, "center": 7, "ema": 6}),
        ("zero2_bf16", {"optimizer": 36, "backward": 766, "center": 7, "ema": 6}),
    ],
)
def test_engine(ds: str, ceilings: dict[str, int]):
    join(1)
    recipe, config = resolve(Recipe.model_validate(SMALL), load_ds_config(f"ds_configs/{ds}.json", {}), ds, batch=4)
    trial = build_trial(recipe, config)
    trial.run()
    with Counter("cpu") as counter, listen(counter.part):
        trial.run()
    known = (
        "optimizer: _local_scalar_dense waits for the device at deepspeed_engine.py",
    )  # whether the step is applied
    counter.check({name: (launches, 1.0) for name, launches in ceilings.items()}, known)
