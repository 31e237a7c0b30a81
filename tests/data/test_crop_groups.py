"""Any layout of crop groups: cut from images, loaded and brought to the device by the names of the groups."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from dino_ds.config.crops import CropGroup, crop_sizes, describe_crops, student_sizes, teacher_sizes
from dino_ds.config.loading import load_recipe
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.loader import Loader
from dino_ds.data.multicrop import MultiCrop, to_tensor
from dino_ds.data.normalisation import IMAGENET
from dino_ds.data.prefetcher import DevicePrefetcher
from tests.data.test_loader import BOTH, CROPS, START, Noise

GRAM = CropGroup("gram", 2, 16, (0.4, 1.0), teachers=("ema",), student=False, augmented=False)
GROUPS = (*CROPS.groups, GRAM)


def test_a_recipe_s_groups_are_dino_s():
    groups = load_recipe(None, {}).groups
    assert describe_crops(groups) == "2x224 + 8x96"
    assert teacher_sizes(groups) == [224] * 2 and student_sizes(groups) == crop_sizes(groups) == [224] * 2 + [96] * 8
    [alone] = load_recipe(None, {"crops.num_local": "0"}).groups
    assert alone == groups[0] and alone.name == "global"


@pytest.mark.slow
@pytest.mark.parametrize(("augment", "workers"), [("worker", 0), ("device", 0)])
def test_a_third_group_reaches_the_device_by_its_name(augment, workers):
    """The other groups' crops are those of a run without it."""
    batches = []
    for groups in (GROUPS, GROUPS[:2]):
        crops = MultiCrop(groups, "low_res")
        loader = Loader(
            Noise(), crops, LoaderOptions(global_batch=8, micro_batch=8, workers=workers, augment=augment), START
        )
        with closing(DevicePrefetcher(loader, torch.device("cpu"))) as fed:
            batches.append(next(itertools.islice(fed, 1, None)))
    with_gram, without = batches
    shapes = {name: [tuple(crop.shape) for crop in crops] for name, crops in with_gram.crops.items()}
    assert shapes == {"global": [(8, 3, 8, 8)] * 2, "local": [(8, 3, 4, 4)], "gram": [(8, 3, 16, 16)] * 2}
    assert list(with_gram.crops) == ["global", "local", "gram"]
    for name, crops in without.crops.items():
        for a, b in zip(with_gram.crops[name], crops, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    seen = [crop for group in GROUPS if group.teachers for crop in with_gram.crops[group.name]]
    assert [crop.shape[-1] for crop in seen] == [8, 8, 16, 16] == teacher_sizes(GROUPS)


@BOTH
def test_a_group_without_augmentation_is_cut_and_flipped_only(augment):
    group, source = replace(GRAM, count=1, size=12, scale=(1.0, 1.0)), Noise(8)
    crops = MultiCrop([group], "low_res")
    with closing(Loader(source, crops, LoaderOptions(global_batch=8, micro_batch=8, augment=augment), START)) as loader:
        batch = next(DevicePrefetcher(loader, torch.device("cpu")))
    [found], whole = batch.crops["gram"], 0
    for index, crop in zip(batch.indices.tolist(), found, strict=True):
        image = to_tensor(source.load(index), IMAGENET)
        whole += any(torch.allclose(crop, some, atol=1e-5) for some in (image, image.flip(2)))
    drawn = [crops.sample(12, 12, seed)[0] for seed in range(100)]
    assert whole > 0 and {crop.flip for crop in drawn} == {True, False}
    assert all(not (crop.jitter or crop.gray or crop.solarize or crop.blur_radius) for crop in drawn)
