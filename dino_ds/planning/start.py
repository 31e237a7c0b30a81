"""Chooses the ds config of a start: the named one, the resumed run's, or the planner's; checks that it fits."""

from __future__ import annotations

import bisect
import copy
import functools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dino_ds.config.ds_config import change_ds_config, load_ds_config, resolve_ds_config
from dino_ds.config.ds_schema import ChosenDsConfig, DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Request, TrainOptions
from dino_ds.costs.memory import GIB, Memory, estimate_memory
from dino_ds.costs.step_costs import count_parameters, share, student_facts
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError, NotEstimated
from dino_ds.health.beat import Event
from dino_ds.models.specs.backbones import ALL, describe_trained
from dino_ds.planning import fit

_MICRO, _ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class Start(NamedTuple):
    """A ds JSON, its path, its config resolved for the machine's ranks, and why it was chosen, "" if it was named."""

    ds: Mapping[str, Any]
    path: str
    config: DsConfig
    why: str = ""

    def __str__(self) -> str:
        config = self.config
        batch = f"micro-batch {config.micro_batch} x accumulation {config.accumulation}"
        return f"{self.why}: {config.precision}, ZeRO {config.stage}, {batch}"


def choose_ds_config(
    recipe: Recipe, options: TrainOptions, ds: Mapping[str, Any], ds_path: str, request: Request
) -> ChosenDsConfig:
    """Choose the ds config of a start of `train`, the same on all ranks; all must call it. `ds`, read from `ds_path`,
    is the one that the request names, or that of a machine without GPUs. Raises ConfigError."""
    machine = functools.reduce(fit.Machine.in_common, distributed.gather_objects(fit.find_machine()))
    before, saved = None, Path(options.run_dir) / "ds_config.json"
    continues = options.resume is not False and not request.names_ds_config
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0 and continues and saved.is_file():
            before = load_ds_config(str(saved), {})
    before = distributed.gather_objects(before)[0]

    def choose() -> Start:
        if before is not None:
            return resumed_start(recipe, before, str(saved), request.ds, machine)
        if request.names_ds_config or machine.card_gib is None:
            return named_start(recipe, ds, ds_path, machine)
        return planned_start(recipe, request.ds, machine)

    start = None
    with distributed.raise_on_all_ranks():
        if distributed.rank() == 0:  # it rehearses the step for all ranks, which takes seconds
            start = choose()
            predict(recipe, start.config, machine)
    share()
    start = start or choose()
    memory = predict(recipe, start.config, machine)
    line = Event("memory   not estimated for this backbone", detail=True)
    if memory is not None:
        parts = {name: size / GIB for name, size in memory.parts.items() if size}
        text = f"memory   predicted peak {memory}"
        line = Event(text, detail=True, gib=memory.gib, moment=memory.moment, parts=parts)
    trained = ""
    if recipe.model.train != ALL:
        elements = sum(student_facts(recipe).trained.values())
        trained = describe_trained(recipe.model.trained, elements, count_parameters(recipe))
    reason, gib = str(start) if start.why else "", memory.gib if memory else None
    return ChosenDsConfig(start.config, reason, line, trained, gib, lambda: check_fits(recipe, start, machine))


def named_start(recipe: Recipe, ds: Mapping[str, Any], path: str, machine: fit.Machine) -> Start:
    """The start with the named ds config, or with the default of a machine without GPUs. Raises ConfigError."""
    return Start(ds, path, _resolve(recipe, ds, path, machine))


