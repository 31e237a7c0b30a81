"""Chooses the checkpoint that a start loads: of the same run, of the previous stage's run, or none; and gives the
training loop the plain values that it needs of a recipe.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from dino_ds.checkpoint.folder import Checkpoints
from dino_ds.checkpoint.manifest import Manifest, SavedCheckpoint
from dino_ds.config.loading import change_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Origin, Request, no_checkpoint, read_run_id, split_origin
from dino_ds.data.feed import Position
from dino_ds.data.images import Joined, Source
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError, ConfigError, naming
from dino_ds.method.specs.own import heads_of, terms_of
from dino_ds.run.run import LoopOptions
from dino_ds.run.run_folder import OtherImages, RunFolder
from dino_ds.run.saver import Saver
from dino_ds.run.train_options import TrainOptions
from dino_ds.weights.layouts import Weights
from dino_ds.weights.read import teacher_weights
from dino_ds.weights.sidecar import recipe_of


def loop_options(
    recipe: Recipe, source: Source, epoch_steps: int, last_step: int, predicted_gib: float | None
) -> LoopOptions:
    batch, every = recipe.data.global_batch, recipe.save_every
    parts = source.joined if isinstance(source, Joined) else ()
    ends = itertools.accumulate(len(part) for _, part in parts)
    return LoopOptions(
        images=len(source),
        global_batch=batch,
        epoch_steps=epoch_steps,
        last_step=last_step,
        log_every=recipe.log_every,
        save_every=None if every == "auto" else every.in_steps(batch, epoch_steps),
        max_bad_fraction=recipe.data.max_bad_fraction,
        teacher_groups=tuple(group.name for group in recipe.groups if recipe.teacher.taught_by in group.teachers),
        predicted_gib=predicted_gib,
        part_ends=dict(zip((place for place, _ in parts), ends, strict=True)),
        most_drift=recipe.eval.most_drift,
    )


def check_lengths(recipe: Recipe, epoch_steps: int, last_step: int) -> list[str]:
    """Lines for the log about warm-ups that end after the run's length, or after `last_step`, the last step of this
    start; an epoch has `epoch_steps` optimizer steps.

    Raises ConfigError for a backbone that is frozen to the end, or a loss term that never begins.
    """
    batch, trial = recipe.data.global_batch, "(a short trial keeps its schedules with --max_steps)"
    last, length = recipe.length.in_steps(batch, epoch_steps), f"length {recipe.length}"
    never = {"model.freeze_backbone": (recipe.model.freeze_backbone, "the backbone would never learn")}
    never |= {f"{term.name}.start": (term.start, f"{term.title} would never begin") for term in terms_of(recipe)}
    for name, (part, so) in never.items():
        if part.value and (end := part.in_steps(batch, epoch_steps)) >= last:
            raise ConfigError(f"{name} {part} is step {end}, and {length} is {last} steps: {so}; shorten it {trial}")
    late, how = (
        {"optimizer.warmup": (recipe.optimizer.warmup, "the learning rate does not reach its peak")},
        recipe.objective,
    )
    if heads_of(recipe):
        late["objective.freeze_prototypes"] = (how.freeze_prototypes, "the prototypes stay as they were drawn")
    if how.warmup_teacher_temp != how.teacher_temp:
        so = f"objective.teacher_temp {how.teacher_temp:g} is not reached"
        late["objective.teacher_temp_warmup"] = (how.teacher_temp_warmup, so)
    for term in terms_of(recipe):
        if term.weight.length is not None:
            late[f"the ramp of {term.name}'s weight"] = (term.weight.length, f"it does not reach {term.weight.end:g}")
    ends = (
        f"{length} is {last}" if last_step >= last else f"--max_steps ends at {last_step} (--length shortens these too)"
    )
    return [
        f"{name} {part} is {steps} steps, and {ends}: {so}"
        for name, (part, so) in late.items()
        if (steps := part.in_steps(batch, epoch_steps)) > min(last, last_step)
    ]


_CONTINUE = "continue"
_SAYS_HOW = ("stage_start", "model.init_from")
"""Keys for how a run began, which do not change what it learns."""


@dataclass(frozen=True)
class Beginning:
    """The checkpoint that a start loads, if any: of this run, or, for a new stage, of the previous stage's run.

    Attributes:
        resumed: checkpoint of this run.
        previous: checkpoint of the previous stage.
        continues: whether the stage takes over the whole training state, else the teacher's weights.
        images_changed: whether the stage trains on other images than the previous one.
        notes: lines for the log.
    """

    resumed: SavedCheckpoint | None = None
    previous: SavedCheckpoint | None = None
    continues: bool = False
    images_changed: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def weights(self) -> tuple[str, Weights] | None:
        """The name and weights that the network is built with; None unless a stage takes over the weights alone."""
        if self.previous is None or self.continues:
            return None
        return str(self.previous.folder), teacher_weights(self.previous)

    def built(self, recipe: Recipe) -> Recipe:
        """The recipe to build the run with. A resume leaves out model.init_from, whose file may be gone, unless
        objective.preserve_weight needs a teacher from that file."""
        if self.resumed is None or recipe.objective.preserve_weight:
            return recipe
        return change_recipe(recipe, {"model.init_from": "none"} | recipe.outlasting_start)

    def check_ahead(self, last_step: int, run: str, ends: str) -> None:
        """Raises ConfigError where the run is already beyond `last_step`; ends: the option that sets that step."""
        done = self.resumed.manifest.step if self.resumed is not None else 0
        if done > last_step:
            raise ConfigError(
                f"{ends} lies behind: {run} has done {done} steps, and would end at {last_step}; give more, or leave "
                "it out"
            )

    def load(self, saver: Saver) -> list[str]:
        """Load the checkpoint into the parts of the run, once they are built; returns lines for the log."""
        if self.resumed is not None:
            saver.load(self.resumed)
        if self.previous is None:
            return []
        if not self.continues:
            return saver.restart_from(self.previous)
        notes = saver.continue_from(self.previous)
        if self.images_changed:  # a position in the order of other images has no meaning
            saver.state.position = Position(saver.state.position.epoch + 1)
        return notes


def choose_beginning(
    folder: RunFolder,
    checkpoints: Checkpoints,
    images: OtherImages,
    options: TrainOptions,
    request: Request,
) -> Beginning:
    """Choose the checkpoint of a start in `folder`, on every rank. `options` name the run or checkpoint that a stage
    begins with.

    For a new stage, sets the folder's `origin`, and lets its recipe count steps from there. Raises ConfigError or
    CheckpointError where there is no checkpoint to begin with, or its network is not the stage's.
    """
    if folder.resume:

        def accept(manifest: Manifest) -> None:
            folder.check_settings(manifest)
            images.check(manifest)

        choice = checkpoints.choose(folder.wanted_step, folder.run_id, accept)
        if choice.saved is not None:
            return Beginning(choice.saved, notes=choice.notes)
        folder.check_nothing_saved()
        if not folder.may_start_anew:
            raise no_checkpoint(folder.path)
    if folder.recipe.stage_start is None:
        return Beginning()
    if options.from_ is None:
        raise ConfigError(f"{folder.path} is a stage that has saved nothing yet: add --from RUN, as at its start")
    return _of_stage(folder, images, *split_origin(options.from_), request)


def _of_stage(folder: RunFolder, images: OtherImages, run: Path, step: int | None, request: Request) -> Beginning:
    recipe = folder.recipe
    run_name, continues = f"--from {run}", recipe.stage_start == _CONTINUE

    def accept(manifest: Manifest) -> None:
        with naming(run_name):
            source = recipe_of(manifest)
        _check_fits(run_name, recipe, source, continues)

    choice = Checkpoints(run, keep=1).choose(step, distributed.gather_objects(read_run_id(run))[0], accept)
    if choice.saved is None:
        raise CheckpointError(f"{run_name}: it has no checkpoint yet; they are written to {run / 'checkpoints'}")
    saved = choice.saved.manifest
    folder.origin = Origin(str(run), saved.run_id, saved.step, str(recipe.stage_start))
    folder.recipe = request.rebased_to_step(recipe, folder.origin.first_step)
    inherited = "all of its training state" if continues else "its teacher's weights"
    notes = [*choice.notes, f"begins with {run}, step {saved.step}: {inherited}"]
    changed = {key: how for key, how in folder.changed(saved).items() if key not in _SAYS_HOW}
    if changed:
        notes.append(f"settings that differ from those of {run}: {', '.join(changed.values())}")
    changes = images.notes(saved)
    return Beginning(None, choice.saved, continues, bool(changes), [*notes, *changes])


def _check_fits(run: str, ours: Recipe, source: Recipe, continues: bool) -> None:
    """Raises CheckpointError, naming the differences, where a stage can't begin with a run of the recipe `source`."""
    backbones = [recipe.model.spec() for recipe in (source, ours)]
    kinds = [type(spec) for spec in backbones]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{run} is of another backbone: {source.model.backbone} there, {ours.model.backbone} here"
        )
    if differ := _differences(*(vars(spec) for spec in backbones)):
        other = backbones[0].in_chans != backbones[1].in_chans
        advice = "; model.init_from in the place of --from adapts weights to other channels" if other else ""
        raise CheckpointError(f"{run} is of another backbone: {differ}{advice}")
    heads = [heads_of(recipe) for recipe in (source, ours)]
    for name, head in heads[1].items():
        if name not in heads[0]:
            raise CheckpointError(
                f"{run} has no {name}: a stage can't begin with a head that was not trained; see "
                "objective.ibot_weight, objective.ibot_head and objective.dino_weight"
            )
        if differ := _differences(vars(heads[0][name]), vars(head)):
            raise CheckpointError(f"{run} has another {name}: {differ}")
    if continues:
        _check_state_fits(run, ours, source, heads[0].keys() - heads[1].keys())


