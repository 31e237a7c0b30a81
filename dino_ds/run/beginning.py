"""The beginning of a run: the checkpoint that a start loads, the plain values that the training loop needs of a recipe,
and the log's first and last lines: what is trained, on what, for how long, and what is unusual."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dino_ds.basics.formatting import short
from dino_ds.basics.names import unquoted
from dino_ds.checkpoint.folder import Checkpoints
from dino_ds.checkpoint.manifest import Manifest, SavedCheckpoint
from dino_ds.config import fields, loading
from dino_ds.config.crops import EMA
from dino_ds.config.ds_schema import ChosenDsConfig
from dino_ds.config.model import ModelSection
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Origin, Request, TrainOptions, no_checkpoint, read_run_id, split_origin
from dino_ds.data.feed import Position
from dino_ds.data.images import Joined, Source
from dino_ds.engine import distributed
from dino_ds.errors import CheckpointError, ConfigError, naming, one_line
from dino_ds.health.beat import Event
from dino_ds.method.specs.own import accumulation_notes, heads_of, teachers_of, terms_of
from dino_ds.run.run import LoopOptions, Run, Saver
from dino_ds.run.run_folder import RunFolder
from dino_ds.weights import layouts, read, sidecar


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
    Raises ConfigError for a backbone that is frozen to the end, or a loss term that never begins."""
    batch, trial = recipe.data.global_batch, "(a short trial keeps its schedules with --max_steps)"
    last, length = recipe.length.in_steps(batch, epoch_steps), f"length {recipe.length}"
    never = {"model.freeze_backbone": (recipe.model.freeze_backbone, "the backbone would never learn")}
    never |= {f"{term.name}.start": (term.start, f"{term.title} would never begin") for term in terms_of(recipe)}
    for name, (part, so) in never.items():
        if part.value and (end := part.in_steps(batch, epoch_steps)) >= last:
            raise ConfigError(f"{name} {part} is step {end}, and {length} is {last} steps: {so}; shorten it {trial}")
    how = recipe.objective
    late = {"optimizer.warmup": (recipe.optimizer.warmup, "the learning rate does not reach its peak")}
    if heads_of(recipe):
        late["objective.freeze_prototypes"] = (how.freeze_prototypes, "the prototypes stay as they were drawn")
    if how.warmup_teacher_temp != how.teacher_temp:
        so = f"objective.teacher_temp {how.teacher_temp:g} is not reached"
        late["objective.teacher_temp_warmup"] = (how.teacher_temp_warmup, so)
    for term in terms_of(recipe):
        if term.weight.length is not None:
            late[f"the ramp of {term.name}'s weight"] = (term.weight.length, f"it does not reach {term.weight.end:g}")
    cut = f"--max_steps ends at {last_step} (--length shortens these too)"
    ends = cut if last_step < last else f"{length} is {last}"
    return [
        f"{name} {part} is {steps} steps, and {ends}: {so}"
        for name, (part, so) in late.items()
        if (steps := part.in_steps(batch, epoch_steps)) > min(last, last_step)
    ]


@dataclass(frozen=True)
class Beginning:
    """The checkpoint that a start loads, if any: of this run, or, for a new stage, of the previous stage's run.

    Attributes:
        resumed: checkpoint of this run.
        previous: checkpoint of the previous stage.
        continues: whether the stage takes over the whole training state; if not, the teacher's weights alone.
        images_changed: whether the stage trains on other images than the previous one.
        notes: lines for the log.
    """

    resumed: SavedCheckpoint | None = None
    previous: SavedCheckpoint | None = None
    continues: bool = False
    images_changed: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def weights(self) -> tuple[str, layouts.Weights] | None:
        """The previous stage's checkpoint, and its teacher's weights; None unless the stage takes over these alone."""
        if self.previous is None or self.continues:
            return None
        return str(self.previous.folder), read.teacher_weights(self.previous)

    def built(self, recipe: Recipe) -> Recipe:
        """The recipe to build the run with. A resume leaves out model.init_from, whose file may be gone, unless
        objective.preserve_weight needs a teacher from that file."""
        if self.resumed is None or recipe.objective.preserve_weight:
            return recipe
        return loading.change_recipe(recipe, {"model.init_from": "none"} | recipe.outlasting_start)

    def load(self, saver: Saver) -> list[str]:
        """Load the checkpoint into the parts of the run, once they are built; returns lines for the log.
        A stage that does not continue loads the objective's running statistics alone. Tensors that the checkpoint lacks
        keep their initial values (a line names them), as does a teacher that is yet to be replaced by a copy."""
        if self.resumed is not None:
            saver.restore(self.resumed, self.resumed.whole())
            saver.saved_step = self.resumed.manifest.step
        if self.previous is None:
            return []
        step, whole = saver.step, self.previous.whole()
        initial = step.state() if self.continues else step.objective.state()
        if self.continues:
            replaced, now = step.schedules.replacements.items(), self.previous.manifest.step
            begin = tuple(f"teachers.{name}." for name, replacement in replaced if replacement.start >= now)
            taken = {name: tensor for name, tensor in whole.items() if not name.startswith(begin)}
            saver.restore(self.previous, initial | taken)
            if self.images_changed:  # a position in the order of other images has no meaning
                saver.state.position = Position(saver.state.position.epoch + 1)
        else:
            step.objective.load_state(initial | {name: tensor for name, tensor in whole.items() if name in initial})
        names = sorted({".".join(name.split(".")[:2]) for name in initial.keys() - whole.keys()})
        return [f"it has no {', '.join(names)}: as at the beginning of a run"] if names else []


