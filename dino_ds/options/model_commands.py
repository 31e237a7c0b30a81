"""The commands about a trained model: how good its features are, what it sees, and its weights elsewhere."""

from __future__ import annotations

from dino_ds.config.recipe import EVALUATIONS
from dino_ds.options.command import JSON as _JSON
from dino_ds.options.command import Command, Flag

_MODEL = Flag("model", "text", None, "a run folder, a file of weights, a Hugging Face folder or a timm name", "none")

MODELS = (
    Command(
        "eval",
        "k-NN, linear, few-shot, retrieval and statistics of a teacher's frozen features",
        "dino_ds.tools.evaluate:run",
        (
            _MODEL,
            Flag(
                "evals",
                "text",
                "knn",
                ", ".join(EVALUATIONS),
            ),
            Flag("source", "text", None, "as data.source of a recipe", shown="the run's, else folder"),
            Flag(
                "root",
                "text",
                None,
                "labelled training images, as data.root; what oxford ... voc look in",
                shown="the run's",
            ),
            Flag("test_root", "text", None, "labelled test images", shown="the run's eval.root, or the source's own"),
            Flag(
                "size",
                "int",
                None,
                "pixels of a side, a multiple of the patch size",
                shown="the model's or the benchmark's",
            ),
            Flag("k", "text", "10,20,100,200", "numbers of neighbours"),
            Flag("temperature", "number", 0.07, "weights of the neighbours: exp(similarity / temperature)"),
            Flag("images", "int", None, "images of each set, at most", shown="all"),
            Flag("epochs", "int", 100, "passes of linear-sgd over the training images"),
            Flag("batch", "int", 256, "images of its steps, over all processes"),
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
            _MODEL,
            Flag("source", "text", None, "as data.source of a recipe", shown="the run's, else folder"),
            Flag("root", "text", None, "images, as data.root", shown="the run's"),
            Flag("out", "text", None, "folder for the PNG files", shown="RUN/pictures"),
            Flag("only", "text", None, "attention, pca, similarity, neighbours, map, curves; with commas", shown="all"),
            Flag("images", "text", "6", "how many images are shown, or which: numbers, files or folders with commas"),
            Flag("queries", "text", None, "images whose neighbours are sought, as --images", shown="6 of the bank"),
            Flag("patch", "text", None, 'chosen patches, "X,Y 2:X,Y" in pixels of image 1 and 2', shown="middles"),
            Flag("foreground", "switch", False, "PCA of the foreground alone, found by the first component"),
            Flag("map", "text", None, "how the map is made: tsne, umap or pca", shown="tsne"),
            Flag("bank", "int", 500, "images of the map, among which neighbours are sought"),
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
            _MODEL,
            Flag("clip", "text", None, "a video, an animated GIF or WebP, a folder or a pattern of images", "none"),
            Flag("out", "text", None, "what to write: a file, for png a folder", shown="CLIP_attention.mp4"),
            Flag("format", "text", None, "mp4, gif or png", shown="as --out ends, else mp4; gif without PyAV"),
            Flag("show", "text", "attention", "attention, heads (60 % of each, in its colour) or pca (of the patches)"),
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
            _MODEL,
            Flag("format", "text", None, "safetensors, timm, hf, dino, onnx or torchscript", shown="none"),
            Flag("out", "text", None, "file or folder to write", shown="beside the weights"),
            Flag("heads", "int", None, "attention heads, of a file that does not say it", shown="as usual"),
            _JSON,
        ),
        takes_recipe=False,
        takes_ds=False,
        bare="model",
    ),
)
