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

from dino_ds.data.formats import EXTENSIONS
from dino_ds.data.multicrop import to_tensor
from dino_ds.data.normalisation import Normalisation
from dino_ds.engine import distributed
from dino_ds.errors import DataError
from dino_ds.evals.context import EvalContext
from dino_ds.evals.knn import average_precision, rank_database
from dino_ds.evals.protocols.work import Benchmark, Files, describe_files

_BENCHMARK = Benchmark(
    "Copydays",
    (".", "copydays"),
    ("original", "strong"),
    "a folder with original/, strong/ and, if wanted, jpegqual/QUALITY/, crops/PERCENT/, distractors/ and whitening/",
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
        blocks = {block: _images(folder / block) for block in ("original", *_copies(folder))}
        extra = {kind: _images(folder / kind) for kind in ("distractors", "whitening") if (folder / kind).is_dir()}
        originals = [path.name for path in blocks["original"]]
        wanted = {block: originals_of([path.name for path in paths], originals) for block, paths in blocks.items()}
    context.begin()
    database = _describe(context, blocks["original"], "original")
    if "distractors" in extra:
        database = torch.cat((database, _describe(context, extra["distractors"], "distractors")))
    whiten = (
        Whitening(_describe(context, extra["whitening"], "whitening")) if "whitening" in extra else torch.nn.Identity()
    )
    database = whiten(database)
    results = {}
    for block in list(blocks)[1:]:
        queries = whiten(_describe(context, blocks[block], block))
        results[f"copydays_{block.replace('/', '_')}_map"] = copy_map(queries, database, wanted[block])
    for kind in ("jpegqual", "crops"):
        values = [value for name, value in results.items() if name.startswith(f"copydays_{kind}_")]
        if values:
            results[f"copydays_{kind}_map"] = sum(values) / len(values)
    return results


class Whitening:
    """Features (n, d) -> (n, d), less the mean of those given and divided by the deviation along their principal axes.

    Like the reference's, the axes are the second moments' about zero, not about the mean.
    """

    def __init__(self, features: Tensor) -> None:
        values = features.double()
        moments = values.T @ values / len(values)
        variances, axes = torch.linalg.eigh(moments)
        self._mean = values.mean(dim=0)
        self._axes = axes / variances.clamp_min(1e-5 * float(variances.max())).sqrt()

    def __call__(self, features: Tensor) -> Tensor:
        return ((features.double() - self._mean) @ self._axes).to(features.dtype)


def squeeze(image: Image.Image, side: int, normalisation: Normalisation) -> Tensor:
    """Image -> (3, side, side), normalised."""
    return to_tensor(image.resize((side, side), Image.Resampling.BICUBIC), normalisation)


def pool(cls: Tensor, patches: Tensor) -> Tensor:
    """CLS (b, d) and patch tokens (b, rows, columns, d) -> (b, 2 d): next to CLS the fourth root of the mean of the
    fourth powers of what is positive."""
    powers = patches.flatten(1, 2).clamp_min(1e-6).pow(_GEM_POWER).mean(dim=1)
    return torch.cat((cls, powers.pow(1 / _GEM_POWER)), dim=1)


def originals_of(copies: Sequence[str], originals: Sequence[str]) -> list[list[int]]:
    """Names -> for each copy the indices of the originals whose name begins alike. Raises DataError where none does."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(originals):
        groups.setdefault(name[:_GROUP], []).append(i)
    alone = [name for name in copies if name[:_GROUP] not in groups]
    if alone:
        raise DataError(
            f"Copydays: {alone[0]} has no original: none of {len(originals)} names begins with {alone[0][:_GROUP]}"
        )
    return [groups[name[:_GROUP]] for name in copies]


def copy_map(queries: Tensor, database: Tensor, wanted: Sequence[Sequence[int]]) -> float:
    """Features (q, d) and (m, d) of any length -> mean average precision in percent of the 20 nearest."""
    ranking = rank_database(queries, database)[:, :_FOUND].tolist()
    values = [average_precision(row, positives) for row, positives in zip(ranking, wanted, strict=True)]
    return 100.0 * sum(values) / len(values)


def _describe(context: EvalContext, paths: Sequence[Path], what: str) -> Tensor:
    backbone = context.backbone
    side = max(1, (context.settings.size or _SIZE) // backbone.stride) * backbone.stride

    def describe(images: Tensor) -> Tensor:
        if not backbone.is_vit:
            return pool(backbone.features(images), backbone.patch_tokens(images))
        tokens = backbone.last_tokens(images, 1)[0]
        rows = images.shape[-1] // backbone.stride
        return pool(tokens[:, 0], tokens[:, 1:].unflatten(1, (rows, rows)))

    prepare = partial(squeeze, side=side, normalisation=backbone.normalisation)
    return describe_files(context, Files(paths), prepare, describe, _BATCH, f"copydays: {what}")


def _copies(folder: Path) -> list[str]:
    """Folders of copies: "strong", and the other kinds that are there, by number."""
    found = ["strong"]
    for kind in ("jpegqual", "crops"):
        inside = folder / kind
        numbers = [path.name for path in inside.iterdir() if path.name.isdecimal()] if inside.is_dir() else []
        found += [f"{kind}/{number}" for number in sorted(numbers, key=int)]
    return found


def _images(folder: Path) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    found = sorted(path for path in files if path.suffix.lower() in EXTENSIONS)
    if not found:
        raise DataError(f"Copydays: {folder} has no images ({' '.join(EXTENSIONS)})")
    return found
