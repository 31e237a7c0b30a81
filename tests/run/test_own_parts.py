"""A loss term, a teacher and a backbone of one's own are met wherever ours are, without an edit of the package."""

from __future__ import annotations

import io
import json
import random
import re
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dino_ds.basics import own_code
from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.errors import ConfigError
from dino_ds.method.build import build_objective
from dino_ds.method.objective import Needs, Objective, Term
from dino_ds.method.specs.base import OF_EVERY_RUN
from dino_ds.method.specs.own import teachers_of, terms_of
from dino_ds.options.commands import ReportOptions
from dino_ds.report.single_run import run as report
from tests.ranks import run_on_ranks
from tests.run import drawing_parts, own_parts
from tests.run.harness import copy_until, image_folder, log_of, read_metrics, train_alone, train_tiny, whole_tensors
from tests.run.test_resume import assert_same_checkpoint

TERM = json.loads(own_parts.OWN["objective.terms"])["variance"]
LENGTH = {"length": "4 steps", "optimizer.warmup": "1 steps", "save_every": "2 steps"}
IDLE = {"teacher.others": json.dumps(json.loads(own_parts.OWN["teacher.others"]) | {"idle": {"momentum": 0.99}})}


def test_they_are_in_log_metrics_report_and_resume(tmp_path, monkeypatch):
    root, straight, resumed = image_folder(tmp_path / "images"), tmp_path / "straight", tmp_path / "resumed"
    changes, ds = LENGTH | own_parts.OWN | IDLE, "zero2_bf16.json"
    monkeypatch.setattr(own_code, "_allowed", set(own_code.code_in(changes.values())))
    assert run_on_ranks(train_tiny, root, straight, ds, None, False, changes) == [None] * 2
    copy_until(2, straight, resumed)
    assert run_on_ranks(train_tiny, root, resumed, ds, None, True, changes) == [None] * 2
    assert_same_checkpoint(straight, resumed, 4)
    whole = whole_tensors(straight, 4)
    log = log_of(straight)
    assert re.search(r"loss \d+\.\d+ \(dino \d+\.\d+, variance \d+\.\d+\), ", log)
    lines = [line for line in read_metrics(straight) if "loss" in line]
    assert [line["slow_momentum"] for line in lines] == pytest.approx([0.9, 0.875, 0.85, 0.825])
    assert [line["variance_weight"] for line in lines] == pytest.approx([0, 0.125, 0.375, 0.5])
    assert all(line["variance"] > 0 for line in lines)
    ours = r"variance(_loss|_weight)?|(slow|idle)_momentum|dino_loss|teacher_entropy"
    assert not [key for line in lines for key in line if key not in OF_EVERY_RUN and not re.fullmatch(ours, key)]
    for line in lines:
        other = line["dino_loss"] + line["variance_weight"] * line["variance_loss"]
        assert line["loss"] == pytest.approx(other, rel=1e-4)
    teacher = [name for name in whole if name.startswith("teacher.")]  # each by its own momentum: they lie apart
    assert any(not torch.equal(whole[name], whole[f"teachers.slow.{name[8:]}"]) for name in teacher)
    with redirect_stdout(io.StringIO()):
        report(ReportOptions(run=str(straight)))
    page = next(straight.glob("*.html")).read_text()
    for words in ("Variance of patches", "Slow momentum"):
        assert words in page, words


EXACT = ("Mixed", "Buffer", "ByItself")
DRAWS = {"data.source": "tests.run.drawing_parts:Source", "objective.freeze_prototypes": "0 steps"}


def _train_drawing(run: Path, ds: str, resume: bool, how: dict[str, str]):
    for seed in (random.seed, np.random.seed, lambda: torch.seed()):
        seed()  # by the system's entropy, as in a new process
    drawn = {"teacher.others": '{"drawn": {"spec": "tests.run.drawing_parts:DrawingEmaSpec"}}'}
    changes = LENGTH | {"save_in_background": "false"} | DRAWS | drawn | how
    return train_tiny(
        "global", run, ds, resume=resume, changes=changes, ds_changes={"gradient_accumulation_steps": "2"}
    )


