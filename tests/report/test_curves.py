"""metrics.jsonl -> curves: what is kept, what is skipped, and what is shown of a long curve."""

from __future__ import annotations

import json

import numpy as np

from dino_ds.report.charts import EMPTY, Curve, read_metrics


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


def test_curves_without_points_and_of_few():
    assert not EMPTY.constant and _curve(2, 2).constant and not _curve(2, np.nan).constant


def _curve(*y):
    return Curve(np.arange(float(len(y))), np.array(y, dtype=float))