def planned_start(recipe: Recipe, overrides: Mapping[str, Any], machine: fit.Machine) -> Start:
    """The start with the planner's ds config for these GPUs, and `overrides` of its keys. Raises ConfigError."""
    assert machine.card_gib is not None
    card, path = fit.Gpu("a GPU", machine.card_gib, bf16=machine.bf16), "the planner's choice"
    cluster = fit.Cluster(card, machine.ranks_per_node, -(-machine.ranks // machine.ranks_per_node))
    try:
        _, recommended, *_ = fit.recommend(recipe, cluster, fit.FILLED * machine.card_gib)
    except NotEstimated as error:
        raise ConfigError(f"{error}, so no ds config can be chosen: name one with --ds_config") from None
    ds = _changed(recommended, path, overrides)
    why = f"by the planner for {machine.ranks} x {machine.card_gib:.1f} GiB (--ds_config FILE takes another)"
    return Start(ds, path, _resolve(recipe, ds, path, machine), why)


def resumed_start(
    recipe: Recipe, saved: dict[str, Any], path: str, overrides: Mapping[str, Any], machine: fit.Machine
) -> Start:
    """Return the start of a resumed run with `saved`, its folder's ds JSON. Precision and stage stay, but stage 1
    becomes 2 if it must accumulate now; the micro-batch stays as far as ranks and batch allow. Raises ConfigError."""
    ds = copy.deepcopy(saved)
    images, rest = divmod(recipe.data.global_batch, machine.ranks)
    # Somebody may have written "auto" into the file since.
    known = {key: int(saved[key]) for key in (_MICRO, _ACCUMULATION) if saved.get(key, "auto") != "auto"}
    before, accumulation = known.get(_MICRO, images), known.get(_ACCUMULATION, 1)
    size = next((size for size in range(min(before, images), 0, -1) if images % size == 0), images)
    if not rest:
        ds = fit.with_batch(ds, size, images // size)
        zero = ds.get("zero_optimization", {})
        if saved.get("train_batch_size", 0) != before * accumulation * machine.ranks:
            # Choose anew what depends on the number of ranks: buckets, and whether communication overlaps.
            zero |= {"reduce_bucket_size": "auto"} if zero.get("stage", 0) > 0 else {}
            zero |= {"overlap_comm": True} if zero.get("stage", 0) > 1 else {}
        if accumulation == 1 and images > size and zero.get("stage") == 1:
            zero["stage"] = 2  # stage 1 would accumulate in low precision
    ds = _changed(ds, path, overrides)
    return Start(ds, path, _resolve(recipe, ds, path, machine), f"as this run was started ({path})")


def _changed(ds: Mapping[str, Any], path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The ds JSON with `overrides`; if micro-batch or accumulation is among them, the other follows from it."""
    batches = {_MICRO, _ACCUMULATION} & overrides.keys()
    kept = {**ds, _MICRO: "auto", _ACCUMULATION: "auto"} if batches else dict(ds)
    kept.pop("train_batch_size", None)
    return change_ds_config(kept, path, overrides)


def _resolve(recipe: Recipe, ds: Mapping[str, Any], path: str, machine: fit.Machine) -> DsConfig:
    batch = recipe.data.global_batch
    return resolve_ds_config(dict(ds), path, batch, machine.ranks, machine.fp16, count_parameters(recipe))


def predict(recipe: Recipe, config: DsConfig, machine: fit.Machine) -> Memory | None:
    """Predict a rank's memory as training measures it, without the planner's margins; None if there is no estimate."""
    try:
        return estimate_memory(recipe, config, machine.ranks, machine.card_gib is not None, machine.libraries)
    except NotEstimated:
        return None


def check_fits(recipe: Recipe, start: Start, machine: fit.Machine) -> None:
    """Raises ConfigError, with what does fit, if the predicted memory is more than a GPU or the host has."""
    if problem := _problem(recipe, start.config, machine):
        cure = _fitting_options(recipe, start, machine) or "take a smaller model, smaller crops or fewer prototypes"
        small = f"the recipe for small images, --config {fit.SMALL}"
        raise ConfigError(f"{start.path} {problem}: {cure}, or {small}; --allow_oversize starts it all the same")


def _fitting_options(recipe: Recipe, start: Start, machine: fit.Machine) -> str:
    """Words that advise the planner's ds config instead of a named one, or the largest micro-batch that fits; or ""."""
    if not start.why and machine.card_gib is not None:
        with suppress(ConfigError):
            if not _problem(recipe, planned_start(recipe, {}, machine).config, machine):
                return "leave --ds_config out, for one that the planner chooses"
    images, batch = recipe.data.global_batch // machine.ranks, recipe.data.global_batch
    smaller = [size for size in fit.micro_batches(batch, machine.ranks) if size < start.config.micro_batch]
    recomputed = {"activation_checkpointing.number_checkpoints": "auto"}

    def fits(changes: Mapping[str, Any]) -> bool:
        ds = _changed(start.ds, start.path, changes)
        return not _problem(recipe, _resolve(recipe, ds, start.path, machine), machine)

    for more in ({}, recomputed) if not start.config.checkpoint_blocks else ({},):
        sizes = [*([start.config.micro_batch] if more else []), *smaller]
        choices = [{_MICRO: str(n), _ACCUMULATION: str(images // n), **more} for n in sizes]
        first = bisect.bisect_left(choices, True, key=fits)  # memory falls with the micro-batch
        if first < len(choices):
            return "add " + " ".join(f"--ds.{key} {value}" for key, value in choices[first].items())
    return ""


def _problem(recipe: Recipe, config: DsConfig, machine: fit.Machine) -> str:
    """Which memory is too small, in words that follow the config's name; "" if both are large enough."""
    memory, here = predict(recipe, config, machine), machine.ranks_per_node
    if memory is None:
        return ""
    if machine.card_gib is None:
        host, ranks = memory.gib * here, f" for {here} ranks" if here > 1 else ""
    else:
        gib = fit.with_margins(memory, machine.ranks).gib
        if gib > machine.card_gib:
            return f"needs {gib:.1f} GiB by prediction, and the GPU has {machine.card_gib:.1f}"
        # Loader processes are left out: their number follows from the node's cores.
        left_out = {"loader processes", "loaded batches"}
        left_out |= set() if recipe.save_in_background else {"checkpoint being written"}
        parts = fit.host_bytes(recipe, config, here, machine.ranks).items()
        host, ranks = sum(size for name, size in parts if name not in left_out) / GIB, ""
    if host > machine.host_gib:
        room = f"{machine.host_gib:.1f}{'' if machine.card_gib else ' to take (90 % of what is free)'}"
        return f"needs {host:.1f} GiB of host memory by prediction{ranks}, and there are {room}"
    return ""
