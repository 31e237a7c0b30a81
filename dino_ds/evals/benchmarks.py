"""The papers' benchmarks: retrieval of landmarks, revisited Oxford and Paris (ROxford5k, RParis6k), and video object
segmentation, DAVIS 2017, in which the masks of a clip's first frame are propagated by similarity of patches. Nothing is
trained.

Sources: Radenović et al. 2018 (arXiv 1803.11285), `python/` of filipradenovic/revisitop for the ground truth and its
metrics; facebookresearch/dino `eval_image_retrieval.py` for sizes and features, `eval_video_segmentation.py` (Jabri et
al. 2020, arXiv 2006.14613). Metrics of region (J) and boundary (F): `metrics.py` and `evaluation.py` of
davisvideochallenge/davis2017-evaluation (Perazzi et al. 2016, Pont-Tuset et al. 2017)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import BaseModel
from torch import Tensor
from tqdm import tqdm

from dino_ds.basics.files import read_object, read_text
from dino_ds.data import decode, multicrop
from dino_ds.data.encoded import NamedFiles
from dino_ds.data.images import UnreadableImage
from dino_ds.data.normalization import Normalization
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, DataError, one_line
from dino_ds.evals.context import EvalContext
from dino_ds.evals.features import GaveUp
from dino_ds.weights.load import Backbone

_SETUPS = {
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}  # for each setup: kinds of images that count as positives, and kinds that are skipped


def oxford(context: EvalContext) -> dict[str, float]:
    """Revisited Oxford: landmarks by cosine, mAP of easy, medium and hard"""
    return _evaluate(context, "oxford", "roxford5k", size=224, scales=(1.0,))


def paris(context: EvalContext) -> dict[str, float]:
    """Revisited Paris: landmarks by cosine, mAP of easy, medium and hard"""
    return _evaluate(context, "paris", "rparis6k", size=512, scales=(1.0, 2**-0.5, 0.5))


def _evaluate(context: EvalContext, name: str, dataset: str, size: int, scales: Sequence[float]) -> dict[str, float]:
    file = f"gnd_{dataset}.json"
    layout = f"a folder {dataset} with jpg/NAME.jpg and {file}, made of gnd_{dataset}.pkl as docs/benchmarks.md says"
    with distributed.raise_on_all_ranks():
        folder = _find_benchmark(context.settings.benchmark_root, dataset, (file, "jpg"), layout)
        try:
            truth = _GroundTruth.model_validate(read_object(folder / file))
            named = {i for answer in truth.gnd for i in (*answer.easy, *answer.hard, *answer.junk)}
            if len(truth.gnd) != len(truth.qimlist) or not named <= set(range(len(truth.imlist))):
                raise ValueError("gnd, qimlist and imlist do not fit together")
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / file} is not a ground truth of revisitop: {one_line(error)}") from None
    context.begin()
    side = context.settings.size or size
    transform = partial(_thumbnail, size=side, normalization=context.backbone.normalization)
    files = [NamedFiles([str(folder / f"jpg/{stem}.jpg") for stem in some]) for some in (truth.imlist, truth.qimlist)]
    describe = partial(describe_at_scales, context.backbone, scales)

    def features(images: Any, label: str) -> Tensor:
        rows, _, bad = context.gather(describe, images, range(len(images)), transform, f"{name}: {label}", batch=1)
        if bad:  # results without them would not be comparable
            raise DataError(f"{len(bad)} images can't be read, such as {bad[0]}: download it again")
        return rows

    database = features(files[0], "database")
    queries = features(_CutOut(files[1], [answer.bbx for answer in truth.gnd]), "queries")
    similarity = F.normalize(queries, dim=-1) @ F.normalize(database, dim=-1).T
    ranking = similarity.argsort(dim=1, descending=True, stable=True).tolist()
    return {f"{name}_{setup}_map": landmark_map(ranking, truth.gnd, setup) for setup in _SETUPS}


def _find_benchmark(root: Path | None, name: str, marks: Sequence[str], layout: str) -> Path:
    """The folder `root` or its subfolder `name`, whichever has all `marks`; layout: the benchmark's files in words."""
    if root is None:
        raise ConfigError(f"{name} needs its images: --benchmark_root DIR, wanted is {layout}")
    for folder in (root, root / name):
        if all((folder / mark).exists() for mark in marks):
            return folder
    raise DataError(f"no {name} in {root} or {root / name}: {' or '.join(marks)} is not there; wanted is {layout}")


