"""Whatever reads weights verifies them: each command that takes a model, each file it reads, each kind of damage."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dino_ds
import dino_ds.basics.files as durable
from dino_ds.commands.export import run as export
from dino_ds.config.loading import load_recipe
from dino_ds.errors import CheckpointError, UserError, lines_for_people
from dino_ds.method.frozen import find_teacher
from dino_ds.options.definition import ExportOptions, PicturesOptions
from dino_ds.report.pictures import run as draw_pictures
from dino_ds.weights.export import export_safetensors, export_timm
from dino_ds.weights.frozen import find_frozen
from dino_ds.weights.load import load
from dino_ds.weights.sidecar import read_sidecar, write_with_sidecar
from dino_ds.weights.start import as_source, find_start
from tests.run.harness import TINY, image_folder, train_alone, whole_tensors
from tests.sample import sampled
from tests.weights.originals import write_native
from tests.weights.test_weights import _backbone

CHANGES = {
    "save_every": "2 steps", "keep_checkpoints": "2", "model.depth": "1", "crops.mask": "dinov2",
    "objective.ibot_weight": "1", "ibot_head.prototypes": "40", "ibot_head.hidden": "24", "ibot_head.bottleneck": "8",
}  # fmt: skip
OLD, NEW = (f"checkpoints/step_{step:08d}" for step in (2, 4))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`run` with checkpoints of steps 2 and 4, and `other`, which differs by its seed alone."""
    place = tmp_path_factory.mktemp("verified")
    image_folder(place / "images")
    for name, seed in (("run", "0"), ("other", "1")):
        changes = CHANGES | {"seed": seed}
        assert train_alone(place / "images", place / name, max_steps=4, changes=changes) is None
    return place


@pytest.fixture
def run(place, tmp_path):
    return Path(shutil.copytree(place / "run", tmp_path / "run"))


def _recipe(**changes):
    return load_recipe(None, {**TINY, **CHANGES, **{key.replace("__", "."): value for key, value in changes.items()}})


COMMANDS = {
    "load": lambda model, out: dino_ds.load(model),
    "export": lambda model, out: export(ExportOptions(model=model, format="timm", out=str(out), json=True)),
    "embed": lambda model, out: dino_ds.embed(model, workers=0),
    "pictures": lambda model, out: draw_pictures(PicturesOptions(model=model, only=("pca",), out=str(out))),
    "init_from": lambda model, out: find_start(_recipe(model__init_from=model).model),
    "from_source": lambda model, out: as_source(_recipe(model__init_from=model, model__backbone="from_source"), None),
    "teacher.source": lambda model, out: find_teacher(_recipe(teacher__source=model)),
}
READ = {
    "": ("teacher.safetensors", "teacher.json", f"{NEW}/manifest.json", f"{NEW}/whole_00000.safetensors"),
    NEW: (f"{NEW}/manifest.json", f"{NEW}/whole_00000.safetensors"),
}
"""Place that is given, below the run -> the files that are read then."""


def _flip(content: bytes, name: str) -> bytes:
    """One bit of the last exponent, or of a number in a JSON."""
    last, bit = len(content) - (1 if b"{" in content else 9), 1 if name.endswith("json") else 64
    place = content.index(b"0.4") + 2 if name.endswith("teacher.json") else last
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


DAMAGE = {
    "flipped": lambda path, other: path.write_bytes(_flip(path.read_bytes(), path.name)),
    "truncated": lambda path, other: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path, other: path.write_bytes(b""),
    "of another run": lambda path, other: shutil.copy(other, path),
}
_NOT_READ = {("teacher.safetensors", damage) for damage in DAMAGE} | {("teacher.json", "of another run")}
"""Damage that a frozen teacher never reads: all but the step is taken from a run's checkpoint."""
CELLS = [
    (command, given, file, damage)
    for command, (given, files), damage in itertools.product(COMMANDS, READ.items(), DAMAGE)
    for file in files
    if command != "teacher.source" or (file, damage) not in _NOT_READ
]


