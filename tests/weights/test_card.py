"""The model card of a run: its results for people, and for the Hugging Face hub."""

from __future__ import annotations

import json
import math

import pytest
import torch
import yaml
from PIL import Image

from dino_ds.commands.export import run as dino_ds_export
from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.errors import ConfigError
from dino_ds.options.model import ExportOptions
from dino_ds.weights.export import export_safetensors
from dino_ds.weights.load import load
from tests.weights.test_weights import _backbone

huggingface_hub = pytest.importorskip("huggingface_hub")
KNN = {"step": 3, "train_images": 2880, "test_images": 936}
KNN |= {"results": {"knn_10": 76.25, "knn_20": None, "small": 1e-05}}


@pytest.fixture
def run(tmp_path):
    """A run folder's files as far as an export reads them; its teacher is of step 3."""
    export_safetensors(_backbone(), tmp_path / "run/teacher.safetensors")
    (tmp_path / "run/config.yaml").write_text("data:\n  source: photos\n")
    return tmp_path / "run"


def _card(run, format="hf"):
    dino_ds_export(ExportOptions(model=str(run), format=format, out=str(run / "out"), heads=None, json=True))
    return huggingface_hub.ModelCard.load(run / "out/README.md")


@pytest.mark.parametrize(("format", "library"), [("hf", "transformers"), ("timm", "timm")])
def test_results_are_read_as_the_hub_reads_them(run, format, library):
    (run / "evaluations.json").write_text(
        json.dumps({"knn": KNN, "linear": KNN | {"step": 2, "results": {"top1": 80}}})
    )
    card = _card(run, format)
    assert card.text.lstrip().startswith("# ViT/8 64 x 2, trained with DINO")  # timm's name has other sizes
    assert card.data.library_name == library and card.data.pipeline_tag == "image-feature-extraction"
    result, small = card.data.eval_results  # that of step 2 is of another teacher
    assert small.metric_value == 1e-05
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("knn_10", 76.25, "photos")
    assert "| knn | knn_10 | 76.25 | 3 | 2880 / 936 |" in card.text and "| linear | top1 | 80 | 2 |" in card.text
    assert "knn_20" not in card.text and "3 steps = 24 images" in card.text
    assert str(run) not in card.content  # no folders of the machine that made it


@pytest.mark.parametrize(("format", "input"), [("hf", "RGB"), ("timm", None)])
@pytest.mark.slow
def test_its_own_lines_load_the_folder(run, monkeypatch, format, input):
    """The code on the card, run beside the folder, gives our features of an image that is not resized: 1e-5."""
    pytest.importorskip("transformers")
    card, model = _card(run, format), load(run)
    monkeypatch.chdir(run)
    image = Image.effect_noise((36, 36), 50).convert("RGB")
    ours = model.preprocess(image)[None]
    names = {"images": image if input else ours}
    exec(card.text.partition("```python")[2].partition("```")[0], names)
    torch.testing.assert_close(names["features"].detach(), model.features(ours), rtol=1e-5, atol=1e-5)


def test_images_have_a_name_without_their_folders(run):
    (run / "config.yaml").write_text("data:\n  root: /secret/place/birds/train\n")
    (run / "evaluations.json").write_text(json.dumps({"knn": KNN}))
    card = _card(run)
    assert card.data.eval_results[0].dataset_name == "birds/train" and "secret" not in card.content


@pytest.mark.parametrize(
    "content",
    [None, {}, {"knn_10": 76.2, "linear": 86.1}, {"knn": {"results": 5}}, {"knn": {"results": {"knn_1": math.nan}}}],
)
def test_without_results_there_is_no_table(run, content):
    """None was made, or by a version that did not say of which step, or none that is a number."""
    if content is not None:
        (run / "evaluations.json").write_text(json.dumps(content))
    card = _card(run)
    assert "## Results" not in card.text and not card.data.eval_results


def test_results_of_other_images_are_not_said_to_be_of_the_run_s(run):
    results = {name: KNN | {"data": data} for name, data in (("knn", "birds"), ("davis", "davis"))}
    (run / "evaluations.json").write_text(json.dumps(results))
    card = _card(run)
    assert [found.dataset_name for found in card.data.eval_results] == ["birds"] * 2 + ["davis"] * 2
    assert "| knn of birds | knn_10 |" in card.text and "| davis | knn_10 |" in card.text


def test_results_that_can_not_be_read_are_one_line(run):
    (run / "evaluations.json").write_text("{")
    with pytest.raises(ConfigError, match=r"evaluations\.json can't be read .*fix or remove it"):
        _card(run)
    assert not (run / "out").exists()


def test_the_settings_on_a_card_are_a_recipe(run):
    """Numbers, ranges, lengths and words under their sections: `--config` takes the YAML as it stands."""
    given = {"optimizer.lr": "0.001", "crops.global_scale": "0.3,0.9", "length": "40 epochs", "model.heads": "2"}
    given |= {"model.layer_scale": "1e-5", "crops.num_local": "2", "head.batch_norm": "true"}
    given |= {"objective.centering": "sinkhorn"}
    recipe = load_recipe(None, given)
    (run / "config.yaml").write_text(dump_recipe(recipe))
    text = _card(run).text.partition("```yaml")[2].partition("```")[0]
    (run / "again.yaml").write_text(text)
    again = load_recipe(str(run / "again.yaml"), {})
    assert again == recipe and yaml.safe_load(text)["optimizer"]["lr"] == 0.001


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


def test_a_card_says_how_it_was_trained_and_no_path(run):
    (run / "evaluations.json").write_text(json.dumps({"knn": KNN}))
    (run / "config.yaml").write_text(
        f"data: {{root: {run}/birds}}\noptimizer: {{lr: 1e-3}}\nmodel: {{init_from: {run}/secret.pth}}\n"
    )
    card = _card(run).content
    assert "images of birds" in card and "optimizer:\n  lr: 0.001" in card and "76.25" in card
    assert str(run) not in card and "secret" not in card