@pytest.mark.parametrize(("ds", "workers"), [("zero1_fp16.json", "0"), ("zero3_fp32.json", "1")], ids=str)
def test_what_users_parts_draw_and_keep_is_resumed_to_the_bit(tmp_path, ds, workers):
    """Terms, a teacher and a source, each kind in one run: 2 ranks, accumulation, steps that fp16 skips."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    how = drawing_parts.drawing(*EXACT) | {"data.workers": workers}
    assert run_on_ranks(_train_drawing, straight, ds, False, how) == [None] * 2
    copy_until(2, straight, resumed)
    assert run_on_ranks(_train_drawing, resumed, ds, True, how) == [None] * 2
    ours, theirs = ([line for line in read_metrics(run) if "loss" in line] for run in (straight, resumed))
    names = ["loss", *(f"{kind.lower()}_loss" for kind in EXACT)]
    assert [[line[name] for name in names] for line in ours] == [[line[name] for name in names] for line in theirs]
    assert_same_checkpoint(straight, resumed, 4)
    mine = load_file(straight / "checkpoints/step_00000004/rank_00001.safetensors")
    assert any(key.startswith("own.buffer.") for key in mine)
    assert "can't be exact" not in log_of(straight) + log_of(resumed)


def test_what_can_not_be_resumed_exactly_is_said(tmp_path):
    how = drawing_parts.drawing("Numpy", "Listed") | DRAWS | LENGTH
    assert train_alone("own", tmp_path / "run", "zero0_fp32.json", None, False, how) is None
    said = [line for line in log_of(tmp_path / "run").splitlines() if "a resume can't be exact" in line]
    assert len(said) == 3 and "data.source gives other images when it reads them again" in said[0]
    assert "queue of loss term listed" in said[1] and "generator of loss term numpy" in said[2]


def test_a_run_is_reported_where_its_own_parts_are_not(tmp_path):
    """The page says what is missing: the run may have been trained on another machine."""
    recipe = load_recipe("quickstart", {"objective.terms": '{"a": {"spec": "gone:A", "weight": 1}}'})
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "images": 64, "loss": 2.5}\n')
    with redirect_stdout(io.StringIO()) as shown:
        report(ReportOptions(run=str(tmp_path)))
    assert "there is no gone on Python" in shown.getvalue() + next(tmp_path.glob("*.html")).read_text()


def _terms(**values):
    """Keys of a recipe with a term of this name and these values; `spec` is that of own_parts.py."""
    ((name, changes),) = values.items()
    return {"objective.terms": json.dumps({name: TERM | changes})}


def _any(**values):
    return own_parts.OWN | _terms(variance={"spec": f"{PARTS}:AnySpec", **values})


PARTS = "tests.run.own_parts"
REFUSED = [
    ({"objective.terms": '{"variance": {"weight": 1}}'}, "variance has no spec: add its class as module:Class"),
    (_terms(dino={}), "the name is one of ours"),
    (_terms(**{"My Term": {}}), "small letters"),
    (_terms(variance={"flor": "much"}), "flor is no field of VarianceSpec: it has floor, teacher"),
    # Else it would be that term's weight.
    (_terms(greedy={"spec": f"{PARTS}:GreedySpec", "takes": "dino"}), "another has the name dino already"),
    ({"teacher.others": '{"teacher": {"momentum": 0.9}}'}, "teacher_momentum of metrics is"),
    ({"teacher.others": '{"slow": {"name": "ema"}}'}, "name 'ema' is a second one"),
    # Otherwise the run's own `loss` or `lr` would be overwritten, or a traceback ends a run that has begun.
    (_any(scalar="lr"), "its scalar lr is every run's metrics too"),
    (_any(feature="patches/nope"), "which sees global, local crops and none of nope"),
    (_any(feature="masked/global"), "no patches of global crops are hidden: set crops.mask"),
    (_any(problem="crops.mask none: set it dinov2"), "loss term variance.*crops.mask none: set it dinov2"),
    (_any(teacher="fast"), "reads teacher fast: teachers here are ema, slow"),
    (_any(spec=f"{PARTS}:EmptySpec"), "loss term variance: build.. gave a NoneType: return a Term"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_parts_that_could_not_work_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        _build(changes)


def _build(changes):
    recipe = load_recipe("quickstart", changes)
    terms_of(recipe), teachers_of(recipe)
    build_objective(recipe, torch.device("cpu"))


FLOW = Path(__file__).parents[2] / "docs/flow.md"


def test_the_documented_term_is_found_built_and_computed(tmp_path, monkeypatch):
    """docs/flow.md: a file of the user's and lines of a recipe."""
    python, lines = (re.search(rf"```{kind}\n(.*?)```", FLOW.read_text()[at:], re.DOTALL)[1] for kind, at in AT.items())
    (tmp_path / "my_terms.py").write_text(python)
    (tmp_path / "mine.yaml").write_text(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = load_recipe(f"quickstart,{tmp_path / 'mine.yaml'}", {})
    *_, spec = terms_of(recipe)
    assert (spec.name, spec.floor, str(spec.weight)) == ("variance", 0.2, "0..0.5 over 1000 steps")
    assert [one.name for one in teachers_of(recipe)] == ["ema", "slow"]
    measured = spec.build(None).loss({"patches/global": torch.zeros(2, 4, 8)}, None, None)
    assert measured.loss == pytest.approx(0.2) and measured.scalars == {"variance": 0}


AT = {"python": FLOW.read_text().index("# my_terms.py") - 20, "yaml": FLOW.read_text().index("# my_terms.py")}


ONE, THREE = torch.zeros(()), torch.zeros(3)


@pytest.mark.parametrize(
    ("targets", "found", "says"),
    [
        (None, None, "targets() gave a NoneType, not 1, one for each micro-batch"),
        ([1], None, "loss() gave a NoneType: return TermLoss"),
        ([1], (THREE, {"spread": ONE}), "loss() gave a tensor (3,) as its loss: give a tensor of one number"),
        ([1], (ONE, {"spread": THREE}), "loss() gave a tensor (3,) as its spread"),
        ([1], (ONE, {}), "loss() gave the scalars none, and its class declares spread"),
    ],
)
def test_what_a_term_gives_is_checked_and_the_term_named(targets, found, says):
    class Mine(Term):
        needs, scalars = Needs((), {}), ("spread",)

        def targets(self, window, masks, schedule):
            return targets

        def loss(self, student, targets, schedule):
            return found

    objective, schedule = Objective({"mine": Mine()}), SimpleNamespace(weights={})

    def step():
        (made,) = objective.targets([{}], [{}], schedule)
        objective.loss({}, made, schedule)

    with pytest.raises(ConfigError, match=re.escape(f"loss term mine: {says}")):
        step()
