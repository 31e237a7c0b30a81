"""Copy detection: find the original of a photo that was cropped, recompressed or changed by hand.

Source: facebookresearch/dino `eval_copy_detection.py`, on the Copydays images of INRIA (Douze et al. 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from dino_ds.data.encoded import NamedFiles
from dino_ds.data.formats import EXTENSIONS
from dino_ds.data.multicrop import to_tensor
from dino_ds.data.normalisation import Normalisation
from dino_ds.engine import distributed
from dino_ds.errors import DataError
from dino_ds.evals.benchmark import Benchmark, describe_files
from dino_ds.evals.context import EvalContext
from dino_ds.evals.knn import average_precision, rank_database

_BENCHMARK = Benchmark(
    "Copydays",
    "copydays",
    ("original", "strong"),
    "a folder with original/, strong/ and, if wanted, jpegqual/QUALITY/, crops/PERCENT/ and distractors/",
    "https://lear.inrialpes.fr/~jegou/data.php#copydays",
)
_SIZE, _BATCH = 320, 16
_FOUND = 20
"""Images that a search returns."""
_GROUP = 4
"""Characters that the names of a photo and of its copies begin with."""
_GEM_POWER = 4


def copydays(context: EvalContext) -> dict[str, float]:
    """Copydays: originals of changed photos by CLS and pool patches, mAP"""
    with distributed.raise_on_all_ranks():
        folder = _BENCHMARK.find(context.settings.benchmark_root)
        numbered = (f"{kind}/{number}" for kind in ("jpegqual", "crops") for number in _numbers(folder / kind))
        copies = ["strong", *numbered]
        extra = ["distractors"] if (folder / "distractors").is_dir() else []
        images = {block: _images(folder / block) for block in ("original", *copies, *extra)}
        originals = [path.name for path in images["original"]]
        wanted = {block: originals_of([path.name for path in images[block]], originals) for block in copies}
    context.begin()
    features = {block: _describe(context, paths, block) for block, paths in images.items()}
    database = torch.cat([features[block] for block in ("original", *extra)])
    maps = {block: copy_map(features[block], database, wanted[block]) for block in copies}
    results = {f"copydays_{block.replace('/', '_')}_map": value for block, value in maps.items()}
    for kind in ("jpegqual", "crops"):
        if values := [value for block, value in maps.items() if block.startswith(kind)]:
            results[f"copydays_{kind}_map"] = sum(values) / len(values)
    return results


def pool(cls: Tensor, patches: Tensor) -> Tensor:
    """CLS (b, d) and patch tokens (b, rows, columns, d) -> (b, 2 d): next to CLS the fourth root of the mean of the
    fourth powers of what is positive."""
    powers = patches.flatten(1, 2).clamp_min(1e-6).pow(_GEM_POWER).mean(dim=1)
    return torch.cat((cls, powers.pow(1 / _GEM_POWER)), dim=1)


def originals_of(copies: Sequence[str], originals: Sequence[str]) -> list[list[int]]:
    """Names -> for each copy the indices of the originals whose name begins alike. Raises DataError where none does."""
    found = [[i for i, name in enumerate(originals) if name[:_GROUP] == copy[:_GROUP]] for copy in copies]
    for copy, alike in zip(copies, found, strict=True):
        if not alike:
            begins = f"none of {len(originals)} names begins with {copy[:_GROUP]}"
            raise DataError(f"Copydays: {copy} has no original: {begins}")
    return found


def copy_map(queries: Tensor, database: Tensor, wanted: Sequence[Sequence[int]]) -> float:
    """Features (q, d) and (m, d) of any length -> mean average precision in percent of the 20 nearest."""
    ranking = rank_database(queries, database)[:, :_FOUND].tolist()
    values = [average_precision(row, positives) for row, positives in zip(ranking, wanted, strict=True)]
    return 100.0 * sum(values) / len(values)


def _squeeze(image: Image.Image, side: int, normalisation: Normalisation) -> Tensor:
    """Image -> (3, side, side), normalised."""
    return to_tensor(image.resize((side, side), Image.Resampling.BICUBIC), normalisation)


def _describe(context: EvalContext, paths: Sequence[Path], what: str) -> Tensor:
    backbone = context.backbone
    side = max(1, (context.settings.size or _SIZE) // backbone.stride) * backbone.stride

    def describe(images: Tensor) -> Tensor:
        if not backbone.is_vit:
            return pool(backbone.features(images), backbone.patch_tokens(images))
        tokens = backbone.last_tokens(images, 1)[0]
        return pool(tokens[:, 0], tokens[:, 1:].unflatten(1, (side // backbone.stride, -1)))

    prepare = partial(_squeeze, side=side, normalisation=backbone.normalisation)
    return describe_files(context, NamedFiles(list(map(str, paths))), prepare, describe, _BATCH, f"copydays: {what}")


def _numbers(folder: Path) -> list[str]:
    """Names of its folders of copies: qualities, or percentages."""
    return sorted((path.name for path in folder.glob("*") if path.name.isdecimal()), key=int)


def _images(folder: Path) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    found = sorted(path for path in files if path.suffix.lower() in EXTENSIONS)
    if not found:
        raise DataError(f"Copydays: {folder} has no images ({' '.join(EXTENSIONS)})")
    return found
