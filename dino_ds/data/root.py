"""Opens the user's own images in any form that data.root may name."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from dino_ds.basics.files import is_url
from dino_ds.basics.names import advise_saved, hub_id
from dino_ds.config import evaluation, loading, stages
from dino_ds.config.fields import ARCHIVES, HDF5, IMAGE_FORMS, REMOTE_ARCHIVES, SOURCES
from dino_ds.config.recipe import Recipe
from dino_ds.data.decode import archives_in, is_image_file, note_left_out, split_part
from dino_ds.data.encoded import EncodedImages
from dino_ds.data.folder import ImageFolder, ListFile, describe_missing
from dino_ds.data.hdf5 import Hdf5Images
from dino_ds.data.listing import printable
from dino_ds.data.parquet import ParquetImages
from dino_ds.data.remote import find_files, is_there, list_folder
from dino_ds.data.remote_request import check_url
from dino_ds.data.shards import TarShards
from dino_ds.errors import ConfigError, DataError

_MAX_FILES, _MAX_BRACES = 1_000_000, 50
ENDINGS = (".txt", *ARCHIVES)  # endings of lists and archives
_SOURCES: dict[str, Any] = {".tar": TarShards, ".parquet": ParquetImages, **dict.fromkeys(HDF5, Hdf5Images)}
"""Class of the source by the ending of its files: it takes their paths, and perhaps the name of a part of them."""
TRAIN_FOLDERS, TEST_FOLDERS = (  # folder names of a dataset's training and test parts
    tuple(spelled for name in names.split() for spelled in (name, name.capitalize(), name.upper()))
    for names in ("train training", "test testing val valid validation")
)
# Address of a dataset on the Hugging Face Hub, or of a file in it; old datasets have no owner.
_HUB_SETS = re.compile(
    r"https?://(www\.)?huggingface\.co/datasets/(?P<name>[\w.-]+(/(?!(tree|blob|resolve|viewer)\b)[\w.-]+)?)"
)
_SETS = {  # how the name of each torchvision dataset's folder or archive begins
    "cifar10": "cifar-10-", "cifar100": "cifar-100-", "stl10": "stl10_binary", "imagenette": "imagenette2",
    "food101": "food-101", "flowers102": "flowers-102", "pets": "oxford-iiit-pet", "eurosat": "eurosat",
}  # fmt: skip
_WITHOUT_LABELS = ("statistics", *evaluation.BENCHMARKS)  # evaluations that need no labeled test images


def open_files(root: str, cache_gib: float = 0.0) -> EncodedImages:
    """Open images by a folder, a file, or a pattern with * ? [ ] and braces ({000..099}, {train,extra}).
    The path of an HDF5 file may name a dataset in it (file.h5:/images). A folder that holds ARCHIVES, but no images or
    folders, is read as these archives. cache_gib: disk space for remote images. Raises DataError."""
    check_root(root)
    path, part = split_part(os.path.expanduser(root))
    if is_url(path) and not path.lower().endswith(".txt"):
        return _open_remote(path, root, part, cache_gib)
    if is_url(path):
        return ListFile(path)
    if not os.path.lexists(path) and re.search(r"[*?\[{]", path):
        return _open_all(expand(path), root, part)
    if os.path.isfile(path):
        return ListFile(path) if path.lower().endswith(".txt") else _open_all([path], root, part)
    inside, others = archives_in(path) if os.path.isdir(path) else ([], [])
    if not inside:
        return ImageFolder(root)
    source = _open_all(inside, root)
    source.notes += note_left_out(others)
    return source


def check_photos(source: str, root: str | None) -> None:
    """Raises ConfigError if `root` names images, but the source is the photographs inside the package."""
    if source == "photos" and root is not None:
        raise ConfigError(
            f"images {root} are named, and the source is photos (recipe quickstart's), the photographs inside the "
            "package: for yours say --data.source folder (--source folder), else leave the root out"
        )


def check_root(root: str, key: str = "data.root") -> None:
    """Raises DataError for a root that clearly has no images, without reading files: fast enough for any start."""
    path, _ = split_part(os.path.expanduser(root))
    if is_url(path) and not _HUB_SETS.match(root):
        check_url(root, key)
        return
    if os.path.isfile(path) and not path.lower().endswith(ENDINGS):
        raise DataError(_wrong_file(path, root, key))
    if os.path.isdir(path):
        if saved := advise_saved(path):
            raise DataError(f"{key} {root} {saved}")
        if stages.holds_checkpoint(Path(path)):
            raise DataError(f"{key} {root} is the folder of a run: give the folder of the images")
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            if next(entries, None) is None:
                problem = f"no images under {key} {root}: the folder is empty"
                raise DataError(f"{problem}: give the folder that holds the images")
    if os.path.lexists(path):
        return
    hub_address = _HUB_SETS.match(root)
    if name := hub_id(root) or (hub_address and hub_address["name"]):
        fetch = f"fetch it first (hf download {name} --repo-type dataset --local-dir DIR)"
        remedy = f"if {name} is a data set of the Hugging Face Hub, {fetch} and give DIR (folders, .tar and .parquet)"
        raise DataError(f"{key} {root} does not exist; {remedy}")
    if root.startswith("pipe:"):
        raise DataError(f"{key} {root} is not a local path: mount or copy it, then give {IMAGE_FORMS}")
    if root in SOURCES:
        remedy = f"the data set: --data.source {root} --data.root DIR --data.download true"
        raise DataError(f"{key} {root} does not exist; {remedy}")
    if not re.search(r"[*?\[{]", path):
        missing = describe_missing(Path(path))
        raise DataError(missing if key == "data.root" else f"{key}: {missing}")
    if "{" not in path and next(glob.iglob(path, recursive=True), None) is None:
        folder = re.split(r"[^/]*[*?\[]", path)[0] or "."
        remedy = f"a pattern names files that list or hold images; for images give their folder, {folder}"
        raise DataError(f"no file matches {key} {root}: {remedy}")


def check_split(root: str) -> None:
    """Raises ConfigError for a folder with a training and a test part, which would be trained on together."""
    folder = Path(os.path.expanduser(root))
    train = next((folder / name for name in TRAIN_FOLDERS if (folder / name).is_dir()), None)
    if train and (tests := test_folder(train)):
        remedy = f"name the images to train on, {train} (for train, labeled test images: --eval.root {tests})"
        listed = "for all of them a .txt list of their paths"
        raise ConfigError(f"{root} holds {train.name}/ and {tests.name}/: {remedy}; {listed}")


def test_folder(train: Path) -> Path | None:
    """Folder of test images beside a folder of training images, or None."""
    names = TEST_FOLDERS if train.name in TRAIN_FOLDERS else ()
    return next((path for name in names if (path := train.with_name(name)).is_dir()), None)


def with_own_images(recipe: Recipe, keys: Collection[str], notes: list[str]) -> Recipe:
    """Adapt `recipe` if it names the user's own images: set data.source folder, and leave out evaluations that need
    labeled test images, unless eval.root names such images. keys: the keys given on the command line, which are never
    changed. `notes` gets a line for each change."""
    changes, data, settings, root = dict[str, str](), recipe.data, recipe.eval, recipe.data.root
    asked = "data.source" not in keys and not data.own_files
    if asked and (data.mixture or (root is not None and _holds_images(root, data.source))):
        changes["data.source"] = "folder"
        images = "data.mixture" if data.mixture else f"data.root {root}"
        notes.append(f"{images} names images: data.source is folder, not {data.source} as in the recipe")
    has_own_images = changes or (data.own_files and {"data.root", "data.source", "data.mixture"} & set(keys))
    if has_own_images and settings.root is None and settings.evals != "auto" and "eval.evals" not in keys:
        kept = [name for name in settings.evals if name in _WITHOUT_LABELS]
        if left_out := [name for name in settings.evals if name not in kept]:
            changes["eval.evals"] = ",".join(kept) or "auto"
            note = f"the recipe's eval.evals {', '.join(left_out)} are left out"
            notes.append(f"{note}: they need labeled test images (--eval.root FOLDER)")
    return loading.change_recipe(recipe, changes) if changes else recipe


def _holds_images(root: str, source: str) -> bool:
    """Whether `root` has image files, among its first 2,000, other than those of torchvision's dataset `source`."""
    path, _ = split_part(os.path.expanduser(root))
    if source == "photos" or is_url(root):
        return True  # the package's photographs have no root
    if not os.path.isdir(path):
        return path.lower().endswith(ENDINGS)
    try:
        if any(name.startswith(_SETS[source]) for name in os.listdir(path)):
            return False
    except OSError:
        return False  # opening the source reports why
    files = ((folder, name) for folder, _, names in os.walk(path) for name in names)
    return any(name.lower().endswith(ENDINGS) or is_image_file(at, name) for at, name in itertools.islice(files, 2000))


