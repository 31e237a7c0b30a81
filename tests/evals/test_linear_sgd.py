"""The linear probe by SGD against torch's own layers and optimizer, one learning rate at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import dino_ds.evals.linear_sgd as module
from dino_ds.data.base import UnreadableImage
from dino_ds.data.cutting import RandomCrop
from dino_ds.data.multicrop import to_tensor
from dino_ds.data.normalisation import IMAGENET, STD, Normalisation
from dino_ds.evals.context import EvalContext, Settings
from dino_ds.evals.features import GaveUp
from dino_ds.evals.linear_sgd import Probes, augmented_batches, kinds_of, linear_sgd, probe_inputs
from tests.ranks import run_on_ranks
from tests.weights import originals
from tests.weights.test_weights import _backbone

pytestmark = pytest.mark.numerical

RATES = (0.5, 5.0, 20.0)  # of 256 images: for the 5 of a batch here a fiftieth of it
SETTINGS = Settings(epochs=3, batch=5, workers=0, seed=4)


class _Blobs:
    """Noise images, brighter in one class than in the other; 13 of them, so that the last batch is short."""

    def __init__(self, seed=0, images=13, classes=("dark", "bright")):
        self._generator_seed, self.classes = seed, classes
        self.labels = [classes.index(("dark", "bright")[i % 2]) for i in range(images)]

    def __len__(self):
        return len(self.labels)

    def load(self, index):
        pixels = np.random.default_rng([self._generator_seed, index]).integers(0, 160, (40, 50, 3))
        if index == 12 and self._generator_seed == 2:
            raise UnreadableImage("12", "broken")
        return Image.fromarray((pixels + 60 * (index % 2)).astype(np.uint8))

    def name(self, index):
        return str(index)


def _context(train=None, test=None, **more):
    sources = (train or _Blobs(), test or _Blobs(seed=1))
    return EvalContext(_backbone(), SETTINGS, torch.device("cpu"), lambda: sources, progress=False, **more)


def test_the_tokens_of_the_last_blocks():
    """Against a walk through the blocks, one image at a time, as the reference's get_intermediate_layers; registers
    are left out."""
    for name in ("vit_small_patch16_224", "vit_small_patch14_reg4_dinov2"):
        model = _backbone(name)
        images = originals.images()
        found = model.last_tokens(images, 2)
        assert found.shape == (2, 3, 1 + 16, 64)
        torch.testing.assert_close(found[-1, :, 0], model.features(images))
        torch.testing.assert_close(found[-1, :, 1:], model.patch_tokens(images).flatten(1, 2))
        shallow = model.vit
        shallow.blocks = shallow.blocks[:1]
        torch.testing.assert_close(found[0, :, 0], model.features(images))
        assert model.last_tokens(images, 9).shape[0] == 1


def test_what_goes_in():
    """CLS of the blocks, the last one's at the end, then the mean of its patches."""
    tokens = torch.randn(4, 2, 1 + 6, 3)
    inputs = probe_inputs(tokens)
    assert torch.equal(inputs[:, :12], torch.cat([tokens[i, :, 0] for i in range(4)], dim=1))
    torch.testing.assert_close(inputs[:, 12:], tokens[3, :, 1:].mean(dim=1))
    probes = Probes(kinds_of(4), 3, 2, RATES, 0, torch.device("cpu"))
    parts = {kind: probes._select(inputs, kind)[:, :-1] for kind in probes.kinds}
    assert torch.equal(parts[1, False], inputs[:, 9:12])
    assert torch.equal(parts[1, True], inputs[:, 9:])
    assert torch.equal(parts[4, False], inputs[:, :12])
    assert torch.equal(parts[4, True], inputs)


def test_equals_torch_s_layers_and_sgd(monkeypatch):
    """One nn.Linear and one torch.optim.SGD with CosineAnnealingLR for each kind and learning rate, as the reference
    trains it, on the same stream of augmented images: the same weights but for FP32 rounding, 1e-4."""
    monkeypatch.setattr(module, "RATES", RATES)
    context = _context()
    probes = Probes(kinds_of(2), 64, 2, RATES, SETTINGS.seed, context.device)
    start = [weight.clone() for weight in probes.weights]
    stream = list(augmented_batches(context))
    assert [(epoch, len(labels)) for epoch, _, labels in stream] == [(e, n) for e in range(3) for n in (5, 5, 3)]
    module._train(context, probes, 3 * 64)
    for kind, first, ours in zip(probes.kinds, start, probes.weights, strict=True):
        for i, rate in enumerate(RATES):
            layer = nn.Linear(first.shape[2] - 1, 2)
            layer.weight.data, layer.bias.data = first[i, :, :-1].clone(), first[i, :, -1].clone()
            optimizer = torch.optim.SGD(layer.parameters(), rate * SETTINGS.batch / 256, momentum=0.9, weight_decay=0)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SETTINGS.epochs, eta_min=0)
            epoch = 0
            for now, images, labels in stream:
                if now != epoch:
                    scheduler.step()
                    epoch = now
                tokens = context.backbone.last_tokens(images, 2)
                x = torch.cat([tokens[b, :, 0] for b in range(2 - kind[0], 2)], dim=1)
                x = torch.cat((x, tokens[-1, :, 1:].mean(dim=1)), dim=1) if kind[1] else x
                optimizer.zero_grad()
                F.cross_entropy(layer(x), labels).backward()
                optimizer.step()
            torch.testing.assert_close(ours[i, :, :-1], layer.weight.data, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours[i, :, -1], layer.bias.data, rtol=1e-4, atol=1e-4)
            assert (ours[i] - first[i]).abs().max() > 1e-3


