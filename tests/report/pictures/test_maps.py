"""Maps against their definitions."""

from __future__ import annotations

import numpy as np
import torch

from dino_ds.report.pictures.maps import PatchColors, foreground, mass_mask, patch_similarity


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


def test_colors_are_the_first_three_components_whitened_through_a_sigmoid():
    """Against an SVD; a component's sign is free."""
    tokens = torch.randn(2, 6, 6, 8, generator=torch.Generator().manual_seed(1)) * torch.arange(8, 0, -1)
    flat = tokens.flatten(0, 2)
    colors = PatchColors(flat)(tokens)
    assert colors.shape == (2, 6, 6, 3)
    for axes in (PatchColors(flat).axes, PatchColors(-flat).axes):
        assert bool((axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)) > 0).all())
    centered = flat.double().numpy() - flat.double().numpy().mean(0)
    _, _, axes = np.linalg.svd(centered, full_matrices=False)
    scores = centered @ axes[:3].T
    wanted = 1 / (1 + np.exp(-2 * scores / scores.std(axis=0)))
    found = colors.flatten(0, 2).numpy()
    for i in range(3):
        assert min(abs(found[:, i] - wanted[:, i]).max(), abs(1 - found[:, i] - wanted[:, i]).max()) < 1e-5


def test_colors_do_not_depend_on_what_else_is_colored():
    """One PCA for all frames: none flickers because of its neighbours. Flat tokens give grey, not NaN."""
    tokens = torch.randn(4, 3, 3, 8, generator=torch.Generator().manual_seed(2))
    colors = PatchColors(tokens.flatten(0, 2))
    torch.testing.assert_close(colors(tokens)[1:2], colors(tokens[1:2]))
    assert bool((PatchColors(torch.ones(9, 8))(torch.ones(9, 8)) == 0.5).all())


def test_the_foreground_is_the_side_that_the_network_looks_at():
    generator = torch.Generator().manual_seed(3)
    inside = torch.zeros(2, 6, 6, dtype=torch.bool)
    inside[:, 2:4, 1:5] = True
    tokens = 0.1 * torch.randn(2, 6, 6, 8, generator=generator) + 3.0 * inside[..., None]
    for looked_at in (inside, ~inside):
        attention = torch.rand(2, 3, 6, 6, generator=generator) + 2.0 * looked_at[:, None]
        assert bool((foreground(tokens, attention) == looked_at).all())
    assert bool(foreground(torch.ones(2, 6, 6, 8), attention).all())


def test_similarity_is_the_cosine_and_1_at_the_patch_itself():
    tokens = torch.randn(2, 3, 4, 5)
    found = patch_similarity(tokens, 1, 2, 3)
    assert abs(float(found[1, 2, 3]) - 1) < 1e-6
    expected = torch.cosine_similarity(tokens[0, 1, 1], tokens[1, 2, 3], dim=0)
    torch.testing.assert_close(found[0, 1, 1], expected)
