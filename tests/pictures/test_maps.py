"""Maps against their definitions; figures as far as their cells go."""

from __future__ import annotations

import numpy as np
import torch

from dino_ds.pictures.draw import draw_attention, draw_curves, draw_neighbours, draw_pca, draw_similarity, picture_of
from dino_ds.pictures.maps import mass_mask, patch_similarity, pca_colours


def test_the_mask_is_the_smallest_that_holds_the_mass():
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(3, 2, 4, 5, generator=generator)
    for one, mask in zip(attention.flatten(0, 1), mass_mask(attention, 0.6).flatten(0, 1), strict=True):
        total, kept = 0.0, set()
        for value, place in sorted(((float(v), i) for i, v in enumerate(one.flatten())), reverse=True):
            kept.add(place)
            total += value
            if total >= 0.6 * float(one.sum()):
                break
        assert set(mask.flatten().nonzero().flatten().tolist()) == kept


def test_colours_are_the_first_three_components():
    """Against an SVD in FP64; stretched, so compared by correlation, which is 1 up to the 2 % that are cut off."""
    tokens = torch.randn(2, 6, 6, 8, generator=torch.Generator().manual_seed(1)) * torch.arange(8, 0, -1)
    colours = pca_colours(tokens)
    assert colours.shape == (2, 6, 6, 3) and colours.min() == 0 and colours.max() == 1
    flat = tokens.flatten(0, 2).double().numpy()
    _, _, axes = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    scores = (flat - flat.mean(0)) @ axes[:3].T
    for i in range(3):
        assert abs(np.corrcoef(scores[:, i], colours.flatten(0, 2)[:, i])[0, 1]) > 0.98


def test_similarity_is_the_cosine_and_1_at_the_patch_itself():
    tokens = torch.randn(2, 3, 4, 5)
    found = patch_similarity(tokens, 1, 2, 3)
    assert abs(float(found[1, 2, 3]) - 1) < 1e-6
    expected = torch.cosine_similarity(tokens[0, 1, 1], tokens[1, 2, 3], dim=0)
    torch.testing.assert_close(found[0, 1, 1], expected)


def test_figures_have_a_cell_for_everything():
    pictures = picture_of(torch.randn(2, 3, 32, 32), (0.5,) * 3, (0.25,) * 3)
    assert pictures.min() >= 0 and pictures.max() <= 1 and pictures.shape == (2, 32, 32, 3)
    tokens = torch.randn(2, 4, 4, 8)
    assert len(draw_attention(pictures, torch.rand(2, 3, 4, 4)).axes) == 2 * 5
    assert len(draw_pca(pictures, tokens).axes) == 4
    assert len(draw_similarity(pictures, tokens, [(0, 1, 1)]).axes) == 3
    shown = pictures.numpy()
    figure = draw_neighbours([shown[0]], [[shown[1], shown[0]]], [["a", "b"]])
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "a", "b"]


def test_curves_of_a_run_that_was_never_evaluated():
    record = {"loss": 3.0, "teacher_entropy": 2.0, "kl": 1.0, "lr": 0.1, "weight_decay": 0.0, "images_per_second": 9.0}
    records = [{"step": i, "teacher_temp": 0.04, "teacher_momentum": 0.99, **record} for i in (1, 2, 3)]
    assert len(draw_curves(records).axes) == 4