def expand(pattern: str) -> list[str]:
    """Expand a pattern to files, each once: braces in their order, matches of a * sorted. Raises DataError if a name
    without a * does not exist, a * matches nothing, or braces stand for too many files."""
    if pattern.count("{") > _MAX_BRACES:
        raise DataError(f"data.root has {pattern.count('{')} braces, {_MAX_BRACES} are allowed: give fewer")
    files: dict[str, None] = {}
    for number, path in enumerate(_braces(pattern)):
        if number >= _MAX_FILES:
            raise DataError(f"data.root {pattern} stands for more than {_MAX_FILES} files: give fewer")
        find = find_files if is_url(path) else lambda path: sorted(glob.glob(path, recursive=True))
        there = is_there if is_url(path) else os.path.lexists
        matches = list(find(path)) if glob.has_magic(path) and not there(path) else [path]
        if not matches or not (is_url(path) or os.path.isfile(matches[0])):
            missing = f"its file {printable(path)} is not there"
            raise DataError(f"data.root {pattern}: {missing}: fix the pattern or fetch it")
        files.update(dict.fromkeys(matches))
    return list(files)


def _braces(pattern: str) -> Iterator[str]:
    """Expand braces as a shell does; braces without a comma or dots are kept."""
    for match in re.finditer(r"\{([^{}]*)\}", pattern):
        options: Iterable[str] = match[1].split(",")
        if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
            first, last = int(numbers[1]), int(numbers[2])
            padded = any(text.startswith("0") and len(text) > 1 for text in numbers.groups())
            width = max(map(len, numbers.groups())) if padded else 0
            step = 1 if last >= first else -1
            options = map(f"{{:0{width}d}}".format, range(first, last + step, step))
        elif "," not in match[1]:
            continue
        for option in options:
            yield from _braces(f"{pattern[: match.start()]}{option}{pattern[match.end() :]}")
        return
    yield pattern


