"""The recipe's section on evaluations during training, the best teacher and stopping without progress. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PlainSerializer

from dino_ds.basics.names import as_written, did_you_mean
from dino_ds.config import fields
from dino_ds.config.fields import PathText, Section, option
from dino_ds.config.sections import DataSection, ObjectiveSection


class EvaluationEntry(NamedTuple):
    metric: str = ""  # the number by which teachers can be compared, for `eval.keep_best`; "" for none
    titles: Mapping[str, tuple[str, str]] = {}  # number -> title and unit of its chart; others have their name
    has_images: bool = False  # whether it brings images of its own, from `eval.benchmark_root`


_STATISTICS = {
    "feature_std": ("Spread of features: 0 collapsed, 1 even", ""),
    "rankme": ("Directions that features use (RankMe)", ""),
    "uniformity": ("Uniformity of features, lower is more even", ""),
}
EVALUATIONS = {  # by name; a new one needs an entry here, and its function an entry in `dino_ds.evals.suite`
    "knn": EvaluationEntry("knn"),
    "linear": EvaluationEntry("linear", {"linear": ("Linear classifier", "%")}),
    "ridge": EvaluationEntry("ridge", {"ridge": ("Linear classifier in closed form (ridge)", "%")}),
    "statistics": EvaluationEntry("rankme", _STATISTICS),
    **dict.fromkeys(("oxford", "paris", "davis"), EvaluationEntry(has_images=True)),
}
BENCHMARKS = tuple(name for name, entry in EVALUATIONS.items() if entry.has_images)
EVALUATION_OF = {entry.metric: name for name, entry in EVALUATIONS.items() if entry.metric}  # by its metric
VAL_LOSS = "val_loss"  # the metric that is better when smaller
_KEEP_BEST = ("auto", "none", *EVALUATION_OF, VAL_LOSS)
if TYPE_CHECKING:
    Evaluation = str
    KeepBest = str
else:
    Evaluation = Literal[tuple(EVALUATIONS)]
    KeepBest = Literal[_KEEP_BEST]


def _parse_evaluations(value: object) -> tuple[str, ...] | Literal["auto"]:
    if value == "auto":
        return "auto"
    words = fields.split_words(value)
    if not isinstance(words, list | tuple) or not words:
        raise ValueError(f"{as_written(value)} is not auto, nor names of evaluations such as knn,statistics")
    if unknown := [name for name in words if name not in EVALUATIONS]:
        near = did_you_mean(str(unknown[0]), EVALUATIONS)
        raise ValueError(f"{unknown[0]!r} is not auto, nor one of {', '.join(EVALUATIONS)}.{near}")
    return fields.once(tuple(words))


Evaluations = Annotated[tuple[str, ...] | Literal["auto"], BeforeValidator(_parse_evaluations)]


def _parse_end(value: object) -> object:
    if not isinstance(value, str):
        return value
    if match := re.fullmatch(r"\s*drift\s+(\S{1,12})\s*", value):
        with suppress(ValueError):
            if 0 < (limit := float(match[1])) < 2:
                return fields.Drift(limit)
        raise ValueError(f"{value!r} is not a distance: write 'drift 0.1', more than 0 and less than 2")
    return re.sub(r"\s*evaluations?\s*$", "", value)


RunEnd = Annotated[
    fields.Count | fields.Drift | None,
    BeforeValidator(_parse_end),
    PlainSerializer(lambda end: str(end) if isinstance(end, fields.Drift) else end),
]


class EvalSection(Section):
    every: fields.LengthField = option(
        fields.Length(5, "epochs"),
        "length between evaluations; given in epochs or images: ten in the run at least; 0 steps: never",
    )
    evals: Evaluations = option("auto", f"{', '.join(EVALUATIONS)}; auto: knn if there are labeled test images")
    root: PathText | None = option(None, "labeled test images of the same classes, given as data.root is")
    k: fields.Count = option(20, "number of neighbors of knn")
    bank_images: fields.Count = option(10000, "largest number of labeled training images in an evaluation")
    test_images: fields.Count = option(2000, "largest number of test images, and of held-out images of val_loss")
    benchmark_root: PathText | None = option(None, f"folder with the images of {', '.join(BENCHMARKS)}")
    keep_best: KeepBest = option(
        "auto", "metric whose best teacher is kept as best_teacher.safetensors; auto: knn if it is evaluated, else none"
    )
    stop_after: RunEnd = option(
        None,
        "the run ends after so many evaluations without a better value of keep_best's metric, or, by 'drift 0.1', once "
        "preserve_loss is above that; none: at its length",
    )
    val_root: PathText | None = option(None, "images without labels for val_loss, the held-out loss, as data.root")
    val_share: Annotated[float, Field(ge=0, le=0.5)] = option(
        0.0,
        "share of the training images, chosen by a hash of their names, that is held out for val_loss, and as "
        "labeled test images where eval.root names none",
        learned=True,
    )
    pictures_every: fields.AutoLength = option("auto", "length between pictures; auto: six times a run; 0 steps: never")
    idle: ClassVar = {"eval.every 0": "eval.keep_best"}
    refused: ClassVar = {"eval.every 0": "eval.val_root eval.val_share"}

    @property
    def patience(self) -> int | None:
        return None if isinstance(self.stop_after, fields.Drift) else self.stop_after

    @property
    def most_drift(self) -> float | None:
        return self.stop_after.limit if isinstance(self.stop_after, fields.Drift) else None


def margin_of_chance(images: float) -> float:
    """Largest difference of accuracy, in points, that chance explains on `images` test images: two standard errors."""
    return 100 / math.sqrt(images)


def eval_problems(section: EvalSection, data: DataSection, objective: ObjectiveSection) -> list[str]:
    wrong, metric, evaluation = [], section.keep_best, EVALUATION_OF.get(section.keep_best)
    if section.k > section.bank_images:
        wrong.append(f"eval.k {section.k} is more than eval.bank_images {section.bank_images}")
    if section.val_root is not None and section.val_share:
        wrong.append("eval.val_root and eval.val_share both name images of the held-out loss: leave one out")
    if section.val_root is not None and not data.own_files:
        wrong.append(f"eval.val_root goes with images of your own, not with data.source {data.source}: take val_share")
    if metric == VAL_LOSS and section.val_root is None and not section.val_share:
        wrong.append("eval.keep_best val_loss needs held-out images: add eval.val_root FOLDER or eval.val_share 0.05")
    if evaluation and section.evals != "auto" and evaluation not in section.evals:
        wrong.append(f"eval.keep_best {metric} needs {evaluation} among eval.evals")
    if evaluation not in (None, "knn") and section.evals == "auto":
        wrong.append(f"eval.keep_best {metric} needs --eval.evals {evaluation}: auto is knn alone")
    if section.patience and metric == "none":
        wrong.append("eval.stop_after needs a metric, and eval.keep_best is none: name one, such as knn or val_loss")
    if section.patience and not section.every.value:
        wrong.append(f"eval.stop_after {section.patience} has no effect with eval.every 0 steps: leave it out")
    if section.most_drift and not objective.preserve_weight:
        needs = "needs objective.preserve_weight, which measures it: give one, or set it none"
        wrong.append(f"eval.stop_after drift {needs}")
    return wrong