def choose_beginning(folder: RunFolder, checkpoints: Checkpoints, options: TrainOptions, request: Request) -> Beginning:
    """Choose a start's checkpoint, on every rank. For a new stage, set `folder.origin`, and let the folder's recipe
    count from there. Raises ConfigError or CheckpointError without a checkpoint, or for one of another network."""
    if folder.resume:
        choice = checkpoints.choose(folder.wanted_step, folder.run_id, folder.check)
        if choice.saved is not None:
            return Beginning(choice.saved, notes=choice.notes)
        with distributed.raise_on_all_ranks():
            if (teacher := folder.path / "teacher.safetensors").exists():
                problem = f"{folder.path} has no checkpoint, and had one: {teacher} was written with it"
                anew = "to start from the beginning, name another --run_dir, or move that file away"
                raise CheckpointError(f"{problem}. Bring {folder.path / 'checkpoints'} back; {anew}")
        if not folder.may_start_anew:
            raise no_checkpoint(folder.path)
    if folder.recipe.stage_start is None:
        return Beginning()
    if options.from_ is None:
        raise ConfigError(f"{folder.path} is a stage that has saved nothing yet: add --from RUN, as at its start")
    return _of_stage(folder, *split_origin(options.from_), request)


def _of_stage(folder: RunFolder, run: Path, step: int | None, request: Request) -> Beginning:
    recipe = folder.recipe
    run_name, continues = f"--from {run}", recipe.stage_start == "continue"

    def accept(manifest: Manifest) -> None:
        with naming(run_name):
            source = sidecar.recipe_of(manifest)
        _check_fits(run_name, recipe, source, continues)

    choice = Checkpoints(run, keep=1).choose(step, distributed.gather_objects(read_run_id(run))[0], accept)
    if choice.saved is None:
        raise CheckpointError(f"{run_name}: it has no checkpoint yet; they are written to {run / 'checkpoints'}")
    saved = choice.saved.manifest
    folder.origin = Origin(str(run), saved.run_id, saved.step, str(recipe.stage_start))
    folder.recipe = request.rebased_to_step(recipe, folder.origin.first_step)
    inherited = "all of its training state" if continues else "its teacher's weights"
    notes = [*choice.notes, f"begins with {run}, step {saved.step}: {inherited}"]
    changed = folder.changed(saved)
    if learned := [how for key, how in changed.items() if key not in ("stage_start", "model.init_from")]:
        notes.append(f"settings that differ from those of {run}: {', '.join(learned)}")
    changes = folder.image_notes(saved)
    return Beginning(None, choice.saved, continues, bool(changes), [*notes, *changes])


