"""Numbers, axes, lines and pictures of a report, one at a time and exactly."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image

from dino_ds.health.lock import RunLock
from dino_ds.report.charts import Chart, Level, Line, draw_curves, summarise_knn
from dino_ds.report.compare import draw_comparison, names_of
from dino_ds.report.curves import EMPTY, Curve, Metrics
from dino_ds.report.folder import read_run
from dino_ds.report.found_pictures import _spread
from dino_ds.report.single_run import draw_run
from dino_ds.report.summary import mean_rate, summarise
from dino_ds.report.svg import Frame, _commands, _levels, _log_ticks, _ticks, draw_chart
from dino_ds.report.terms import TermKeys, find_terms
from dino_ds.report.text import duration, number
from tests.report.runs import LOG, make_run, save_picture


def _curve(*y):
    return Curve(np.arange(float(len(y))), np.array(y, dtype=float))


def test_numbers_as_people_read_them():
    for value, text in (
        *((None, "–"), (float("nan"), "NaN"), (float("inf"), "∞"), (float("-inf"), "−∞"), (5.0, "5"), (0.5, "0.5")),
        *((1234.6, "1,235"), (0.0123456, "0.01235"), (1.2345e-5, "1.23e-05"), (76.2, "76.2"), (2e6, "2,000,000")),
    ):
        assert number(value) == text
    for seconds, text in ((None, "–"), (0.2, "0 s"), (59.6, "1 min"), (3600, "1 h"), (11525, "3 h 12 min")):
        assert duration(seconds) == text
    assert duration(90061) == "1 d 1 h"


def test_ticks_are_round():
    assert list(_ticks(0, 1, 5)) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert list(_ticks(0.3, 0.9, 3)) == pytest.approx([0.4, 0.6, 0.8])  # 0.6 / 3 is a bit more than 0.2 there
    assert _log_ticks(1e-3, 1e4) == pytest.approx([0.01, 1, 100, 10000])
    assert _log_ticks(0.5, 30) == pytest.approx([1, 10])
    assert _log_ticks(1, 9) == pytest.approx([1, 2, 5])


def test_values_lie_where_the_axes_say():
    frame = Frame(520, 270, (0, 10), (0, 1), False)
    assert [frame.across(0), frame.across(10), frame.down(0), frame.down(1)] == pytest.approx([52, 510, 248, 20])
    assert list(_commands(_curve(1, np.nan, 2, 3), log=False)) == ["M0 1", "M2 2", "L3 3"]
    assert list(_commands(_curve(1, 100), log=True)) == ["M0 0", "L1 2"]
    (*_, lower), (*_, upper) = _levels([Level("a", 0.5), Level("b", 0.51)], frame)
    assert lower - upper == pytest.approx(13)


def test_the_scale_fits_the_values():
    """Logarithmic from a factor of 100, never from zero; levels are inside."""
    for values, zero, log in (((1, 100), False, 1), ((1, 99), False, 0), ((1, 100), True, 0), ((0, 100), False, 0)):
        assert f'data-log="{log}"' in draw_chart(Chart("a", "", [Line("a", _curve(*values), 1)], zero=zero))

    def shown(**how):
        matrix = re.search(r'data-matrix="([^"]+)"', draw_chart(Chart("a", "", [Line("a", _curve(5, 10), 1)], **how)))
        *_, scale, _, shift = map(float, matrix[1].split())
        return (248 - shift) / scale, (20 - shift) / scale

    assert shown() == pytest.approx((4.7, 10.3)) and shown(zero=True)[0] == pytest.approx(0, abs=1e-6)
    assert shown(levels=[Level("above", 20)])[1] > 20


def test_an_area_of_a_long_run_stays_small():
    long = _curve(*np.linspace(1, 2, 5000))
    page = draw_chart(Chart("a", "", [Line("a", long, 1, "area", base=long)]))
    (outline,) = re.findall(r'class="c1 fill" d="([^"]+)"', page)
    assert outline.count("L") < 1000


def test_curves_without_points_and_of_few():
    assert not EMPTY.constant and _curve(2, 2).constant and not _curve(2, np.nan).constant
    curve = _curve(*range(1600))
    assert curve.thinned(400) is curve and curve.thinned(399) is not curve


def test_figures_of_a_run():
    curves = {"images": _curve(100, 300), "images_per_second": _curve(100, 50)}
    assert mean_rate(Metrics(curves, 2, 0)) == 300 / 5  # a second and four
    found = summarise_knn(Metrics({"knn_top1": Curve(np.array([5.0, 6, 7]), np.array([50, np.nan, 40]))}, 3, 0))
    assert found == {"teacher": 40, "step": 7, "best": 50, "best_step": 5}


def test_a_term_that_no_code_here_names_has_all_its_curves(tmp_path):
    """Its loss, its targets' entropy and KL, and a scalar with a name of its own: on the page, in JSON and compared."""
    folder = make_run(tmp_path / "run")
    own = {"toy_teacher_entropy": 1.5, "spread": 0.25, "toy_cross_entropy": 2.0, "toy_loss": 2.5, "flat_loss": 3.25}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        if "loss" in line:
            parts = {key: value * (1 + i / 100) for key, value in {**own, "toy_kl": 0.5}.items()}
            lines[i] = {"step": line["step"], "loss": line["loss"], **parts, "lr": line["lr"]}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read_run(folder)
    assert find_terms(run.metrics) == [
        TermKeys("toy", "toy_cross_entropy", "toy_teacher_entropy", "toy_kl"), TermKeys("flat", "flat_loss")
    ]  # fmt: skip
    page = draw_run(run)
    assert "toy 2.200 = entropy 1.650 + KL 0.550; flat 3.58" in page
    for title in ("Loss, all terms", "Loss of toy", "Loss of toy: KL of teacher and student", "Loss of flat", "spread"):
        assert page.count(f'role="img" aria-label="{title}"') == (2 if title == "Loss of toy" else 1), title
    assert {key for key in summarise(run) if key.startswith(("toy", "flat", "spread"))} == {*own, "toy_kl"}
    assert "Loss of toy: cross-entropy" in draw_comparison([run, read_run(make_run(tmp_path / "other"))])
    assert len(draw_curves(run.metrics).axes) == 8  # the sum and the targets are large


def test_what_a_folder_says(tmp_path):
    folder = make_run(tmp_path / "run", log=LOG)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"memory_gib": 0.8', '"memory_gib": 0.9', 1) + '{"step": 110, ')
    run = read_run(folder)
    assert run.checkpoints == {100: 1000 / 2**30} and run.state == "unfinished"
    assert "metrics.jsonl: 1 broken lines were left out" in run.notes
    assert summarise(run)["memory_gib"] == 0.9
    lock = RunLock(folder)
    lock.acquire()
    assert read_run(folder).state == "running"
    lock.release()
    other = make_run(tmp_path / "other/run")
    assert names_of([run, read_run(other)]) == [f"{tmp_path.name}/run", "other/run"]


def test_wide_pictures_come_last_and_curves_are_drawn_anew(tmp_path):
    folder = make_run(tmp_path / "run")
    save_picture(folder / "pictures/curves.png")
    Image.new("RGB", (300, 100)).save(folder / "pictures/a.png")
    page = draw_run(read_run(folder))
    assert page.count("<img") == 4
    assert page.index('class="picture wide"') > page.index('class="picture"')
    assert _spread(list(range(10))) == [0, 2, 4, 5, 7, 9]
