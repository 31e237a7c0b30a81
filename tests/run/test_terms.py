"""Runs with several terms, by the coding rate, near the start, and with Gram anchoring: resumed, named, and refused."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from dino_ds.config import loading, stages
from dino_ds.errors import ConfigError
from dino_ds.method.frozen import PreserveTerm
from dino_ds.models.specs.backbones import VITS
from dino_ds.models.vit import VisionTransformer
from dino_ds.options.commands import ReportOptions
from dino_ds.report.single_run import run as report
from dino_ds.run.metrics import NEAR
from tests.engine.harness import tiny_schedules
from tests.ranks import run_on_ranks
from tests.run import harness, test_resume
from tests.run.harness import image_folder, log_of, losses_of, read_metrics, train_alone, train_tiny, whole_tensors

DINOV2 = {
    "crops.mask": "dinov2", "objective.ibot_weight": "1", "objective.koleo_weight": "0.1",
    "objective.centering": "sinkhorn", "ibot_head.prototypes": "40", "ibot_head.hidden": "48",
    "ibot_head.bottleneck": "16",
}  # fmt: skip
ACCUMULATED = {"gradient_accumulation_steps": "2"}


def test_a_run_names_its_terms_from_the_first_line_to_the_report(tmp_path):
    run = tmp_path / "run"
    images = image_folder(tmp_path / "images")
    assert train_tiny(images, run, max_steps=3, changes=DINOV2, ds_changes=ACCUMULATED) is None
    assert "warning  loss term koleo compares 4 images at a time, not the 8 of a step" in log_of(run)
    terms = {"teacher_entropy", "kl", "dino_loss", "ibot_loss", "ibot_teacher_entropy", "ibot_kl", "koleo_loss"}
    for record in read_metrics(run):
        assert terms < record.keys()
        whole = record["dino_loss"] + record["ibot_loss"] + 0.1 * record["koleo_loss"]
        assert record["loss"] == pytest.approx(whole, rel=1e-5)
        assert record["ibot_kl"] == pytest.approx(record["ibot_cross_entropy"] - record["ibot_teacher_entropy"])
    with redirect_stdout(io.StringIO()):
        report(ReportOptions(run=str(run)))
    page = next(run.glob("*.html")).read_text()
    for words in ("Loss of DINO", "Masked patches (iBOT): teacher entropy", "KoLeo, sum over the global crops"):
        assert words in page, words


RATE = {"objective.dino_weight": "0", "objective.coding_rate_weight": "1", "model.drop_path": "0"}


def test_two_ranks_equal_one(tmp_path):
    """Covariances are summed over ranks, so ZeRO 3 on two ranks has the losses of one process: to 1e-4, as four steps
    of Adam at a high rate carry FP32's rounding on. Metrics have the term's parts, and nothing of prototypes."""
    images, how = image_folder(tmp_path / "images"), {"changes": RATE}
    assert train_alone(images, tmp_path / "alone", max_steps=4, **how) is None
    assert run_on_ranks(train_tiny, images, tmp_path / "ranks", "zero3_fp32.json", 4, **how) == [None, None]
    for (_, one), (_, two) in zip(losses_of(tmp_path / "alone"), losses_of(tmp_path / "ranks"), strict=True):
        assert two == pytest.approx(one, abs=1e-4)
    for line in read_metrics(tmp_path / "alone"):
        assert line["loss"] == pytest.approx(1 - line["view_cosine"] - line["coding_rate"], abs=1e-5)
        assert not {"teacher_entropy", "kl"} & line.keys()


def test_a_collapse_without_prototypes_reaches_log_and_metrics(tmp_path):
    images = image_folder(tmp_path / "images")
    first, *others = sorted(images.iterdir())
    for path in others:
        path.write_bytes(first.read_bytes())
    plain = {f"crops.{name}": "0" for name in ("num_local", "jitter", "blur", "grayscale", "flip", "solarize")}
    plain["crops.global_scale"] = "0.99,1"
    still = {"length": "15 steps", "optimizer.lr": "1e-12", "optimizer.min_lr": "0", "optimizer.warmup": "2 steps"}
    assert train_tiny(images, tmp_path / "run", changes=RATE | plain | still | {"log_every": "1"}) is None
    assert log_of(tmp_path / "run").count("the student gives every image the same feature (coding_spread 0.0") == 1
    last = read_metrics(tmp_path / "run")[-1]
    assert last["collapsed"] == 1 and last["coding_spread"] < NEAR and last["view_cosine"] > 0.9


KEEP = {"objective.preserve_weight": "0.5", "model.drop_path": "0", "save_every": "2 steps"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """images/, a run on them, and another one of another network."""
    place = tmp_path_factory.mktemp("trained")
    image_folder(place / "images")
    other = {"model.patch_size": "16", "model.width": "48", "model.depth": "1"}
    for name, changes in (("run", {}), ("other", other)):
        assert train_alone(place / "images", place / name, max_steps=2, changes=changes) is None
    return place


def test_mean_of_both_distances():
    """1 - cosine by a loop over CLS features and patches, to 1e-6: FP32 sums in another order; 0 without a teacher."""
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


def test_a_run_begins_at_no_distance_and_is_kept_near(trained, tmp_path):
    """Step 1 measures the start against itself: the rounding of bf16 (2**-8 of a feature, squared in a cosine, 1e-3 at
    most). A hundred times the weight ends nearer. Resumed, it goes on to the bit; a checkpoint has the
    start's digest alone."""
    ends = []
    for weight in ("0.001", "100"):
        changes = KEEP | {"model.init_from": str(trained / "run"), "objective.preserve_weight": weight}
        args, ds = (trained / "images", tmp_path / weight), "zero3_bf16.json"
        assert run_on_ranks(train_tiny, *args, ds, 4, changes=changes) == [None, None]
        distances = [line["preserve_loss"] for line in read_metrics(tmp_path / weight) if "preserve_loss" in line]
        assert distances[0] == pytest.approx(0, abs=1e-3)
        ends.append(distances[-1])
    assert ends[1] < 0.5 * ends[0]
    parts = harness.copy_until(2, tmp_path / "100", tmp_path / "parts")
    assert run_on_ranks(train_tiny, trained / "images", parts, ds, 4, True, changes=changes) == [None, None]
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "100")
    test_resume.assert_same_checkpoint(tmp_path / "parts", tmp_path / "100", 4)
    kept = [name for name in whole_tensors(tmp_path / "100", 4) if name.startswith("teachers.")]
    assert kept == ["teachers.start.sha256"]


