"""Mean, standard deviation and range of a run's images: the user's, those of the weights that it begins with or learns
from, ImageNet's, or measured; one set of numbers for all that is made of the run."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest
import tifffile

import dino_ds
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.data.normalization import Normalization, Stated, with_image_settings
from dino_ds.errors import CheckpointError, ConfigError
from dino_ds.models.foreign import build_backbone
from dino_ds.weights.export import FORMATS
from dino_ds.weights.frozen import stated_images
from dino_ds.weights.load import Backbone
from tests.data.files import Arrays
from tests.run.harness import TINY, log_of
from tests.run.test_stages import flags, run, words_of
from tests.sample import sampled

MEANS, SPREAD = np.array([0.2, 0.4, 0.6, 0.1, 0.3, 0.7]), 0.05
SAID = {1: 0.25, 3: (0.3, 0.5, 0.7), 4: (0.1, 0.2, 0.3, 0.4)}


def _pixels(index: int, channels: int, bits: int) -> np.ndarray:
    noise = np.random.default_rng(index).normal(MEANS[:channels], SPREAD, (40, 48, channels))
    return (np.clip(noise, 0, 1) * (2**bits - 1)).astype(np.uint8 if bits == 8 else np.uint16)


def _recipe(channels: int, **changes: str):
    return load_recipe(None, {**TINY, "model.in_chans": str(channels), **changes})


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for channels, mean in {**SAID, "": None}.items():
        spec = _recipe(channels or 3).model.spec()
        about = {} if mean is None else {"mean": mean, "std": 0.125 if channels == 1 else [0.125] * channels}
        FORMATS["safetensors"](Backbone(build_backbone(spec, 32), 32, "", about), folder / f"{channels}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("channels", "bits", "says", "key"),
    sampled(
        itertools.product([1, 3, 4, 6], [8, 16], [None, "user", "", 1, 3, 4], ["model.init_from", "teacher.source"]),
        lambda cell: tuple(itertools.combinations(cell[:3], 2)) + cell[3:],
    ),
)
def test_each_start_takes_what_is_known(weights, channels, bits, says, key):
    """The user's numbers, else the weights', gray and RGB alike, else ImageNet's in 8 bits, else the images' own."""
    user = {"data.mean": ",".join(["0.5"] * channels), "data.std": ",".join(["0.25"] * channels)}
    changes = user if says == "user" else {} if says is None else {key: str(weights / f"{says}.safetensors")}
    recipe = _recipe(channels, **changes)
    images = Arrays(*[_pixels(i, channels, bits) for i in range(8)])
    found, notes = with_image_settings(recipe, images, stated=lambda: stated_images(recipe))
    mean, said = found.data.mean, [note for note in notes if note.startswith("mean ")]
    assert found.data.known_range == (None if bits == 8 else (0, 65535))
    takes = says in SAID and (channels == says or {channels, says} == {1, 3})
    if says == "user":
        assert mean == (0.5,) * channels and not said
    elif takes:
        theirs = np.broadcast_to(SAID[says], says)
        assert mean == pytest.approx(theirs if channels == says else (theirs.mean(),) * channels)
        assert found.data.std == (0.125,) * channels and f", as {key} {weights}/{says}.safetensors says (" in said[0]
    elif channels in (1, 3) and bits == 8:
        assert mean is None and not said and Normalization.of(found) == Normalization.usual(channels)
    else:
        assert mean == pytest.approx(MEANS[:channels], abs=0.005) and ", measured on 8 images (" in said[0]
        assert found.data.std == pytest.approx([SPREAD] * channels, abs=0.01)


def test_a_run_that_goes_on_keeps_what_it_began_with():
    """One of an earlier version too, whose recipe has no mean of its four channels; a stage as well."""
    images, earlier = Arrays(*[_pixels(i, 4, 16) for i in range(8)]), _recipe(4, **{"data.value_range": "0,65535"})
    stage = change_recipe(earlier, {"stage_start": "restart"})
    for recipe, before in ((_recipe(4), earlier), (stage, None)):
        found, notes = with_image_settings(recipe, images, lambda before=before: before, pytest.fail)
        assert (found.data.mean, found.data.known_range, notes) == (None, (0, 65535), [])


def test_a_range_that_the_weights_state_is_taken_where_it_fits():
    """Signed values, of which the images alone do not tell which are black and white."""
    images = Arrays(*[_pixels(i, 1, 8).astype(np.int16) - 100 for i in range(8)])
    found, notes = with_image_settings(_recipe(1), images, stated=lambda: Stated("it", None, (-1000.0, 1000.0)))
    assert found.data.known_range == (-1000, 1000) and "data.value_range -1000,1000, as it says" in notes
    with pytest.raises(ConfigError, match="which of them are black and white is not known"):
        with_image_settings(_recipe(1), images, stated=lambda: Stated("it", None, (0.0, 1000.0)))


def test_means_that_are_not_known_are_refused(weights, tmp_path):
    shutil.copy(weights / "4.safetensors", tmp_path / "alone.safetensors")
    with pytest.raises(CheckpointError, match="no file says the mean and std of its images' 4 channels: write both, 4"):
        dino_ds.load(tmp_path / "alone.safetensors", heads=2)
    (tmp_path / "alone.json").write_text('{"mean": 0.5, "std": [0.1, 0.2, 0.3, 0.4]}')
    assert dino_ds.load(tmp_path / "alone.safetensors", heads=2).normalization.mean == (0.5,) * 4
    with pytest.raises(ConfigError, match=r"data.mean and data.std can't be measured on images"):
        with_image_settings(_recipe(4), Arrays(np.full((4, 4, 4), np.nan, np.float32)))


@pytest.mark.slow
def test_one_set_of_numbers_for_all_that_is_made_of_a_run(tmp_path):
    """Measured once: the run, its resume, a stage, a student, a run from its teacher, features and exports have it."""
    (root := tmp_path / "root").mkdir()
    for i in range(12):
        tifffile.imwrite(root / f"{i:02d}.tif", _pixels(i, 4, 16), photometric="minisblack", planarconfig="contig")
    base = {**TINY, "data.root": str(root), "model.in_chans": "4", "model.drop_path": "0"}

    def go(name: str, *more: str, **changes: str) -> dict:
        assert run(words_of(tmp_path / name, *more, *flags({**base, **changes}))) is None
        return json.loads((tmp_path / f"{name}/teacher.json").read_text())

    first = go("first", "--max_steps", "1")
    numbers = {key: first[key] for key in ("mean", "std", "value_range")}
    assert numbers["mean"] == pytest.approx(MEANS[:4], abs=0.005) and ", measured on 12 images (" in log_of(
        tmp_path / "first"
    )
    assert load_recipe(str(tmp_path / "first/config.yaml"), {}).data.mean == tuple(numbers["mean"])
    tifffile.imwrite(root / "12.tif", _pixels(0, 4, 16) // 9, photometric="minisblack", planarconfig="contig")
    teach = {"teacher.source": str(tmp_path / "first"), "teacher.distill": "features"}
    again = [
        go("first", "--max_steps", "2", "--resume", "--allow_change", "images"),
        go("stage", "--max_steps", "1", "--from", str(tmp_path / "first"), stage_start="restart"),
        go("student", "--max_steps", "1", **teach),
        go("other", "--max_steps", "1", **{"model.init_from": str(tmp_path / "first")}),
    ]
    dino_ds.embed(str(tmp_path / "other"), root=str(root), out=str(tmp_path / "f.npy"), workers=0)
    dino_ds.export(str(tmp_path / "other"), format="timm", out=str(tmp_path / "timm"))
    features, folder = (json.loads((tmp_path / name).read_text()) for name in ("f.npy.json", "timm/config.json"))
    again += [features["normalization"] | features, folder["pretrained_cfg"] | folder]
    assert [{key: about[key] for key in numbers} for about in again] == [numbers] * len(again)
