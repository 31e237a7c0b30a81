"""Curves of metrics.jsonl, figures as far as what lies in them goes, and the pictures of a run or a command."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from dino_ds.config.loading import load_recipe
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.definition import PicturesOptions
from dino_ds.report import draw
from dino_ds.report.html import Chart, Curve, Line, _plot, chart_svg, read_metrics
from dino_ds.report.pictures import KINDS, PeriodicPictures, run
from dino_ds.weights.export import FORMATS
from tests.report.runs import assert_inside
from tests.run.harness import image_folder
from tests.weights.test_weights import _backbone


@pytest.fixture
def pictures():
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return draw.picture_of(images, (0.5,) * 3, (0.25,) * 3)


def _shown(figure):
    """Pictures in a figure and its words."""
    axes = figure.axes[0]
    return [image.get_array() for image in axes.images], [text.get_text() for text in axes.texts if text.get_text()]


def test_figures_show_everything(pictures):
    assert pictures.min() >= 0 and pictures.max() <= 1 and pictures.shape == (2, 32, 32, 3)
    attention = torch.rand(2, 3, 4, 4)
    heading = "2 of 9 images; light is much and dark is little attention, in words that fill two lines"
    shown, words = _shown(draw.draw_attention(pictures, attention, heading))
    assert words[2:] == ["image", "head 0", "head 1", "head 2"] and " ".join(words[:2]).endswith("fill two lines")
    for row in range(2):
        expected = pictures[row].numpy(), *(draw.heat(pictures[row], head) for head in attention[row])
        np.testing.assert_allclose(np.stack(shown[4 * row : 4 * row + 4]), np.stack(expected), atol=1e-6)
    assert "12 of 14 heads" in _shown(draw.draw_attention(pictures, torch.rand(2, 14, 4, 4)))[1][0]
    assert len(_shown(draw.draw_pca(pictures, torch.randn(2, 4, 4, 8)))[0]) == 4


def test_the_frame_of_a_neighbor_says_whether_it_is_of_the_class(pictures):
    picture = pictures[0].numpy()
    figure = draw.draw_neighbors([picture], [[picture] * 3], [["q", "a", "b", "c"]], [[True, False, None]])
    colors = [frame.get_edgecolor()[:3] for frame in figure.axes[0].patches]
    assert len(colors) == 2 and colors[0][2] > colors[0][0] and colors[1][0] > colors[1][2]
    words = _shown(figure)[1]
    assert words[-8:] == ["image", "1", "2", "3", "q", "a", "b", "c"] and "blue the same" in words[0]
    assert _shown(draw.draw_neighbors([picture], [[picture]], [["", ""]], [[None]]))[1] == ["image", "1"]


def test_pictures_keep_their_shape_and_place():
    """A wide picture is not stretched; what is put into a cell is there and nowhere else."""
    sheet = draw.Sheet(1, 2)
    sheet.put(0, 1, np.zeros((10, 20, 3)))
    pixels = draw.figure_pixels(sheet.figure)
    rows, columns = np.nonzero((pixels[..., :3] < 50).all(axis=-1))
    assert abs((np.ptp(columns) + 1) / (np.ptp(rows) + 1) - 2) < 0.05
    assert columns.min() > pixels.shape[1] / 2


def test_words_are_read_on_any_page_and_the_ground_is_clear():
    """Of a PNG file with a palette: colors of pictures stay, words have one color, what is not drawn is clear."""
    sheet = draw.Sheet(1, 2, heading="words")
    sheet.put(0, 0, np.full((10, 10, 3), (1.0, 0.0, 0.0)))
    pixels = draw.figure_pixels(sheet.figure)
    again = np.asarray(Image.open(io.BytesIO(draw.png_of(pixels))).convert("RGBA")).astype(int)
    assert np.abs(again[..., 3] - pixels[..., 3]).max() < 17 and again[-20, -20, 3] == 0
    assert {tuple(color) for color in again[again[..., 3] > 0][:, :3].tolist()} == {(255, 0, 0), (0x72, 0x7C, 0x8B)}


@pytest.mark.slow
def test_cosines_alone_place_an_image_on_the_map():
    features = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    lengths = 2.0 ** (torch.arange(30)[:, None] % 5)  # powers of 2 round nothing
    np.testing.assert_array_equal(draw.place(features * lengths), draw.place(features))
    assert all(np.isfinite(draw.place(features[:few])).all() for few in (2, 3, 4))


@pytest.mark.parametrize(
    ("values", "zero", "log"),
    [
        ((1, 100), False, True), ((1, 99), False, False), ((1, 100), True, False), ((0, 100), False, False),
        ((-3, -1), False, False), ((-3, -1), True, False), ((5, 5), False, False), (range(-3000, 3000), True, False),
    ],
)  # fmt: skip
def test_all_values_lie_inside_of_the_chart_s_axes(values, zero, log):
    """Also negative ones, and levels above and below; logarithmic from a factor of 100."""
    x = np.arange(float(len(values)))
    lines = [Line("a", Curve(x, np.array(values, float)))]
    for levels in ({}, {"above": 120.0, "beside": 119.0}):
        chart = Chart("a", "unit", lines, levels, zero=zero)
        axes = Figure().add_subplot()
        _plot(axes, chart)
        assert axes.get_yscale() == ("log" if log else "linear")
        low, high = axes.get_ylim()
        assert low <= min(values) and max((*values, *levels.values())) <= high and (not zero or low <= 0 <= high)
        assert len({text.get_position()[1] for text in axes.texts}) == len(levels)  # names don't overlap
        assert_inside(chart_svg(chart))
    for few in ([np.nan], [1.0], [1.0, np.nan]):  # a single point is no curve
        assert chart_svg(Chart("a", "", [Line("a", Curve(x[: len(few)], np.array(few)))], {})) == ""
    assert ">0.0002<" in chart_svg(Chart("a", "", [Line("a", Curve(x[:2], np.array([1e-4, 4e-4])))], {}))


def test_colors_are_the_first_three_components_whitened_through_a_sigmoid():
    """Against an SVD of all images' patches; a component's sign is free. Flat tokens give gray, not NaN."""
    tokens = torch.randn(2, 6, 6, 8, generator=torch.Generator().manual_seed(1)) * torch.arange(8, 0, -1)
    flat = tokens.flatten(0, 2).double().numpy()
    centered = flat - flat.mean(0)
    _, _, axes = np.linalg.svd(centered, full_matrices=False)
    scores = centered @ axes[:3].T
    wanted = 1 / (1 + np.exp(-2 * scores / scores.std(axis=0)))
    found = draw.patch_colors(tokens)
    assert found.shape == (2, 6, 6, 3)
    for i, row in enumerate(found.flatten(0, 2).numpy().T):
        assert min(abs(row - wanted[:, i]).max(), abs(1 - row - wanted[:, i]).max()) < 1e-5
    assert bool((draw.patch_colors(torch.ones(1, 3, 3, 8)) == 0.5).all())


def test_lines_of_metrics_jsonl_become_curves(tmp_path):
    """Broken ones are counted; NaN and infinity are text there; of a step written twice the later line counts."""
    lines = [
        '{"step": 1, "loss": 4.0}', '{"step": 2, "loss"', "[1, 2]", "\x00\x00", '{"loss": 3.0}',
        '{"step": "x", "loss": 3.0}', '{"step": -1, "loss": 3.0}', "", '{"step": 1e400, "loss": 3.0}', "[" * 3000,
        '{"step": 4}', '{"step": 3, "loss": 3.0, "what": "text", "why": null, "list": [1]}',
        '{"step": 5, "loss": "nan"}', '{"step": 6, "loss": "-inf"}', '{"step": 3, "loss": 2.0}',
    ]  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    metrics = read_metrics(path)
    assert (metrics.lines, metrics.broken, [*metrics.curves]) == (5, 9, ["loss"])
    assert metrics["loss"].x.tolist() == [1, 3, 5, 6] and metrics["loss"].finite.tolist() == [4, 2]
    np.testing.assert_array_equal(metrics["loss"].y, [4, 2, np.nan, -np.inf])


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    FORMATS["safetensors"](_backbone(), path / "teacher.safetensors")
    image_folder(path / "images", 12, 3)
    (path / "images/class0/000.png").write_bytes(b"broken")
    return path


def _run(pictured, only=None, root="images", **changes):
    values = {"model": str(pictured), "root": root and str(pictured / root), **changes}
    return run(PicturesOptions(**values, only=only and only.split(","))).data


@pytest.mark.slow
def test_one_picture_of_each_kind(pictured, tmp_path, monkeypatch):
    """In the place that is named, as --out=~/pictures comes too: the shell leaves that as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    written = _run(pictured)["pictures"]
    assert written == [str(pictured / f"pictures/{kind}.png") for kind in ("pca", "map", "neighbors")]
    assert all(Image.open(path).size[0] > 200 for path in written)
    assert _run(pictured, only="attention", out="~/pictures")["pictures"] == [str(tmp_path / "pictures/attention.png")]
    assert {Path(path).stem for path in written} | {"attention"} == set(KINDS)


