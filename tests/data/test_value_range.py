"""Images deeper than 8 bits: their values reach the network, scaled by one range, and nothing is clipped in silence."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.config.crops import all_crops, dino_groups
from dino_ds.config.loading import change_recipe, load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.data.batches import LoaderOptions, MultiCropDataset, augmented_crops
from dino_ds.data.decode import EncodedImage, load_image, open_image
from dino_ds.data.folder import ImageFolder
from dino_ds.data.image_values import ImageValues, Sample, find_misfits, look_at_values
from dino_ds.data.images import UnreadableImage, ValueRange, to_unit
from dino_ds.data.multicrop import EvalCrop, MultiCrop
from dino_ds.data.normalization import IMAGENET, STD, with_image_settings
from dino_ds.engine import distributed
from dino_ds.errors import ConfigError
from tests.data.files import Arrays, Files, decode_rgb, encoded, photo, png16, ppm, put, tiff
from tests.ranks import run_on_ranks

_RNG = np.random.default_rng(0)
GRAY, RGB = (_RNG.integers(0, 65536, shape, dtype=np.uint16) for shape in ((9, 7), (9, 7, 3)))
SIGNED = _RNG.integers(-(2**15), 2**15, (9, 7)).astype("i2")
FLOAT = _RNG.normal(size=(9, 7)).astype(np.float32)


def decoded(data: bytes, value_range: ValueRange) -> np.ndarray:
    return EncodedImage(data, "file", 10**7, value_range).decode()


def test_pngs_tiffs_and_jpeg2000_keep_every_value():
    """Pillow alone gives the high byte of 16-bit RGB."""
    np.testing.assert_array_equal(EncodedImage(png16(RGB), "file", None).values(), RGB)
    for form, how in (("PNG", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("JPEG2000", {})):
        data = encoded(Image.fromarray(GRAY), form, **how)
        np.testing.assert_array_equal(EncodedImage(data, "file", None).values(), GRAY)


@pytest.mark.parametrize("open_file", [load_image, open_image])
def test_a_file_that_a_class_has_opened_must_keep_its_bits(open_file):
    """Pillow's RGB of 12 bits in a 16-bit PNG would have 16 levels."""
    source = Arrays(Image.open(io.BytesIO(png16(RGB % 4096))))
    with pytest.raises(UnreadableImage, match=r"arrays/0 .more than 8 bits a channel, and Pillow's RGB has 8"):
        open_file(source, 0, None)


def test_what_would_be_squeezed_is_refused():
    for data in (png16(RGB[:, :, :2]), ppm(RGB, 65535)):
        with pytest.raises(UnreadableImage, match=r"more than 8 bits a channel can't be read from .* make it RGB PNG"):
            decoded(data, (0, 65535))
    for data in (png16(GRAY), png16(RGB), tiff(FLOAT)):
        with pytest.raises(UnreadableImage, match=r"deeper than 8 bits, and no data.value_range"):
            decode_rgb(data, "file", None)


def test_values_are_scaled_exactly_or_named():
    np.testing.assert_allclose(to_unit(SIGNED, (-32768, 32767), "x"), (SIGNED + 32768.0) / 65535, atol=1e-7)
    far = np.array([[2**30, 2**30 + 50, 2**30 + 100]])
    np.testing.assert_allclose(to_unit(far, (2**30, 2**30 + 100), "x"), [[0, 0.5, 1]], atol=1e-7)
    np.testing.assert_array_equal(to_unit(np.full((1, 1), 255, np.uint8), (0, 9), "x"), [[1]])
    for values, range_, reason in (
        (GRAY, (0, 4095), rf"uint16 values, {GRAY.min()} to {GRAY.max()}: beyond data.value_range 0,4095"),
        (FLOAT, (0, 1), "float32 values, -.* beyond data.value_range 0,1"),
        (np.array([[0, np.nan]]), (0, 1), "NaN or infinite pixels"),
        (np.array([[0, np.inf]]), (0, 1), "NaN or infinite pixels"),
        (np.array([["a"]]), (0, 1), "not an image"),
    ):
        with pytest.raises(UnreadableImage, match=reason):
            to_unit(values, range_, "x")
    with pytest.raises(UnreadableImage, match="NaN"):
        decoded(tiff(np.where(FLOAT > 1, np.float32("nan"), FLOAT)), (-9, 9))


def test_evaluations_crop_deep_images_as_those_of_8_bits():
    """8-bit resizing rounds to levels."""
    image = photo(120, 90)
    deep = np.asarray(image).astype(np.float32) / 255
    crop = EvalCrop(32, IMAGENET)
    levels = (crop(deep) - crop(image)) * torch.tensor(STD).view(3, 1, 1) * 255
    assert levels.abs().max() <= 1 and levels.abs().mean() <= 0.3


def crops_of(source, value_range) -> list[torch.Tensor]:
    crops = MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 3), "dino")
    dataset = MultiCropDataset(source, crops, LoaderOptions(augment="device", value_range=value_range))
    return [view for epoch in range(4) for view in all_crops(augmented_crops(dataset.__getitems__([(epoch, 0)])))]


@pytest.mark.parametrize("scale", [1, 257])
def test_the_same_picture_in_8_and_in_16_bits_gives_the_same_crops(scale):
    """To rounding of FP32 where both go as FP32; a run of 8 bits alone rounds to levels when it resizes."""
    image = photo(120, 90)
    deep, shallow = Files(png16(np.asarray(image).astype(np.uint16) * scale)), Files(encoded(image, "PNG"))
    range_ = (0.0, 255.0 * scale)
    for ours, theirs in zip(crops_of(deep, range_), crops_of(shallow, range_), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)  # a hue turns with the last bits of nearly gray
    for ours, theirs in zip(crops_of(deep, range_), crops_of(shallow, None), strict=True):
        levels = (ours - theirs)[0] * torch.tensor(STD).view(3, 1, 1) * 255
        assert levels.abs().mean() <= 1