def _check_fits(run: str, ours: Recipe, source: Recipe, continues: bool) -> None:
    """Raises CheckpointError, naming the differences, where a stage can't begin with a run of the recipe `source`."""
    backbones = [recipe.model.spec() for recipe in (source, ours)]
    other = f"{run} is of another backbone:"
    if len({type(spec) for spec in backbones}) == 2:
        raise CheckpointError(f"{other} {source.model.backbone} there, {ours.model.backbone} here")
    if differ := _differences(*(vars(spec) for spec in backbones)):
        advice = "; model.init_from in the place of --from adapts weights to other channels"
        raise CheckpointError(f"{other} {differ}{advice if backbones[0].in_chans != backbones[1].in_chans else ''}")
    heads = [heads_of(recipe) for recipe in (source, ours)]
    for name, head in heads[1].items():
        if name not in heads[0]:
            problem = f"{run} has no {name}: a stage can't begin with a head that was not trained"
            remedy = "see objective.ibot_weight, objective.ibot_head and objective.dino_weight"
            raise CheckpointError(f"{problem}; {remedy}")
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
        problem = f"{run}: crops.global_size {sizes[0]} there, {sizes[1]} here, and its positions are learned ones"
        raise CheckpointError(f"{problem}; set crops.resolutions and keep crops.global_size {sizes[0]}, or {advice}")


def _differences(source: dict[str, object], ours: dict[str, object]) -> str:
    """The differences in words, such as "depth 12 there, 2 here"."""
    names = [name for name in source if source[name] != ours.get(name)]
    return ", ".join(f"{name} {source[name]} there, {ours.get(name)} here" for name in names)


MOST_KEPT = 0.5  # largest share that the initial weights may still have in a teacher at the end


def announce(run: Run, folder: RunFolder, chosen: ChosenDsConfig, request: Request, notes: Iterable[str]) -> None:
    """Write the first lines of a run's log, those for the screen, then details; `notes` are from building the run."""
    recipe, config, device, data = folder.recipe, folder.config, run.step.engine.device, folder.recipe.data
    steps, batch = run.step.schedules.steps, data.global_batch
    own_steps = run.options.last_step - folder.first_step
    given_batch = config.micro_batch, config.accumulation, distributed.world_size()
    balanced, alone = accumulation_notes(recipe, *given_batch)
    shown = list(_summary(run, folder, chosen, request))
    if folder.resume:
        position, done = run.state.position, run.step.applied_steps
        where = f"at step {done}, epoch {position.epoch}, image {position.samples}"
        shown.append(Event(f"resumed  {where if done else 'from the start: there is no checkpoint yet'}", step=done))
    few = few_images(run.options.images, own_steps * batch, data.advise_command)
    shown += [f"warning  {text}" for text in (*few, *alone, *slow_teachers(recipe, steps))]
    texts = [*notes, *balanced]
    room = max(0, 9 - len(shown))  # notes that the screen shows above the line about the run folder
    hidden = len(texts) - room
    more = "" if hidden <= 0 else f"{hidden} more note{'s' if hidden > 1 else ''} and "
    product = f"{batch} = micro-batch {given_batch[0]} x accumulation {given_batch[1]} x ranks {given_batch[2]}"
    details = [f"batch    global batch {product}; {run.options.epoch_steps} steps an epoch"]
    details += [f"engine   ZeRO {config.stage}, {config.precision}, {device}"]
    details += [f"chosen   {chosen.reason}"] if chosen.reason else []
    run.log.info(
        *shown,
        *(f"note     {text}" for text in texts[:room]),
        f"folder   {run.path}: log.txt there has {more}all details, --verbose shows them here",
        *(Event(f"note     {text}", detail=True) for text in texts[room:]),
        chosen.memory,
        *(Event(line, detail=True) for line in details),
    )