class QueryAnswers(BaseModel):
    """One query's box in pixels (left, top, right, bottom), and the indices of its images in the database by kind."""

    bbx: tuple[float, float, float, float]
    easy: list[int]
    hard: list[int]
    junk: list[int]


class _GroundTruth(BaseModel):
    """Names of the database's images and of the queries, and the queries' answers; keys are revisitop's."""

    imlist: list[str]
    qimlist: list[str]
    gnd: list[QueryAnswers]


def landmark_map(ranking: Sequence[Sequence[int]], answers: Sequence[QueryAnswers], setup: str) -> float:
    """Mean average precision in percent; ranking: the whole database for each query, most similar first.
    An average precision is the area under the precision-recall curve by the trapezoidal rule, junk skipped; queries
    without positives are left out, NaN if none is left. Equal to `compute_map` of revisitop."""
    precisions = []
    for row, answer in zip(ranking, answers, strict=True):
        positive, junk = ({i for kind in kinds for i in getattr(answer, kind)} for kinds in _SETUPS[setup])
        kept = [image for image in row if image in positive or image not in junk]
        area = 0.0
        for hits, place in enumerate(place for place, image in enumerate(kept) if image in positive):
            area += ((hits / place if place else 1.0) + (hits + 1) / (place + 1)) / 2
        precisions += [area / len(positive)] if positive else []
    return 100.0 * sum(precisions) / len(precisions) if precisions else float("nan")


