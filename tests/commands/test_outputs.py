"""No command writes over what is there: it is refused before any work, or the default name gets a number."""

from __future__ import annotations

from pathlib import Path

import pytest

from dino_ds.basics.files import free_stem
from dino_ds.errors import ConfigError
from dino_ds.options.commands import COMMANDS
from tests.hostile.test_run_folders import _command

WRITING = {
    ("train", "--config quickstart --print out.yaml"): "out.yaml",
    ("train", "--config quickstart --run_dir out"): "out/config.yaml",
    ("plan", "--config vitti16 --write out.json"): "out.json",
    ("report", "run --out out.html"): "out.html",
    ("look-data", "--config quickstart --out out.png"): "out.png",
    ("eval", "weights --out out.json"): "out.json",
    ("embed", "weights --out out.npy"): "out.npy",
    ("embed", "weights  --out out.npy"): "out.csv",
    ("embed", "weights --out out.parquet"): "out.parquet.json",
    ("find", "x.npy 0 --out out"): "out.png",
    ("find", "x.npy  0 --out out"): "out.csv",
    ("curate", "x.npy --clusters 3 --out out"): "out/clusters.csv",
    ("curate", "x.npy --clusters 3"): "x-clusters",
    ("pictures", "weights --only map --out out"): "out/map.png",
    ("pictures", "weights --only pca"): "pictures/pca.png",
    ("export", "weights --format safetensors --out out.safetensors"): "out.safetensors",
    ("export", "weights  --format safetensors --out out.safetensors"): "out.json",
    ("export", "weights --format timm --out out"): "out/model.safetensors",
    ("shard", "--root images --out out"): "out/0.tar",
    ("bench tune", "--config vitti16"): "tune.html",
    ("bench tune", "--config vitti16 --out out.html"): "out.json",
    ("bench step", "--profile out"): "out/trace.json",
}
THERE = '{"knn": {}}'
"""The content of the file that is there: results of an evaluation too, to which another one's may be added."""
PRINTING = {"advise", "bench inference", "bench ladder", "doctor"}
"""Commands that write no file."""


def test_every_command_is_here():
    assert {command for command, _ in WRITING} == COMMANDS.keys() - PRINTING


@pytest.mark.parametrize(("command", "words"), WRITING)
def test_what_is_there_stays_and_the_command_says_so(tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    file = Path(WRITING[command, words])
    file.parent.mkdir(exist_ok=True)
    file.write_text(THERE)
    Path("images").mkdir()
    Path("images/a.png").touch()
    before = sorted(tmp_path.rglob("*"))
    code, lines = _command([*command.split(), *words.split()])
    assert code == 2 and str(file.parts[0]) in lines[-1] and not any("Traceback" in line for line in lines)
    assert file.read_text() == THERE and sorted(tmp_path.rglob("*")) == before


def test_a_default_name_that_is_taken_gets_a_number(tmp_path):
    """By any of its files; a name that the user gives is refused."""
    stem, endings = tmp_path / "x-found", (".txt", ".png")
    assert free_stem(None, stem, endings) == str(stem)
    (tmp_path / "x-found.png").touch()
    (tmp_path / "x-found-2.txt").symlink_to("nowhere")
    assert free_stem(None, stem, endings) == f"{stem}-3"
    with pytest.raises(ConfigError, match=r"x-found-2.txt is there already: remove it, or name another with --out"):
        free_stem(f"{stem}-2", stem, endings)
