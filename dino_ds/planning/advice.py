"""The advice of `dino-ds advise` on each setting: its value, the flags, and the reason, with a source.

A rule without a source says that it is a rule of thumb. Nothing here reads an image or needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from dino_ds.config.loading import load_recipe
from dino_ds.planning.rules import (
    LEAST_BATCH,
    Data,
    Gpus,
    batch_size,
    cpu_patch,
    crop_sizes,
    epochs,
    momentum,
    prototypes,
    recipe_for,
    released_weights,
    tiny_patch,
)

RULE = "rule of thumb"


@dataclass(frozen=True)
class Row:
    """One piece of advice: `flags` of `train` that follow from it, a readable `value`, and why, with a source."""

    setting: str
    value: str
    why: str
    flags: dict[str, str]


def advise(data: Data, gpus: Gpus) -> list[Row]:
    """The rows in the order in which one decides. `data` has at least LEAST_IMAGES images; `gpus`: the useful ones."""
    recipe, weights = recipe_for(data, gpus), released_weights(data, gpus)
    rows = [_start(data, gpus, weights), _backbone(data, gpus, recipe, weights), _objective(recipe, weights)]
    rows.append(_crops(data, gpus, recipe))
    if not gpus.count:
        rows.append(_cpu_length(data))
    elif recipe.startswith("dinov2"):
        why = "learning rate and momentum too are the recipe's: dinov2's config for ImageNet"
        rows.append(Row("length", "125,000 steps", why, {}))
        batch = str(batch_size(data, gpus))
        rows.append(
            Row("batch", batch, "dinov2's 2048, or the next multiple of the GPUs below", {"data.global_batch": batch})
        )
    else:
        rows += _schedule(data, gpus, recipe, weights)
    return rows


def fewer_gpus(data: Data, used: Gpus, offered: int) -> Row:
    """Why not all of the GPUs are useful."""
    batch = batch_size(data, used)
    why = f"{batch} images a step (below), {LEAST_BATCH} or more for each GPU: rule of thumb"
    return Row("GPUs", f"{used.count} of {offered}", why, {})


def _start(data: Data, gpus: Gpus, weights: str | None) -> Row:
    if weights:
        why = (
            "below 1 million images (rule of thumb): a user's k-NN was 83.6 % frozen, 85.1 from scratch, 86.9 "
            "continued (dinov3#23)"
        )
        return Row("start", f"continue from {weights}", why, {"model.init_from": weights})
    if not data.color:
        channels = data.channels
        why = f"released weights have 3 channels, these images {channels}: adapting them (docs/backbones.md) is untried"
        return Row("start", "from scratch", why, {"model.in_chans": str(channels)})
    if data.tiny:
        return Row("start", "from scratch", f"released weights know 224 pixels, these images have {data.side}", {})
    if not gpus.count:
        why = "without a GPU only a small network is feasible (docs/quickstart.md): see the note on released weights"
        return Row("start", "from scratch", why, {})
    return Row("start", "from scratch", "DINO and DINOv2 had 1.28 million images (arXiv 2104.14294, 2304.07193)", {})


def _backbone(data: Data, gpus: Gpus, recipe: str, weights: str | None) -> Row:
    if weights:
        base = weights.startswith("vit_base")
        why = "4 GPUs and 100,000 images for ViT-B, else ViT-S: rule of thumb"
        flags = {"model.backbone": "vit_base_patch16_224"} if base else {}
        return Row("backbone", f"ViT-{'B' if base else 'S'}/16", why, flags)
    if not gpus.count:
        patch, why = cpu_patch(data)[0], "recipe cifar10, measured on two cores (docs/quickstart.md)"
        flags = {} if patch == 8 else {"model.patch_size": str(patch)}
        return Row("backbone", f"2 blocks, 128 wide, patch {patch}", why, flags)
    if data.tiny:
        small = str(tiny_patch(data))
        own = {"model.patch_size": small, "model.width": "192", "model.depth": "12", "model.heads": "3"}
        return Row("backbone", f"ViT-Ti/{small}", "patches of 4 below 64 px, of 8 below 96: rule of thumb", own)
    names = {"vitti16": "ViT-Ti/16", "vits16": "ViT-S/16", "vitb16": "ViT-B/16", "dinov2_vitl16_short": "ViT-L/16"}
    why = "Ti below 50,000 images, S below 1 million or 4 GPUs, L with 8 GPUs of 40 GB, else B: rule of thumb"
    return Row("backbone", names[recipe], why, {})


def _objective(recipe: str, weights: str | None) -> Row:
    if recipe.startswith("dinov2"):
        return Row(
            "objective", "DINOv2", "8 such GPUs can afford its batch of 2048 (dinov2#298: 32 would not work)", {}
        )
    if weights:
        why = "what these weights were made with; DINOv2's fell from 80 to 10 % without its heads (dinov2#204)"
        return Row("objective", "DINO", why, {})
    return Row("objective", "DINO", "batches below 2048: DINOv2's authors cannot advise them (dinov2#298)", {})


def _crops(data: Data, gpus: Gpus, recipe: str) -> Row:
    known, mild = load_recipe(recipe, {}).crops, "half strength and no blur: recipe cifar10"
    local = known.num_local
    if not gpus.count:
        sizes = crop_sizes(data.side, *cpu_patch(data))
        why = f"by the images' size, with few patches for a CPU: rule of thumb; {mild}"
        why = "recipe cifar10 (docs/quickstart.md)" if sizes == (32, 16) else why
    elif recipe == "cifar10":
        sizes, local = crop_sizes(data.side, tiny_patch(data), 64), 6
        why = f"{mild}; sizes by the images: rule of thumb"
    else:
        sizes = crop_sizes(data.side, 16, 224)
        why = f"not larger than the images' {data.side} px: rule of thumb; in DINO's ratio"
        why = "DINO's (main_dino.py); number and scales are the recipe's" if sizes == (224, 96) else why
    wanted = {"global_size": sizes[0], "local_size": sizes[1], "num_local": local}
    flags = {f"crops.{key}": str(value) for key, value in wanted.items() if value != getattr(known, key)}
    return Row("crops", f"2 x {sizes[0]} + {local} x {sizes[1]} px", why, flags)


def _cpu_length(data: Data) -> Row:
    most, recipe_s = 2000 * data.images, "batch, learning rate and momentum are the recipe's (docs/quickstart.md)"
    if most < 600_000:
        why = f"the most that LightlyTrain advises; {recipe_s}"
        return Row("length", f"{most:,} images, each 2000 times", why, {"length": f"{most} images"})
    measured = "12 minutes of two cores on CIFAR-10" + (", 40 on photographs of 375 px" if data.side >= 64 else "")
    return Row("length", "600,000 images", f"{measured}; {recipe_s}", {})


def _schedule(data: Data, gpus: Gpus, recipe: str, weights: str | None) -> list[Row]:
    """Length, batch, learning rate, momentum, prototypes."""
    passes, batch = epochs(data.images, weights is not None), batch_size(data, gpus)
    steps = max(1, data.images // batch * passes)
    ema, outputs, warmup = momentum(batch, steps), prototypes(data.images), max(1, min(10, passes // 10))
    lightly = "LightlyTrain: 200-2000 below 100,000 images, 100-500 to 1 million, 5-100 above 10 million"
    rows = [
        Row(
            "length",
            f"{passes} epochs = {steps:,} steps",
            f"a quarter of what training from scratch takes: rule of thumb ({lightly})" if weights else lightly,
            {"length": f"{passes} epochs"},
        ),
        _batch(data.images, batch),
        _learning_rate(batch, warmup, 1e-4 if weights else 7.5e-4 if recipe == "vitb16" else 5e-4),
        Row(
            "EMA momentum",
            f"{ema:g} to 1",
            "DINO: 0.996 at 512, 0.9995 at 256 (main_dino.py); LightlyTrain: 0.99 up to 20,000 images; here as many "
            "images as DINO's 0.996 averages, at most a hundredth of the run, but 0.99 or more: rule of thumb",
            {"teacher.momentum": f"{ema:g}"},
        ),
        Row(
            "prototypes",
            f"{outputs:,}",
            "the least; LightlyTrain's up to 20,000 images"
            if 16 * outputs > data.images
            else "16 images or more for each: rule of thumb; LightlyTrain's 1,024 (20,000 images) to 65,536",
            {"head.prototypes": str(outputs)},
        ),
    ]
    if weights:
        frozen = max(1, min(500, steps // 20))
        rows.append(
            Row(
                "head first",
                f"{frozen} steps, head only",
                "the head is new: LightlyTrain's page on DINOv2 freezes 1 epoch long; 500 steps, or a twentieth of the "
                "run: rule of thumb",
                {"model.freeze_backbone": f"{frozen} steps", "objective.freeze_prototypes": "0 steps"},
            )
        )
    return rows


def _batch(images: int, batch: int) -> Row:
    why = "DINO's k-NN at 128, 256, 512, 1024: 57.9, 59.1, 59.6, 59.9 % (arXiv 2104.14294, table 9)"
    if 8 * batch > images:
        why = f"the least, though it leaves {images // batch} steps an epoch: rule of thumb. {why}"
    elif images < 16 * batch:
        why = f"more would leave fewer than 8 steps an epoch of {images:,} images: rule of thumb. {why}"
    return Row("batch", str(batch), why, {"data.global_batch": str(batch)})


def _learning_rate(batch: int, warmup: int, rate: float) -> Row:
    why = f"{rate:g} for 256 images, linear; warm-up 10 epochs, a tenth of the run at most (main_dino.py, LightlyTrain)"
    flags = {"optimizer.lr": f"{rate:g}", "optimizer.warmup": f"{warmup} epochs"}
    if rate == 1e-4:
        why = f"a fifth of DINO's, so that the weights survive: rule of thumb (dinov2#204); {why}"
    return Row("learning rate", f"{rate * batch / 256:.2g}, warm-up {warmup} epochs", why, flags)


def expected_knn(data: Data, gpus: Gpus) -> tuple[str, str]:
    """(what to expect, source)"""
    recipe, weights = recipe_for(data, gpus), released_weights(data, gpus)
    if weights:
        known = "76.1" if "base" in weights else "74.5"
        return (
            "a few points above the released weights on your classes",
            f"they have {known} % on ImageNet (dino README); +3.3 for that user (dinov3#23)",
        )
    if not gpus.count and data.side < 64:
        return "41.9 % on CIFAR-10's 50,000 images", "raw pixels 40.5, untrained 27.3 (docs/quickstart.md, measured)"
    if data.tiny and gpus.count:
        return (
            "84 % on CIFAR-10's 50,000 images, not reached by us",
            "ResNet-18, 200 epochs: benchmarks of lightly; ours is untried",
        )
    figures = {
        "dinov2_vitl16_short": ("81.6 % on ImageNet", "dinov2 README"),
        "vitb16": ("up to 76.1 % on ImageNet", "400 epochs, dino README"),
        "vits16": (
            "69.3 % on ImageNet's 1.28 million images",
            "100 epochs, dino README; 51.8 % on ImageNet-100: lightly",
        ),
    }
    return figures.get(recipe, ("above raw pixels and the untrained network", "no published figure; rule of thumb"))
