"""Options of the commands about a trained model: how good its features are, what it sees, its weights elsewhere."""

from __future__ import annotations

from typing import Annotated, Literal

from dino_ds.config.fields import BENCHMARKS, EVALUATIONS
from dino_ds.options.definition import Heads, Help, Json, Model, command

PictureKind = Literal["attention", "pca", "similarity", "neighbours", "map", "curves"]
MapMethod = Literal["tsne", "umap", "pca"]
ClipForm = Literal["mp4", "gif", "png"]
EmbedWhat = Literal["cls", "mean", "patches"]
ExportForm = Literal["safetensors", "timm", "hf", "dino", "dinov2", "onnx", "torchscript"]

_Source = Annotated[str | None, Help("as data.source of a recipe", "the run's, else folder")]


@command("eval", "dino_ds.commands.evaluate:run")
class EvalOptions:
    """k-NN, linear, few-shot, retrieval and statistics of a teacher's frozen features"""

    model: Model
    evals: Annotated[tuple[str, ...], Help("comma-separated list of", choices=EVALUATIONS)] = ("knn",)
    source: _Source = None
    root: Annotated[str | None, Help("labelled training images, as data.root", "the run's")] = None
    test_root: Annotated[str | None, Help("labelled test images", "the run's eval.root, or the source's own")] = None
    benchmark_root: Annotated[str | None, Help(f"folder of the data of {', '.join(BENCHMARKS)}", "none")] = None
    size: Annotated[int | None, Help("pixels of a side, of whole patches", "the model's or the benchmark's")] = None
    k: Annotated[tuple[int, ...] | None, Help("numbers of neighbours of knn", "10,20,100,200")] = None
    temperature: Annotated[float | None, Help("knn weighs neighbours by exp(similarity / temperature)", "0.07")] = None
    images: Annotated[int | None, Help("images of each set, at most", "all")] = None
    epochs: Annotated[int | None, Help("passes of linear-sgd over the training images", "100")] = None
    batch: Annotated[int | None, Help("images of its steps, over all processes", "256")] = None
    workers: Annotated[int | None, Help("data loading processes per rank", "by the cores", zero=True)] = None
    out: Annotated[str | None, Help("JSON file for the results", "RUN/evaluations.json of a run")] = None
    json: Json = False


@command("embed", "dino_ds.commands.embed:run", check="dino_ds.commands.embed:check")
class EmbedOptions:
    """a vector for every image, in one file: for search, clustering, or a classifier of your own"""

    model: Model
    out: Annotated[str, Help("file to write, whose ending says how: .parquet, .npy, .csv or .pt")]
    source: _Source = None
    root: Annotated[str | None, Help("images, as data.root", "the run's")] = None
    what: Annotated[EmbedWhat, Help("features of the image (CLS), the mean of its patches, or their map")] = "cls"
    half: Annotated[bool, Help("16-bit numbers: half the size")] = False
    size: Annotated[int | None, Help("pixels of a side, of whole patches", "the model's")] = None
    batch: Annotated[int, Help("images at once, per process")] = 64
    workers: Annotated[int | None, Help("data loading processes per rank", "by the cores", zero=True)] = None
    json: Json = False


@command("pictures", "dino_ds.report.draw_pictures:run")
class PicturesOptions:
    """what a teacher sees: attention, PCA of patches, similarity, nearest neighbours, a map, the run's curves"""

    model: Model
    source: _Source = None
    root: Annotated[str | None, Help("images, as data.root", "the run's")] = None
    out: Annotated[str | None, Help("folder for the PNG files", "RUN/pictures")] = None
    only: Annotated[tuple[PictureKind, ...] | None, Help("comma-separated list of", "all")] = None
    images: Annotated[str | None, Help("how many, or which: numbers, files, folders with commas", "6")] = None
    queries: Annotated[str | None, Help("images whose neighbours are sought, as --images", "6 of the bank")] = None
    patch: Annotated[str | None, Help('chosen patches, "X,Y 2:X,Y" in pixels of image 1 and 2', "middles")] = None
    foreground: Annotated[bool, Help("PCA of the foreground alone, found by the first component")] = False
    map: Annotated[MapMethod | None, Help("how the map is made", "tsne")] = None
    bank: Annotated[int | None, Help("images of the map, among which neighbours are sought", "500")] = None
    size: Annotated[int | None, Help("pixels of a side of --images", "twice the model's, 16 to 30 patches")] = None
    json: Json = False


@command("attention-video", "dino_ds.report.attention_video:run")
class AttentionVideoOptions:
    """a clip with the teacher's attention over it: a video, an animation, or a folder or pattern of images"""

    model: Model
    clip: Annotated[str, Help("a video, animated GIF or WebP, folder or pattern of images", bare=True)]
    out: Annotated[str | None, Help("what to write: a file, for png a folder", "CLIP_attention.mp4")] = None
    format: Annotated[ClipForm | None, Help("", "as --out ends, else mp4; gif without PyAV")] = None
    show: Annotated[Literal["attention", "heads", "pca"], Help("mean, 60 % of each head, or PCA")] = "attention"
    head: Annotated[int | None, Help("one head's attention", "the mean of all", zero=True)] = None
    fps: Annotated[float | None, Help("frames a second of what is written", "the clip's, 25 of images")] = None
    size: Annotated[int | None, Help("pixels of a frame's shorter side", "twice the model's, 16 to 30 patches")] = None
    json: Json = False


@command("export", "dino_ds.commands.export:run", check="dino_ds.commands.export:check")
class ExportOptions:
    """the teacher of a run, or any weights, as timm, Hugging Face, ONNX, TorchScript or the reference's form"""

    model: Model
    format: Annotated[ExportForm, Help("one of")]
    out: Annotated[str | None, Help("file or folder to write", "beside the weights")] = None
    push: Annotated[
        str | None, Help("OWNER/NAME: upload hf or timm to the Hugging Face Hub too, privately", "none")
    ] = None
    heads: Heads = None
    backbone: Annotated[
        str | None, Help("timm's name or module:Class of no ViT, of a file that doesn't say it", "known")
    ] = None
    json: Json = False
