"""How images are prepared goes out with weights and comes back in, whoever wrote the files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from dino_ds.commands.export import run as export
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.options.definition import ExportOptions
from dino_ds.weights.export import FORMATS
from dino_ds.weights.load import load
from tests.weights.huggingface import write_native
from tests.weights.test_weights import _backbone

STATISTICS = {"mean": [0.3, 0.4, 0.5], "std": [0.1, 0.2, 0.3], "value_range": [0, 4095]}


def _image(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(("side", "longer"), [(24, 30), (32, 40), (48, 64), (100, 150)])  # of odd borders timm cuts
@pytest.mark.parametrize("of_a_run", [False, True])  # the other half
def test_an_export_prepares_images_as_evaluations_do(tmp_path, side, longer, of_a_run):
    """timm's transform gives dino_ds's pixels and features, of images as large as most of the run's; of weights alone
    where images are not larger than the network's, whose export says so."""
    model, source = _backbone(), tmp_path / "a.safetensors"
    for i, sides in enumerate([(side, side), (side, longer), (longer, side)]):
        (tmp_path / "images").mkdir(exist_ok=True)
        _image(*sides).save(tmp_path / f"images/{i}.png")
    FORMATS["safetensors"][0](model, source)
    if of_a_run:
        source = tmp_path / "run"
        FORMATS["safetensors"][0](model, tmp_path / "run/teacher.safetensors")
        (source / "config.yaml").write_text(f"format: 1\ndata: {{root: {tmp_path / 'images'}}}")
    page = export(ExportOptions(model=str(source), format="timm", out=str(tmp_path / "timm"))).page
    stated = json.loads((tmp_path / "timm/config.json").read_text())["pretrained_cfg"]
    cuts = side > 32 and of_a_run
    assert stated["crop_pct"] == (0.875 if cuts else 1) and f"crop_pct is {stated['crop_pct']:g}" in page
    other = "at most 32 pixels, set it to 1" if cuts else "more than 32 pixels, set it to 0.875"
    assert f"where the shorter side has {other}" in page
    transform = timm.data.create_transform(**timm.data.resolve_data_config(stated))
    for path in (tmp_path / "images").iterdir() if of_a_run or side <= 32 else ():
        ours, theirs = model.preprocess(path), transform(Image.open(path))
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
        cosine = torch.cosine_similarity(*(model.features(pixels[None]) for pixels in (ours, theirs)))
        assert cosine.item() > 0.999


@pytest.mark.parametrize("change", [{}, {"image_mean": 0.5, "image_std": 0.25}], ids=str)
def test_a_processor_is_applied(tmp_path, change):
    """`preprocess` makes of an image what transformers makes of it: 1e-5 of the largest value."""
    transformers = pytest.importorskip("transformers")
    write_native(None, tmp_path / "hf")
    path, image = tmp_path / "hf/preprocessor_config.json", _image(60, 60)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf", backend="pil")
    theirs = processor(image, return_tensors="pt")["pixel_values"][0].float()
    model = load(tmp_path / "hf")
    assert not any("preprocessor" in note for note in model.notes)
    torch.testing.assert_close(model.preprocess(image), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"image_mean": [0.5', "preprocessor_config.json can't be read"),
        ("[1]", r"preprocessor_config.json can.t be read \(it is not a JSON object\)"),
        ('{"do_normalize": "false"}', "do_normalize false is not known to dino_ds, only 1"),
        ('{"rescale_factor": 0}', "rescale_factor 0 is not known to dino_ds, only 0.00392157"),
        ('{"rescale_offset": true}', "rescale_offset True is not known"),
        ('{"image_mean": [0.5], "image_std": [0.5]}', "unusable mean or std of 3 channels"),
        ('{"image_mean": {"r": 1}, "image_std": 0.5}', "unusable mean or std of 3 channels"),
        ('{"image_mean": 0.5, "image_std": 0}', "unusable mean or std of 3 channels"),
    ],
)
def test_a_processor_that_can_t_be_applied_is_refused(tmp_path, content, says):
    write_native(None, tmp_path / "hf")
    (tmp_path / "hf/preprocessor_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path / "hf")


def test_a_processor_without_statistics_is_noted(tmp_path):
    write_native(None, tmp_path / "hf")
    (tmp_path / "hf/preprocessor_config.json").write_text('{"do_normalize": true}')
    note = "preprocessor_config.json has no image_mean or image_std: the usual ones are taken"
    assert note in load(tmp_path / "hf").notes


def test_an_export_replaces_nothing(tmp_path):
    FORMATS["safetensors"][0](_backbone(), tmp_path / "teacher.safetensors")
    (tmp_path / "mine.json").write_text("{}")
    for model, out, words in (
        (".", None, "is what is to be exported: name another file with --out"),
        ("teacher.safetensors", None, "is what is to be exported: name another file with --out"),
        (".", "mine.safetensors", r"mine\.json is there already"),
        (".", "mine.bin", r"end in \.safetensors"),
    ):
        place = None if out is None else str(tmp_path / out)
        with pytest.raises(ConfigError, match=words):
            export(ExportOptions(model=str(tmp_path / model), format="safetensors", out=place))
    assert (tmp_path / "mine.json").read_text() == "{}" and len(list(tmp_path.iterdir())) == 3
