"""Weights out and in, with how images are prepared: what another program computes with ours is the same."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import nn

import dino_ds
from dino_ds.commands.export import run as export
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.evals.features import crop_pct_of
from dino_ds.models.foreign import build_backbone
from dino_ds.models.specs.backbones import BACKBONES, ViTSpec
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.specs.foreign import ForeignSpec
from dino_ds.models.vit import VisionTransformer
from dino_ds.options.definition import ExportOptions
from dino_ds.weights.export import FORMATS, export_timm
from dino_ds.weights.load import Backbone, load
from tests.sample import sampled
from tests.weights.originals import assert_same, images, randomised, write_native

KINDS = ["vit_small_patch16_224", "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"]
KINDS += ["vit_giant_patch14_dinov2", "vit_giant_patch14_reg4_dinov2"]
SIZE, PATCH = 32, 8


def _backbone(name: str = KINDS[0], interpolation: str = "antialias", size: int = SIZE, depth: int = 2) -> Backbone:
    """Narrow blocks of a kind, weights that matter everywhere, and what a run writes beside them."""
    torch.manual_seed(0)
    arch = dataclasses.replace(BACKBONES[name], patch_size=PATCH, width=64, depth=depth, heads=1)
    if arch.swiglu:
        arch = dataclasses.replace(arch, mlp_ratio=2.75 * 2)  # 176 = (int(64 * 4 * 2 / 3) + 7) // 8 * 8, as DINOv2
    vit = VisionTransformer(arch, size, BackboneOptions(pos_embed_interpolation=interpolation))
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.2)
    about = {
        "timm_name": name, "timm_arguments": {"img_size": size}, "pos_embed_interpolation": interpolation,
        "architecture": dataclasses.asdict(arch), "step": 3, "images": 24,
    }  # fmt: skip
    return Backbone(vit, size, "a test", about)


@pytest.mark.parametrize("said", ["hf_hub:someone/else", "../../elsewhere", "resnet", 7])
def test_only_a_name_that_timm_has_goes_into_an_export(tmp_path, said):
    """teacher.json of a run folder may say anything."""
    model = _backbone()
    model.about["timm_name"] = said
    export_timm(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architecture"] == KINDS[0]


@pytest.mark.parametrize(("name", "size"), sampled(itertools.product(KINDS, [32, 48])))
def test_timm_builds_the_exported_folder(name, size, tmp_path):
    """At other sizes too."""
    model = _backbone(name, size=size)
    del model.about["timm_arguments"]  # the export finds its own
    _read_back(model, tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, dynamic_img_size=True).eval()
    torch.testing.assert_close(theirs(images(40, 24)), model.features(images(40, 24)), rtol=1e-5, atol=1e-5)


NARROW = {"depth": 1, "embed_dim": 64, "num_heads": 2}
FOREIGN = [
    ("vit_medium_patch16_gap_240", NARROW | {"qk_norm": True}, 3),
    ("vit_small_patch32_224", NARROW | {"class_token": False, "global_pool": "avg"}, 4),
    ("deit3_small_patch16_224", NARROW | {"init_values": None}, 1),
    ("eva02_tiny_patch14_224", NARROW | {"num_reg_tokens": 2, "patch_size": 16}, 3),
    ("resnet18", {"channels": [8, 8, 16, 16], "global_pool": "max", "layers": [1, 1, 1, 1]}, 4),
    ("convnext_atto", {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16], "ls_init_value": None}, 3),
]
"""Other networks of timm's, with arguments that change what is computed: None is the default, as in training."""


def _read_back(model: Backbone, place) -> None:
    """timm, transformers where it is installed, and dino_ds compute the features of `model` from its exports: 1e-5 of
    the largest; the first two take nothing from elsewhere, and leave nothing out."""
    export_timm(model, place / "out")
    given = images(model.image_size, model.image_size, channels=model.network.spec.in_chans)
    ours, folder = model.features(given), place / "out"
    found = [timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(given), load(folder).features(given)]
    if importlib.util.find_spec("transformers"):
        import transformers

        theirs, info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        found.append(theirs.eval()(pixel_values=given).pooler_output)
    FORMATS["safetensors"](model, place / "a.safetensors")
    found.append(load(place / "a.safetensors").features(given))
    about = json.loads((place / "a.json").read_text())
    if "timm_arguments" in about:  # else only dino_ds reads it, as the export says
        name = json.loads((folder / "config.json").read_text())["architecture"]
        empty = timm.create_model(name, num_classes=0, **about["timm_arguments"]).eval()
        empty.load_state_dict(safetensors.torch.load_file(place / "a.safetensors"), strict=True)
        found.append(empty(given))
    for features in found:
        assert_same(features, ours)