def _open_remote(path: str, root: str, part: str | None, cache_gib: float) -> EncodedImages:
    """Open the address of archives, or of a folder that directly holds archives."""
    paths = list[str]()
    if not path.lower().endswith(ARCHIVES):
        paths = [file for file in list_folder(path.rstrip("/")) if file.lower().endswith(ARCHIVES)]
    elif "{" in path and is_there(path):
        paths = [path]
    if not paths and (path.lower().endswith(ARCHIVES) or re.search(r"[*\[{]", path)):
        paths = expand(path)
    if not paths or paths[0].lower().endswith(tuple(set(ARCHIVES) - set(REMOTE_ARCHIVES))):
        kinds = f"{' or '.join(REMOTE_ARCHIVES)} files, a folder right in which they are, or a .txt list"
        wanted = f"an address is of {kinds} that names single images"
        raise DataError(f"data.root {root}: {wanted}; other files are read on a disk: copy them")
    return _open_all(paths, root, part, cache_gib=cache_gib)


def _open_all(paths: list[str], root: str, part: str | None = None, **options: float) -> Any:
    if wrong := next((path for path in paths if Path(path).suffix.lower() not in ARCHIVES), None):
        raise DataError(_wrong_file(wrong, root))
    endings = sorted({Path(path).suffix.lower() for path in paths}, reverse=True)
    if len(endings) > 1:
        raise DataError(f"data.root {root} holds both {' and '.join(endings)} files: give one kind, as a pattern")
    return _SOURCES[endings[0]](paths, *([] if part is None else [part]), **options)


def _wrong_file(path: str, root: str, key: str = "data.root") -> str:
    name = printable(path)
    if os.path.isfile(f"{path}.json"):
        return f"{name} is a file of features: give the folder of the images"
    if is_image_file(*os.path.split(path)):
        folder = printable(os.path.dirname(path)) or "."
        return f"{name} is a single image: give the folder that it is in, {folder}"
    return f"{name} ({key} {root}) is none of {IMAGE_FORMS}; unpack archives and compressed files first"
