"""The advice of `dino-ds advise` on each setting: its value, the flags, and the reason, with a source.

A reason without a source says that it is a rule of thumb. Nothing here reads an image or needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dino_ds.config.crop_checks import fitting_sizes
from dino_ds.config.fields import MOST_PASSES
from dino_ds.config.loading import load_recipe
from dino_ds.planning.rules import (
    LEAST_BATCH,
    Data,
    Gpus,
    batch_size,
    continued_length,
    cpu_patch,
    epochs,
    momentum,
    prototypes,
    recipe_for,
    released_weights,
    small_momentum,
    tiny_patch,
)

_NETWORKS = {"small_vits16": "ViT-S/16", "vits16": "ViT-S/16", "vitb16": "ViT-B/16", "dinov2_vitl16_short": "ViT-L/16"}
_LIGHTLY_LENGTHS = "LightlyTrain: 200-2000 below 100,000 images, 100-500 to 1 million, 5-100 above 10 million"
_KNN_OF_BATCHES = "DINO's k-NN at 128, 256, 512, 1024: 57.9, 59.1, 59.6, 59.9 % (arXiv 2104.14294, table 9)"
_MOMENTA = (
    "DINO: 0.996 at 512, 0.9995 at 256 (main_dino.py); LightlyTrain: 0.99 up to 20,000 images; here as many images as "
    "DINO's 0.996 averages, at most a hundredth of the run, but 0.99 or more: rule of thumb"
)


@dataclass(frozen=True)
class Row:
    """One piece of advice: a readable `value`, the reason with a source, and the `flags` of `train` that follow."""

    setting: str
    value: str
    why: str
    flags: dict[str, str] = field(default_factory=dict)


def advise(data: Data, gpus: Gpus) -> list[Row]:
    """Advise on each setting, in the order of decisions. `data` has LEAST_IMAGES or more; `gpus`: useful ones."""
    recipe, weights = recipe_for(data, gpus), released_weights(data, gpus)
    return [
        _start(data, gpus, weights),
        _backbone(data, gpus, recipe, weights),
        _objective(recipe, weights),
        *([_MUON] if recipe == "small" else []),
        _crops(data, gpus, recipe, weights),
        *_schedule(data, gpus, recipe, weights),
    ]


def fewer_gpus(data: Data, used: Gpus, offered: int) -> Row:
    """Advise to use fewer GPUs than are offered."""
    why = f"{batch_size(data, used)} images a step (below), {LEAST_BATCH} or more for each GPU: rule of thumb"
    return Row("GPUs", f"{used.count} of {offered}", why)


def _start(data: Data, gpus: Gpus, weights: str | None) -> Row:
    why, flags = "DINO and DINOv2 had 1.28 million images (arXiv 2104.14294, 2304.07193)", dict[str, str]()
    if weights:
        why = "below 1 million images (rule of thumb): a user's k-NN was 83.6 % frozen, 85.1 from scratch, 86.9 "
        return Row("start", f"continue from {weights}", f"{why}continued (dinov3#23)", {"model.init_from": weights})
    if not data.color:
        why = f"released weights have 3 channels, these images {data.channels}: adapting them (docs/backbones.md) is "
        why, flags = f"{why}untried", {"model.in_chans": str(data.channels)}
    elif data.tiny:
        why = f"released weights know 224 pixels, these images have {data.side}"
    elif not gpus.count:
        why = "without a GPU only a small network is feasible (docs/quickstart.md): see the note on released weights"
    return Row("start", "from scratch", why, flags)


def _backbone(data: Data, gpus: Gpus, recipe: str, weights: str | None) -> Row:
    why = "S below 1 million images or 4 GPUs, L with 8 GPUs of 40 GB, else B: rule of thumb"
    network, flags = _NETWORKS.get(recipe, ""), dict[str, str]()
    if weights:
        base, why = weights.startswith("vit_base"), "4 GPUs and 100,000 images for ViT-B, else ViT-S: rule of thumb"
        network = "ViT-B/16" if base else "ViT-S/16"
    elif not gpus.count:
        patch, why = cpu_patch(data)[0], "recipe small, measured on a CPU (docs/small-data.md)"
        network, flags = f"2 blocks, 128 wide, patch {patch}", {} if patch == 8 else {"model.patch_size": str(patch)}
    elif data.tiny:
        small, why = str(tiny_patch(data)), "patches of 4 below 64 px, of 8 below 96: rule of thumb"
        flags = {"model.patch_size": small, "model.width": "192", "model.depth": "12", "model.heads": "3"}
        network = f"ViT-Ti/{small}"
    return Row("backbone", network, why, flags)


_MUON = Row("optimizer", "Muon", "k-NN 3 to 6 points above AdamW's, on a CPU (docs/notes/small-data.md)")


def _objective(recipe: str, weights: str | None) -> Row:
    if recipe.startswith("dinov2"):
        why = "8 such GPUs can afford its batch of 2048 (dinov2#298: 32 would not work)"
        return Row("objective", "DINOv2", why)
    if recipe.startswith("small"):
        why = "k-NN above DINO's on three sets of small images, measured on a CPU (docs/small-data.md)"
        return Row("objective", "coding rate (SimDINO)", why)
    why = "batches below 2048: DINOv2's authors cannot advise them (dinov2#298)"
    if weights:
        why = "what these weights were made with; DINOv2's fell from 80 to 10 % without its heads (dinov2#204)"
    return Row("objective", "DINO", why)


def _crops(data: Data, gpus: Gpus, recipe: str, weights: str | None) -> Row:
    start = {"model.init_from": weights} if weights else {}
    known, mild = load_recipe(recipe, start).crops, "colors of recipe small, no blur"
    local = known.num_local
    if not gpus.count:
        sizes = fitting_sizes(data.side, *cpu_patch(data))
        why = f"by the images' size, with few patches for a CPU: rule of thumb; {mild}"
        why = "measured on images of 32 and 64 pixels (docs/small-data.md)" if sizes in ((32, 16), (64, 32)) else why
    elif recipe == "small":
        sizes, local = fitting_sizes(data.side, tiny_patch(data), 64), 6
        why = f"{mild}; sizes by the images: rule of thumb"
    else:
        sizes = fitting_sizes(data.side, 16, 224)
        why = f"not larger than the images' {data.side} px: rule of thumb; in DINO's ratio"
        why = "DINO's (main_dino.py); number and scales are the recipe's" if sizes == (224, 96) else why
    wanted = {"global_size": sizes[0], "local_size": sizes[1], "num_local": local}
    flags = {f"crops.{key}": str(value) for key, value in wanted.items() if value != getattr(known, key)}
    return Row("crops", f"2 x {sizes[0]} + {local} x {sizes[1]} px", why, flags)


def _schedule(data: Data, gpus: Gpus, recipe: str, weights: str | None) -> Iterator[Row]:
    """Advise on length, batch, learning rate, momentum and prototypes, unless the recipe's values stay."""
    if not gpus.count:
        yield _cpu_length(data)
        return
    batch = batch_size(data, gpus)
    if recipe.startswith("dinov2"):
        why = "dinov2's 2048, or the next multiple of the GPUs below"
        yield Row(
            "length", "125,000 steps", "learning rate and momentum too are the recipe's: dinov2's config for ImageNet"
        )
        yield Row("batch", str(batch), why, {"data.global_batch": str(batch)})
        return
    if weights:
        yield from _continued(data.images, batch)
        return
    passes = epochs(data.images)
    steps = max(1, data.images // batch * passes)
    yield Row("length", f"{passes} epochs = {steps:,} steps", _LIGHTLY_LENGTHS, {"length": f"{passes} epochs"})
    yield _batch(data.images, batch)
    rate, warmup = 7.5e-4 if recipe == "vitb16" else 5e-4, max(1, min(10, passes // 10))
    why = "linear in the batch; warm-up 10 epochs, a tenth of the run at most (main_dino.py, LightlyTrain)"
    flags = {"optimizer.lr": f"{rate:g}", "optimizer.warmup": f"{warmup} epochs"}
    row = Row("learning rate", f"{_rate(rate, batch)}, warm-up {warmup} epochs", why, flags)
    if recipe == "small":
        yield replace(row, flags={**flags, "optimizer.lr_scaling": "linear"})  # the recipe's root is for its own rate
        ema, faster = f"{small_momentum(batch):g}", "low ones learn faster (docs/small-data.md)"
        why = f"recipe small's 0.9 at 64 images, by the root of the batch: {faster}"
        yield Row("EMA momentum", f"{ema} to 1", why, {"teacher.momentum": ema})
        return  # its objective has no prototypes
    yield row
    if recipe.startswith("small"):
        ema = f"{load_recipe(recipe, {}).teacher.momentum:g}"
        yield Row("EMA momentum", f"{ema} to 1", f"recipe {recipe}'s: low ones learn faster (docs/small-data.md)")
        return
    yield from _momentum_and_prototypes(data.images, batch, steps)


def _continued(images: int, batch: int) -> Iterator[Row]:
    """Advise on the schedule of a run from released weights: that of recipe continue, shortened or lengthened."""
    length = continued_length(images)
    steps, tenth = length // batch, length // 10
    why = f"a quarter of what training from scratch takes: rule of thumb ({_LIGHTLY_LENGTHS})"
    flags = {"length": f"{length} images", "eval.every": f"{length // 20} images"}
    yield Row("length", f"{length:,} images = {steps:,} steps", why, flags)
    yield _batch(images, batch)
    why = (
        "a fifth of DINO's, in the last block, 0.9 of it in each one below, so that the weights survive: rule of thumb"
    )
    flags = {"optimizer.lr": "0.0001", "optimizer.warmup": f"{tenth} images"}
    yield Row("learning rate", f"{_rate(1e-4, batch)}, warm-up a tenth", why, flags)
    yield from _momentum_and_prototypes(images, batch, steps)
    frozen = f"{max(1, min(500, steps // 20))} steps"
    why = "the head is new: LightlyTrain's page on DINOv2 freezes 1 epoch long; 500 steps, or a twentieth of the run"
    yield Row("head first", f"{frozen}, head only", f"{why}: rule of thumb", {"model.freeze_backbone": frozen})


def _rate(rate: float, batch: int) -> str:
    """Describe optimizer.lr, and the learning rate that follows at this batch."""
    return f"{rate:g} for 256 images" + (f": {rate * batch / 256:.2g} for {batch}" if batch != 256 else "")


def _momentum_and_prototypes(images: int, batch: int, steps: int) -> Iterator[Row]:
    ema, outputs = f"{momentum(batch, steps):g}", prototypes(images)
    yield Row("EMA momentum", f"{ema} to 1", _MOMENTA, {"teacher.momentum": ema})
    why = "16 images or more for each: rule of thumb; LightlyTrain's 1,024 (20,000 images) to 65,536"
    why = "the least; LightlyTrain's up to 20,000 images" if 16 * outputs > images else why
    yield Row("prototypes", f"{outputs:,}", why, {"head.prototypes": str(outputs)})


def _cpu_length(data: Data) -> Row:
    most, rest = MOST_PASSES * data.images, "batch, learning rate and momentum are the recipe's (docs/quickstart.md)"
    if most < 600_000:
        why = f"the most that LightlyTrain advises; {rest}"
        return Row("length", f"{most:,} images, each {MOST_PASSES:,} times", why, {"length": f"{most} images"})
    more = ", 40 on photographs of 375 px" if not data.tiny else ", 3 times as long at 64 px" if data.side > 32 else ""
    measured = f"about half an hour of a CPU core on CIFAR-10{more}"
    return Row("length", "600,000 images", f"{measured}; {rest}")


def _batch(images: int, batch: int) -> Row:
    why = _KNN_OF_BATCHES
    if 8 * batch > images:
        why = f"the least, though it leaves {images // batch} steps an epoch: rule of thumb. {why}"
    elif images < 16 * batch:
        why = f"more would leave fewer than 8 steps an epoch of {images:,} images: rule of thumb. {why}"
    return Row("batch", str(batch), why, {"data.global_batch": str(batch)})