@pytest.mark.parametrize(
    ("swiglu", "rope", "registers", "scale", "channels", "patch"),
    sampled(
        itertools.product([False, True], [None, "separate"], [0, 2], [None, 0.5], [1, 3, 4], [8, 16]),
        lambda cell: tuple(itertools.combinations(cell, 2)),
    ),
)
def test_vits_are_read_back(tmp_path, swiglu, rope, registers, scale, channels, patch):
    """Each pair of options. timm's rotary ViTs all have LayerScale: the export gives them one of ones."""
    how = {"mlp_ratio": 6.0 if swiglu else 4.0, "norm_eps": 1e-5 if rope else 1e-6, "qkv_bias": not rope or swiglu}
    spec = ViTSpec(patch, 64, 2, 2, swiglu=swiglu, rope=rope, registers=registers, in_chans=channels, **how)
    spec = dataclasses.replace(spec, layer_scale=scale)
    about = {"mean": 0.5, "std": 0.25, "step": 1}
    _read_back(Backbone(randomised(build_backbone(spec, SIZE)), SIZE, "a test", about), tmp_path)


@pytest.mark.parametrize(("name", "arguments", "channels"), FOREIGN)
def test_other_networks_are_read_back(tmp_path, name, arguments, channels):
    network = randomised(build_backbone(ForeignSpec(name, channels, json.dumps(arguments, sort_keys=True)), 64))
    _read_back(Backbone(network, 64, "a test", {"mean": 0.5, "std": 0.25}), tmp_path)


def test_what_no_other_program_builds_is_refused_in_words(tmp_path):
    for change in ({"rms_norm": True}, {"cls_norm": True}, {"rope_min_period": 1.0, "rope_max_period": 9.0}):
        spec = ViTSpec(8, 64, 1, 2, rope="separate", norm_eps=1e-5, **change)
        model = Backbone(build_backbone(spec, SIZE), SIZE, "a test", {})
        with pytest.raises(ConfigError, match="with these norms or rotary positions, which neither timm nor transf"):
            export_timm(model, tmp_path / "out")


def test_a_run_folder_gives_features_patches_and_attention(tmp_path):
    model = _backbone(KINDS[2])
    FORMATS["safetensors"](model, tmp_path / "teacher.safetensors")
    loaded = dino_ds.load(tmp_path)
    given = images(40, 24)
    assert loaded.features(given).equal(model.features(given)) and loaded(given).equal(loaded.features(given))
    patches, attention = loaded.patch_tokens(given), loaded.attention(given)
    assert patches.shape == (3, 5, 3, 64) and attention.shape == (3, 1, 5, 3)
    whole = loaded.vit.last_attention(given)
    torch.testing.assert_close(attention.flatten(2), whole[:, :, 0, -15:], rtol=1e-5, atol=1e-7)
    assert patches[:, 1, 2].equal(model.vit.tokens(given)[:, 1 + 4 + 5])
    # The last block by hand.
    assert (attention > 0).all() and (attention.sum(dim=(2, 3)) < 1).all()
    assert not loaded.features(given).requires_grad


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("a.safetensors", "hello", "not a readable"),
            ("a.pth", "hello", "not a readable torch file"),
            ("b.pth", "PK\x03\x04 and no more", "not a readable"),
            ("a.safetensors", "version https://git-lfs.github.com/spec/v1\noid", "Git LFS in place .*: git lfs pull"),
            ("a.pth", "<!DOCTYPE html><html>", "a web page in place of the file: download it again"),
        ],
    )
    def test_no_checkpoint(self, tmp_path, name, content, said):
        (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path / name)

    def test_nothing_there(self, tmp_path):
        with pytest.raises(CheckpointError, match="does not exist"):
            load(tmp_path / "nothing")
        with pytest.raises(CheckpointError, match=r"n \.\.\. does not exist; give a run folder"):
            load("n" * 5000)  # longer than a name may be
        with pytest.raises(CheckpointError, match=r"neither a run .* \(no model\.safetensors\)"):
            load(tmp_path)


