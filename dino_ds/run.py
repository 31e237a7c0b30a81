"""One training run as a thing: what it is built of, where it stands, and how that is saved and loaded."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path
from typing import Any

import torch

from dino_ds import distributed
from dino_ds.build import build_network, build_schedules, build_zeros
from dino_ds.checkpoint import Checkpoints, save_teacher
from dino_ds.config import Recipe
from dino_ds.costs.flops import tokens_of
from dino_ds.data.batches import batch_bytes
from dino_ds.data.feed import Feed
from dino_ds.data.loader import Position, build_loader, steps_per_epoch
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.sources import Source
from dino_ds.data.workers import check_shared_memory
from dino_ds.ds_config import DsConfig
from dino_ds.engine import DTYPES, Engine, device
from dino_ds.engine_partition import Placement
from dino_ds.errors import DataError
from dino_ds.evals.features import spread_indices
from dino_ds.evals.watch import KnnWatch
from dino_ds.models.attention import chosen_kernel
from dino_ds.objective.dino import DinoLoss
from dino_ds.run_folder import RunFolder
from dino_ds.step import DinoStep
from dino_ds.teacher import Teacher


class Run:
    """Student, teacher and objective (`step`), data (`source`, `crops`, `position`) and evaluation (`watch`).

    Every rank builds one. Raises UserError for data, ds config or checkpoint that can't be used.
    """

    def __init__(self, recipe: Recipe, config: DsConfig, source: Source, folder: RunFolder) -> None:
        self.recipe, self.config, self.source, self.folder = recipe, config, source, folder
        self._checkpoints = Checkpoints(folder.path, recipe.keep_checkpoints)
        with distributed.together():
            self.epoch_steps = steps_per_epoch(len(source), recipe.data.global_batch)
            self.watch = KnnWatch.build(recipe, source, self.epoch_steps)
            found = self._checkpoints.find_latest() if folder.resume else None
            state = None if found is None else self._checkpoints.read_state(found)
            if state is not None:
                folder.check_same(state)
        _check_same_images(source)
        self.crops = MultiCrop(**recipe.crops.model_dump())
        self.step = build_step(recipe, config, self.epoch_steps)
        self.position = Position(0, 0)
        self.skipped_steps = 0
        self.bad_images: set[str] = set()
        if found is not None and state is not None:
            self._load(found, state)

    def attention_kernels(self) -> str:
        """Which kernel runs for each crop size, such as "sdpa: flash at 197 and 37 tokens"."""
        levers, arch, crops = self.config.levers, self.recipe.model.architecture(), self.recipe.crops
        if levers.attention != "sdpa":
            return levers.attention
        sizes = [crops.global_size, *([crops.local_size] if crops.num_local else [])]
        kernels: dict[str, list[str]] = {}
        for tokens in [tokens_of(arch, size) for size in sizes]:
            kernel = levers.attention_backend
            if kernel == "auto":
                where, dtype = self.step.engine.device, DTYPES[self.config.precision]
                kernel = chosen_kernel(arch.heads, arch.width // arch.heads, tokens, dtype, where)
            kernels.setdefault(kernel, []).append(str(tokens))
        return "sdpa: " + ", ".join(f"{name} at {' and '.join(tokens)} tokens" for name, tokens in kernels.items())

    def build_feed(self) -> Feed:
        """As the function of that name, from `position` on."""
        return build_feed(self.recipe, self.source, self.config.micro_batch, self.step.engine.device, self.position)

    def advance(self) -> None:
        """One micro-batch of every rank has been used."""
        consumed = self.config.micro_batch * distributed.world_size()
        self.position = self.position.advance(consumed, self.epoch_steps * self.recipe.data.global_batch)

    @property
    def images_drawn(self) -> int:
        """Different images used so far, by all ranks; the few that an epoch leaves out are taken as drawn after it."""
        return len(self.source) if self.position.epoch else self.position.samples

    def save(self) -> None:
        """A checkpoint, and the teacher as one file that timm reads. All ranks must call it."""
        step = self.step
        teacher = step.teacher.state_dict() if distributed.rank() == 0 else {}
        whole = {f"teacher.{name}": tensor for name, tensor in teacher.items()}
        whole["center"] = step.objective.center.value.cpu()
        state = {
            "step": step.applied_steps,
            "position": dataclasses.asdict(self.position),
            "skipped_steps": self.skipped_steps,
            "bad_images": sorted(self.bad_images),
            "knn": self.watch.state_dict() if self.watch else {},
            **self.folder.description(),
        }
        self._checkpoints.save(step.engine, whole, state)
        prefix = "backbone."
        backbone = {name.removeprefix(prefix): t for name, t in teacher.items() if name.startswith(prefix)}
        about = self.folder.about_teacher(self.recipe.model.architecture(), step.applied_steps)
        save_teacher(self.folder.path, backbone, about)

    def _load(self, found: Path, state: dict[str, Any]) -> None:
        whole = self._checkpoints.load(found, self.step.engine)
        self.step.objective.center.load(whole.pop("center"))
        self.step.teacher.load_state_dict({name.removeprefix("teacher."): t for name, t in whole.items()})
        self.position = Position(**state["position"])
        self.skipped_steps = state["skipped_steps"]
        self.bad_images = set(state["bad_images"])
        if self.watch and state["knn"]:
            self.watch.load_state_dict(state["knn"])
        self.step.restore(state["step"])


def build_feed(recipe: Recipe, source: Source, micro_batch: int, where: torch.device, start: Position) -> Feed:
    """This rank's micro-batches on the device `where`, from `start` on; every rank calls it.

    Raises DataError where shared memory is too small for them.
    """
    data, channels, crops = recipe.data, recipe.model.in_chans, MultiCrop(**recipe.crops.model_dump())
    with distributed.together():
        check_shared_memory(batch_bytes(crops, micro_batch, channels, data.augment), data.workers)
    loader = build_loader(
        source,
        crops,
        recipe.seed,
        data.global_batch,
        micro_batch,
        distributed.rank(),
        distributed.world_size(),
        data.workers,
        start,
        augment=data.augment,
        max_pixels=data.max_pixels,
        channels=channels,
        device=where,
    )
    return Feed(loader, where)


def build_step(recipe: Recipe, config: DsConfig, epoch_steps: int) -> DinoStep:
    """Student, teacher and objective of a recipe, new, on this process group; every rank must call it."""
    optimizer = recipe.optimizer
    network = build_network(recipe, config.levers, Placement(config))
    if config.levers.compile:
        # Blocks, so that the engine finds plain modules; before it, so that its hooks stay outside.
        network.backbone.compile_blocks()
    engine = Engine(network, config, (optimizer.beta1, optimizer.beta2), optimizer.eps)
    teacher = Teacher(
        build_zeros(recipe, config.levers, device()),
        engine.masters(),
        DTYPES[config.precision],
        keep_copy=config.levers.teacher_copy,
        compiled=config.levers.compile,
    )
    objective = DinoLoss(
        recipe.head.prototypes, recipe.objective.student_temp, recipe.objective.center_momentum, engine.device
    )
    return DinoStep(engine, teacher, objective, build_schedules(recipe, epoch_steps))


def _check_same_images(source: Source) -> None:
    """Ranks that count other images would train apart and wait for each other for ever.

    Raises DataError on all ranks. Looks at the number of images and at some of their names.
    """
    names = "".join(Path(source.name(i)).name for i in spread_indices(len(source), 1000))
    found = distributed.gather_objects((len(source), zlib.crc32(names.encode())))
    for other, images in enumerate(found):
        if images != found[0]:
            raise DataError(
                f"rank 0 finds {found[0][0]} images, rank {other} {images[0]}, not the same ones: "
                "data.root must hold the same files on all machines"
            )
