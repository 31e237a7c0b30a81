"""Segmentation by a linear layer: counts, metric and fit against slow references, and scenes of colors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dino_ds.errors import DataError
from dino_ds.evals.linear import LinearProbe
from dino_ds.evals.protocols.voc import (
    confusion_of,
    fit_patch_probe,
    pixels_of_patches,
    segment,
    segmentation_scores,
    voc,
)
from tests.evals.protocols.tiny import context_of, label_map, segments
from tests.ranks import run_on_ranks


def _labels(height, width, seed=0):
    labels = np.random.default_rng(seed).choice([0, 3, 20, 255], (height, width))
    return labels.astype(np.uint8)


def test_pixels_are_counted_in_the_patch_of_their_centre():
    labels = _labels(23, 31)
    ours = pixels_of_patches(labels, 4, 5).view(4, 5, 21)
    wanted = np.zeros((4, 5, 21))
    for y in range(23):
        for x in range(31):
            if labels[y, x] != 255:
                wanted[int((y + 0.5) / 23 * 4), int((x + 0.5) / 31 * 5), labels[y, x]] += 1
    assert np.array_equal(ours.numpy(), wanted)


def test_mean_iou_equals_its_definition():
    found, wanted = (torch.from_numpy(_labels(40, 30, seed) % 24) for seed in (0, 1))
    wanted[wanted == 15] = 255  # 255 % 24
    found[found == 15] = 7
    ious = []
    known = wanted != 255
    for c in range(21):
        union = int((((found == c) | (wanted == c)) & known).sum())
        if union:
            ious.append(int(((found == c) & (wanted == c) & known).sum()) / union)
    scores = segmentation_scores(confusion_of(found, wanted))
    assert scores["voc_miou"] == pytest.approx(100 * np.mean(ious), abs=1e-10)
    assert scores["voc_pixel_accuracy"] == pytest.approx(100 * float((found == wanted)[known].double().mean()))
    assert segmentation_scores(confusion_of(wanted % 255, wanted))["voc_miou"] == 100


def _samples():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(300, 4, generator=generator) * torch.tensor([1, 5, 0.2, 1]) + 2
    scores = tokens @ torch.randn(4, 3, generator=generator)
    counts = torch.nn.functional.one_hot((scores + torch.randn(300, 3, generator=generator)).argmax(dim=1), 3).float()
    return tokens, counts * torch.randint(0, 9, (300, 1), generator=generator)


def _fit(parts):
    from dino_ds.engine import distributed

    tokens, counts = _samples()
    rank, world = distributed.rank(), distributed.world_size()
    mine = [torch.arange(rank, 300, world)[i::parts] for i in range(parts)]
    return fit_patch_probe([tokens[i] for i in mine], [counts[i] for i in mine])


def test_the_fit_is_logistic_regression_of_pixels():
    """scikit-learn on standardised tokens, each weighted by its pixels; its C is 1 / (decay x pixels)."""
    tokens, counts = _samples()
    ours = _fit(parts=3)
    x = ((tokens - tokens.mean(dim=0)) / tokens.std(dim=0, unbiased=False)).numpy()
    pixels = counts.sum(dim=1).numpy()
    wanted = LogisticRegression(C=1 / (1e-4 * pixels.sum()), tol=1e-10, max_iter=10_000)
    wanted.fit(x, counts.argmax(dim=1).numpy(), sample_weight=pixels)
    np.testing.assert_allclose(ours(tokens).softmax(dim=1), wanted.predict_proba(x), atol=2e-3)


def test_two_ranks_fit_what_one_fits():
    tokens, _ = _samples()
    one = _fit(parts=1)(tokens).softmax(dim=1)
    for probe in run_on_ranks(_fit, 2):
        torch.testing.assert_close(probe(tokens).softmax(dim=1), one, rtol=0, atol=2e-3)


def test_logits_are_enlarged_to_the_photo():
    probe = LinearProbe(torch.zeros(2), torch.ones(2), torch.eye(2), torch.zeros(2), 0.0)
    patches = torch.tensor([[[0.0, 1.0], [3.0, 0.0]]])
    assert segment(probe, patches, 1, 8).tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]


def test_scenes_of_colors_are_understood(tmp_path):
    """Only the blurred edges between patches are in doubt: none here, where patches are blocks' quarters."""
    segments(tmp_path / "VOCdevkit/VOC2012")
    results = voc(context_of(tmp_path, size=64))
    assert results["voc_miou"] > 85 and results["voc_pixel_accuracy"] > 90, results


def test_two_ranks_give_what_one_gives(tmp_path):
    """One rank has no image to learn from. The fits end a little apart: a few pixels at edges are other ones."""
    segments(tmp_path, train=1, val=3)
    one = voc(context_of(tmp_path, size=64))
    for two in run_on_ranks(_voc, tmp_path):
        assert two == pytest.approx(one, abs=0.3)


def _voc(root):
    return voc(context_of(root, size=64))


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    with pytest.raises(DataError, match=r"no Pascal VOC 2012 in .*is not there; wanted is JPEGImages/NAME.jpg"):
        voc(context_of(tmp_path))
    segments(tmp_path, train=2, val=1)
    path = tmp_path / "SegmentationClass/2007_val_0.png"
    label_map(path, np.full((64, 96), 21))
    with pytest.raises(DataError, match=r"2007_val_0.png has class 21: Pascal VOC has 21, and 255 is ignored"):
        voc(context_of(tmp_path, size=64))
    path.unlink()
    with pytest.raises(DataError, match=r"not complete: 1 files are not there, such as .*2007_val_0.png"):
        voc(context_of(tmp_path))
    (tmp_path / "ImageSets/Segmentation/val.txt").write_text("\n")
    with pytest.raises(DataError, match="names nothing"):
        voc(context_of(tmp_path))
