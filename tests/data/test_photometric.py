"""Photometric augmentation on the device: torchvision's float operations, each crop with its own parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F

from dino_ds.config.crops import dino_groups
from dino_ds.data import photometric
from dino_ds.data.multicrop import AUGMENTATIONS, AugmentationParams, CropParameters, MultiCrop
from dino_ds.data.normalization import IMAGENET, MEAN, STD, Normalization
from dino_ds.data.photometric import augment, gaussian_blur
from tests.data.files import photo

pytestmark = pytest.mark.numerical

LEVEL = 1 / 255
NORMALIZE = IMAGENET.offset_and_factor()
NOTHING = CropParameters((0, 0, 1, 1), False, (), False, None, False)


def crops(count: int, size: int = 32, channels: int = 3) -> torch.Tensor:
    """uint8 (n, h, w, c): photographs with noise, pure colors and gray."""
    some = torch.from_numpy(np.stack([np.asarray(photo(size + i, size + i))[-size:, -size:] for i in range(count)]))
    some[0, : size // 2] = 128
    some[0, size // 2 :, :, 1:] = 0
    return some[..., [0, 1, 2, 1, 0][:channels]].contiguous()


def as_floats(some: torch.Tensor) -> torch.Tensor:
    return some.permute(0, 3, 1, 2) / 255


def pixels(out: torch.Tensor) -> torch.Tensor:
    return out * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)


def changed_by_torchvision(image, view: CropParameters, blur, threshold: float):
    """An image of Pillow's or a float tensor, in the order of DINO's Compose."""
    image = F.horizontal_flip(image) if view.flip else image
    for name, factor in view.jitter:
        image = getattr(F, f"adjust_{name}")(image, factor)
    image = F.rgb_to_grayscale(image, num_output_channels=3) if view.gray else image
    image = image if view.blur_radius is None else blur(image, view.blur_radius)
    return F.solarize(image, threshold) if view.solarize else image


def reference(some: torch.Tensor, views: list[CropParameters]) -> torch.Tensor:
    def blur(image, radius):
        return F.gaussian_blur(image, [13, 13], [radius] * 2)

    crops = zip(as_floats(some), views, strict=True)
    return torch.stack([changed_by_torchvision(image, view, blur, 128 / 255) for image, view in crops])


def augmented(some: torch.Tensor, views: list[CropParameters]) -> torch.Tensor:
    channels = some.shape[-1]
    normalize = Normalization.usual(channels).offset_and_factor()
    return augment(some, [AugmentationParams.build(views, channels)], normalize)


@pytest.mark.parametrize("augmentation", sorted(AUGMENTATIONS))
def test_the_chain_equals_torchvisions_for_drawn_parameters(augmentation):
    """Every crop has its own operations in its own order. 1e-4: hue divides by the chroma of grayish pixels."""
    multicrop = MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 6), augmentation)
    views = [view for seed in range(30) for view in multicrop.sample(100, 80, seed)]
    some = crops(len(views))
    out, expected = pixels(augmented(some, views)), reference(some, views)
    solarized = torch.tensor([view.solarize for view in views])
    torch.testing.assert_close(out[~solarized], expected[~solarized], rtol=0, atol=1e-4)
    torch.testing.assert_close(out[solarized], expected[solarized], rtol=0, atol=LEVEL + 1e-4)


def test_crops_smaller_than_the_blur_are_blurred():
    some = torch.rand(2, 3, 4, 5)
    out = gaussian_blur(some, torch.tensor([0.5, 2.0]))
    expected = torch.stack([F.gaussian_blur(x, [9, 7], [s, s]) for x, s in zip(some, (0.5, 2.0), strict=True)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert gaussian_blur(torch.rand(1, 3, 1, 1), torch.tensor([1.0])).shape == (1, 3, 1, 1)


def test_nothing_waits_for_the_device():
    """On the meta device there are no values: whatever the host would have to read raises an error."""
    views = MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.05, 0.4), 30), "dino").sample(100, 80, 0)
    plan = AugmentationParams.build(views, 3).moved(lambda tensor: tensor.to("meta"))
    out = augment(torch.empty(len(views), 16, 16, 3, dtype=torch.uint8, device="meta"), [plan], NORMALIZE.to("meta"))
    assert out.shape == (len(views), 3, 16, 16) and out.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_a_gpu_gives_what_the_cpu_gives_and_is_not_waited_for(fused, monkeypatch):
    views = MultiCrop(dino_groups(64, (0.4, 1.0), 16, (0.05, 0.4), 30), "dino").sample(100, 80, 0)
    some, plan = crops(len(views), 64), AugmentationParams.build(views, 3)
    there, moved = some.cuda(), plan.moved(torch.Tensor.cuda)
    monkeypatch.setattr(photometric, "TAKEN", {"augmentation"} if fused else set())
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = augment(there, [moved], NORMALIZE.to(there.device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(pixels(out.cpu()), pixels(augment(some, [plan], NORMALIZE)), rtol=0, atol=LEVEL)


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels_than_rgb_keep_what_applies_to_them(channels):
    some = crops(4, channels=channels)
    colors = (("saturation", 0.5), ("hue", 0.1))
    views = [replace(NOTHING, jitter=colors, gray=True), NOTHING, replace(NOTHING, jitter=(("contrast", 0.7),))]
    views.append(replace(NOTHING, jitter=(*colors, ("brightness", 1.3)), flip=True, blur_radius=1.0, solarize=True))
    out = augmented(some, views) * (sum(STD) / 3) + sum(MEAN) / 3
    x = as_floats(some)
    torch.testing.assert_close(out[:2], x[:2], rtol=0, atol=1e-6)
    contrast = (0.7 * x[2] + 0.3 * x[2].mean()).clamp(0, 1)
    torch.testing.assert_close(out[2], contrast, rtol=0, atol=1e-6)
    bright = F.gaussian_blur((x[3].flip(-1) * 1.3).clamp(0, 1), [13, 13], [1.0, 1.0])
    torch.testing.assert_close(out[3], torch.minimum(bright, 1 - bright), rtol=0, atol=1e-5)
