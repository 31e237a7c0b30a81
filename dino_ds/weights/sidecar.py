"""A file of weights and the JSON next to it, its sidecar: written so that they always go together, verified when read.

This is half of one rule: whatever reads weights verifies them. The other half is
`dino_ds.checkpoint.opening.open_checkpoint`. The sidecar holds length and CRC32 of its file of weights, and a checksum
of its own content. Two files can't be replaced in one step, so the sidecar is written first and describes the old file
too until that is replaced: whenever the process dies, one of its two descriptions fits the file on the disk.
Sidecars of other programs have no checksums, and are not verified.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dino_ds.basics.durable import discard, is_gone, replace_file, replacing
from dino_ds.basics.file_format import FORMAT, check_format
from dino_ds.basics.names import sidecar_of
from dino_ds.basics.text_file import read_object
from dino_ds.checkpoint.files import FileRecord, checksum
from dino_ds.checkpoint.manifest import Manifest, content_sum
from dino_ds.checkpoint.opening import checksum_once
from dino_ds.config.recipe import Recipe
from dino_ds.data.normalization import Normalization
from dino_ds.errors import CheckpointError, one_line
from dino_ds.models.specs.base import BackboneSpec

_FILE, _SUM, _BEFORE = "weights_file", "crc32", "before"
"""Keys of a sidecar: length and CRC32 of its file of weights; checksum of the other keys; description of the file that
is being replaced."""
Facts = dict[str, Any]


def write_with_sidecar(weights: Path, write: Callable[[Path], FileRecord | None], facts: Facts) -> None:
    """Replace a file of weights by the one that `write` makes at a path, and its sidecar by `facts`. Raises OSError.

    `write` returns length and CRC32 of what it has written if it knows them.
    """
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


def read_json(path: Path) -> Facts:
    """The object in a JSON file, {} where there is no such file. Raises CheckpointError for any other content."""
    if not os.path.lexists(path):
        return {}
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read ({one_line(error, 80)}): bring it back, or remove it") from None


def read_facts(sidecar: Path) -> Facts:
    """The content of a sidecar as it is, {} if there is none. Raises CheckpointError where its own checksum differs."""
    facts = read_json(sidecar)
    if _FILE in facts:
        check_format(facts.get("format"), sidecar, "write the weights again with this dino_ds")
    rest = {key: value for key, value in facts.items() if key != _SUM}
    if _FILE in facts and facts.get(_SUM, content_sum(rest)) != content_sum(rest):
        raise CheckpointError(
            f"{sidecar} is damaged or was edited (its own checksum differs): bring it back; if the edit is meant, "
            f"remove its {_SUM!r}"
        )
    return facts


def _fitting(facts: Facts, record: FileRecord) -> Facts | None:
    """The one of a sidecar's descriptions that fits a file's `record`, without the keys that verify it, or None."""
    for description in (facts, facts.get(_BEFORE)):
        if isinstance(description, dict) and description.get(_FILE) == vars(record):
            return _plain(description)
    return None


def _plain(facts: Facts) -> Facts:
    """A sidecar's facts without the keys that verify it and its file."""
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
    return {
        **({"value_range": list(known)} if known else {}),
        "mean": list(normalization.mean),
        "std": list(normalization.std),
        **_timm(recipe, arch),
        "pos_embed_interpolation": recipe.model.pos_embed_interpolation,
        **({"distilled_from": dict(distilled)} if distilled else {}),
        "step": step,
        "images": step * recipe.data.global_batch,
        "architecture": dict(vars(arch)),
        "versions": dict(versions),
    }


def about_checkpoint(saved: Manifest) -> dict[str, Any]:
    """The content that teacher.json would have, written from this checkpoint. Raises CheckpointError."""
    return about_teacher(recipe_of(saved), saved.frozen_teacher, saved.step, saved.versions)


def recipe_of(saved: Manifest) -> Recipe:
    """The recipe that a checkpoint was saved with. Raises CheckpointError where it is none."""
    try:
        return Recipe.model_validate(saved.recipe)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"its recipe can't be used ({where}: {first['msg']})") from None


def _timm(recipe: Recipe, arch: BackboneSpec) -> dict[str, Any]:
    backbone, size = recipe.model.backbone, recipe.crops.global_size
    facts = {} if arch.told_by_tensors else {"backbone": backbone, "image_size": size}
    known = arch.timm_model(backbone, size)
    if known is None:
        return {"image_size": size, **facts}
    name, arguments = known[0], known[1] | {"num_classes": 0}
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return facts | {
        "load": f"model = timm.create_model({name!r}, {written}); "
        "model.load_state_dict(safetensors.torch.load_file('teacher.safetensors'))",
        "timm_name": name,
        "timm_arguments": arguments,
    }
