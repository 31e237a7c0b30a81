# %% [markdown]
# # From photographs to features
#
# The Python API in a few minutes of two CPU cores: train, look at what the teacher has learned, make a vector for
# every image, evaluate, and go on with a classifier of your own. The photographs come with the package. For your own
# images take `config="vits16", data={"root": "/images"}`; [api.md](api.md#train-from-python) has the details.

# %%
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from IPython.display import Image

import dino_ds
from dino_ds.data.eval_crops import EvalCrop
from dino_ds.data.sources import build_source
from dino_ds.pictures.canvas import figure_png
from dino_ds.pictures.charts import draw_curves
from dino_ds.pictures.draw import draw_neighbours, draw_patches
from dino_ds.pictures.series import read_metrics

# %% [markdown]
# ## Train
#
# Names and values are those of the command: this is `dino-ds train --config quickstart --max_steps 300 ...`, and writes
# the same files. A callback gets the numbers as they are written. To stop, interrupt the kernel: the run is saved,
# and the same cell goes on with it (`resume="auto"`).


# %%
def show(step, metrics):
    if "knn_top1" in metrics:
        print(f"step {step}: k-NN {metrics['knn_top1']:.1f} %")


run = dino_ds.train(
    "quickstart",
    run_dir="../runs/notebook",
    max_steps=300,
    resume="auto",
    callbacks=[show],
    **{"eval.every": "150 steps", "eval.pictures_every": "0 steps"},
)
print(f"{run.path}: {len(run.metrics)} lines of metrics, the last: {run.metrics[-1]}")

# %% [markdown]
# ## Look
#
# The loss in its two parts, and the accuracy of nearest neighbours. `run.report()` writes all of it as a page.

# %%
Image(figure_png(draw_curves(read_metrics(run.path / "metrics.jsonl")), dpi=75, palette=True))

# %% [markdown]
# `run.load()` is the teacher; `dino_ds.load` also takes a file of weights (ours, DINO's, DINOv2's, timm's), a Hugging
# Face folder or a timm name. `preprocess` takes a Pillow image, and resizes, cuts and normalises it.

# %%
model = run.load(device="cuda" if torch.cuda.is_available() else "cpu")
train, test = (build_source("photos", None, split, False) for split in ("train", "test"))
image = test.load(0)
batch = model.preprocess(image)[None].to(next(model.parameters()).device)
print("image        ", image.size, test.classes[test.labels[0]])
print("features     ", tuple(model.features(batch).shape), "(b, width)")
print("patch tokens ", tuple(model.patch_tokens(batch).shape), "(b, rows, columns, width)")
print("attention    ", tuple(model.attention(batch).shape), "(b, heads, rows, columns)")

# %% [markdown]
# Any size that the patches divide will do. Each head's attention over the image, and below it the fewest patches that
# together have 60 % of it.

# %%
crop = EvalCrop(16 * model.patch_size, model.normalisation)
names = ("astronaut", "cat", "coffee")
photos = build_source("folder", str(Path(dino_ds.__file__).parent / "data/photos"), "train", False)
chosen = [i for i in range(len(photos)) if Path(photos.name(i)).stem in names]
images = torch.stack([crop(photos.load(i)) for i in chosen])
figures = draw_patches(model, images.to(batch.device), model.normalisation.mean, model.normalisation.std)
Image(figure_png(figures["attention"], dpi=75, palette=True))

# %% [markdown]
# The first three principal components of all their patches as colours: equal colours mean equal things.

# %%
Image(figure_png(figures["pca"], dpi=75, palette=True))

# %% [markdown]
# ## Embed
#
# A vector for every training image of the run; `dino_ds.embed(run, "/images", "x.npy")` takes other images, and
# writes a file instead. Beside three of them their nearest neighbours, blue where they are of the same photograph.

# %%
found = dino_ds.embed(run)
rows = F.normalize(torch.from_numpy(found.features), dim=1)
shown = [0, len(rows) // 3, len(rows) // 2]
nearest = (rows[shown] @ rows.T).topk(7).indices[:, 1:]  # the nearest is the image itself
label = [found.classes[i] for i in found.labels]
figure = draw_neighbours(
    [np.asarray(train.load(i)) for i in shown],
    [[np.asarray(train.load(int(i))) for i in near] for near in nearest],
    [[label[i], *[label[j] for j in near]] for i, near in zip(shown, nearest, strict=True)],
    [[label[i] == label[j] for j in near] for i, near in zip(shown, nearest, strict=True)],
)
Image(figure_png(figure, dpi=75, palette=True))

# %% [markdown]
# ## Evaluate
#
# On labelled images that were not trained on, with nothing learned (`knn`) or a linear classifier in closed form
# (`ridge`). Other names are in [docs/evaluations.md](evaluations.md).

# %%
results = dino_ds.evaluate(run, ["knn", "ridge"], k=10)["results"]
for name, result in results.items():
    print(name, result["results"])
print(f"by chance {100 / len(found.classes):.1f} %")

# %% [markdown]
# ## Going on with a head of your own
#
# `model.vit` is an ordinary `torch.nn.Module`: `model.vit.features(images)` gives features with gradients once they
# are asked for. First the head alone on frozen features, then both; on every fourth image.

# %%
torch.manual_seed(0)
pixels, test_pixels = (
    torch.stack([model.preprocess(source.load(i)) for i in range(0, len(source), 4)]).to(batch.device)
    for source in (train, test)
)
targets, test_targets = (torch.tensor(source.labels[::4]).to(batch.device) for source in (train, test))
frozen = torch.cat([model.features(part) for part in pixels.split(64)])
head = torch.nn.Linear(model.width, len(train.classes)).to(batch.device)


def fit(parameters, compute, epochs, rate):
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(targets)).split(64):
            loss = F.cross_entropy(head(compute(rows)), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = head(model.features(test_pixels)).argmax(dim=1) == test_targets
    return f"loss {loss.item():.2f}, {100 * right.float().mean():.1f} % of the test patches"


print("head alone:", fit(head.parameters(), lambda rows: frozen[rows], epochs=30, rate=1e-2))
model.vit.requires_grad_(True)
both = [*head.parameters(), *model.vit.parameters()]
print("both:      ", fit(both, lambda rows: model.vit.features(pixels[rows]), epochs=5, rate=3e-4))

# %% [markdown]
# Also in Python: `dino_ds.plan(...)` says whether a recipe fits a GPU. On the command line: `dino-ds pictures RUN`,
# `dino-ds export RUN --format hf`, and what `dino-ds --help` lists.