@pytest.mark.parametrize(
    ("types", "low", "high", "chosen"),
    [
        ("uint16", 0, 200, (0, 255)),
        ("uint16", 3, 256, (0, 1023)),
        ("uint16", 0, 16384, (0, 65535)),
        ("float32", 0, 254.5, (0, 255)),
        ("float32", 0, 1.5, "0,1.5"),
        ("int32", -1024, 3071, "-1024,3071"),
        ("float32", -0.51234, 1, "-0.52,1"),
        ("float32 uint16", 0, 1, "0,1"),
    ],
)
def test_auto_takes_what_covers_the_sample_or_says_the_flag(types, low, high, chosen):
    sample = Sample(images=64, values=[ImageValues("a.tif", kind, low, high) for kind in types.split()] * 32)
    if isinstance(chosen, tuple):
        assert sample.decide()[0] == chosen
        return
    with pytest.raises(ConfigError) as refused:
        sample.decide()
    found = f"deeper than 8 bits: {types.replace(' ', ' and ')}, values {low} to {high}"
    assert found in str(refused.value) and f"give --data.value_range {chosen}, or wider" in str(refused.value)
    given = load_recipe(None, {"data.value_range": chosen}).data.known_range
    assert given is not None and given[0] <= low and high <= given[1]


def test_images_that_a_range_does_not_fit_are_counted_and_one_is_named():
    dark, blank = ImageValues("dark.tif", "float32", 0, 1), ImageValues("blank.tif", "uint16", 7, 7)
    good, bright = (ImageValues(f"{high}.png", "uint16", 0, high) for high in (3000, 5000))
    skipped, faint = find_misfits([good, bright, dark, blank, dark], (0, 4095))
    assert skipped.startswith("1 of 5 images") and "5000.png (uint16 values, 0 to 5000: beyond" in skipped
    assert faint.startswith("2 of 5 images") and "use less than 1% of data.value_range 0,4095" in faint
    assert find_misfits([good, blank], (0, 4095)) == []
    assert "deeper than 8 bits, and no data.value_range" in find_misfits([good], None)[0]


def test_a_few_deep_files_among_many_are_found(tmp_path):
    put(tmp_path, {f"{i}.jpg": encoded(photo(8, 8), "JPEG") for i in range(200)})
    put(tmp_path, {"deep.png": png16(GRAY % 1000), "broken.png": b"no image", "nan.tif": tiff(FLOAT * np.nan)})
    chosen, words = look_at_values([ImageFolder(str(tmp_path))], 3).decide()
    assert chosen == (0, 1023)
    assert words.startswith("1 of 1 images") and f" to {(GRAY % 1000).max()}; data.value_range 0,1023, 8-bit " in words


def recipe_for(in_chans: int = 3, value_range: str = "auto") -> Recipe:
    return load_recipe(None, {"model.in_chans": str(in_chans), "data.value_range": value_range})


def test_sources_of_arrays_and_their_channels():
    deep = Arrays(*[np.full((4, 4, 5), 1000 * i, np.uint16) for i in range(20)])
    assert with_image_settings(recipe_for(5), deep)[0].data.value_range == (0, 65535)
    assert with_image_settings(recipe_for(5, "-5,20000"), deep)[0].data.value_range == (-5, 20000)
    assert load_image(deep, 1, (0, 2000), 5).tolist() == np.full((4, 4, 5), 0.5).tolist()
    with pytest.raises(UnreadableImage, match=r"arrays/1 \(5 channels, 3 are wanted\)"):
        load_image(deep, 1, (0, 2000))
    with pytest.raises(ConfigError, match=r"is 3, .* data\.source folder have 5 channels; set --model\.in_chans 5$"):
        with_image_settings(recipe_for(3), deep)


def _chosen_and_refused(root: Path) -> tuple[object, list[str], str]:
    mine, others = (ImageFolder(str(root / str(number))) for number in (distributed.rank(), 1 - distributed.rank()))
    recipe, notes = with_image_settings(recipe_for(), mine)
    with pytest.raises(ConfigError) as refused:
        with_image_settings(recipe_for(), others)
    return recipe.data.value_range, notes, str(refused.value)


def test_two_ranks_agree(tmp_path):
    put(tmp_path, {"0/a.tif": png16(GRAY % 3000), "1/a.tif": tiff(FLOAT)})
    first, second = run_on_ranks(_chosen_and_refused, tmp_path)
    assert first == second and first[0] == (0, 4095) and "float32" in first[2]


def test_the_recipe_takes_auto_or_two_numbers():
    for text, value in (("auto", "auto"), ("0,4095", (0, 4095)), ("[-1024, 3071.5]", (-1024, 3071.5))):
        recipe = load_recipe(None, {"data.value_range": text})
        assert recipe.data.value_range == value and change_recipe(recipe, {"seed": "1"}).data.value_range == value
    for text in ("4095", "0,1,2", "5,5", "9,0", "0,nan", "0,inf", "0,1e300", "0,1e-300", "a,b", "12-bit"):
        with pytest.raises(ConfigError, match=r"--data.value_range: .* is not (auto, nor two numbers|a range)"):
            load_recipe(None, {"data.value_range": text})