def _trained():
    """Every rank's own weights, by learning rate, and what is reported."""
    context = _context()
    probes = Probes(kinds_of(2), 64, 2, RATES, SETTINGS.seed, context.device)
    module._train(context, probes, 3 * 64)
    weights = {RATES[i]: [w[row].numpy() for w in probes.weights] for row, i in enumerate(probes._mine)}
    return weights, linear_sgd(_context())


def test_two_ranks_give_what_one_gives():
    """Three learning rates, two on one rank; batches of 5 and 3 are unequal shares. The features of a batch are in
    another order on two ranks: sums round differently, 1e-4."""
    weights, found = _trained()
    both = run_on_ranks(_trained)
    assert both[0][1] == pytest.approx(found, abs=1e-6) and both[1][1] == both[0][1]
    assert sorted(both[0][0].keys() | both[1][0].keys()) == sorted(RATES) and len(both[0][0]) == 2
    for rate, mine in {**both[0][0], **both[1][0]}.items():
        for one, other in zip(mine, weights[rate], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_the_report_has_the_best_of_each_kind_and_what_was_unreadable():
    found = linear_sgd(_context())
    assert found["linear_sgd"] == max(found.values()) > 60  # chance is 50
    assert found.keys() == {"linear_sgd", *(f"linear_sgd_{n}{mean}" for n in (1, 2) for mean in ("", "_mean"))}
    # Classes go by their names; of a network of one block there are two kinds.
    assert linear_sgd(_context(test=_Blobs(seed=1, classes=("bright", "dark")))) == found
    assert kinds_of(1) == [(1, False), (1, True)]
    context = _context(_Blobs(seed=2))
    linear_sgd(context)
    assert context.notes == ["left out, unreadable: 12 (broken)"]


def test_training_is_given_up_between_batches():
    context = _context(give_up=lambda: True)
    probes = Probes(kinds_of(2), 64, 2, RATES, SETTINGS.seed, context.device)
    with pytest.raises(GaveUp):
        module._train(context, probes, 3 * 64)


def test_random_crops_follow_from_the_seed():
    """The whole image where the scale asks for it; both ways round; grey planes as the channels of a color image."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    crop = RandomCrop(16, IMAGENET)
    assert torch.equal(crop(image, 3), crop(image, 3)) and not torch.equal(crop(image, 3), crop(image, 4))
    flat = Image.fromarray(np.full((40, 60, 3), 7, dtype=np.uint8))
    torch.testing.assert_close(crop(flat, 5), to_tensor(flat.resize((16, 16)), IMAGENET))
    assert RandomCrop(16, Normalisation.usual(2))(np.asarray(image)[:, :, :2], 3).shape == (2, 16, 16)
    assert crop._cut(image, (0, 0, 60, 40), False) == image.resize((16, 16), Image.Resampling.BILINEAR)
    gradient = Image.fromarray(np.tile(np.arange(60, dtype=np.uint8)[None, :, None], (40, 1, 3)))
    rising = [bool((crop(gradient, seed)[0, 8].diff() >= 0).all()) for seed in range(60)]
    assert 15 < sum(rising) < 45
    # Red says the column, green the row: 8 to 100 % of the area are seen.
    rows, columns = np.mgrid[:100, :100] * 2
    places = Image.fromarray(np.stack((columns, rows, rows), axis=-1).astype(np.uint8))
    areas = []
    for seed in range(300):
        across, down = (crop(places, seed)[i] for i in (0, 1))
        areas.append(
            float(np.ptp(across.numpy()) * STD[0] * np.ptp(down.numpy()) * STD[1] * (255 / 2 / 99 * 16 / 15) ** 2)
        )
    assert 0.06 < min(areas) < 0.12 and 0.9 < max(areas) < 1.1
