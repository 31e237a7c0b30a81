"""Staying near the start: the term against a loop, runs that begin at distance zero, and what is refused."""

from __future__ import annotations

import pytest
import torch

from dino_ds.config.loading import load_recipe
from dino_ds.config.stages import RecipeRequest
from dino_ds.errors import ConfigError
from dino_ds.method.preserve import PreserveTerm
from dino_ds.method.specs.own import teachers_of, terms_of
from tests.engine.harness import tiny_schedules
from tests.ranks import run_on_ranks
from tests.run.harness import copy_until, image_folder, losses_of, read_metrics, train_alone, train_tiny, whole_tensors
from tests.run.test_resume import assert_same_checkpoint

KEEP = {"objective.preserve_weight": "0.5", "model.drop_path": "0", "save_every": "2 steps"}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Images, and a short run that others start from."""
    place = tmp_path_factory.mktemp("started")
    image_folder(place / "images")
    assert train_alone(place / "images", place / "start", max_steps=2) is None
    return place


def test_mean_of_both_distances():
    """1 - cosine by a loop over CLS features, and over patches, to 1e-6: FP32 sums in another order; 0 without a
    teacher."""
    generator, term, schedule = torch.Generator().manual_seed(0), PreserveTerm(True), tiny_schedules().at(0)
    shapes = {"cls/global": (6, 8), "patches/global": (6, 9, 8)}
    own, theirs = ({n: torch.randn(shape, generator=generator) for n, shape in shapes.items()} for _ in range(2))
    (targets,) = term.targets([{"start": theirs}], [{}], schedule)
    means = []
    for name in shapes:
        rows = zip(own[name].view(-1, 8), theirs[name].view(-1, 8), strict=True)
        means.append(torch.stack([1 - (a @ b) / (a.norm() * b.norm()) for a, b in rows]).mean())
    torch.testing.assert_close(term.loss(own, targets, schedule).loss, sum(means) / 2, rtol=0, atol=1e-6)
    assert float(term.loss(own, term.targets([{}], [{}], schedule)[0], schedule).loss) == 0


def test_a_run_begins_at_no_distance_and_is_kept_near(started, tmp_path):
    """Step 1 measures the start against itself: the rounding of bf16 (2**-8 of a feature, squared in a cosine, 1e-3 at
    most). A hundred times the weight ends nearer. Resumed, it goes on to the bit; a checkpoint has the
    start's digest alone."""
    ends = []
    for weight in ("0.001", "100"):
        changes = KEEP | {"model.init_from": str(started / "start"), "objective.preserve_weight": weight}
        args, ds = (started / "images", tmp_path / weight), "zero3_bf16.json"
        assert run_on_ranks(train_tiny, *args, ds, 4, changes=changes) == [None, None]
        distances = [line["preserve_loss"] for line in read_metrics(tmp_path / weight) if "preserve_loss" in line]
        assert distances[0] == pytest.approx(0, abs=1e-3)
        ends.append(distances[-1])
    assert ends[1] < 0.5 * ends[0]
    parts = copy_until(2, tmp_path / "100", tmp_path / "parts")
    assert run_on_ranks(train_tiny, started / "images", parts, ds, 4, True, changes=changes) == [None, None]
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "100")
    assert_same_checkpoint(tmp_path / "parts", tmp_path / "100", 4)
    assert [name for name in whole_tensors(tmp_path / "100", 4) if name.startswith("teachers.")] == [
        "teachers.start.sha256"
    ]


def test_without_a_start_it_is_refused():
    with pytest.raises(ConfigError, match=r"keeps features of the weights of model\.init_from: give that"):
        load_recipe(None, {"objective.preserve_weight": "1"})


def test_a_later_stage_keeps_nothing_of_the_start_and_says_so():
    """Whose file may be gone; only with a start of its own it can, and a stage has the run before."""
    run = load_recipe("continue", {"model.init_from": "weights.pth", "model.backbone": "resnet18"})
    assert run.objective.preserve_weight
    for stage_start in ("continue", "restart"):
        given = RecipeRequest(None, {"stage_start": stage_start})
        assert not given.applied_to(run).objective.preserve_weight
        assert "ends with the run before: it kept features of weights.pth" in "".join(given.notes)
    kept = RecipeRequest(None, {})
    assert kept.applied_to(run, forget=False) == run and kept.notes == []
    with pytest.raises(ConfigError, match=r"keeps features of the weights of model\.init_from: give that"):
        RecipeRequest(None, {"stage_start": "continue", "objective.preserve_weight": "1"}).applied_to(run)


def test_a_weight_of_zero_makes_neither_term_nor_teacher():
    recipe = load_recipe(None, {"model.init_from": "x.pth"})
    assert [term.name for term in terms_of(recipe)] == ["dino"]
    assert [teacher.name for teacher in teachers_of(recipe)] == ["ema"]
