"""The fast paths of a GPU and their plain forms, which compute the same up to rounding. A GPU, driver or version of
torch may compute a fast path wrongly, or not at all. So the first start with new ones compares the fast paths that the
run would use with their plain forms, and leaves out those that fail."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dino_ds.basics.files import cache_folder, hash_code
from dino_ds.basics.ranges import TAKEN
from dino_ds.basics.seeds import sample_keys
from dino_ds.config.crops import student_masks
from dino_ds.config.ds_schema import DsConfig, PerformanceOptions
from dino_ds.config.recipe import Recipe
from dino_ds.data import feed, multicrop, photometric
from dino_ds.engine import distributed, process
from dino_ds.errors import one_line
from dino_ds.method.dino import sums_of_rows
from dino_ds.models.fused import fuse_as_in_training
from dino_ds.models.network import Network
from dino_ds.models.prototypes import Compared, Comparison, Logits


@dataclass(frozen=True)
class Case:
    """A run whose fast paths are compared; build: makes its student, on the CPU."""

    recipe: Recipe
    config: DsConfig
    device: torch.device
    build: Callable[[Recipe, PerformanceOptions], Network]

    def proof(self, name: str) -> Path:
        """The file in the user's cache that exists once `name` has passed on this GPU, for such a run and this code."""
        model, driver = self.recipe.model, Path("/proc/driver/nvidia/version")
        card = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        about = [card, driver.read_text() if driver.exists() else "", torch.__version__, hash_code(), name]
        about += [self.config.precision, model.backbone, str(self.recipe.objective)] if name != EVERY else []
        return cache_folder() / "fast_paths" / hashlib.sha256("\n".join(about).encode()).hexdigest()[:32]


class FastPath(NamedTuple):
    """where: the fast code and its file, in words; plain: the code in its place; tolerance: the largest relative
    difference of their results, which `compare` returns."""

    name: str
    where: str
    plain: str
    tolerance: float
    is_used: Callable[[Case], bool]
    compare: Callable[[Case, str], float]

    def problem(self, case: Case) -> str:
        """Why the fast path can't be taken, or ""."""
        try:
            difference = self.compare(case, self.name)
        except Exception as error:  # whatever a machine lacks, and whatever a compiler raises
            return one_line(error)
        return "" if difference <= self.tolerance else f"results differ by {difference:.1e}"


EVERY = "every fast path"


def settle(case: Case) -> DsConfig:
    """Decide which fast paths this process takes. Returns the config with the others off, and a note on each of those
    that the run would use. Every rank must call it."""
    problems = dict[str, str]()
    if not case.config.performance.fast_paths:
        problems = {path.name: "dino_ds.fast_paths is false" for path in FAST_PATHS}
    elif case.device.type == "cuda":
        problems = dict(pair for of_rank in distributed.gather_objects(_problems(case)) for pair in of_rank.items())
    performance = _take(case, {path.name for path in FAST_PATHS} - problems.keys())
    used = [path for path in FAST_PATHS if path.name in problems and path.is_used(case)]
    notes = [f"slower: {path.plain} in place of {path.where}: {problems[path.name]}" for path in used]
    return replace(case.config, performance=performance, notes=notes)


def _problems(case: Case) -> dict[str, str]:
    proven = [path.name for path in FAST_PATHS if case.proof(EVERY).exists() or case.proof(path.name).exists()]
    unproven = [path for path in FAST_PATHS if path.is_used(case) and path.name not in proven]
    problems = {path.name: path.problem(case) for path in unproven}
    process.release_memory()
    for path in (path for path in unproven if not problems[path.name]):
        with suppress(OSError):  # if the cache can't be written, only time is lost
            case.proof(path.name).parent.mkdir(parents=True, exist_ok=True)
            case.proof(path.name).touch()
    return {name: why for name, why in problems.items() if why}


def _take(case: Case, names: Collection[str]) -> PerformanceOptions:
    TAKEN.clear()
    TAKEN.update(names)
    asked = case.config.performance
    attention, mode = asked.attention if "varlen" in names else "sdpa", asked.compile if "compile" in names else "off"
    return replace(asked, attention=attention, compile=mode)


