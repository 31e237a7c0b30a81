"""Report, pictures and comparison of a run of each shipped objective, and of one whose losses are negative."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from dino_ds.method.objective import Measured, Needs, Term
from dino_ds.method.specs.base import TermSpec
from dino_ds.models.base import patches_of
from dino_ds.options.model import PicturesOptions
from dino_ds.options.run import ReportOptions
from dino_ds.report.command import run as report
from dino_ds.report.curves import read_metrics
from dino_ds.report.draw_pictures import run as pictures
from dino_ds.report.plot import draw_curves
from tests.ranks import run_on_ranks
from tests.report.runs import assert_inside
from tests.run.harness import image_folder, train_tiny

PATCHES = patches_of("global")


@dataclass(frozen=True)
class NegativeSpec(TermSpec):
    """A term that is to be as large as possible: its loss is negative."""

    reads_patches: ClassVar[bool] = True

    def build(self, parts: Any) -> Term:
        return NegativeTerm()


class NegativeTerm(Term):
    scalars = ()
    needs = Needs(student=(PATCHES,), teachers={})

    def targets(self, window, masks, schedule):
        return [None for _ in window]

    def loss(self, student, targets, schedule):
        return Measured(-student[PATCHES].float().var(), {})


_ALONE = {"objective.dino_weight": "0", "objective.freeze_prototypes": "0 steps"}
OBJECTIVES = {
    "dino": {},
    "coding_rate": {**_ALONE, "objective.coding_rate_weight": "1"},
    "ibot": {"crops.mask": "dinov2", "objective.ibot_weight": "1", "objective.koleo_weight": "0.1"},
    "gram": {"gram.weight": "2", "gram.crop_size": "48", "gram.start": "0 steps", "gram.teacher": "DIR/dino"},
    "distill": {"teacher.source": "DIR/dino", "objective.freeze_prototypes": "0 steps"},
    "own": {**_ALONE, "objective.terms": '{"own": {"spec": "tests.report.test_objectives:NegativeSpec", "weight": 1}}'},
}


def _train_all(folder):
    """One run of each objective in one process, which has its own copy of `train`: nothing is predicted of memory."""
    train = importlib.import_module("dino_ds.train")  # dino_ds.train is a function
    train.agreed = lambda recipe, machine, choose: choose()
    train.predict = train.check_fits = lambda *given: None
    images = image_folder(folder / "images")
    for name, changes in OBJECTIVES.items():
        changes = {key: value.replace("DIR", str(folder)) for key, value in changes.items()}
        said = train_tiny(images, folder / name, max_steps=3, changes={"model.drop_path": "0", **changes})
        assert said is None, (name, said)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objectives")
    run_on_ranks(_train_all, folder, world=1)
    return folder


@pytest.mark.slow
def test_every_objective_has_report_pictures_and_comparison(runs):
    for name in OBJECTIVES:
        run = runs / name
        report(ReportOptions(run=str(run)))
        assert_inside((run / "report.html").read_text())
        metrics = read_metrics(run / "metrics.jsonl")
        for axes in draw_curves(metrics).axes:
            low, high = axes.get_ylim()
            drawn = [y for line in axes.lines for y in line.get_ydata()]
            assert low <= min(drawn, default=low) and max(drawn, default=high) <= high, name
        assert name not in ("coding_rate", "own") or metrics["loss"].finite.max() < 0
    pictures(PicturesOptions(model=str(run), only=("curves",)))
    assert (run / "pictures/curves.png").stat().st_size > 10_000
    first, *others = [str(runs / name) for name in OBJECTIVES]
    report(ReportOptions(run=first, compare=tuple(others)))
    assert_inside((runs / "dino/compare.html").read_text())
