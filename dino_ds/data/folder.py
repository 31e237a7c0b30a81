"""Any tree of image files, with or without class folders."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from PIL import Image

from dino_ds.data.images import UnreadableImage, load_rgb
from dino_ds.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}
_SUGGESTION_ENTRIES = 2000
"""How many directory entries are looked at to find a better folder to suggest."""


class ImageFolder:
    """All images under `root`, sorted by path.

    Labels are the first-level folders if every image lies in one and there are at least two; folders named train, val
    or test are no classes. Names that begin with a dot are left out. Raises DataError if there are no images.
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root).expanduser()
        if not self._root.is_dir():
            raise DataError(_describe_missing(self._root))
        self._paths, files, folders = _scan(self._root)
        if not self._paths:
            raise DataError(_describe_empty(self._root, files, folders))
        self.labels, self.classes = _label(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def load(self, index: int) -> Image.Image:
        return load_rgb(self.name(index))

    def read(self, index: int) -> bytes:
        try:
            return Path(self.name(index)).read_bytes()
        except OSError as error:
            raise UnreadableImage(self.name(index), error.strerror or str(error)) from None

    def name(self, index: int) -> str:
        return os.path.join(self._root, self._paths[index])


def _scan(root: Path) -> tuple[list[str], int, list[str]]:
    """Relative paths of images (sorted), the number of files of any kind, names of the first-level folders.

    A folder that several links lead to is read once, under its own path where that is inside the tree.
    """
    images: list[str] = []
    first_level: list[str] = []
    linked: list[str] = []
    files, own, seen = 0, [""], set()
    while own or linked:
        folder = own.pop() if own else linked.pop(0)
        try:
            where = os.stat(root / folder)
            entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{root / folder} cannot be read: {error.strerror}; mend its permissions or link") from None
        if (where.st_dev, where.st_ino) in seen:
            continue
        seen.add((where.st_dev, where.st_ino))
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "lost+found":
                continue
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir():
                (linked if entry.is_symlink() else own).append(path)
                if not folder:
                    first_level.append(entry.name)
            else:
                files += 1
                if entry.name.lower().endswith(EXTENSIONS):
                    images.append(path)
    return sorted(images), files, first_level


def _label(paths: list[str]) -> tuple[list[int] | None, list[str] | None]:
    first = [path.partition("/")[0] if "/" in path else None for path in paths]
    classes = sorted({name for name in first if name is not None})
    if None in first or len(classes) < 2 or {name.lower() for name in classes} <= _SPLIT_NAMES:
        return None, None
    numbers = {name: number for number, name in enumerate(classes)}
    return [numbers[name] for name in first if name is not None], classes


def _describe_missing(root: Path) -> str:
    if root.exists():
        return f"{root} is a file; --data.root wants a folder of images"
    parent = root.parent
    names = [entry.name for entry in os.scandir(parent) if entry.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(root.name, names, n=1)
    if near:
        return f"{root} does not exist. Did you mean {parent / near[0]}?"
    existing = next((folder for folder in root.parents if folder.is_dir()), Path("/"))
    return f"{root} does not exist ({existing} does); give --data.root an existing folder of images"


def _describe_empty(root: Path, files: int, folders: list[str]) -> str:
    found = f"{len(folders)} folders" + (f": {' '.join(folders[:5])}" if folders else "")
    looked = f"looked for {' '.join(EXTENSIONS)} in {files} files, {found}{' ...' if len(folders) > 5 else ''}"
    near = _find_sibling_with_images(root)
    return f"no images under {root} ({looked}). " + (
        f"Did you mean {near}?" if near else "Give --data.root the folder that holds the images"
    )


def _find_sibling_with_images(root: Path) -> Path | None:
    """The folder beside `root` that holds images: train first, then the most similar name."""
    parent = root.resolve().parent
    siblings = [entry.name for entry in os.scandir(parent) if entry.is_dir() and not entry.name.startswith(".")]
    alike = sorted(siblings, key=lambda name: -difflib.SequenceMatcher(None, name, root.name).ratio())
    for name in sorted(alike, key=lambda name: name != "train"):
        if name != root.resolve().name and _holds_images(parent / name):
            return root.parent / name
    return None


def _holds_images(folder: Path) -> bool:
    looked_at = 0
    for _, _, names in os.walk(folder):
        if any(name.lower().endswith(EXTENSIONS) and not name.startswith(".") for name in names):
            return True
        looked_at += 1 + len(names)
        if looked_at > _SUGGESTION_ENTRIES:
            return False
    return False
