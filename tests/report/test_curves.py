"""metrics.jsonl -> curves: what is kept, what is skipped, and that a thinned curve looks the same."""

from __future__ import annotations

import json

import numpy as np

from dino_ds.report.curves import Curve, read_metrics


def _read(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    return read_metrics(path)


def test_broken_lines_are_skipped_and_counted(tmp_path):
    lines = [
        '{"step": 1, "loss": 4.0}',
        '{"step": 2, "loss"',
        "[1, 2]",
        "\x00\x00",
        '{"loss": 3.0}',
        '{"step": "x", "loss": 3.0}',
        '{"step": -1, "loss": 3.0}',
        "",
        '{"step": 1e400, "loss": 3.0}',
        "[" * 3000,
        '{"step": 4}',
        '{"step": 3, "loss": 3.0, "what": "text", "why": null, "list": [1]}',
    ]
    metrics = _read(tmp_path, "\n".join(lines))
    assert metrics["loss"].x.tolist() == [1, 3]
    assert metrics.lines == 2
    assert metrics.broken == 9
    assert metrics.curves.keys() == {"loss"}


def test_nan_is_text_there_and_a_number_here(tmp_path):
    metrics = _read(tmp_path, '{"step": 1, "loss": "nan"}\n{"step": 2, "loss": "-inf"}\n{"step": 3, "loss": 1.0}\n')
    np.testing.assert_array_equal(metrics["loss"].y, [np.nan, -np.inf, 1.0])
    assert metrics["loss"].finite.tolist() == [1.0]


def test_of_a_step_written_twice_the_later_line_counts(tmp_path):
    steps = [1, 2, 3, 2, 3, 4]
    metrics = _read(tmp_path, "".join(json.dumps({"step": s, "loss": i}) + "\n" for i, s in enumerate(steps)))
    assert metrics["loss"].x.tolist() == [1, 2, 3, 4]
    assert metrics["loss"].y.tolist() == [0, 3, 4, 5]


def test_thinning_keeps_each_part_s_ends_and_extremes():
    """Against the definition, bucket by bucket; unequal distances of steps too."""
    generator = np.random.default_rng(0)
    x = np.cumsum(generator.integers(1, 9, 20_000)).astype(float)
    curve = Curve(x, generator.normal(size=len(x)))
    thin = curve.thinned(100)
    assert len(thin) <= 400
    place = np.minimum(((x - x[0]) / (x[-1] - x[0]) * 100).astype(int), 99)
    kept = set(thin.x.tolist())
    for bucket in range(100):
        inside = place == bucket
        xs, ys = x[inside], curve.y[inside]
        wanted = {xs[0], xs[-1], xs[ys.argmin()], xs[ys.argmax()]}
        assert wanted <= kept
    assert set(zip(thin.x, thin.y, strict=True)) <= set(zip(x, curve.y, strict=True))


def test_means_are_those_of_the_parts():
    x, y = np.arange(10.0), np.array([1, 3, 2, np.nan, np.nan, np.nan, 5, 5, 6, 8])
    means = Curve(x, y).means(5)  # edges at 1.8, 3.6, 5.4, 7.2
    np.testing.assert_allclose(means.x, [0.5, 2.5, 4.5, 6.5, 8.5])
    np.testing.assert_allclose(means.y, [2, 2, np.nan, 5, 7])


def test_thinning_keeps_gaps_and_short_curves():
    y = np.ones(5000)
    y[2520:2523] = np.nan  # inside a part
    y[130] = np.inf
    thin = Curve(np.arange(5000.0), y).thinned(50)
    assert np.isnan(thin.y).sum() == 1
    assert np.isinf(thin.y).sum() == 1
    short = Curve(np.arange(5.0), np.arange(5.0))
    assert short.thinned() is short
    assert len(Curve(np.arange(5000.0), np.full(5000, np.nan)).thinned(50)) <= 200
