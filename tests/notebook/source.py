# %% [markdown]
# # What a teacher has learned
#
# The Python API on the newest run in `../runs`, which `make train` has left there: features, patches, attention,
# nearest neighbours, a picture, and a classifier that goes on from the teacher. It takes a minute on two CPU cores.
# (The outputs below are of the quickstart's run: 100 seconds of training on patches of 18 photographs.)

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
from dino_ds.pictures.draw import draw_neighbours, draw_patches

teachers = sorted(Path("../runs").glob("*/teacher.safetensors"), key=lambda path: path.stat().st_mtime)
run = teachers[-1].parent
model = dino_ds.load(run, device="cuda" if torch.cuda.is_available() else "cpu")
print(f"{run}: {model.width} features, images of {model.image_size} pixels, patches of {model.patch_size}")

# %% [markdown]
# `load` also takes a file of weights (ours, DINO's, DINOv2's, timm's), a Hugging Face folder or a timm name.
# `preprocess` takes a Pillow image, and resizes, cuts and normalises it; folders of your own images are read as the
# photographs are below.

# %%
train, test = (build_source("photos", None, split, False) for split in ("train", "test"))
image = test.load(0)
batch = model.preprocess(image)[None].to(next(model.parameters()).device)
print("image        ", image.size, test.classes[test.labels[0]])
print("features     ", tuple(model.features(batch).shape), "(b, width)")
print("patch tokens ", tuple(model.patch_tokens(batch).shape), "(b, rows, columns, width)")
print("attention    ", tuple(model.attention(batch).shape), "(b, heads, rows, columns)")

# %% [markdown]
# ## Attention and patches
#
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
# ## Nearest neighbours
#
# Features of the training patches, and for each test patch a vote of the nearest ones: no training involved.


# %%
def describe(source):
    """Features (n, width) and labels (n,) of every fourth image."""
    indices = range(0, len(source), 4)
    pixels = torch.stack([model.preprocess(source.load(i)) for i in indices]).to(batch.device)
    return torch.cat([model.features(part) for part in pixels.split(64)]), torch.tensor(
        [source.labels[i] for i in indices]
    )


bank, bank_labels = describe(train)
queries, labels = describe(test)
cosines, nearest = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).cpu().topk(10)
votes = F.one_hot(bank_labels[nearest]) * (cosines / 0.07).exp()[..., None]
accuracy = (votes.sum(dim=1).argmax(dim=1) == labels).float().mean()
print(
    f"k-NN of {len(bank)} on {len(queries)} patches: {100 * accuracy:.1f} %, by chance {100 / len(train.classes):.1f} %"
)

# %%
rows = [0, 100, 200]
found = [[np.asarray(train.load(4 * int(i))) for i in nearest[row, :6]] for row in rows]
captions = [[test.classes[labels[row]], *[train.classes[bank_labels[i]] for i in nearest[row, :6]]] for row in rows]
same_class = [[bool(labels[row] == bank_labels[i]) for i in nearest[row, :6]] for row in rows]
figure = draw_neighbours([np.asarray(test.load(4 * row)) for row in rows], found, captions, same_class)
Image(figure_png(figure, dpi=75, palette=True))

# %% [markdown]
# ## Going on with a head of your own
#
# `model.vit` is an ordinary `torch.nn.Module`: `model.vit.features(images)` gives features with gradients once they
# are asked for. First the head alone on frozen features, then both.

# %%
torch.manual_seed(0)
head = torch.nn.Linear(model.width, len(train.classes)).to(batch.device)
pixels = torch.stack([model.preprocess(train.load(i)) for i in range(0, len(train), 4)]).to(batch.device)
targets = bank_labels.to(batch.device)


def fit(parameters, compute, epochs, rate):
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(targets)).split(64):
            loss = F.cross_entropy(head(compute(rows)), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        test_pixels = torch.stack([model.preprocess(test.load(i)) for i in range(0, len(test), 4)]).to(batch.device)
        right = head(model.features(test_pixels)).argmax(dim=1).cpu() == labels
    return f"loss {loss.item():.2f}, {100 * right.float().mean():.1f} % of the test patches"


print("head alone:", fit(head.parameters(), lambda rows: bank[rows], epochs=30, rate=1e-2))
model.vit.requires_grad_(True)
both = [*head.parameters(), *model.vit.parameters()]
print("both:      ", fit(both, lambda rows: model.vit.features(pixels[rows]), epochs=5, rate=3e-4))

# %% [markdown]
# More: `dino-ds eval RUN`, `dino-ds pictures RUN`, `dino-ds export RUN --format hf`, `dino-ds report RUN`.
