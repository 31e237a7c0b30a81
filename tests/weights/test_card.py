"""The model card of a run, and where an export may be written."""

from __future__ import annotations

import json
import math

import pytest
import torch
import yaml
from PIL import Image

from dino_ds.commands.export import run as dino_ds_export
from dino_ds.errors import ConfigError
from dino_ds.options.model import ExportOptions
from dino_ds.weights.export import export_safetensors
from dino_ds.weights.load import load
from tests.weights.test_weights import _backbone

KNN = {"step": 3, "train_images": 2880, "test_images": 936}
KNN |= {"results": {"knn_10": 76.25, "knn_20": None, "small": 1e-05}}


@pytest.fixture
def run(tmp_path):
    """A run folder's files as far as an export reads them; its teacher is of step 3."""
    export_safetensors(_backbone(), tmp_path / "run/teacher.safetensors")
    (tmp_path / "run/config.yaml").write_text("data:\n  source: photos\n")
    return tmp_path / "run"


def _card(run):
    dino_ds_export(ExportOptions(model=str(run), format="timm", out=str(run / "out"), json=True))
    return (run / "out/README.md").read_text()


def test_what_a_card_says(run):
    """Results for people, facts for the hub, and no folder of the machine that made it."""
    results = {"knn": KNN, "linear": KNN | {"step": 2, "results": {"top1": 80}}, "davis": KNN | {"data": "davis"}}
    (run / "evaluations.json").write_text(json.dumps(results))
    (run / "config.yaml").write_text(
        f"data: {{root: {run}/birds/train}}\noptimizer: {{lr: 1e-3}}\nmodel: {{init_from: {run}/secret.pth}}\n"
    )
    card = _card(run)
    facts = yaml.safe_load(card.split("---")[1])
    assert (facts["library_name"], facts["pipeline_tag"]) == ("timm", "image-feature-extraction")
    assert "# ViT/8 64 x 2, trained with DINO" in card  # timm's name has other sizes
    assert "| knn | knn_10 | 76.25 | 3 | 2880 / 936 |" in card and "| linear | top1 | 80 | 2 |" in card
    assert "| davis | knn_10 |" in card and "knn_20" not in card and "3 steps = 24 images of birds/train" in card
    assert str(run) not in card and "secret" not in card


@pytest.mark.slow
def test_its_own_lines_load_the_folder(run, monkeypatch):
    """The code on the card, run beside the folder, gives our features of an image that is not resized: 1e-5."""
    card, model = _card(run), load(run)
    monkeypatch.chdir(run)
    ours = model.preprocess(Image.effect_noise((36, 36), 50).convert("RGB"))[None]
    names = {"images": ours}
    exec(card.partition("```python")[2].partition("```")[0], names)
    torch.testing.assert_close(names["features"].detach(), model.features(ours), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "content",
    [None, {}, {"knn_10": 76.2, "linear": 86.1}, {"knn": {"results": 5}}, {"knn": {"results": {"knn_1": math.nan}}}],
)
def test_without_results_there_is_no_table(run, content):
    """None was made, or by a version that did not say of which step, or none that is a number."""
    if content is not None:
        (run / "evaluations.json").write_text(json.dumps(content))
    assert "## Results" not in _card(run)


def test_results_that_can_not_be_read_are_one_line(run):
    (run / "evaluations.json").write_text("{")
    with pytest.raises(ConfigError, match=r"evaluations\.json can't be read .*fix or remove it"):
        _card(run)
    assert not (run / "out").exists()


@pytest.mark.parametrize("name", [".", "teacher.safetensors"])
def test_nobody_is_told_to_remove_what_is_exported(run, name):
    with pytest.raises(ConfigError, match="is what is to be exported: name another file with --out"):
        dino_ds_export(ExportOptions(model=str(run / name), format="safetensors", out=None, heads=None, json=False))
    assert (run / "teacher.safetensors").exists()


def test_a_file_of_weights_takes_no_other_file_s_place(run):
    """It has a JSON beside it, and is known by its ending."""
    beside = run / "mine.json"
    beside.write_text("{}")
    for out, words in (("mine.safetensors", r"mine\.json is there already"), ("mine.bin", r"end in \.safetensors")):
        with pytest.raises(ConfigError, match=words):
            dino_ds_export(
                ExportOptions(model=str(run), format="safetensors", out=str(run / out), heads=None, json=True)
            )
    assert beside.read_text() == "{}" and not list(run.glob("mine.[sb]*"))
