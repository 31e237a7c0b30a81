"""One training run as a thing: what it is built of, where it stands, and how that is saved and loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from torch import Tensor

from dino_ds import distributed
from dino_ds.checkpoint.files import write_tensors
from dino_ds.checkpoint.folder import Checkpoints, Choice
from dino_ds.checkpoint.manifest import Manifest, SavedCheckpoint, read_manifest
from dino_ds.checkpoint.saving import SaveCost, Saving
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.flops import tokens_of
from dino_ds.data.base import Source
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.loader import Loader, Position, steps_per_epoch
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.prefetcher import DevicePrefetcher
from dino_ds.data.workers import check_shared_memory
from dino_ds.durable import replace_file, replacing
from dino_ds.engine.device import DTYPES, device, use_deterministic_kernels
from dino_ds.engine.engine import Engine
from dino_ds.engine.placement import Placement
from dino_ds.errors import CheckpointError, StorageError
from dino_ds.evals.album import PeriodicPictures
from dino_ds.evals.watch import EvalRunner
from dino_ds.models.attention import chosen_kernel
from dino_ds.objective.dino import DinoLoss
from dino_ds.teacher import Teacher
from dino_ds.training.build import build_network, build_schedules, build_zeros
from dino_ds.training.other_images import OtherImages, describe_images, same_images
from dino_ds.training.run_folder import RunFolder
from dino_ds.training.step import DinoStep


class Run:
    """Student, teacher and objective (`step`), data (`source`, `crops`, `position`), evaluation (`watch`, `album`).

    Every rank builds one. Raises UserError for data, ds config or checkpoint that can't be used.
    """

    def __init__(self, recipe: Recipe, config: DsConfig, source: Source, folder: RunFolder) -> None:
        self.recipe, self.config, self.source, self.folder = recipe, config, source, folder
        folder.agree()
        with distributed.raise_on_all_ranks():
            self.epoch_steps = steps_per_epoch(len(source), recipe.data.global_batch)
        self.watch = EvalRunner.build(recipe, source, self.epoch_steps)
        keep_every = recipe.keep_every.in_steps(recipe.data.global_batch, self.epoch_steps)
        self.album = PeriodicPictures.build(recipe, source, self.epoch_steps, folder.path / "pictures")
        self._checkpoints = Checkpoints(folder.path, recipe.keep_checkpoints, keep_every)
        self._images = describe_images(source, recipe.data.root)
        images = OtherImages(recipe, self._images, folder.allows_other_images)
        choice = self._choose(images)
        folder.adopt_run_id(choice.saved.manifest if choice.saved else None)
        self.crops = MultiCrop(recipe.crops.groups, recipe.crops.augment)
        # Weights of a checkpoint take the place of others, whose file may be gone.
        begins = recipe if choice.saved is None else change_recipe(recipe, {"model.init_from": "none"})
        self.step = build_step(begins, config, self.epoch_steps)
        self._saving = Saving(self._checkpoints, self.step.flags, recipe.save_in_background, self._write_teacher)
        self.position = Position(0, 0)
        self.skipped_steps = 0
        self.bad_images: set[str] = set()
        self.notes = choice.notes + same_images(source, self._images)
        if self.step.engine.started_from:
            self.notes.append(f"started from {self.step.engine.started_from}")
        if choice.saved is not None:
            self._load(choice.saved)
            self.notes += [*folder.notes_on(choice.saved.manifest), *images.notes(choice.saved.manifest)]

    def _choose(self, images: OtherImages) -> Choice:
        folder = self.folder
        if not folder.resume:
            return Choice(None, [])

        def accept(manifest: Manifest) -> None:
            folder.check_settings(manifest)
            images.check(manifest)

        choice = self._checkpoints.choose(folder.wanted_step, folder.run_id, accept)
        if choice.saved is None and not folder.may_start_anew:
            raise CheckpointError(
                f"no checkpoint in {folder.path} and --resume was given; --resume auto starts from the beginning then"
            )
        return choice

    def open_folder(self, last_step: int) -> None:
        """The run folder is this run's from now on; every rank calls it.

        Raises ConfigError, or StorageError where there is no room for one checkpoint: then nothing is written.
        """
        if self.step.applied_steps < last_step:
            backbone = self.step.teacher.network.backbone
            teacher = sum(4 * p.numel() for p in backbone.parameters())
            self._saving.check_space(self.step.engine.state().tensors, self._whole(), teacher)
        self.folder.write()
        with distributed.raise_on_all_ranks():
            try:
                self.notes += self._checkpoints.tidy(self.step.applied_steps)
            except OSError as error:
                raise StorageError(f"{error.filename}: {error.strerror}: the run can't be gone on with") from None

    def attention_kernels(self) -> str:
        """Which kernel runs for each crop size, such as "sdpa: flash at 197 and 37 tokens"."""
        performance, arch = self.config.performance, self.recipe.model.architecture()
        if performance.attention != "sdpa":
            return performance.attention
        kernels: dict[str, list[str]] = {}
        for tokens in [tokens_of(arch, group.size) for group in self.recipe.crops.groups]:
            kernel = performance.attention_backend
            if kernel == "auto":
                where, dtype = self.step.engine.device, DTYPES[self.config.precision]
                kernel = chosen_kernel(arch.heads, arch.width // arch.heads, tokens, dtype, where)
            kernels.setdefault(kernel, []).append(str(tokens))
        return "sdpa: " + ", ".join(f"{name} at {' and '.join(tokens)} tokens" for name, tokens in kernels.items())

    def build_prefetcher(self) -> DevicePrefetcher:
        """As the function of that name, from `position` on."""
        return build_prefetcher(
            self.recipe, self.source, self.config.micro_batch, self.step.engine.device, self.position
        )

    def advance(self) -> None:
        """One micro-batch of every rank has been used."""
        consumed = self.config.micro_batch * distributed.world_size()
        self.position = self.position.advance(consumed, self.epoch_steps * self.recipe.data.global_batch)

    @property
    def images_drawn(self) -> int:
        """Different images used so far, by all ranks; the few that an epoch leaves out are taken as drawn after it."""
        return len(self.source) if self.position.epoch else self.position.samples

    def steps_between_saves(self) -> int | None:
        """By the recipe; 0: none but the last; None: by what a save costs."""
        every = self.recipe.save_every
        return None if every == "auto" else every.in_steps(self.recipe.data.global_batch, self.epoch_steps)

    def save(self, wait: bool) -> str | None:
        """A checkpoint, and the teacher as one file that timm reads; lines to say. All ranks must call it.

        It is written while training goes on, and counts when `look_at_save` has found it complete; with `wait` it is
        complete on return. Raises StorageError on all ranks where that fails, or three saves in a row have failed.
        """
        step = self.step
        part = step.engine.state()
        state = {
            "position": dataclasses.asdict(self.position),
            "skipped_steps": self.skipped_steps,
            "bad_images": sorted(self.bad_images),
            "knn": self.watch.state_dict() if self.watch else {},
        }
        manifest = {
            **self.folder.description(),
            "step": step.applied_steps,
            "state": state,
            "images": self._images.to_json(),
        }
        return _text(self._saving.save(part.tensors, part.layout, self._whole(), manifest, wait))

    def _whole(self) -> dict[str, Tensor]:
        """What all ranks hold."""
        teacher = {f"teacher.{name}": p.detach() for name, p in self.step.teacher.network.named_parameters()}
        return {**teacher, "center": self.step.objective.center.value}

    def look_at_save(self) -> str | None:
        """After each applied step, on all ranks: commits a save that all have written; lines to say.

        Raises StorageError on all ranks when three saves in a row have failed.
        """
        return _text(self._saving.look())

    def finish_save(self, must: bool = False) -> str | None:
        """Commits a save that is still being written; lines to say. On all ranks, when the run ends on all of them.

        With `must` its failure is a StorageError on all ranks.
        """
        return _text(self._saving.finish(must))

    def save_cost(self) -> SaveCost | None:
        """What the last checkpoint of this process took; None before the first."""
        return self._saving.cost

    def save_figures(self) -> dict[str, float]:
        """The same as metrics."""
        cost = self.save_cost()
        if cost is None:
            return {}
        return {
            "save_seconds": cost.seconds,
            "save_stall_seconds": cost.stall_seconds,
            "checkpoint_gib": cost.bytes / 2**30,
        }

    def _load(self, saved: SavedCheckpoint) -> None:
        whole, state = saved.whole(), saved.manifest.state
        try:
            self.step.engine.load_state(saved)
            self.step.objective.center.load(whole.pop("center"))
            self.step.teacher.load_state_dict({name.removeprefix("teacher."): t for name, t in whole.items()})
            self.position = Position(int(state["position"]["epoch"]), int(state["position"]["samples"]))
            self.skipped_steps = int(state["skipped_steps"])
            self.bad_images = {str(name) for name in state["bad_images"]}
            if self.watch and state["knn"]:
                self.watch.load_state_dict(state["knn"])
        except (LookupError, TypeError, ValueError) as error:  # whole, and yet not what a run has written
            raise CheckpointError(f"{saved.folder} lacks what a run needs: {error!r}") from error
        self.step.restore(saved.manifest.step)

    def _write_teacher(self, folder: Path) -> None:
        """RUN/teacher.safetensors, FP32 with timm's names, from a checkpoint; RUN/teacher.json: how it was made."""
        saved, prefix = SavedCheckpoint(folder, read_manifest(folder)), "teacher.backbone."
        backbone = {name.removeprefix(prefix): t for name, t in saved.whole().items() if name.startswith(prefix)}
        path = self.folder.path / "teacher.safetensors"
        with replacing(path) as temporary:
            write_tensors(temporary, backbone, {"format": "pt"})
        about = self.folder.about_teacher(self.recipe.model.architecture(), saved.manifest.step)
        replace_file(path.with_suffix(".json"), json.dumps(about, indent=1) + "\n")