def test_a_run_that_leaves_its_start_ends_saved_if_asked(trained, tmp_path):
    run, end = tmp_path / "run", {"eval.stop_after": "drift 0.05", "log_every": "2"}
    changes = KEEP | end | {"model.init_from": str(trained / "run"), "save_every": "0 steps"}
    assert run_on_ranks(train_tiny, trained / "images", run, "zero2_fp32.json", changes=changes) == [None, None]
    log = log_of(run)
    assert log.count("ended    eval.stop_after: preserve_loss 0.") == 1 and "done     step 4 of 12" in log
    assert (run / "checkpoints/step_00000004").is_dir() and "drift 0.05" in (run / "config.yaml").read_text()


def test_a_later_stage_keeps_nothing_of_the_start_and_says_so():
    """Whose file may be gone; only with a start of its own it can, and a stage has the run before."""
    run = loading.load_recipe("continue", {"model.init_from": "weights.pth", "model.backbone": "resnet18"})
    assert run.objective.preserve_weight
    for stage_start in ("continue", "restart"):
        given = stages.Request(recipe={"stage_start": stage_start})
        assert not given.applied_to(run).objective.preserve_weight
        assert "ends with the run before: it kept features of weights.pth" in "".join(given.notes)
    kept = stages.Request(recipe={})
    assert kept.applied_to(run, forget=False) == run and kept.notes == []
    with pytest.raises(ConfigError, match=r"keeps features of the weights of model\.init_from: give that"):
        stages.Request(recipe={"stage_start": "continue", "objective.preserve_weight": "1"}).applied_to(run)


