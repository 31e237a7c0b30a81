"""`dino-ds convert`: the same checkpoint for other numbers of ranks, and the student's weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dino_ds.checkpoint.manifest import SavedCheckpoint, read_manifest
from dino_ds.cli.main import main
from dino_ds.commands.convert import run as convert
from dino_ds.config.loading import load_recipe
from dino_ds.engine.saved_state import MASTER, SavedParameters
from dino_ds.errors import StorageError
from dino_ds.options.run import ConvertOptions
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, losses_of, train_tiny

DS = "zero2_bf16.json"
STEP = "checkpoints/step_00000003"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps on two ranks; the prototypes' counter is another than the rest's."""
    root = tmp_path_factory.mktemp("convert")
    changes = {"objective.freeze_prototypes": "1 steps"}
    assert run_on_ranks(train_tiny, image_folder(root / "images"), root / "run", DS, 3, False, changes) == [None, None]
    return root


def _values(folder):
    saved = SavedCheckpoint(folder, read_manifest(folder))
    parameters = SavedParameters(saved)
    values = {
        (kind, name): torch.cat([v for _, v in parameters.read(kind, name, 0, torch.Size(shape).numel())])
        for name, shape in parameters.shapes.items()
        for kind in (MASTER, *parameters.moments)
    }
    return saved, parameters, values


def _convert(trained, out, **flags):
    flags = {"ranks": None, "student": False, "json": False} | flags
    convert(ConvertOptions(checkpoint=str(trained / "run" / STEP), out=str(out), **flags))


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.full)])
def test_another_number_of_ranks_holds_the_same(trained, tmp_path, ranks, capsys):
    _convert(trained, tmp_path / "out", ranks=ranks, json=True)
    result = json.loads(capsys.readouterr().out)
    old, old_parameters, old_values = _values(trained / "run" / STEP)
    new, parameters, values = _values(tmp_path / "out" / STEP)
    assert result["ranks"] == new.manifest.world_size == len(new.layouts) == ranks
    assert parameters.shared == old_parameters.shared
    names = list(parameters.shapes)
    assert [parameters.step_of([n]) for n in names] == [old_parameters.step_of([n]) for n in names]
    assert {parameters.step_of([n]) for n in names} == {2, 3}
    assert all(torch.equal(values[key], old_values[key]) for key in old_values)
    assert all(torch.equal(new.whole()[key], tensor) for key, tensor in old.whole().items())
    assert new.whole().keys() == old.whole().keys()
    sizes = [(tmp_path / "out" / STEP / f"rank_{rank:05d}.safetensors").stat().st_size for rank in range(ranks)]
    assert max(sizes) == pytest.approx(min(sizes), rel=0.1), "the ranks share the work"
    assert result["bytes"] == sum(f.stat().st_size for f in (tmp_path / "out" / STEP).glob("*.safetensors"))


def test_a_converted_checkpoint_is_resumed_like_any_other(trained, tmp_path):
    """To the bit, as from the checkpoint it was made of; and nothing else of the old run is needed."""
    _convert(trained, tmp_path / "converted", ranks=5)
    shutil.copytree(trained / "run", tmp_path / "run")
    changes = {"objective.freeze_prototypes": "1 steps"}
    for run in ("run", "converted"):
        assert run_on_ranks(train_tiny, trained / "images", tmp_path / run, DS, 5, True, changes) == [None, None]
    assert losses_of(tmp_path / "converted") == losses_of(tmp_path / "run")[3:]
    assert load_recipe(str(tmp_path / "converted/config.yaml"), {}) == load_recipe(
        str(tmp_path / "run/config.yaml"), {}
    )


def test_the_student_s_weights_by_name(trained, tmp_path):
    _convert(trained, tmp_path / "out", student=True)
    student = load_file(tmp_path / "out/student.safetensors")
    _, parameters, values = _values(trained / "run" / STEP)
    assert {name: tuple(tensor.shape) for name, tensor in student.items()} == parameters.shapes
    assert all(torch.equal(tensor.view(-1), values[MASTER, name]) for name, tensor in student.items())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["student.safetensors"]


def test_it_runs_where_there_is_no_deepspeed(trained, tmp_path):
    """From the command line; DeepSpeed, which a machine without a compiler may lack, is not imported."""
    code = (
        "import json, sys; sys.modules['deepspeed'] = None; from dino_ds.commands.convert import run; "
        "from dino_ds.options.run import ConvertOptions; run(ConvertOptions(**json.loads(sys.argv[1])))"
    )
    flags = {"checkpoint": str(trained / "run" / STEP), "out": str(tmp_path / "out"), "ranks": 4}
    flags |= {"student": False, "json": False}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(flags)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("step 3: 2 ranks -> 4, ") and (tmp_path / "out/checkpoints/latest").is_file()


def _refused(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(["convert", *map(str, words)])
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "Traceback" not in text
    return stop.value.code, text


def test_refusals_leave_nothing_behind(trained, tmp_path, capsys):
    checkpoint, out = trained / "run" / STEP, tmp_path / "out"
    damaged = tmp_path / "step_00000003"
    shutil.copytree(checkpoint, damaged)
    path = damaged / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    cases = [
        (("--out", out), 2, "no checkpoint is given: dino-ds convert CHECKPOINT"),
        (("--checkpoint", checkpoint, "--out", out, "--student", "--ranks", 2), 2, "leave one out"),
        (("--checkpoint", tmp_path / "nothing", "--out", out), 3, "is not a folder"),
        (("--checkpoint", trained / "run", "--out", out), 3, "found: step_00000003"),
        (("--checkpoint", tmp_path / "full", "--out", out), 3, "incomplete"),
        (("--checkpoint", damaged, "--out", out), 3, "is damaged"),
        (("--checkpoint", checkpoint, "--out", tmp_path / "full"), 2, "is there already"),
        (("--checkpoint", checkpoint, "--out", tmp_path / "full/file/out"), 5, "can't be written"),
    ]
    for words, code, message in cases:
        found = _refused(capsys, *words)
        assert found[0] == code and message in found[1], found
        assert not out.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "step_00000003"]


def test_a_disk_without_room_is_seen_before_writing(trained, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"MB needed, 0\.0 MB free; fix --out"):
        _convert(trained, tmp_path / "out")
    assert not any(Path(tmp_path).iterdir())
