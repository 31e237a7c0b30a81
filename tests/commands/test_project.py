"""`dino-ds init`: the files load, the scripts start what they say, nothing is overwritten."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from dino_ds.commands import project as project_room
from dino_ds.commands.project import check, run
from dino_ds.config.ds_config import load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.engine.device import device
from dino_ds.errors import ConfigError
from dino_ds.options.commands import COMMANDS, TRAIN
from dino_ds.options.flags import parse_flags
from dino_ds.options.run import InitOptions
from dino_ds.planning import start
from dino_ds.planning.start import Machine
from tests.run.harness import image_folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    """That of a machine of 24 GiB of host memory without a GPU, in a folder with a space in its name."""
    assert device().type == "cpu"
    monkeypatch.setattr(start, "find_machine", lambda: Machine(1, 1, 24.0))
    run(InitOptions(dir=str(tmp_path / "my project"), recipe="vits16", root=str(tmp_path / "my images")))
    return tmp_path / "my project"


def test_the_recipe_is_the_shipped_one_and_the_ds_json_fits_the_machine(project):
    assert load_recipe(str(project / "recipe.yaml"), {}) == load_recipe("vits16", {})
    ds = load_ds_config(str(project / "ds.json"), {})
    micro, accumulation = ds["train_micro_batch_size_per_gpu"], ds["gradient_accumulation_steps"]
    assert micro * accumulation == 512 and micro < 512  # 512 at once would take 80 GiB
    readme = (project / "README.md").read_text()
    assert len(readme.splitlines()) <= 12 and "dino-ds report 'runs/my project'" in readme


@pytest.mark.parametrize(("recipe", "slow"), [("vits16", True), ("small", False)])
def test_what_can_t_be_trained_here_is_said(recipe, slow, tmp_path, monkeypatch, capsys):
    """Images that are not there, and a network that is too much for a CPU, with what to do."""
    monkeypatch.delenv("DS_ACCELERATOR")
    asked = []
    # Where the variable says it, DeepSpeed doesn't warn that it found no GPU.
    monkeypatch.setattr(
        start, "find_machine", lambda: asked.append(os.environ.get("DS_ACCELERATOR")) or Machine(1, 1, 15.0)
    )
    run(InitOptions(dir=str(tmp_path / "a"), recipe=recipe, root=str(tmp_path / "none")))
    said = capsys.readouterr().out
    assert asked == ["cpu"] and "none does not exist" in said
    assert slow == ("step of 512 images takes about 8 minutes" in said) == ("--recipe small" in said)
    assert "15.0 GiB to take" in (tmp_path / "a/ds.json").read_text()
    images = image_folder(tmp_path / "images", 1)
    run(InitOptions(dir=str(tmp_path / "b"), recipe=recipe, root=str(images)))
    said = capsys.readouterr().out
    assert "does not exist" not in said and slow == (f"dino-ds advise {images}" in said)


def test_on_gpus_the_ds_json_is_the_planner_s(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "find_machine", lambda: Machine(1, 1, 64.0, card_gib=23.6))
    run(InitOptions(dir=str(tmp_path), recipe="vits16"))
    ds = load_ds_config(str(tmp_path / "ds.json"), {})
    assert ds["bf16"]["enabled"] and ds["train_micro_batch_size_per_gpu"] < 512
    assert "1 x 23.6 GiB" in (tmp_path / "ds.json").read_text()


@pytest.mark.parametrize(("script", "program"), [("train.sh", "dino-ds"), ("slurm.sh", "srun")])
def test_scripts_train_with_the_files_beside_them(project, script, program, tmp_path, monkeypatch):
    for name in ("dino-ds", "srun", "scontrol"):
        stand_in = tmp_path / "bin" / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(
            f'#!/bin/sh\npwd > "{tmp_path}/{name}.words"\nprintf "%s\\n" "$@" >> "{tmp_path}/{name}.words"\n'
        )
        stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for name, value in (("SLURM_SUBMIT_DIR", str(project)), ("SLURM_JOB_ID", "1"), ("SLURM_JOB_NODELIST", "n1")):
        monkeypatch.setenv(name, value)
    subprocess.run(["bash", project / script, "--seed", "3"], check=True, cwd=tmp_path)
    folder, *words = (tmp_path / f"{program}.words").read_text().splitlines()
    flags = parse_flags(COMMANDS["launch"], words[1:]).train if program == "dino-ds" else None
    flags = flags or parse_flags(TRAIN, words[words.index("train") + 1 :])
    assert folder == str(project) and flags.recipe == {"data.root": str(tmp_path / "my images"), "seed": "3"}
    assert flags.fixed["config"] == "recipe.yaml" and flags.fixed["run_dir"] == "runs/my project"
    monkeypatch.chdir(project)
    load_ds_config(flags.fixed["ds_config"], {})
    assert flags.fixed["ds_config"] == ("ds.json" if script == "train.sh" else "ds_configs/zero2_bf16.json")
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", project / script], check=True)


@pytest.mark.parametrize("recipe", ["small", "quickstart", "resnet50"])
def test_other_recipes_are_made_for_folders_too(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(project_room, "_ds_config", lambda recipe: (1, "{}", False))
    run(InitOptions(dir=str(tmp_path), recipe=recipe))
    shipped, ours = load_recipe(recipe, {}), load_recipe(str(tmp_path / "recipe.yaml"), {})
    assert ours == shipped.model_copy(update={"data": shipped.data.model_copy(update={"source": "folder"})})


@pytest.mark.parametrize(
    ("dir", "recipe", "says"),
    [
        ("full", "vits16", "full is not empty: name a new folder"),
        ("file", "vits16", "file can't be written: a file is there"),
        ("new", "vits17", "Did you mean vits16"),
        ("new", "dinov3_gram", "begin with its first one"),
    ],
)
def test_what_can_t_be_made_is_refused_before_anything_is_written(dir, recipe, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    for name in ("full/x", "file"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=re.escape(says)):
        check(InitOptions(dir=dir, recipe=recipe))
    assert not (tmp_path / "new").exists()