@pytest.mark.parametrize(("command", "given", "file", "damage"), sampled(CELLS))
def test_damage_is_named_and_never_used(place, run, tmp_path, command, given, file, damage, capsys):
    DAMAGE[damage](run / file, place / "other" / file)
    with pytest.raises(UserError) as error:
        COMMANDS[command](str(run / given), tmp_path / "out")
    message = str(error.value)
    assert error.value.exit_code == 3 and len(lines_for_people(message)) == 1
    assert any(words in message for words in (Path(file).name, "is of another run"))
    assert not (tmp_path / "out").exists() and not capsys.readouterr().out


_LOST = [
    (command, file, make)
    for command, file, make in itertools.product(COMMANDS, ("teacher.json", "teacher.safetensors"), (None, os.mkfifo))
    if command != "teacher.source" or file == "teacher.json"
]


@pytest.mark.parametrize(("command", "file", "make"), sampled(_LOST))
def test_a_run_s_teacher_and_its_description_go_together(run, tmp_path, command, file, make):
    (run / file).unlink()
    if make is not None:
        make(run / file)
    with pytest.raises(CheckpointError, match=rf"{file} (is missing|can't be read|is not a file)"):
        COMMANDS[command](str(run), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "given"), sampled(itertools.product(COMMANDS, ["", NEW])))
def test_a_checkpoint_of_another_run_in_a_run_is_not_used(place, run, tmp_path, command, given):
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(place / "other/checkpoints", run / "checkpoints")
    with pytest.raises(CheckpointError, match=f"is of another run than {run}/environment.json says"):
        COMMANDS[command](str(run / given), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_s_teacher_is_its_own(run):
    old, new, last = dino_ds.load(run / OLD), dino_ds.load(run / NEW), dino_ds.load(run)
    for model, step in ((old, 2), (new, 4)):
        whole = whole_tensors(run, step)
        assert all(torch.equal(t, whole[f"teacher.backbone.{n}"]) for n, t in model.network.state_dict().items())
        assert model.heads.keys() == {"head", "ibot_head"} and model.network.mask_token is None
        for head, tensors in model.heads.items():
            assert all(torch.equal(t, whole[f"teacher.{head}.{n}"]) for n, t in tensors.items())
        assert torch.equal(model.mask_token, whole["teacher.backbone.mask_token"]) and model.mask_token.any()
        assert (model.about["step"], model.notes) == (step, [])
    assert new.about == last.about
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(new.features(images), last.features(images))
    assert not torch.equal(old.features(images), last.features(images))
    alone = shutil.copytree(run / OLD, run.parent / "kept")
    assert torch.equal(dino_ds.load(alone).features(images), old.features(images))


def test_what_is_made_of_a_checkpoint_is_named_by_its_step(run):
    export(ExportOptions(model=str(run / OLD), format="safetensors", json=True))
    assert json.loads((run / "teacher-step_00000002.json").read_text())["step"] == 2
    dino_ds.evaluate(run / OLD, ["statistics"], workers=0)
    assert json.loads((run / "evaluations-step_00000002.json").read_text())["statistics"]["step"] == 2
    assert not (run / "evaluations.json").exists()
    draw_pictures(PicturesOptions(model=str(run / OLD), only=("pca",)))
    assert (run / "pictures/step_00000002/pca.png").is_file()
    assert find_frozen(str(run / OLD)).notes == ["the EMA teacher of step 2"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("checkpoints", r"checkpoints is neither a run \(no config.yaml\) nor a Hugging Face folder"),
        (f"{OLD}/whole_00000.safetensors", r"is a part of a checkpoint: give .*step_00000002"),
        ("checkpoints/step_00000006", "checkpoint step 6 is incomplete: it has no manifest.json"),
    ],
)
def test_what_is_near_a_checkpoint_gets_an_answer(run, given, says):
    if given.endswith("6"):
        (run / given).mkdir()  # as a writer that was killed may have left one
    with pytest.raises(CheckpointError, match=says):
        dino_ds.load(run / given)