def synthetic_inputs(recipe: Recipe, images: int, device: torch.device) -> feed.Batch:
    """A micro-batch of normal noise, different on each rank, with masks drawn as the recipe says."""
    first = distributed.rank() * images
    keys = sample_keys(recipe.seed, 0, torch.arange(first, first + images, device=device))
    generator = torch.Generator(device).manual_seed(recipe.seed * 1000 + distributed.rank())
    shape, normal = (images, recipe.model.in_chans), functools.partial(torch.randn, device=device, generator=generator)
    crops = {group.name: [*normal(group.count, *shape, group.size, group.size)] for group in recipe.groups}
    return feed.Batch(crops, keys, multicrop.synthetic_masks(recipe, images, device))


def _results(case: Case, taken: Collection[str]) -> list[Tensor]:
    """With `taken` fast paths: losses, a teacher's rows, Sinkhorn-Knopp sums, and gradients of heads and two blocks."""
    performance, device, images = _take(case, taken), case.device, case.config.micro_batch
    dtype = process.DTYPES[case.config.precision]
    two_blocks = case.recipe.model.model_copy(update={"depth": 2, "train": "all", "init_from": None})
    recipe = case.recipe.model_copy(update={"model": two_blocks})
    network = case.build(recipe, performance).to(device).train()
    fuse_as_in_training(network)
    if performance.compile != "off":
        network.backbone.compile_segments(performance.compile)
    inputs = synthetic_inputs(recipe, images, device)
    masks = student_masks(recipe.groups, inputs.masks)
    crops = {group.name: inputs.crops[group.name] for group in recipe.groups if group.student}
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        seen = {name: output for name, output in network(crops, None, masks).items() if isinstance(output, Logits)}
        sums = [sums_of_rows(logits, 0.1) for logits in seen.values()]
    comparisons = {}
    for name, logits in seen.items():
        # Each crop is compared with its image's other crops among the first two; a row of patches with itself.
        pairs = len(logits.rows) % images == 0
        like = logits._replace(rows=logits.rows[: 2 * images] if pairs else logits.rows, weight=logits.weight.clone())
        comparisons[name] = Comparison(like, torch.zeros_like(logits.scale), 0.04, 0.1, 1 + pairs, exclude_own=pairs)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    outputs = network(crops, inputs.drop_keys, masks, comparisons, 0).values()
    losses = torch.stack([o.loss if isinstance(o, Compared) else o.float().square().mean() for o in outputs])
    losses.sum().backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    return [losses.detach(), *(logits.rows for logits in seen.values()), *sums, *gradients]


def _compare_results(case: Case, name: str) -> float:
    plain, fast = ([tensor.float() for tensor in _results(case, taken)] for taken in ([], [name]))
    # Some gradients are zero but for roundings: their errors are relative to a hundredth of the norm of all.
    floor = 0.01 * torch.stack([tensor.norm() for tensor in plain]).norm()
    errors = [(a - b).norm() / b.norm().maximum(floor) for a, b in zip(fast, plain, strict=True)]
    return float(torch.stack(errors).max())


def _compare_augmentation(case: Case, _: str) -> float:
    from dino_ds.data.photometric_triton import augment

    channels, dtype = case.recipe.model.in_chans, torch.float32 if case.recipe.data.known_range else torch.uint8
    shapes = {(group.size, group.size, channels) for group in case.recipe.groups}
    return max(photometric.kernel_difference(augment, case.device, dtype, shape) for shape in shapes)


_LOW = 0.1  # in bf16, fp16 and TF32 the gradients of two plain forms differ by hundredths
FAST_PATHS = (
    FastPath("augmentation", "Triton's augmentation (data/photometric_triton.py)", "torch's operators", 1e-4,
             lambda case: case.recipe.data.augment == "device", _compare_augmentation),
    FastPath("fused", "fused functions (models/fused.py)", "torch's operators", _LOW,
             lambda case: not case.config.performance.deterministic, _compare_results),
    FastPath("tf32", "TF32 in products of heads (models/prototypes.py)", "FP32", _LOW,
             lambda case: case.config.precision != "fp32", _compare_results),
    FastPath("varlen", "attention in one kernel (models/attention.py)", "a kernel for each size", _LOW,
             lambda case: case.config.performance.attention == "varlen", _compare_results),
    FastPath("compile", "compiled blocks and CUDA graphs (models/base.py)", "plain blocks", _LOW,
             lambda case: case.config.performance.compile != "off", _compare_results),
)  # fmt: skip
