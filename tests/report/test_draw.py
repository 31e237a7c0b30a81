"""Figures as far as what lies in them goes, and as files and tensors."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from dino_ds.errors import ConfigError
from dino_ds.report.charts import Chart, Line
from dino_ds.report.curves import Curve, read_metrics
from dino_ds.report.draw import (
    MASS,
    Sheet,
    coat,
    draw_attention,
    draw_map,
    draw_neighbors,
    draw_pca,
    figure_pixels,
    figure_png,
    figure_tensor,
    head_colors,
    heat,
    overlay,
    picture_of,
)
from dino_ds.report.maps import PatchColors, find_method, foreground, mass_mask, place
from dino_ds.report.plot import _plot, chart_svg, draw_curves
from tests.report.runs import assert_inside


@pytest.fixture
def pictures():
    return picture_of(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), (0.5,) * 3, (0.25,) * 3)


def _shown(figure):
    """Pictures in a figure and its words."""
    axes = figure.axes[0]
    return [image.get_array() for image in axes.images], [text.get_text() for text in axes.texts if text.get_text()]


def test_figures_show_everything(pictures):
    assert pictures.min() >= 0 and pictures.max() <= 1 and pictures.shape == (2, 32, 32, 3)
    tokens, attention = torch.randn(2, 4, 4, 8), torch.rand(2, 3, 4, 4)
    shown, words = _shown(draw_attention(pictures, attention))
    assert len(shown) == 2 * 2 * (1 + 3) and words == ["image, all heads", "head 0", "head 1", "head 2"]
    assert "12 of 14 heads" in _shown(draw_attention(pictures, torch.rand(2, 14, 4, 4)))[1][0]
    assert len(_shown(draw_pca(pictures, tokens))[0]) == 4
    shown = pictures.numpy()
    figure = draw_neighbors([shown[0]], [[shown[1], shown[0]]], [["q", "a", "b"]], [[None, None]])
    assert _shown(figure)[1] == ["query", "1", "2", "q", "a", "b"] and not figure.axes[0].patches


def test_the_frame_of_a_neighbour_says_whether_it_is_of_the_class(pictures):
    picture = pictures[0].numpy()
    figure = draw_neighbors([picture], [[picture] * 3], [["q", "a", "b", "c"]], [[True, False, None]])
    colors = [frame.get_edgecolor()[:3] for frame in figure.axes[0].patches]
    assert len(colors) == 2 and colors[0][2] > colors[0][0] and colors[1][0] > colors[1][2]
    assert _shown(figure)[1][0] == "query (blue: its class)"


def test_each_picture_is_what_its_title_says(pictures):
    """Attention of each head and what it keeps."""
    attention = torch.rand(1, 2, 4, 4)
    shown, _ = _shown(draw_attention(pictures[:1], attention))
    kept, colors = mass_mask(attention[0], MASS), head_colors(2)
    expected = [pictures[0].numpy(), overlay(pictures[0], attention[0] * kept, colors)]
    for head in range(2):
        one = slice(head, head + 1)
        expected += [heat(pictures[0], attention[0, head]), overlay(pictures[0], kept[one].float(), colors[one])]
    for found, wanted in zip(shown, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert heat(torch.zeros(16, 32, 3), torch.rand(2, 2)).shape == (16, 32, 3)


@pytest.mark.slow
def test_channels_that_are_no_colors():
    """Two channels: the first in grey; four: the first three as colors; 2 to 98 % of their values."""
    images = torch.rand(2, 4, 8, 8) - 0.5
    two, four = (picture_of(images[:, :c], [0.5] * c, [1.0] * c) for c in (2, 4))
    assert two.shape == four.shape == (2, 8, 8, 3)
    low, high = torch.quantile(images.flatten(2), torch.tensor([0.02, 0.98]), dim=2)[..., None, None]
    stretched = ((images - low) / (high - low)).clamp(0, 1)
    for channel in range(3):
        torch.testing.assert_close(two[..., channel], stretched[:, 0])
        torch.testing.assert_close(four[..., channel], stretched[:, channel])


def test_the_background_is_black_and_the_rest_has_its_own_components(pictures):
    tokens = torch.randn(2, 4, 4, 8, generator=torch.Generator().manual_seed(1))
    tokens[:, :2] += 9
    attention = torch.rand(2, 3, 4, 4)
    attention[:, :, :2] += 5
    plain, cut = (_shown(draw_pca(pictures, tokens, *given))[0] for given in ((), (attention,)))
    assert (cut[1][2:] == 0).all() and (cut[1][:2] > 0).all()
    assert (plain[1] > 0).all() and not np.allclose(plain[1][:2], cut[1][:2])


def test_a_patch_has_the_color_of_the_head_that_looks_at_it(pictures):
    """Two heads, each at a patch of its own and one at which both look; elsewhere the picture is dark."""
    weights = torch.zeros(2, 2, 2)
    weights[0, 0, 0] = weights[1, 1, 1] = weights[0, 0, 1] = 1
    weights[1, 0, 1] = 3
    colors = head_colors(2)
    grey = torch.full((32, 32, 3), 0.4)
    found = torch.from_numpy(overlay(grey, weights, colors))[8::16, 8::16]
    mixed = 0.25 * colors[0] + 0.75 * colors[1]
    wanted = torch.stack([torch.stack([colors[0], mixed]), torch.stack([torch.zeros(3), colors[1]])])
    wanted = 0.5 * wanted + 0.2
    wanted[1, 0] = 0.1
    torch.testing.assert_close(found.float(), wanted)
    assert coat(grey, torch.ones(2, 2, 3)) == pytest.approx(np.full((32, 32, 3), 0.3 * 0.4 + 0.7))
    warm = heat(grey, weights[1])
    assert warm[8, 24].sum() > warm[24, 24].sum() > warm[8, 8].sum()


def test_a_figure_as_a_file_and_as_a_tensor(pictures):
    figure = draw_pca(pictures, torch.randn(2, 4, 4, 8))
    tensor = figure_tensor(figure, dpi=60)
    assert tensor.dtype == torch.uint8 and tensor.shape[0] == 3 and tensor.is_contiguous()
    file, small = figure_png(figure, dpi=60), figure_png(figure, dpi=60, palette=True)
    image = Image.open(io.BytesIO(file))
    assert image.size == (tensor.shape[2], tensor.shape[1]) and image.mode == "RGB"
    assert bool((np.asarray(image) == tensor.permute(1, 2, 0).numpy()).all())
    assert len(small) < len(file) and Image.open(io.BytesIO(small)).size == image.size


def test_pictures_keep_their_shape_and_place():
    """A wide picture is not stretched; what is put into a cell is there and nowhere else."""
    sheet = Sheet(1, 2)
    sheet.put(0, 1, np.zeros((10, 20, 3)))
    pixels = figure_pixels(sheet.figure, dpi=100)
    rows, columns = np.nonzero((pixels < 50).all(axis=-1))
    assert abs((np.ptp(columns) + 1) / (np.ptp(rows) + 1) - 2) < 0.05
    assert columns.min() > pixels.shape[1] / 2


def test_names_of_classes_are_no_formulas(recwarn):
    """Nor do they run into each other, nor does a script that the font lacks leave warnings."""
    names, picture = ["$\\frac$", "犬", "a very long name of a class that nobody can read"], np.zeros((8, 8, 3))
    shown = ["$\\frac$", "犬", "a very long name of a cl…"]
    figure = draw_neighbors([picture] * 3, [[picture]] * 3, [[name, ""] for name in names], [[None]] * 3)
    assert _shown(figure)[1][2:] == shown
    figure_pixels(figure)
    points, thumbnails = np.random.default_rng(0).normal(size=(3, 2)), [picture.astype(np.uint8)] * 3
    figure = draw_map(points, thumbnails, names, "")
    figure_pixels(figure)
    assert [text.get_text() for text in figure.legends[0].texts] == [shown[0], shown[2], shown[1]]
    assert not recwarn.list


@pytest.mark.slow
def test_likes_lie_together_on_the_map():
    """Every method keeps three far clusters apart: neighbors on the map are of one cluster. The same points again."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(30) % 3
    features = 8 * torch.eye(8)[labels] + torch.randn(30, 8, generator=generator)
    for method in ("tsne", "pca"):
        points = torch.from_numpy(place(features, method))
        distances = torch.cdist(points, points) + 1e9 * torch.eye(30)
        assert (labels[distances.argmin(dim=1)] == labels).float().mean() > 0.9, method
        assert bool((torch.from_numpy(place(features, method)) == points).all())
    assert place(features[:2], "tsne").shape == (2, 2)
    points = place(features, "pca")
    np.testing.assert_allclose(points.mean(axis=0), 0, atol=1e-5)
    lengths = torch.rand(30, 1, generator=generator) + 0.5  # cosines decide
    np.testing.assert_allclose(np.abs(place(features * lengths, "pca")), np.abs(points), atol=1e-4)


