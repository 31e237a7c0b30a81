"""Report and comparison of runs of one objective, of several terms, and of one whose losses are negative."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import dino_ds.planning.start as start
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.method.objective import Measured, Needs, Term
from dino_ds.method.specs.base import TermSpec
from dino_ds.models.base import patches_of
from dino_ds.options.run import ReportOptions
from dino_ds.report.command import run as report
from dino_ds.report.curves import read_metrics
from dino_ds.report.folder import read_run
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
    "dino": {"eval.every": "2 steps", "eval.root": "DIR/images", "eval.k": "3"},
    "ibot": {"crops.mask": "dinov2", "objective.ibot_weight": "1", "objective.koleo_weight": "0.1"},
    "own": {**_ALONE, "objective.terms": '{"own": {"spec": "tests.report.test_objectives:NegativeSpec", "weight": 1}}'},
}


def _train_all(folder):
    """One run of each objective in one process, which has its own copy of the planner."""
    images = image_folder(folder / "images", classes=2)
    for name, changes in OBJECTIVES.items():
        changes = {key: value.replace("DIR", str(folder)) for key, value in changes.items()}
        said = train_tiny(images, folder / name, max_steps=4, changes={"model.drop_path": "0", **changes})
        assert said is None, (name, said)
        start.agreed = lambda recipe, machine, choose: choose()
        start.predict = start.check_fits = lambda *given: None  # the memory of one run is enough


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objectives")
    run_on_ranks(_train_all, folder, world=1)
    return folder


@pytest.mark.slow
def test_every_objective_has_report_and_comparison(runs):
    """The comparison has the charts of all of them."""
    first, *others = [str(runs / name) for name in OBJECTIVES]
    report(ReportOptions(run=first, compare=tuple(others)))
    assert_inside((runs / "dino/compare.html").read_text())
    for name in ("ibot", "own"):
        report(ReportOptions(run=str(runs / name)))
        assert_inside((runs / name / "report.html").read_text())
    assert read_metrics(runs / "own/metrics.jsonl")["loss"].finite.max() < 0


@pytest.mark.slow
def test_a_real_run_is_understood(runs, capsys):
    """Whatever training writes today: no note, a state, every figure; the log and the events say the same."""
    report(ReportOptions(run=str(runs / "dino"), json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == []
    assert (found["state"], found["step"], found["planned_steps"]) == ("stopped", 4, 12)
    assert not {key for key, value in found.items() if value is None}
    assert found["knn"].keys() == {"teacher", "step", "best", "best_step", "untrained", "raw_pixels", "chance"}
    events = read_run(runs / "dino").events
    assert events.fact("memory", "parts", dict) and events.fact("images", "images", int) == 20
    lines = [line.split(" ", 1)[1] for line in (runs / "dino/log.txt").read_text().splitlines()]
    assert lines == [json.loads(line)["line"] for line in (runs / "dino/events.jsonl").read_text().splitlines()]
    files = [str(runs / "dino" / name) for name in ("config.yaml", "ds_config.json")]  # "from its own files"
    batch = load_recipe(files[0], {}).data.global_batch
    assert resolve_ds_config(load_ds_config(files[1], {}), files[1], batch, 1).micro_batch == batch
