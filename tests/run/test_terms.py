"""A run with several terms names them in its metrics, alarm and report."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from dino_ds.options.commands import ReportOptions
from dino_ds.report.single_run import run as report
from dino_ds.run.reports import WINDOWS, CollapseAlarm
from tests.run.harness import image_folder, log_of, read_metrics, train_tiny

DINOV2 = {
    "crops.mask": "dinov2",
    "objective.ibot_weight": "1",
    "objective.koleo_weight": "0.1",
    "objective.centering": "sinkhorn",
    "ibot_head.prototypes": "40",
    "ibot_head.hidden": "48",
    "ibot_head.bottleneck": "16",
}
ACCUMULATED = {"gradient_accumulation_steps": "2"}


def test_a_run_names_its_terms_from_the_first_line_to_the_report(tmp_path):
    run = tmp_path / "run"
    images = image_folder(tmp_path / "images")
    assert train_tiny(images, run, max_steps=3, changes=DINOV2, ds_changes=ACCUMULATED, predicts=True) is None
    log = log_of(run)
    for line in (
        "note     targets are balanced over all 8 images of a step; 2 micro-batches are held at once",
        "warning  loss term koleo compares 4 images at a time, not the 8 of a step",
    ):
        assert line in log, line
    terms = {"teacher_entropy", "kl", "dino_loss", "ibot_loss", "ibot_teacher_entropy", "ibot_kl", "koleo_loss"}
    for record in read_metrics(run):
        assert terms < record.keys()
        whole = record["dino_loss"] + record["ibot_loss"] + 0.1 * record["koleo_loss"]
        assert record["loss"] == pytest.approx(whole, rel=1e-5)
        assert record["ibot_kl"] == pytest.approx(record["ibot_cross_entropy"] - record["ibot_teacher_entropy"])
    with redirect_stdout(io.StringIO()):
        report(ReportOptions(run=str(run)))
    page = next(run.glob("*.html")).read_text()
    titles = "Loss, the weighted sum", "Loss of DINO", "Masked patches (iBOT)", "KoLeo, sum over the global crops"
    for words in titles:
        assert words in page, words
    assert "Masked patches (iBOT): teacher entropy" in page


def test_an_alarm_names_its_rows():
    alarm = CollapseAlarm(100, 0, "masked patch")
    lines = [alarm.look(step, entropy=4.605, kl=0.0) for step in range(1, WINDOWS + 1)]
    assert lines[:-1] == [""] * (WINDOWS - 1)
    assert f"collapse after step {WINDOWS}: the teacher gives every masked patch the same target" in lines[-1]
