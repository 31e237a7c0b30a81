"""Images/s of one core for each way of making crops, and for the parts of it.

`python -m scripts.bench_data [--root FOLDER] [--out data]`: on image files, or on the embedded photographs. With --out
data.json, data.md and data.png.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import fire
import torch
from torch import Tensor

from dino_ds.basics.formatting import markdown_table
from dino_ds.config.crops import all_crops, describe_crops
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.batches import LoaderBatch, LoaderOptions, MultiCropDataset, augmented_crops
from dino_ds.data.decode import EncodedImage
from dino_ds.data.folder import ImageFolder
from dino_ds.data.images import UnreadableImage
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.normalization import STD
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError
from dino_ds.planning.measure import Timing, describe_host, host_line, time_interleaved
from scripts.data_picture import draw
from scripts.pil_pipeline import PilPipeline
from scripts.results import write_result
from scripts.storage import read_rates, read_table

_BATCH = 16
_PIPELINES = {
    "pil": "DINO's own: Pillow and torchvision v1, decoding included",
    "exact": "data.augment worker: decoding, crops and augmentation by Pillow",
    "split_worker": "data.augment device, the worker's part: decoding and uint8 crops",
    "device": "data.augment device, the device's part, on this CPU",
    "device_gpu": "the same on the GPU",
    "split_total": "data.augment device, both parts on this CPU",
    "decode": "decoding alone",
}


def main(
    root: str | None = None, config: str | None = None, images: int = 120, rounds: int = 5, out: str | None = None
) -> None:
    """Raises DataError where no image can be read."""
    recipe = load_recipe(config, {"data.root": root} if root else {})
    result, figure = measure(recipe, images, rounds)
    if out is None:
        print(_page(result))
    else:
        write_result(Path(out) / "data", result, _page(result), figure)


def measure(recipe: Recipe, images: int, rounds: int) -> tuple[dict[str, Any], Any]:
    """The result and its picture. Raises ConfigError for a source that has no files, DataError."""
    torch.set_num_threads(1)
    multicrop = MultiCrop.of(recipe)
    files = _Files(recipe, images)
    timings = _time(multicrop, files, recipe, rounds)
    rates = {name: {"images_per_second": len(files) / t.seconds, "spread": t.spread} for name, t in timings.items()}
    split = timings["split_worker"].seconds + timings["device"].seconds
    rates["split_total"] = {"images_per_second": len(files) / split}
    worker, device = _both_modes(multicrop, files, recipe)
    result: dict[str, Any] = {
        "pipelines": rates,
        "ratio_split_to_pil": timings["pil"].seconds / timings["split_worker"].seconds,
        "augmentation_share": timings["device"].seconds / split,
        "ratio_exact_to_pil": timings["pil"].seconds / timings["exact"].seconds,
        "distance_levels": _distance(worker, device),
        "read": read_rates(files.contents, rounds),
        "clock": timings["pil"].clock,
        "crops": f"{describe_crops(recipe.groups)}, {recipe.crops.augment}",
        "images": files.describe(),
        "host": describe_host(),
    }
    return result, draw(result, [crop[0] for crop in worker], [crop[0] for crop in device])


class _Files:
    """Encoded images in memory: storage is measured by itself."""

    labels = classes = None

    def __init__(self, recipe: Recipe, images: int) -> None:
        data = recipe.data
        if data.root is None and data.source == "folder":
            self.where = "the embedded photographs"
            with resources.as_file(resources.files("dino_ds.data") / "photos") as folder:
                self._take(ImageFolder(str(folder)), images, data.max_pixels)
        else:
            self.where = data.root or data.source
            self._take(build_source(data.source, data.root, "train", data.download), images, data.max_pixels)

    def _take(self, source: Any, images: int, max_pixels: int) -> None:
        if not hasattr(source, "read"):
            raise ConfigError(
                f"bench data decodes image files, and data.source {self.where} has none: give --data.root"
            )
        self.contents: list[bytes] = []
        self._sizes: list[tuple[int, int]] = []
        count, unreadable = min(images, len(source)), ""
        for index in (i * len(source) // count for i in range(count)):
            try:
                data = source.read(index)
                image = EncodedImage(data, source.name(index), max_pixels)
                image.decode()
            except UnreadableImage as error:
                unreadable = str(error)
                continue
            self.contents.append(data)
            self._sizes.append((image.width, image.height))
        if not self.contents:
            raise DataError(f"none of {count} images of {self.where} can be read, the last one {unreadable}")

    def __len__(self) -> int:
        return len(self.contents)

    def read(self, index: int) -> bytes:
        return self.contents[index]

    def load(self, index: int) -> Any:
        raise NotImplementedError

    def name(self, index: int) -> str:
        return str(index)

    def describe(self) -> dict[str, Any]:
        pixels = [width * height for width, height in self._sizes]
        return {
            "where": self.where,
            "count": len(self),
            "mean_megapixels": sum(pixels) / len(pixels) / 1e6,
            "largest": max(self._sizes, key=lambda size: size[0] * size[1]),
            "mean_kilobytes": sum(map(len, self.contents)) / len(self) / 1000,
        }


def _dataset(multicrop: MultiCrop, files: _Files, recipe: Recipe, augment: str, device: str) -> MultiCropDataset:
    changes = {"augment": augment, "channels": 3, "value_range": None, "device": torch.device(device)}
    return MultiCropDataset(files, multicrop, LoaderOptions.of(recipe, **changes))


def _batches(dataset: MultiCropDataset, files: _Files) -> list[LoaderBatch]:
    keys = [(0, index) for index in range(len(files))]
    built = [dataset.__getitems__(keys[i : i + _BATCH]) for i in range(0, len(keys), _BATCH)]
    return [_checked(batch) for batch in built]


def _checked(batch: LoaderBatch | DataError) -> LoaderBatch:
    if isinstance(batch, DataError):
        raise batch
    return batch


def _time(multicrop: MultiCrop, files: _Files, recipe: Recipe, rounds: int) -> dict[str, Timing]:
    """All pipelines interleaved, each over all images; the GPU by itself, since it goes by wall time."""
    worker, split = (_dataset(multicrop, files, recipe, augment, "cpu") for augment in ("worker", "device"))
    ready, pil = _batches(split, files), PilPipeline(multicrop)
    runs: dict[str, Callable[[], object]] = {
        "pil": lambda: [pil(data) for data in files.contents],
        "exact": lambda: [worker.__getitems__([(0, index)]) for index in range(len(files))],
        "split_worker": lambda: [split.__getitems__([(0, index)]) for index in range(len(files))],
        "device": lambda: [augmented_crops(batch) for batch in ready],
        "decode": lambda: [EncodedImage(data, "", recipe.data.max_pixels).decode() for data in files.contents],
    }
    with torch.random.fork_rng(devices=[]):
        timings = time_interleaved(runs, rounds, 1, torch.device("cpu"))
    if torch.cuda.is_available():
        there = [
            b.moved(torch.Tensor.cuda) for b in _batches(_dataset(multicrop, files, recipe, "device", "cuda"), files)
        ]
        gpu = {"device_gpu": lambda: [augmented_crops(batch) for batch in there]}
        timings |= time_interleaved(gpu, rounds, 3, torch.device("cuda"))
    return timings


def _both_modes(multicrop: MultiCrop, files: _Files, recipe: Recipe) -> tuple[list[Tensor], list[Tensor]]:
    """The crops (b, 3, h, w) of the first images by worker and by device."""
    datasets = (_dataset(multicrop, files, recipe, augment, "cpu") for augment in ("worker", "device"))
    worker, device = (all_crops(augmented_crops(_batches(dataset, files)[0])) for dataset in datasets)
    return worker, device


def _distance(worker: list[Tensor], device: list[Tensor]) -> float:
    """Mean difference of two sets of crops, in levels of 255."""
    scale = torch.tensor(STD).view(3, 1, 1) * 255
    return torch.stack([((a - b).abs() * scale).mean() for a, b in zip(worker, device, strict=True)]).mean().item()


def _page(result: dict[str, Any]) -> str:
    images, pipelines = result["images"], result["pipelines"]
    rows = [
        [name, f"{rate['images_per_second']:.1f}", f"{1000 / rate['images_per_second']:.2f}", _PIPELINES[name]]
        for name, rate in sorted(pipelines.items(), key=lambda item: list(_PIPELINES).index(item[0]))
    ]
    width, height = images["largest"]
    return "\n".join(
        [
            f"bench data: {images['count']} images of {images['where']}, {images['mean_megapixels']:.2f} megapixels "
            f"and {images['mean_kilobytes']:.0f} kB on average, the largest {width} x {height}",
            f"crops {result['crops']}",
            f"{host_line(result['host'])}; {result['clock']} time, interleaved",
            "",
            markdown_table(["pipeline", "images/s", "ms", "what it is"], rows),
            "",
            f"split_worker is {result['ratio_split_to_pil']:.2f} x pil, exact {result['ratio_exact_to_pil']:.2f} x; "
            f"augmentation is {100 * result['augmentation_share']:.0f} % of split_total; "
            f"crops of the two modes differ by {result['distance_levels']:.2f} of 255 levels on average",
            "",
            read_table(result["read"]),
        ]
    )


if __name__ == "__main__":
    fire.Fire(main)