def test_neighbors_have_their_class_and_no_image_is_its_own(pictured, tmp_path, monkeypatch):
    shown, plain = [], draw.draw_neighbors
    monkeypatch.setattr(draw, "draw_neighbors", lambda *given: shown.extend(given) or plain(*given))
    _run(pictured, only="neighbors", out=str(tmp_path))
    queries, found, captions, same_class, _ = shown
    assert len(queries) == 6 and [len(row) for row in found] == [6] * 6
    for query, row, texts, same in zip(queries, found, captions, same_class, strict=True):
        assert same == [text.split()[1] == texts[0] for text in texts[1:]]
        assert not any(np.array_equal(query, picture) for picture in row)


def test_bad_input_is_one_line(pictured, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "one/a.png").write_bytes((pictured / "images/class1/001.png").read_bytes())
    for changes, error, words in (
        ({"root": str(tmp_path / "one"), "only": "map"}, DataError, "one image alone has no neighbors and no map"),
        ({"model": "nowhere.pth", "out": str(tmp_path / "file/out")}, ConfigError, "name another folder with --out"),
    ):
        with pytest.raises((error, DataError), match=words):
            _run(pictured, **{"out": str(tmp_path / "out"), **changes})
    assert not (tmp_path / "out").exists()


def test_a_run_has_pictures_six_times_unless_its_recipe_says_how_often(pictured):
    source = build_source("folder", str(pictured / "images"), "train", False)
    for every, due in (("auto", [0, 21, 42, 63, 84, 101]), ("30 steps", [0, 30, 60, 90, 101])):
        recipe = load_recipe(None, {"length": "101 steps", "eval.pictures_every": every})
        album = PeriodicPictures.build(recipe, source, 5)
        assert [step for step in range(102) if album.due(step, last=step == 101)] == due
