"""No file that a command reads leads to an import of a class that the user has not typed; typing it has this effect."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

import dino_ds
from dino_ds.basics import own_code
from dino_ds.method.specs.own import own_teachers, own_terms
from dino_ds.models.specs.foreign import facts_of
from tests.hostile.guard import run_command
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, train_tiny
from tests.run.own_parts import OWN
from tests.run.test_outputs import MODEL

pytestmark = pytest.mark.faults

MINE = """
from pathlib import Path
from PIL import Image
from tests.run.own_parts import LinearEmaSpec, VarianceSpec
from tests.weights.own import Own

Path("imported").touch()

class Images:
    def __init__(self, root): self.files = sorted(Path(root).glob("*.png"))
    def __len__(self): return len(self.files)
    def load(self, index): return Image.open(self.files[index])
    def name(self, index): return self.files[index].name
"""
NAMES = "mine:Images,mine:Own,mine:VarianceSpec,mine:LinearEmaSpec"
RUNS = {
    "source": {"data.source": "mine:Images"},
    "backbone": MODEL | {"model.backbone": "mine:Own"},
    "parts": {key: text.replace("tests.run.own_parts", "mine") for key, text in OWN.items()},
}
"""Keys of recipes whose run folders, weights and features name a class of the user's."""
TRAIN = "train --ds_config ds_configs/zero0_fp32.json --max_steps 2 --run_dir"
EXPORT = "--format safetensors --out x.safetensors"
COMMANDS = {
    "resume": f"{TRAIN} run --resume",
    "stage": f"{TRAIN} new --from run --stage_start restart",
    "start": f"{TRAIN} new --data.root images --data.global_batch 4 --model.init_from run --model.backbone from_source",
    "eval": "eval run --evals statistics --workers 0",
    "embed": "embed run --workers 0 --out x.npy",
    "pictures": "pictures run --only map",
    "export": f"export run {EXPORT}",
    "teacher": f"export run/teacher.safetensors {EXPORT}",
    "checkpoint": f"export run/checkpoints/step_00000001 {EXPORT}",
    "bench": "bench inference run --batches 1 --rounds 1 --warmup 0",
    "find": "find features.npy images/000.png",
    "curate": "curate features.npy --clusters 2",
    "report": "report run",
}
READ_BY = {
    "source": "resume stage eval embed pictures find curate",
    "backbone": "start export teacher checkpoint bench",
    "parts": "resume report",
}
"""The commands that read the class's name in such a run, each once; `make test-all` runs the others with it."""
CELLS = [
    pytest.param(run, command, marks=[pytest.mark.full] * (command not in READ_BY[run].split()))
    for run, command in itertools.product(RUNS, COMMANDS)
]


def _make(place: Path, changes: dict[str, str]) -> str | None:
    """A run and features in `place`, by a process in which the user has typed the class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        said = train_tiny(place / "images", place / "run", max_steps=1, changes=changes)
        source = {"source": "mine:Images", "root": "images"} if "data.source" in changes else {}
        dino_ds.embed("run", out="features.npy", workers=0, **source)
    return said


@pytest.fixture(scope="module")
def made(request, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    image_folder(place / "images", 8)
    (place / "mine.py").write_text(MINE)
    assert run_on_ranks(_make, place, RUNS[request.param], world=1) == [None]
    (place / "imported").unlink(missing_ok=True)
    return place


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A copy of `made` as the working folder of a user who has typed nothing yet."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_code, "_allowed", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    for kept in (own_terms, own_teachers, facts_of):
        kept.cache_clear()
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(("made", "command"), CELLS, indirect=["made"])
def test_only_what_is_typed_is_imported(place, command):
    words = COMMANDS[command].split()
    with mock.patch("dino_ds.train.train") as train:
        code, lines = run_command(words)
        assert not (place / "imported").exists() and "mine" not in sys.modules and not (code and train.called)
        refused = [line for line in lines if "names the class mine:" in line and "--allow_code mine:" in line]
        assert bool(code) == bool(refused), lines
        if code:
            assert run_command([*words, "--allow_code", NAMES])[0] == 0
            assert train.called or (place / "imported").exists()


TIMM = {"architecture": "resnet18", "pretrained_cfg": {"input_size": [3, 96, 96]}}
OTHERS = {
    "ds_config.json": ({"optimizer": {"type": "mine:Own", "params": {}}}, COMMANDS["resume"]),
    "environment.json": ({"run_id": "mine:Own", "from": {"run": "mine:Own"}, "starts": ["mine:Own"]}, "report run"),
    "config.json": ({"architecture": "mine:Own", "auto_map": {"AutoModel": "mine:Own"}}, f"export hub {EXPORT}"),
    " config.json": (TIMM | {"model_args": {"act_layer": "mine:Own"}}, f"export hub {EXPORT}"),
    "images.txt": ("images/000.png\tmine:Own\nmine:Images\n", "advise images.txt --source folder"),
    "clusters.csv": ("name,cluster\n000.png,mine:Own\n", f"{TRAIN} new --data.balance clusters:run/clusters.csv"),
}
"""Files that name no class in any version, with one, and the command that reads them."""


@pytest.mark.parametrize("file", OTHERS)
@pytest.mark.parametrize("made", ["parts"], indirect=True)
def test_a_class_where_none_is_named_is_not_imported(place, file):
    content, command = OTHERS[file]
    shutil.copytree(place / "run", place / "hub")
    (place / "hub/config.yaml").unlink()
    text = content if isinstance(content, str) else json.dumps(content)
    (place / ("hub" if "hub" in command else "run") / file.strip()).write_text(f"{text}\n")
    (place / "hub/teacher.safetensors").rename(place / "hub/model.safetensors")
    with mock.patch("dino_ds.train.train"):
        code, lines = run_command(command.split())
    assert code in (0, 2, 3) and not any("Traceback" in line for line in lines)
    assert not (place / "imported").exists() and "mine" not in sys.modules