def test_a_method_that_is_not_there(monkeypatch):
    """t-SNE is for those who have scikit-learn; nobody else has to say so."""
    assert find_method("pca") == "pca" and find_method(None) == "tsne"
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"dino_ds\[viz\]"):
        find_method("tsne")
    assert find_method(None) == "pca"


def test_the_map_names_its_groups_where_there_are_few():
    points, thumbnails = np.random.default_rng(0).normal(size=(30, 2)), [np.zeros((8, 8, 3), dtype=np.uint8)] * 30
    few = draw_map(points, thumbnails, [f"g{i % 3}" for i in range(30)], "a title")
    assert [text.get_text() for text in few.legends[0].texts] == ["g0", "g1", "g2"]
    assert len(few.axes[0].images) == 30 and few.texts[0].get_text() == "a title"
    heights = [image.get_extent()[2] for image in few.axes[0].images]
    assert heights == sorted(heights, reverse=True)  # the lower lie upon the higher
    assert not draw_map(points, thumbnails, [f"g{i}" for i in range(30)], "").legends
    assert not draw_map(points, thumbnails, None, "").legends


def _curves(folder, *records):
    """Of lines of metrics.jsonl."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return draw_curves(read_metrics(folder / "metrics.jsonl"))


@pytest.mark.slow
def test_curves_with_and_without_evaluations(tmp_path):
    """NaN, text in metrics.jsonl, and keys that a run of another version lacks leave gaps."""
    record = {"loss": 3.0, "teacher_entropy": 2.0, "kl": 1.0, "lr": 0.1, "weight_decay": 0.0, "images_per_second": 9.0}
    records = [{"step": i, "teacher_temp": 0.04, "teacher_momentum": 0.99, **record} for i in (1, 2)]
    records.append({"step": 3, "loss": "nan", "kl": "nan", "lr": "inf"})
    knn = {"step": 3, "knn_top1": 50.0, "knn_raw_pixels": 30.0, "knn_chance": 10.0}
    early = {"step": 0, "knn_top1": 40.0, "knn_raw_pixels": 31.0, "knn_chance": 9.0}
    figure = _curves(tmp_path, early, *records, knn)
    figure_pixels(figure, dpi=50)
    loss, panel, rate, *_ = figure.axes
    assert loss.get_title() == "Loss, nats" and loss.get_ylim()[1] > 3 and rate.get_title() == "Learning rate"
    assert panel.get_title() == "k-NN top-1 of the teacher, %: 50, teacher at step 3"
    assert [text.get_text() for text in panel.texts] == ["chance 10", "raw pixels 30", "untrained 40"]
    alone = _curves(tmp_path, records[0]).axes
    assert alone[1].get_title() == "Learning rate"
    assert alone[1].lines[0].get_marker() == "o"  # a line through one point can't be seen


@pytest.mark.parametrize(
    ("values", "zero", "base", "log"),
    [
        ((1, 100), False, None, True), ((1, 99), False, None, False), ((1, 100), True, None, False),
        ((0, 100), False, None, False), ((-3, -1), False, None, False), ((-3, -1), True, None, False),
        ((-2, 1), True, (-3, 0.5), False), ((5, 5), False, None, False), (tuple(range(-3000, 3000)), True, None, False),
    ],
)  # fmt: skip
def test_all_values_lie_inside_of_the_chart_s_axes(values, zero, base, log):
    """Also negative ones, an area's base, and levels above and below; logarithmic from a factor of 100."""
    x = np.arange(float(len(values)))
    base = base and Curve(x, np.array(base, float))
    lines = [Line("a", Curve(x, np.array(values, float)), 1, "area" if zero else "line", base)]
    lines += [Line("base", base)] if base else []
    for levels in ({}, {"above": 120.0, "beside": 119.0}):
        chart = Chart("a", "unit", lines, levels, zero=zero)
        axes = Figure().add_subplot()
        _plot(axes, chart)
        assert axes.get_yscale() == ("log" if log else "linear")
        low, high = axes.get_ylim()
        assert low <= min(values) and max((*values, *levels.values())) <= high and (not zero or low <= 0 <= high)
        assert len({text.get_position()[1] for text in axes.texts}) == len(levels)  # names don't overlap
        assert_inside(chart_svg(chart))
    assert chart_svg(Chart("a", "", [Line("a", Curve(x[:1], np.array([np.nan])))], {})) == ""
    assert ">0.0002<" in chart_svg(Chart("a", "", [Line("a", Curve(x[:2], np.array([1e-4, 4e-4])))], {}))


def test_the_mask_is_the_smallest_that_holds_the_mass():
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(3, 2, 4, 5, generator=generator)
    for one, mask in zip(attention.flatten(0, 1), mass_mask(attention, 0.6).flatten(0, 1), strict=True):
        total, kept = 0.0, set()
        for value, index in sorted(((float(v), i) for i, v in enumerate(one.flatten())), reverse=True):
            kept.add(index)
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
    """One PCA for all frames: none flickers because of its neighbors. Flat tokens give grey, not NaN."""
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
