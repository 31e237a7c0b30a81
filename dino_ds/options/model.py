"""Options of the commands that evaluate a trained model, use and show its features, and export its weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from dino_ds.config.evaluation import BENCHMARKS, Evaluation
from dino_ds.config.fields import AllowedCode, Amount, Count, Gib, Listed, Positive, Seed, option
from dino_ds.options.definition import Heads, Json, Model, command

PictureKind = Literal["map", "neighbors", "pca", "attention"]
EmbedWhat = Literal["cls", "mean", "patches"]

_Source = Annotated[
    str | None,
    Field(description="as data.source of a recipe", json_schema_extra={"shown": "the run's, else folder"}),
]


def _check_form(form: object) -> object:
    if form in ("onnx", "adapters"):
        raise ValueError(
            "LoRA's adapters are added to the weights of every export: take safetensors or timm"
            if form == "adapters"
            else "for ONNX write timm, then torch.onnx.export of timm.create_model('local-dir:FOLDER', pretrained=True)"
        )
    return form


ExportForm = Annotated[Literal["safetensors", "timm"], BeforeValidator(_check_form)]


@command("eval", "evaluate")
class EvalOptions:
    """k-NN, linear classifiers and statistics of a teacher's frozen features"""

    model: Model
    evals: Listed[Evaluation] = option(("knn",), "comma-separated list of")
    source: _Source = None
    root: str | None = option(None, "labeled training images, as data.root", shown="the run's")
    test_root: str | None = option(None, "labeled test images", shown="the run's eval.root, or the source's own")
    benchmark_root: str | None = option(None, f"folder of the data of {', '.join(BENCHMARKS)}")
    size: Count | None = option(None, "pixels of a side, of whole patches", shown="the model's or the benchmark's")
    k: Listed[Count] | None = option(None, "numbers of neighbors of knn", shown="10,20,100,200")
    temperature: Positive | None = option(None, "knn weighs neighbors by exp(similarity / temperature)", shown="0.07")
    images: Count | None = option(None, "images of each set, at most", shown="all")
    workers: Amount | None = option(None, "data loading processes per rank", shown="by the cores")
    out: str | None = option(None, "JSON file for the results", shown="RUN/evaluations.json of a run")
    allow_code: AllowedCode = None
    json: Json = False


@command("embed", "evaluate")
class EmbedOptions:
    """a vector for every image, in one file: for search, clustering, or a classifier of your own"""

    model: Model
    out: str = option(..., "file to write, .npy (a .csv beside it names the rows) or .parquet")
    source: _Source = None
    root: str | None = option(None, "images, as data.root", shown="the run's")
    what: EmbedWhat = option("cls", "features of the image (CLS), the mean of its patches, or their map")
    half: bool = option(False, "16-bit numbers: half the size")
    size: Count | None = option(None, "pixels of a side, of whole patches", shown="the model's")
    batch: Count = option(64, "images at once, per process")
    workers: Amount | None = option(None, "data loading processes per rank", shown="by the cores")
    allow_code: AllowedCode = None
    json: Json = False


_Features = Annotated[
    str, Field(description="a file of dino-ds embed: .npy or .parquet", json_schema_extra={"bare": True})
]


@command("find", "evaluate")
class FindOptions:
    """the nearest images of one or more: a table, a list and a picture"""

    features: _Features
    images: tuple[str, ...] = option(..., "image files, or rows of features by number or name", bare=True)
    top: Count = option(20, "images for each")
    model: str | None = option(None, "what made features, for files", shown="as embed was told")
    root: str | None = option(None, "the images of features, where they have moved", shown="as embed was told")
    out: str | None = option(None, "begin of the names of the new list and picture", shown="FEATURES-found, or -2, ...")
    memory_gib: Gib = option(1.0, "memory for blocks of features")
    allow_code: AllowedCode = None
    json: Json = False


@command("curate", "evaluate")
class CurateOptions:
    """lists without near-duplicates, clusters and balanced lists, from the features of images"""

    features: _Features
    duplicates: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] | None = option(
        None, "keep one of near-duplicates: neighbors whose images show the same (auto), or pairs of this cosine"
    )
    clusters: Listed[Count] | None = option(None, "clusters; with further numbers clusters of these, as 1000,100,10")
    draw: Count | None = option(None, "images of a list that is balanced over the clusters")
    seed: Seed = option(0, "of clusters and draws")
    root: str | None = option(None, "the images of features, where they have moved", shown="as embed was told")
    out: str | None = option(None, "new folder", shown="FEATURES-duplicates, -clusters or -drawn")
    memory_gib: Gib = option(1.0, "memory for blocks of features")
    allow_code: AllowedCode = None
    json: Json = False


@command("pictures", "look")
class PicturesOptions:
    """what a teacher sees: a map of images, nearest neighbors, PCA of patches, attention"""

    model: Model
    source: _Source = None
    root: str | None = option(None, "images, as data.root", shown="the run's")
    out: str | None = option(None, "folder for the PNG files", shown="RUN/pictures")
    only: Listed[PictureKind] | None = option(None, "comma-separated list of", shown="those that say something")
    allow_code: AllowedCode = None
    json: Json = False


@command("export", "export")
class ExportOptions:
    """a run's teacher, or any weights, as safetensors or a folder for timm and transformers"""

    model: Model
    format: ExportForm = option(..., "one of")
    out: str | None = option(None, "file or folder to write", shown="beside the weights")
    heads: Heads = None
    backbone: str | None = option(
        None, "timm's name or module:Class of no ViT, of a file that doesn't say it", shown="known"
    )
    allow_code: AllowedCode = None
    json: Json = False