def describe_at_scales(backbone: Backbone, scales: Sequence[float], images: Tensor) -> Tensor:
    """One image (1, 3, h, w) of any size -> (1, d), the normalized sum of its features at `scales`, each cropped to
    whole patches at the right and bottom, as patch embeddings do; what is smaller than a patch is enlarged to one."""
    total, patch = Tensor([0.0]).to(images.device), backbone.side_multiple
    for scale in scales:
        is_shrunken = scale != 1 and min(images.shape[-2:]) * scale >= 1
        scaled = F.interpolate(images, scale_factor=scale, mode="bilinear") if is_shrunken else images
        height, width = (max(side, patch) for side in scaled.shape[-2:])
        if (height, width) != scaled.shape[-2:]:
            scaled = F.interpolate(scaled, size=(height, width), mode="bilinear")
        total = total + backbone.features(scaled[..., : height // patch * patch, : width // patch * patch])
    return F.normalize(total, dim=-1)


class _CutOut:
    """Images of files, each cropped to its box. Has no `read`, which would return the uncropped file."""

    labels = classes = None

    def __init__(self, files: NamedFiles, boxes: Sequence[tuple[float, float, float, float]]) -> None:
        self._files, self._boxes, self.name = files, boxes, files.name

    def __len__(self) -> int:
        return len(self._files)

    def load(self, index: int) -> Image.Image:
        image: Any = decode.load_image(self._files, index, None)
        return image.crop(self._boxes[index])


def _thumbnail(image: Image.Image, size: int, normalization: Normalization) -> Tensor:
    """Image -> (3, h, w), normalized: shrunken so that its longer side is at most `size` pixels."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    return multicrop.to_tensor(small, normalization)


_CLIPS, _FRAMES, _LABELS = "ImageSets/2017/val.txt", "JPEGImages/480p", "Annotations/480p"
_LAYOUT = f"{_FRAMES}/CLIP/00000.jpg, {_LABELS}/CLIP/00000.png and {_CLIPS} "
_LAYOUT += "(TrainVal 480p of https://davischallenge.org/davis2017/code.html)"
_LAST_FRAMES, _NEIGHBORHOOD, _NEAREST, _TEMPERATURE = 7, 12, 5, 0.1


def davis(context: EvalContext) -> dict[str, float]:
    """DAVIS 2017: masks of a clip's first frame carried on by patches, J and F"""
    with distributed.raise_on_all_ranks():
        folder = _find_benchmark(context.settings.benchmark_root, "DAVIS", (_CLIPS, _FRAMES, _LABELS), _LAYOUT)
        clips = read_text(str(folder / _CLIPS), "a list of clips").split()
        if not clips:
            raise DataError(f"{folder / _CLIPS} names no clips: download it again")
    context.begin()
    judged, gave_up = list[list[float]](), False
    with distributed.raise_on_all_ranks():
        mine = clips[distributed.rank() :: distributed.world_size()]
        for clip in tqdm(mine, "davis: clips", leave=False, disable=distributed.hidden_bar(context.progress)):
            judged += _judge(context, folder, clip)
            if gave_up := context.give_up():
                break
    answers = distributed.gather_objects((judged, gave_up))
    if any(gave_up for _, gave_up in answers):
        raise GaveUp
    rows = sorted(row for judgments, _ in answers for row in judgments)  # sorted: the same on any number of ranks
    means = 100 * np.array(rows).mean(axis=0)
    return {"davis_jf_mean": float(means.mean()), "davis_j_mean": float(means[0]), "davis_f_mean": float(means[1])}


def _judge(context: EvalContext, folder: Path, clip: str) -> list[list[float]]:
    """J and F of each object of a clip; neither its first frame nor its last one counts. Raises DataError."""
    model, paths = context.backbone, sorted((folder / _FRAMES / clip).glob("*.jpg"))
    if len(paths) < 3:
        raise DataError(f"DAVIS: clip {clip} has {len(paths)} frames, 3 are needed: download it again")
    frames = NamedFiles(list(map(str, paths)))
    width, height = _read(frames, 0).size
    wanted = [_read_label_map(folder / _LABELS / clip / f"{path.stem}.png", (width, height)) for path in paths]
    objects = int(wanted[0].max())
    if objects == 0:
        raise DataError(f"DAVIS: the first frame of clip {clip} has no object: download it again")
    sides = frame_sides(width, height, context.settings.size or 480, model.stride)

    def patches(index: int) -> Tensor:
        resized = _read(frames, index).resize(sides[::-1], Image.Resampling.BILINEAR)
        return model.patch_tokens(multicrop.to_tensor(resized, model.normalization)[None].to(context.device))[0].float()

    tokens = patches(0)
    small = Image.fromarray(wanted[0]).resize((tokens.shape[1], tokens.shape[0]), Image.Resampling.NEAREST)
    labels = F.one_hot(torch.from_numpy(np.array(small)).long(), objects + 1).permute(2, 0, 1).float()
    carry = LabelPropagation(tokens, labels.to(context.device))
    predicted = [hard_labels(carry(patches(i)), model.stride, height, width) for i in range(1, len(frames) - 1)]
    pair = [torch.from_numpy(np.stack(masks)).to(context.device) for masks in (predicted, wanted[1:-1])]
    return judge_masks(pair[0], pair[1], objects)


def _read(frames: NamedFiles, index: int) -> Any:
    try:
        return decode.load_image(frames, index, None)
    except UnreadableImage as error:
        raise DataError(f"{error}: download it again") from None


def _read_label_map(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Read uint8 (h, w): palette indices or gray values, 0 for void pixels, 255 in the file."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.mode not in ("P", "L") or image.size != size:
                raise ValueError(f"mode {image.mode} and size {image.size}: wanted is P or L, {size} as its photo")
            mask = np.array(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} is not a PNG of labels: {one_line(error)}") from None
    return np.where(mask == 255, 0, mask).astype(np.uint8)


class LabelPropagation:
    """Propagates soft labels (classes, rows, columns) of a clip's first frame, frame by frame.
    A patch gets the mean label of the 5 most similar patches, weighted by exp(cosine / 0.1), among those at most 12
    rows and columns away in the first frame and the last 7. Patches: (rows, columns, d), of any norm."""

    def __init__(self, patches: Tensor, labels: Tensor) -> None:
        self._first = F.normalize(patches, dim=-1), labels.movedim(0, -1)
        self._last: deque[tuple[Tensor, Tensor]] = deque(maxlen=_LAST_FRAMES)

    def __call__(self, patches: Tensor) -> Tensor:
        """The next frame's patches -> its labels (classes, rows, columns)."""
        targets = F.normalize(patches, dim=-1)
        features, labels = (torch.stack(kind) for kind in zip(self._first, *self._last, strict=True))
        carried = torch.empty_like(labels[0])
        column = torch.arange(carried.shape[1], device=carried.device)
        near_column = (column[:, None] - column).abs() <= _NEIGHBORHOOD
        for top, rows in enumerate(targets):  # row by row, with the rows around each: saves memory
            seen = slice(max(0, top - _NEIGHBORHOOD), top + _NEIGHBORHOOD + 1)
            likeness = torch.einsum("wd,frcd->wfrc", rows, features[:, seen])
            likeness = likeness.masked_fill_(~near_column[:, None, None], -torch.inf).flatten(1)
            value, index = likeness.topk(min(_NEAREST, likeness.shape[1]), dim=1)
            weights = (value / _TEMPERATURE).softmax(dim=1)
            carried[top] = (weights[..., None] * labels[:, seen].flatten(0, 2)[index]).sum(dim=1)
        self._last.append((targets, carried))
        return carried.movedim(-1, 0)


def frame_sides(width: int, height: int, size: int, patch: int) -> tuple[int, int]:
    """(height, width) at which the model sees frames: the shorter side has `size` pixels, the longer one a multiple of
    64; both are rounded to multiples of the patch size."""
    step = max(64 // patch, 1) * patch
    short = max(size // patch, 1) * patch
    long = max(int(size * max(width, height) / min(width, height)) // step * step, short)
    return (long, short) if height > width else (short, long)


def hard_labels(soft: Tensor, patch: int, height: int, width: int) -> np.ndarray:
    """Soft labels of patches (classes, rows, columns) -> each pixel's class, uint8 (height, width).
    As in the reference, each class is stretched to [0, 1] over the frame before the largest wins."""
    fine = F.interpolate(soft[None], scale_factor=patch, mode="bilinear", align_corners=False)[0]
    lowest = fine.amin(dim=(1, 2), keepdim=True)
    span = fine.amax(dim=(1, 2), keepdim=True) - lowest
    stretched = torch.where(span > 0, (fine - lowest) / span.clamp_min(1e-12), fine.sign())
    winner = stretched.argmax(dim=0).to(torch.uint8).cpu().numpy()
    return np.array(Image.fromarray(winner).resize((width, height), Image.Resampling.NEAREST))


def judge_masks(predicted: Tensor, wanted: Tensor, objects: int) -> list[list[float]]:
    """Labels uint8 (frames, h, w), 0 is background -> J, intersection over union, and F of each object, means over
    frames."""
    pairs = [(predicted == number, wanted == number) for number in range(1, objects + 1)]
    return [[float(_share(a & b, a | b).mean()), float(_boundary_similarity(a, b).mean())] for a, b in pairs]


def _boundary_similarity(predicted: Tensor, wanted: Tensor) -> Tensor:
    """F-measure of the boundaries' pixels of masks (n, h, w), FP64 (n,); they match within 0.008 of the diagonal."""
    radius, values = math.ceil(0.008 * math.hypot(*predicted.shape[1:])), []
    for masks in zip(predicted.split(16), wanted.split(16), strict=True):  # dilating them all takes more memory
        edges, wanted_edges = map(_boundaries, masks)
        # Without predicted pixels precision is 1, without wanted ones recall is 1.
        precision = _share(edges & _dilate(wanted_edges, radius), edges)
        recall = _share(wanted_edges & _dilate(edges, radius), wanted_edges)
        values.append(2 * precision * recall / (precision + recall).clamp_min(1e-12))
    return torch.cat(values)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Pixels of the masks `part` (n, h, w) as a share of those of `whole`, FP64 (n,); 1 where `whole` is empty."""
    pixels = whole.sum(dim=(1, 2)).double()
    return torch.where(pixels > 0, part.sum(dim=(1, 2)).double() / pixels.clamp_min(1), 1.0)


def _boundaries(masks: Tensor) -> Tensor:
    """Pixels that differ from their right, lower or lower right neighbor: 1 pixel wide, half a pixel off."""
    padded = F.pad(masks.float(), (0, 1, 0, 1), mode="replicate") > 0
    right, below, both = padded[:, :-1, 1:], padded[:, 1:, :-1], padded[:, 1:, 1:]
    return (masks ^ right) | (masks ^ below) | (masks ^ both)


def _dilate(masks: Tensor, radius: int) -> Tensor:
    """Masks of all pixels within `radius` pixels, Euclidean, of a pixel of the mask."""
    offsets = torch.arange(-radius, radius + 1, device=masks.device)
    disk = (offsets[:, None] ** 2 + offsets[None] ** 2 <= radius**2).float()
    return F.conv2d(masks[:, None].float(), disk[None, None], padding=radius)[:, 0] > 0.5
