"""The commands about a trained model: how good its features are, what it sees, and its weights elsewhere."""

from __future__ import annotations

from dino_ds.config.recipe import BENCHMARKS, EVALUATIONS
from dino_ds.options.command import HEADS, MODEL, Command, Flag
from dino_ds.options.command import JSON as _JSON

PICTURES = ("attention", "pca", "similarity", "neighbours", "map", "curves")
MAPS = ("tsne", "umap", "pca")
CLIP_FORMS = ("mp4", "gif", "png")
CLIP_SHOWS = ("attention", "heads", "pca")
EXPORTS = ("safetensors", "timm", "hf", "dino", "onnx", "torchscript")
"""The tools have the same names (tests/config/test_cli.py)."""

MODELS = (
    Command(
        "eval",
        "k-NN, linear, few-shot, retrieval and statistics of a teacher's frozen features",
        "dino_ds.tools.evaluate:run",
        (
            MODEL,
            Flag("evals", "names", ("knn",), "some of", choices=EVALUATIONS),
            Flag("source", "text", None, "as data.source of a recipe", shown="the run's, else folder"),
            Flag("root", "text", None, "labelled training images, as data.root", shown="the run's"),
            Flag("test_root", "text", None, "labelled test images", shown="the run's eval.root, or the source's own"),
            Flag("benchmark_root", "text", None, f"folder of the data of {', '.join(BENCHMARKS)}", shown="none"),
            Flag("size", "int", None, "pixels of a side, of whole patches", shown="the model's or the benchmark's"),
            Flag("k", "numbers", None, "numbers of neighbours of knn", shown="10,20,100,200"),
            Flag("temperature", "number", None, "knn weighs neighbours by exp(similarity / temperature)", shown="0.07"),
            Flag("images", "int", None, "images of each set, at most", shown="all"),
            Flag("epochs", "int", None, "passes of linear-sgd over the training images", shown="100"),
            Flag("batch", "int", None, "images of its steps, over all processes", shown="256"),
            Flag("workers", "int", None, "data loading processes per rank", shown="by the cores", zero=True),
            Flag("out", "text", None, "JSON file for the results", shown="RUN/evaluations.json of a run"),
            _JSON,
        ),
        takes_recipe=False,
        takes_ds=False,
        bare="model",
    ),
    Command(
        "pictures",
        "what a teacher sees: attention, PCA of patches, similarity, nearest neighbours, a map, the run's curves",
        "dino_ds.tools.pictures:run",
        (
            MODEL,
            Flag("source", "text", None, "as data.source of a recipe", shown="the run's, else folder"),
            Flag("root", "text", None, "images, as data.root", shown="the run's"),
            Flag("out", "text", None, "folder for the PNG files", shown="RUN/pictures"),
            Flag("only", "names", None, "some of", shown="all", choices=PICTURES),
            Flag("images", "text", None, "how many are shown, or which: numbers, files or folders with commas", "6"),
            Flag("queries", "text", None, "images whose neighbours are sought, as --images", shown="6 of the bank"),
            Flag("patch", "text", None, 'chosen patches, "X,Y 2:X,Y" in pixels of image 1 and 2', shown="middles"),
            Flag("foreground", "switch", False, "PCA of the foreground alone, found by the first component"),
            Flag("map", "text", None, "how the map is made", shown="tsne", choices=MAPS),
            Flag("bank", "int", None, "images of the map, among which neighbours are sought", shown="500"),
            Flag("size", "int", None, "pixels of a side of --images", shown="twice the model's, 16 to 30 patches"),
            _JSON,
        ),
        takes_recipe=False,
        takes_ds=False,
        bare="model",
    ),
    Command(
        "attention-video",
        "a clip with the teacher's attention over it: a video, an animation, or a folder or pattern of images",
        "dino_ds.tools.attention_video:run",
        (
            MODEL,
            Flag("clip", "text", None, "a video, animated GIF or WebP, folder or pattern of images", required=True),
            Flag("out", "text", None, "what to write: a file, for png a folder", shown="CLIP_attention.mp4"),
            Flag("format", "text", None, "", shown="as --out ends, else mp4; gif without PyAV", choices=CLIP_FORMS),
            Flag("show", "text", "attention", "its mean, 60 % of each head, or PCA of patches", choices=CLIP_SHOWS),
            Flag("head", "int", None, "one head's attention", shown="the mean of all", zero=True),
            Flag("fps", "number", None, "frames a second of what is written", shown="the clip's, 25 of images"),
            Flag("size", "int", None, "pixels of a frame's shorter side", shown="twice the model's, 16 to 30 patches"),
            _JSON,
        ),
        takes_recipe=False,
        takes_ds=False,
        bare="model clip",
    ),
    Command(
        "export",
        "the teacher of a run, or any weights, as timm, Hugging Face, ONNX, TorchScript or the reference's form",
        "dino_ds.tools.export:run",
        (
            MODEL,
            Flag("format", "text", None, "one of", choices=EXPORTS, required=True),
            Flag("out", "text", None, "file or folder to write", shown="beside the weights"),
            HEADS,
            _JSON,
        ),
        takes_recipe=False,
        takes_ds=False,
        check="dino_ds.tools.export:check",
        bare="model",
    ),
)