def test_without_the_checkpoint_a_run_has_its_backbone(run):
    images, before = torch.randn(2, 3, 32, 32), dino_ds.load(run)
    shutil.rmtree(run / NEW)
    model = dino_ds.load(run)
    assert torch.equal(model.features(images), before.features(images)) and not model.heads
    assert "its head is not available" in model.notes[0]


def test_a_meant_edit_of_teacher_json(run):
    """It is refused until its checksum is removed; its file of weights is verified as before."""
    place = run / "teacher.json"
    facts = json.loads(place.read_text())
    facts["mean"] = [0.0, 0.0, 0.0]
    place.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=r"was edited .*remove its 'crc32'"):
        dino_ds.load(run)
    del facts["crc32"]
    place.write_text(json.dumps(facts))
    assert dino_ds.load(run).normalization.mean == (0, 0, 0)
    DAMAGE["flipped"](run / "teacher.safetensors", None)
    with pytest.raises(CheckpointError, match=r"teacher\.safetensors is damaged"):
        dino_ds.load(run)


def _tensors(value):
    return lambda path: save_file({"a": torch.full((9,), float(value))}, path)


@pytest.mark.parametrize("death", range(4))
def test_a_death_at_any_point_leaves_a_file_and_its_own_description(tmp_path, monkeypatch, death):
    """Two files can't be replaced in one step: whichever there are, they fit, and the next write is as any other."""
    path, replace, calls = tmp_path / "a.safetensors", durable.os.replace, itertools.count()
    write_with_sidecar(path, _tensors(1), {"step": 1})

    class Death(BaseException):
        pass

    def dies(source, target):
        if next(calls) == death:
            raise Death
        replace(source, target)

    for step in (2, 3):
        calls = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(durable.os, "replace", dies)
            with pytest.raises(Death) if death < 3 else contextlib.nullcontext():
                write_with_sidecar(path, _tensors(step), {"step": step})
        assert read_sidecar(path) == {"step": load_file(path)["a"][0]}
    write_with_sidecar(path, _tensors(4), {"step": 4})
    assert read_sidecar(path) == {"step": 4} == {"step": load_file(path)["a"][0]}
    assert set(json.loads(path.with_suffix(".json").read_text())) == {"format", "step", "weights_file", "crc32"}


BAD = (math.nan, math.inf, -math.inf, 1e308, -1, 0, True, "x", None, [1.0])


def _numbers(content: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Paths of all numbers in a JSON."""
    if isinstance(content, bool) or not isinstance(content, dict | list | int | float):
        return []
    if isinstance(content, int | float):
        return [path]
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    return [found for key, value in entries for found in _numbers(value, (*path, key))]


SIDE_FILES = {
    "teacher.json": (export_safetensors, "a.safetensors", "a.json"),
    "timm": (export_timm, "timm", "timm/config.json"),
    "Hugging Face": (write_native, "hf", "hf/config.json"),
    "processor": (write_native, "hf", "hf/preprocessor_config.json"),
}


@pytest.mark.parametrize("kind", SIDE_FILES)
def test_no_number_beside_weights_makes_features_that_are_none(tmp_path, kind):
    """Each number in turn, each bad value: refused, or it makes no feature that is not a number."""
    write, weights, side = SIDE_FILES[kind]
    model = _backbone("vit_small_patch14_dinov2")
    model.about["value_range"] = [0.0, 255.0]
    write(model, tmp_path / weights)
    content = read_sidecar(tmp_path / weights) if kind == "teacher.json" else json.loads((tmp_path / side).read_text())
    pixels = torch.randint(0, 256, (48, 40, 3), dtype=torch.uint8).numpy()
    numbers = _numbers(content)
    # Every value in a fifth of the numbers, and in each number two of the values.
    for path, bad in [(path, bad) for i, path in enumerate(numbers) for bad in BAD[i % 5 :: 5]]:
        changed = json.loads(json.dumps(content))
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = bad
        (tmp_path / side).write_text(json.dumps(changed))
        with contextlib.suppress(CheckpointError):
            found = load(tmp_path / weights)
            assert torch.isfinite(found.features(found.preprocess(pixels)[None])).all(), (path, bad)