def _text(lines: list[str]) -> str | None:
    return "\n".join(lines) or None


def build_prefetcher(
    recipe: Recipe, source: Source, micro_batch: int, where: torch.device, start: Position
) -> DevicePrefetcher:
    """This rank's micro-batches on the device `where`, from `start` on; every rank calls it.

    Raises DataError where shared memory is too small for them.
    """
    with distributed.raise_on_all_ranks():
        check_shared_memory(recipe.batch_bytes(micro_batch), recipe.data.workers)
    ranks = {"rank": distributed.rank(), "world_size": distributed.world_size()}
    options = LoaderOptions.of(recipe, micro_batch=micro_batch, device=where, **ranks)
    loader = Loader(source, MultiCrop(recipe.crops.groups, recipe.crops.augment), options, start)
    return DevicePrefetcher(loader, where)


def build_step(recipe: Recipe, config: DsConfig, epoch_steps: int) -> DinoStep:
    """Student, teacher and objective of a recipe, new, on this process group; every rank must call it."""
    optimizer = recipe.optimizer
    if config.performance.deterministic:
        use_deterministic_kernels()
    network = build_network(recipe, config.performance, Placement(config))
    if config.performance.compile != "off":
        # Blocks, so that the engine finds plain modules; before it, so that its hooks stay outside.
        network.backbone.compile_blocks(config.performance.compile)
    engine = Engine(network, config, (optimizer.beta1, optimizer.beta2), optimizer.eps)
    network = build_zeros(recipe, config.performance, device())
    weights = sum(p.numel() for p in network.parameters())
    teacher = Teacher(
        network,
        engine.masters(),
        DTYPES[config.precision],
        keep_copy=config.keeps_teacher_copy(device().type == "cuda", weights),
        compiled=config.performance.compile,
    )
    objective = DinoLoss(
        recipe.head.prototypes, recipe.objective.student_temp, recipe.objective.center_momentum, engine.device
    )
    return DinoStep(engine, teacher, objective, build_schedules(recipe, epoch_steps))
