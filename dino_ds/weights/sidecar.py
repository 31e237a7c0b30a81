"""The JSON beside a file of weights, its sidecar: writes and verifies it, and reads what it says about training images.
Checkpoints in any folder are opened here too, verified."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dino_ds.basics.files import FORMAT, check_format, discard, is_gone, read_object, replace_file, replacing
from dino_ds.basics.formatting import range_text
from dino_ds.basics.names import sidecar_of
from dino_ds.checkpoint import manifest as manifests
from dino_ds.checkpoint.folder import find_damage
from dino_ds.checkpoint.manifest import FileRecord, Manifest, SavedCheckpoint, checksum, content_sum
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import ENVIRONMENT, read_run_id
from dino_ds.data.images import ValueRange
from dino_ds.data.normalization import USUAL_CHANNELS, Normalization
from dino_ds.errors import CheckpointError, one_line

_MOST = 1e3  # largest mean and deviation, where black is 0 and white 1; the least deviation is its inverse square
PROCESSOR = "preprocessor_config.json"  # the file of a Hugging Face folder that says how images are prepared
_FILE, _SUM, _BEFORE = "weights_file", "crc32", "before"
"""Keys of a sidecar: length and CRC32 of its file of weights; checksum of the other keys; description of the file that
is being replaced."""
Facts = dict[str, Any]
_known_sums: dict[tuple[object, ...], FileRecord] = {}


def write_with_sidecar(weights: Path, write: Callable[[Path], FileRecord | None], facts: Facts) -> None:
    """Replace a file of weights by the one that `write` makes at a path, and its sidecar by `facts`. Raises OSError.
    `write` returns length and CRC32 of what it has written if it knows them."""
    sidecar, before = sidecar_of(weights), _description_of(weights)
    try:
        with replacing(weights) as temporary:
            record = write(temporary) or checksum(temporary)
            now = {**facts, "format": FORMAT, _FILE: vars(record)}
            replace_file(sidecar, _sealed(now | ({_BEFORE: before} if before else {})))
    except BaseException:
        if is_gone(weights):
            discard(sidecar)  # it describes nothing
        raise
    replace_file(sidecar, _sealed(now))


def read_sidecar(weights: Path) -> Facts:
    """The facts in the sidecar of a file of weights, {} without a sidecar. Reads the whole file to verify that the
    sidecar describes it. Raises CheckpointError where one of the two is damaged or of another run."""
    sidecar = sidecar_of(weights)
    facts = read_facts(sidecar)
    while _FILE in facts:
        try:
            record = checksum_once(weights)
        except OSError as error:
            raise CheckpointError(f"{weights} can't be read: {error.strerror}") from None
        if (fitting := _fitting(facts, record)) is not None:
            return fitting
        facts, before = read_facts(sidecar), facts
        if facts == before:  # a running process has not replaced it meanwhile
            raise CheckpointError(
                f"{weights} is damaged or of another run ({_shown(record)}, and {sidecar.name} says "
                f"{_shown(facts[_FILE])}): bring the right one back; if it was changed on purpose, remove {_FILE!r} "
                f"and {_SUM!r} there"
            )
    return _plain(facts)


def read_facts(sidecar: Path) -> Facts:
    """The content of a sidecar as it is, {} if there is none. Raises CheckpointError where its own checksum differs."""
    facts = read_json(sidecar)
    if _FILE in facts:
        check_format(facts.get("format"), sidecar, "write the weights again with this dino_ds")
    rest = {key: value for key, value in facts.items() if key != _SUM}
    if _FILE in facts and facts.get(_SUM, content_sum(rest)) != content_sum(rest):
        why = f"{sidecar} is damaged or was edited (its own checksum differs)"
        raise CheckpointError(f"{why}: bring it back; if the edit is meant, remove its {_SUM!r}")
    return facts


def read_json(path: Path) -> Facts:
    """The object in a JSON file, {} where there is no such file. Raises CheckpointError for any other content."""
    if not os.path.lexists(path):
        return {}
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read ({one_line(error, 80)}): bring it back, or remove it") from None


def _fitting(facts: Facts, record: FileRecord) -> Facts | None:
    """The one of a sidecar's descriptions that fits a file's `record`, without the keys that verify it, or None."""
    for description in (facts, facts.get(_BEFORE)):
        if isinstance(description, dict) and description.get(_FILE) == vars(record):
            return _plain(description)
    return None


def _plain(facts: Facts) -> Facts:
    return {key: value for key, value in facts.items() if key not in ("format", _FILE, _SUM, _BEFORE)}


def _description_of(weights: Path) -> Facts | None:
    """Description of the file of weights that is about to be replaced; None if there is no such file or description."""
    try:
        facts = read_facts(sidecar_of(weights))
        if _FILE not in facts or not weights.is_file():
            return None
        if _BEFORE not in facts:
            return {key: value for key, value in facts.items() if key != _SUM}
        record = checksum(weights)
    except (CheckpointError, OSError):
        return None
    fitting = _fitting(facts, record)
    return None if fitting is None else {**fitting, _FILE: vars(record)}


def _sealed(facts: Facts) -> str:
    plain = json.loads(json.dumps(facts))  # tuples are lists in JSON
    return json.dumps({**plain, _SUM: content_sum(plain)}, indent=1) + "\n"


def _shown(record: object) -> str:
    """Human-readable length and CRC32 of a file; `record` is a FileRecord or what a sidecar has in its place."""
    if isinstance(record, FileRecord):
        return f"{record.bytes} bytes, crc {record.crc32:08x}"
    try:
        return _shown(FileRecord(**record))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return one_line(record, 40)


def about_teacher(
    recipe: Recipe, distilled: Mapping[str, Any] | None, step: int, versions: Mapping[str, str]
) -> dict[str, Any]:
    """Content of teacher.json: how the teacher was made, `distilled` from what, and how timm builds its model."""
    arch, known, normalization = recipe.model.spec(), recipe.data.known_range, Normalization.of(recipe)
    backbone, size = recipe.model.backbone, recipe.crops.global_size
    built: dict[str, Any] = {} if arch.told_by_tensors else {"backbone": backbone, "image_size": size}
    if (timm := arch.timm_model(backbone, size)) is None:
        built = {"image_size": size, **built}
    else:
        name, arguments = timm[0], timm[1] | {"num_classes": 0}
        written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        load = f"model = timm.create_model({name!r}, {written}); "
        load += "model.load_state_dict(safetensors.torch.load_file('teacher.safetensors'))"
        built |= {"load": load, "timm_name": name, "timm_arguments": arguments}
    return {
        **({"value_range": list(known)} if known else {}),
        "mean": list(normalization.mean),
        "std": list(normalization.std),
        **built,
        "pos_embed_interpolation": recipe.model.pos_embed_interpolation,
        **({"distilled_from": dict(distilled)} if distilled else {}),
        "step": step,
        "images": step * recipe.data.global_batch,
        "architecture": dict(vars(arch)),
        "versions": dict(versions),
    }


def recipe_of(saved: Manifest) -> Recipe:
    try:
        return Recipe.model_validate(saved.recipe)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"its recipe can't be used ({where}: {first['msg']})") from None


def open_checkpoint(folder: Path, only: str = "") -> SavedCheckpoint:
    """Open the checkpoint in any `folder`. This process alone verifies that every file exists with the right length,
    and every byte of the files whose names begin with `only`: no others may be read then. A checkpoint in the folder of
    a run must belong to that run. Raises CheckpointError."""
    run = folder.absolute().parent.parent
    try:
        manifest = manifests.read_manifest(folder)
        if folder.absolute().parent.name == "checkpoints" and read_run_id(run) not in (None, manifest.run_id):
            raise CheckpointError(f"checkpoint {folder} is of another run than {run / ENVIRONMENT} says")
        manifests.check_present(folder, manifest)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} can't be read ({error.strerror})") from None
    names = [name for name in sorted(manifest.files) if name.startswith(only)]
    if problem := find_damage(folder, manifest, names, checksum_once):
        raise CheckpointError(problem)
    return SavedCheckpoint(folder, manifest)


def checksum_once(path: Path, progress: Callable[[int], object] = lambda _bytes: None) -> FileRecord:
    """Length and CRC32 of a file, as by `checksum`, but an unchanged file is not read again. Raises OSError."""
    at = path.stat()
    key = (os.path.realpath(path), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
    if key in _known_sums:
        return _known_sums[key]
    record = checksum(path, progress)
    if (
        time.time() - at.st_ctime > 2
    ):  # by a coarse clock, a second change soon after may leave a file's times as they are
        _known_sums[key] = record
    return record


def normalization_of(about: Mapping[str, Any], channels: int) -> Normalization:
    """Mean and deviation removed from training images of `channels` channels: those that a file states, else ImageNet's
    of gray and RGB images. Raises CheckpointError as `stated_normalization`, and where neither is known."""
    stated = stated_normalization(about, channels)
    if stated is None and channels not in USUAL_CHANNELS:
        raise CheckpointError(
            f"no file says the mean and std of its images' {channels} channels: write both, {channels} numbers each, "
            f"black 0 and white 1, into the JSON beside the weights (FILE.pth.json, or FILE.json of FILE.safetensors)"
        )
    return stated or Normalization.usual(channels)


def stated_normalization(about: Mapping[str, Any], channels: int) -> Normalization | None:
    """Mean and deviation as the file next to the weights states them, None if it does not. A single number holds for
    all channels. Raises CheckpointError for other counts or deviations."""
    stated = about if "mean" in about or "std" in about else timm_statistics(about.get("pretrained_cfg"))
    if not stated:
        return None
    try:
        both = [stated[name] for name in ("mean", "std")]
        lists = ([value] * channels if isinstance(value, int | float) else value for value in both)
        mean, std = (tuple(float(value) for value in values) for values in lists)
        if not len(mean) == len(std) == channels or not all(abs(value) <= _MOST for value in mean):
            raise ValueError
        if not all(1 / _MOST**2 <= value <= _MOST for value in std):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        why = f"the JSON beside the weights has an unusable mean or std of {channels} channels"
        raise CheckpointError(f"{why}: {str(stated.get('mean'))[:80]} and {str(stated.get('std'))[:80]}") from None
    return Normalization(mean, std)


def notes_on_mean(about: Mapping[str, Any], channels: int) -> list[str]:
    said = stated_normalization(about, channels)
    return [] if said else ["no file says the mean and std of its images: ImageNet's, unless data.mean sets others"]


def range_of(about: Mapping[str, Any]) -> ValueRange | None:
    """The range of values of training images deeper than 8 bits. Raises CheckpointError for anything but a range."""
    if "value_range" not in about:
        return None
    try:
        low, high = (float(value) for value in about["value_range"])
        if not (-1e18 <= low < high <= 1e18 and high - low >= 1e-18):  # as data.value_range
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        why = f"the JSON beside the weights has an unusable value_range: {str(about['value_range'])[:80]}"
        raise CheckpointError(why) from None
    return low, high


def notes_on_range(trained_on: ValueRange | None, ours: ValueRange | None) -> list[str]:
    old, new = (f"values of {range_text(r)}" if r else "8-bit images" for r in (trained_on, ours))
    return [] if trained_on == ours else [f"it was trained on {old}, this run is on {new} (--data.value_range)"]


def processor_statistics(processor: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Mean and standard deviation of a Hugging Face image processor, {} if it has none, and notes on them. Raises
    CheckpointError for a processor that does not scale pixels to [0, 1] and then normalize them."""
    if not processor:
        return {}, []
    wanted = {"do_rescale": True, "do_normalize": True, "rescale_offset": False, "rescale_factor": 1 / 255}
    for key, value in wanted.items():
        setting = processor.get(key, value)
        if not isinstance(setting, bool | float) or abs(setting - value) > 1e-6:
            raise CheckpointError(f"{PROCESSOR}: {key} {str(setting)[:20]} is not known to dino_ds, only {value:.6g}")
    mean, std = (processor.get(key) for key in ("image_mean", "image_std"))
    if mean is None or std is None:
        return {}, [f"{PROCESSOR} has no image_mean or image_std: the usual ones are taken"]
    return {"mean": mean, "std": std}, []


def timm_side(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """The side of native images in timm's config.json, or None; not checked. arguments: its "model_args"."""
    stated = config["pretrained_cfg"] if isinstance(config.get("pretrained_cfg"), dict) else config
    sizes = stated.get("input_size")
    return arguments.get("img_size", sizes[-1] if isinstance(sizes, list) and sizes else None)


def timm_statistics(config: Any) -> dict[str, Any]:
    """Mean and deviation in timm's pretrained_cfg, {} unless both have one number per channel."""
    if not isinstance(config, dict):
        return {}
    mean, std, size = (config.get(name) for name in ("mean", "std", "input_size"))
    if not (isinstance(mean, list) and isinstance(std, list) and isinstance(size, list) and size):
        return {}
    return {"mean": mean, "std": std} if len(mean) == len(std) == size[0] else {}