def _summary(run: Run, folder: RunFolder, chosen: ChosenDsConfig, request: Request) -> Iterator[str]:
    """Yield lines that say what is trained, on which images and device, and for how long."""
    recipe, config, options = folder.recipe, folder.config, run.options
    data, ranks, steps = recipe.data, distributed.world_size(), run.step.schedules.steps
    yield Event(f"images   {options.images:,} in {data.place}", images=options.images, place=data.place)
    teacher = run.step.teachers.exported.backbone
    spec, weights = recipe.model.spec(), sum(tensor.numel() for tensor in teacher.parameters())
    size = f"{weights / 1e6:,.1f} million" if weights >= 1e6 else f"{weights:,}"
    network = f"{recipe.model.backbone} ({spec.sizes}; {size} weights)"
    loss = " + ".join(term.title.removeprefix("Loss of ") for term in terms_of(recipe))
    crops = []  # for each resolution, such as "2 global crops of 224 px, 8 local of 96"
    for groups in map(recipe.groups_of, recipe.resolutions):
        first_group, *others = [f"{group.count} {group.name}{{}} of {group.size}{{}}" for group in groups]
        crops.append(", ".join([first_group.format(" crops", " px"), *(text.format("", "") for text in others)]))
    yield f"trains   {network} on {'; or '.join(crops)}; loss: {loss}"
    if chosen.trained:
        yield f"trained  {chosen.trained}"
    on_gpu = run.step.engine.device.type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    each = " for each" if ranks > 1 else ""
    gib = "" if chosen.predicted_gib is None else f"; {chosen.predicted_gib:.1f} GiB of memory predicted{each}"
    yield f"device   {where}, {config.precision}, {ranks} process{'es' if ranks > 1 else ''}{gib}"
    total = f" of the schedules' {steps:,}" if options.last_step < steps else ""
    images = (options.last_step - folder.first_step) * data.global_batch
    since = f" from step {folder.first_step:,}" if folder.first_step else ""
    length = f"length   {options.last_step:,} steps{total}, {data.global_batch:,} images each: {images:,} images{since}"
    length += f", each {short(images / options.images)} times"
    yield Event(length, steps=steps, last_step=options.last_step)
    shown_above = ("data.root", "data.source")
    overrides = [f"{key} {unquoted(value)}" for key, value in request.recipe.items() if key not in shown_above]
    name = folder.config_name or (f"that of {folder.origin.run}" if folder.origin else "the defaults")
    as_it_is = " as it is"
    if folder.resume and request.config is None:
        name = folder.config_name or "this run's own"
        as_it_is = f", as {folder.path / 'config.yaml'} has it"
    changed = f"; set otherwise here: {one_line(', '.join(overrides), 160)}" if overrides else as_it_is
    yield f"recipe   {name}{changed}"


def few_images(images: int, shown: int, advise: str = "dino-ds advise") -> list[str]:
    """Warnings about few `images`, and many passes over them. shown: images of all steps; advise: command to name."""
    most = fields.MOST_PASSES * images
    few = f"{images} images are few (LightlyTrain recommends several thousand): what else to do: {advise}"
    often = f"each of {images:,} images is shown {shown // images:,} times; LightlyTrain advises "
    often += f'{fields.MOST_PASSES:,} at most: --length "{most} images"'
    return [few] * (images < fields.FEW_IMAGES) + [often] * (shown >= most + images)


def slow_teachers(recipe: Recipe, steps: int) -> list[str]:
    """Warnings about EMA teachers that after `steps` steps still consist mostly of their random initial weights."""
    warnings = []
    drawn = recipe.stage_start is None and recipe.model.init_from is None
    for teacher in [teacher for teacher in teachers_of(recipe) if teacher.follows and drawn]:
        rate = sum(1 - teacher.momentum_at(steps * part // 100, steps) for part in range(100)) / 100
        if (kept := math.exp(-rate * steps)) > MOST_KEPT:
            key = "teacher.momentum" if teacher.name == EMA else f"teacher.others: {teacher.name} momentum"
            began = f"after all {steps} steps the teacher would still be {kept:.0%} what it began as"
            warnings.append(f"{began}: lower {key} (here {max(0.0, 1 - 10 / steps):.4g} or less) or train longer")
    return warnings


def closing_lines(run: Run, model: ModelSection) -> list[str]:
    """Return the last lines of the log of a run that has reached its last step."""
    path, steps = run.path, run.step.schedules.steps
    knows = model.spec().timm_model(model.backbone) is not None
    named = f", backbone={model.backbone!r}" if ":" in model.backbone else ""
    how = f"{path / 'teacher.json'} says how timm loads it" if knows else f"dino_ds.load({str(path)!r}{named}) loads it"
    of, cut = f" of {steps}" if run.step.applied_steps < steps else "", run.options.last_step < steps  # --max_steps
    evaluations, folders = run.evaluations, sorted(path.glob("pictures/step_*"), reverse=True)
    kinds = ("map", "neighbors", "pca", "attention")  # the most telling first
    pictures = (folder / f"{kind}.png" for folder in folders for kind in kinds)
    picture = next((file for file in pictures if file.is_file()), None)
    return [
        f"done     step {run.step.applied_steps}{of}; the run is in {path}",
        *(["ended    " + evaluations.finished()] if evaluations and evaluations.finished() else []),
        f"teacher  {path / 'teacher.safetensors'}; {how}",
        *(evaluations.ending(path, cut) if evaluations else []),
        *([f"picture  {picture}"] if picture else []),
        f"report   dino-ds report {shlex.quote(str(path))} (curves, evaluations and pictures: {path / 'report.html'})",
    ]