def _check_state_fits(run: str, ours: Recipe, source: Recipe, left_out: set[str]) -> None:
    """Raises CheckpointError where a stage can't take over the optimizer's moments of a run of the recipe `source`."""
    advice = "take --stage_start restart, which begins with the weights alone"
    if source.optimizer.kind != ours.optimizer.kind:
        kinds = f"optimizer.kind {source.optimizer.kind} there, {ours.optimizer.kind} here"
        raise CheckpointError(f"{run}: {kinds}, which has no use for the other's moments; {advice}")
    parts = [recipe.model.trained for recipe in (source, ours)]
    if parts[0] != parts[1]:
        differ = _differences(vars(parts[0]), vars(parts[1])).replace("kind ", "model.train ")
        raise CheckpointError(f"{run} trained another part: {differ}; {advice}")
    if left_out:
        raise CheckpointError(f"{run} has {', '.join(sorted(left_out))}, which this stage does not train; {advice}")
    if source.hides_patches != ours.hides_patches:
        crops = [recipe.crops for recipe in (source, ours)]
        seen = [section.mask + ("" if section.mask_hides else ", mask_hides false") for section in crops]
        raise CheckpointError(f"{run}: crops.mask {seen[0]} there, {seen[1]} here; {advice}")
    spec, sizes = ours.model.spec(), [recipe.crops.global_size for recipe in (source, ours)]
    if "pos_embed_interpolation" in spec.obeys and sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{run}: crops.global_size {sizes[0]} there, {sizes[1]} here, and its positions are learned ones; set "
            f"crops.resolutions and keep crops.global_size {sizes[0]}, or {advice}"
        )


def _differences(source: dict[str, object], ours: dict[str, object]) -> str:
    """The differences in words, such as "depth 12 there, 2 here"."""
    names = [name for name in source if source[name] != ours.get(name)]
    return ", ".join(f"{name} {source[name]} there, {ours.get(name)} here" for name in names)