def test_the_tokens_of_the_last_blocks():
    """Against a walk through the blocks, one image at a time, as the reference's; registers are left out."""
    for name in ("vit_small_patch16_224", "vit_small_patch14_reg4_dinov2"):
        model = _backbone(name)
        batch = images()
        found = model.last_tokens(batch, 2)
        assert found.shape == (2, 3, 1 + 16, 64)
        torch.testing.assert_close(found[-1, :, 0], model.features(batch))
        torch.testing.assert_close(found[-1, :, 1:], model.patch_tokens(batch).flatten(1, 2))
        shallow = model.vit
        shallow.blocks = shallow.blocks[:1]
        torch.testing.assert_close(found[0, :, 0], model.features(batch))
        assert model.last_tokens(batch, 9).shape[0] == 1


@pytest.mark.slow
def test_onnxruntime_computes_what_the_model_does(tmp_path):
    """Features of any batch, within the rounding of other kernels; how images are prepared is in the file."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = _backbone()
    FORMATS["onnx"](model, tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    assert json.loads(session.get_modelmeta().custom_metadata_map["mean"]) == pytest.approx(model.normalization.mean)
    for count in (1, 5):
        batch = images(SIZE, SIZE, count)
        (features,) = session.run(None, {"images": batch.numpy()})
        torch.testing.assert_close(torch.from_numpy(features), model.features(batch), atol=1e-4, rtol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def _image(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(("side", "longer"), [(24, 30), (32, 40), (48, 64), (100, 150)])  # of odd borders timm cuts
@pytest.mark.parametrize("of_a_run", [False, True])  # the other half
def test_an_export_prepares_images_as_evaluations_do(tmp_path, side, longer, of_a_run):
    """timm's transform gives our pixels, of images as large as most of the run's; weights alone say so."""
    model, source = _backbone(), tmp_path / "a.safetensors"
    for i, sides in enumerate([(side, side), (side, longer), (longer, side)]):
        (tmp_path / "images").mkdir(exist_ok=True)
        _image(*sides).save(tmp_path / f"images/{i}.png")
    FORMATS["safetensors"](model, source)
    if of_a_run:
        source = tmp_path / "run"
        FORMATS["safetensors"](model, tmp_path / "run/teacher.safetensors")
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


def test_the_crop_of_images_with_a_page_a_channel_is_found(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    (tmp_path / "config.yaml").write_text(f"format: 1\nmodel: {{in_chans: 4}}\ndata: {{root: {tmp_path / 'images'}}}")
    (tmp_path / "images").mkdir()
    tifffile.imwrite(tmp_path / "images/0.tif", np.zeros((4, 40, 40), np.uint16), imagej=True)
    assert (crop_pct_of(str(tmp_path), 32), crop_pct_of(str(tmp_path), 40)) == (0.875, 1)


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
        ('{"image_mean": 0.5, "image_std": 0}', "unusable mean or std of 3 channels"),
    ],
)
def test_a_processor_that_can_t_be_applied_is_refused(tmp_path, content, says):
    write_native(None, tmp_path / "hf")
    (tmp_path / "hf/preprocessor_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path / "hf")


def test_an_export_replaces_nothing(tmp_path):
    FORMATS["safetensors"](_backbone(), tmp_path / "teacher.safetensors")
    (tmp_path / "mine.json").write_text("{}")
    itself = "is the file to export: copy it, or name another file with --out"
    for model, out, words in (
        (".", None, itself),
        ("teacher.safetensors", None, itself),
        (".", "mine.safetensors", r"mine\.json is there already"),
        (".", "mine.bin", r"end in \.safetensors"),
    ):
        place = None if out is None else str(tmp_path / out)
        with pytest.raises(ConfigError, match=words):
            export(ExportOptions(model=str(tmp_path / model), format="safetensors", out=place))
    assert (tmp_path / "mine.json").read_text() == "{}" and len(list(tmp_path.iterdir())) == 3