GRAM = {"gram.weight": "2", "gram.crop_size": "48"}
SNAPSHOT = GRAM | {"gram.start": "1 steps", "gram.refresh_every": "3 steps", "gram.refreshes": "2"}
SNAPSHOT["save_every"] = "3 steps"


def test_a_run_resumed_across_a_replacement_is_bit_identical(trained, tmp_path):
    """Replaced after steps 1 (the snapshot) and 4; dead after 3, and stopped exactly at 4."""
    straight, parts, ds = tmp_path / "straight", tmp_path / "parts", "zero2_bf16.json"
    for run, steps, resume in ((straight, 6, False), (parts, 4, True), (parts, 6, True)):
        if not parts.exists() and resume:
            harness.copy_until(3, straight, parts)
        assert run_on_ranks(train_tiny, trained / "images", run, ds, steps, resume, SNAPSHOT) == [None, None]
    test_resume.assert_same_checkpoint(parts, straight, 6)
    assert any(name.startswith("teachers.gram.backbone.") for name in whole_tensors(straight, 6))
    ours, theirs = ([r["gram_loss"] for r in read_metrics(run) if "gram_loss" in r] for run in (parts, straight))
    assert ours == theirs and ours[0] == 0 < min(ours[1:])


@pytest.mark.parametrize(
    ("name", "ds"), [("other", "zero2_bf16.json"), ("run/checkpoints/step_00000002", "zero3_fp32.json")]
)
def test_a_teacher_from_a_run(trained, tmp_path, name, ds):
    """The other run may have other patches and width. Its teacher is never trained: a checkpoint has its digest."""
    changes, run = GRAM | {"gram.teacher": str(trained / name)}, tmp_path / "run"
    for steps, resume in ((1, False), (3, True)):
        assert run_on_ranks(train_tiny, trained / "images", run, ds, steps, resume, changes) == [None] * 2
    assert read_metrics(run)[-1]["gram_loss"] > 0
    kept = {key: t for key, t in whole_tensors(run, 3).items() if key.startswith("teachers.gram.")}
    assert [(key, tuple(t.shape)) for key, t in kept.items()] == [("teachers.gram.sha256", (32,))]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gram.teacher": "OTHER", "gram.crop_size": "40"}, "OTHER can't take its crops: images of 40 x 40 pixels"),
        ({"gram.teacher": "OTHER", "gram.refresh_every": "2"}, "whose EMA teacher can't replace it: set gram.refresh"),
        ({"gram.teacher": "OTHER/none"}, "gram.teacher OTHER/none: OTHER/none does not exist"),
        ({"gram.teacher": "OTHER/gray.safetensors"}, "gray.safetensors is for images of 1 channels, and this run's "),
        (
            dict.fromkeys((f"model.{key}" for key in ("patch_size", "width", "depth", "heads")), "none")
            | {"model.backbone": "tests.run.test_terms:NoPatches", "model.drop_path": "0", "gram.crop_size": "none"},
            "gram.weight is for patches: tests.run.test_terms:NoPatches gives features of whole images only",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_written(trained, tmp_path, changes, says):
    other = trained / "other"
    gray = VisionTransformer(replace(VITS["vit_tiny_patch16_224"], in_chans=1), 32)
    save_file(gray.state_dict(), other / "gray.safetensors")
    given = GRAM | {key: value.replace("OTHER", str(other)) for key, value in changes.items()}
    said = train_alone(trained / "images", tmp_path / "run", changes=given)
    assert said is not None and says in said.replace(str(other), "OTHER") and "\n" not in said
    assert not (tmp_path / "run/config.yaml").exists()


class NoPatches(torch.nn.Module):
    def __init__(self, in_chans):
        super().__init__()
        self.layer = torch.nn.Linear(in_chans, 8)

    def forward(self, images):
        return self.layer(images.mean((2, 3)))
