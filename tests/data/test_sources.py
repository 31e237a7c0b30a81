"""Sources: every kind of file becomes right RGB or is named as unreadable; what is missing is said in one line."""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dino_ds.config.fields import SOURCES
from dino_ds.data import torchvision_sets
from dino_ds.data.base import UnreadableImage
from dino_ds.data.decode import MAX_PIXELS, decode_rgb
from dino_ds.data.encoded import read_file
from dino_ds.data.photos import PATCH_PIXELS
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError, DataError

ORANGE = (240, 120, 40)


def save(path: Path, color: tuple[int, int, int] = ORANGE, size: tuple[int, int] = (12, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def folder(root: Path):
    return build_source("folder", str(root), "train", False)


# folder


def test_class_folders_give_labels_in_sorted_order(tmp_path):
    for name in ("dog/2.png", "cat/1.png", "cat/deep/er/0.PNG", "dog/10.jpeg"):
        save(tmp_path / name)
    (tmp_path / "dog/readme.txt").write_text("no image")
    save(tmp_path / "dog/.hidden.png")
    source = folder(tmp_path)
    assert [os.path.relpath(source.name(i), tmp_path) for i in range(len(source))] == [
        "cat/1.png",
        "cat/deep/er/0.PNG",
        "dog/10.jpeg",
        "dog/2.png",
    ]
    assert source.labels == [0, 0, 1, 1]
    assert source.classes == ["cat", "dog"]
    assert source.load(3).getpixel((0, 0)) == ORANGE


@pytest.mark.parametrize(
    "names", [["a.png", "b.png"], ["cat/a.png", "b.png"], ["one/a.png", "one/b.png"], ["train/a.png", "val/b.png"]]
)
def test_a_tree_without_classes_has_no_labels(tmp_path, names):
    for name in names:
        save(tmp_path / name)
    source = folder(tmp_path)
    assert len(source) == 2
    assert source.labels is None
    assert source.classes is None


def test_links_are_followed_once_and_loops_end(tmp_path):
    save(tmp_path / "elsewhere/x.png")
    root = tmp_path / "root"
    save(root / "zebra/a.png")
    (root / "alias").symlink_to(root / "zebra")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "zebra/loop").symlink_to(root)
    source = folder(root)
    assert [os.path.relpath(source.name(i), root) for i in range(len(source))] == ["linked/x.png", "zebra/a.png"]


def test_missing_folder_names_the_nearest(tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(
        DataError, match=re.escape(f"{tmp_path}/imagse does not exist. Did you mean {tmp_path}/images?")
    ):
        folder(tmp_path / "imagse")
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/zzz/zzz does not exist ({tmp_path} does)")):
        folder(tmp_path / "zzz/zzz")
    with pytest.raises(DataError, match=r"one.png is a single image: give the folder"):
        folder(save(tmp_path / "one.png"))


def test_folder_without_images_says_what_was_looked_at(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / "x" / name).mkdir(parents=True)
    (tmp_path / "x/a/notes.txt").write_text("")
    with pytest.raises(DataError) as caught:
        folder(tmp_path / "x")
    assert str(caught.value).startswith(f"no images under {tmp_path}/x (looked for .jpg .jpeg .png ")
    assert "in 1 files, 3 folders: a b c). Give the folder" in str(caught.value)
    for found, suggested in (("elsewhere", None), ("xx", "xx"), ("train", "train")):
        save(tmp_path / found / "0.png")
        words = f"Did you mean {tmp_path}/{suggested}?" if suggested else "Give the folder that holds the images"
        with pytest.raises(DataError, match=re.escape(words)):
            folder(tmp_path / "x")
    assert "\n" not in str(caught.value)


# files


def encoded(image: Image.Image, form: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def load_rgb(path: Path) -> Image.Image:
    return Image.fromarray(decode_rgb(read_file(str(path), str(path)), str(path), MAX_PIXELS))


def images_of_every_mode() -> dict[str, tuple[bytes, tuple[int, int, int]]]:
    """Name -> (file of 8 bits a channel or less, its colour as RGB)."""
    color = Image.new("RGB", (8, 8), ORANGE)
    palette = color.quantize(4)
    see_through = Image.new("RGBA", (8, 8), (*ORANGE, 0))
    half = Image.new("LA", (8, 8), (0, 128))
    hole = palette.copy()
    hole.info["transparency"] = palette.getpixel((0, 0))
    return {
        "RGB png": (encoded(color, "PNG"), ORANGE),
        "RGB jpeg": (encoded(color, "JPEG", quality=100, subsampling=0), ORANGE),
        "grey": (encoded(Image.new("L", (8, 8), 77), "PNG"), (77,) * 3),
        "one bit": (encoded(Image.new("1", (8, 8), 1), "PNG"), (255,) * 3),
        "palette": (encoded(palette, "PNG"), ORANGE),
        "palette with transparency": (encoded(hole, "PNG", transparency=palette.getpixel((0, 0))), (255,) * 3),
        "alpha": (encoded(see_through, "PNG"), (255,) * 3),
        "grey and alpha": (encoded(half, "PNG"), (127,) * 3),
        "CMYK": (encoded(color.convert("CMYK"), "JPEG", quality=100), ORANGE),
        "LAB": (encoded(Image.new("LAB", (8, 8), (255, 128, 128)), "TIFF"), (255,) * 3),
        "gif": (encoded(palette, "GIF"), ORANGE),
        "webp": (encoded(color, "WEBP", lossless=True), ORANGE),
    }


@pytest.mark.parametrize("kind", sorted(images_of_every_mode()))
def test_every_mode_becomes_right_rgb(tmp_path, kind):
    data, expected = images_of_every_mode()[kind]
    (tmp_path / "file.png").write_bytes(data)  # the content decides, not the name
    image = load_rgb(tmp_path / "file.png")
    assert image.mode == "RGB"
    assert image.size == (8, 8)
    np.testing.assert_allclose(image.getpixel((4, 4)), expected, atol=2)  # JPEG rounds


def test_exif_rotation_is_applied(tmp_path):
    image = Image.new("RGB", (16, 8), "black")
    image.paste("white", (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise: the left half becomes the upper one
    image.save(tmp_path / "turned.png", exif=exif)
    upright = load_rgb(tmp_path / "turned.png")
    assert upright.size == (8, 16)
    assert upright.getpixel((4, 2)) == (255, 255, 255)
    assert upright.getpixel((4, 13)) == (0, 0, 0)


def broken_files() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    jpeg, png = encoded(Image.fromarray(noise), "JPEG"), encoded(Image.fromarray(noise), "PNG")
    return {
        "empty": b"",
        "text": b"<html>404</html>",
        "truncated jpeg": jpeg[: len(jpeg) // 2],
        "truncated png": png[: len(png) // 2],
        "header only": jpeg[:30],
        "damaged png": png[:60] + bytes(40) + png[100:],
    }


@pytest.mark.parametrize("kind", sorted(broken_files()))
def test_broken_files_are_named(tmp_path, kind):
    path = tmp_path / "broken.jpg"
    path.write_bytes(broken_files()[kind])
    with pytest.raises(UnreadableImage) as caught:
        load_rgb(path)
    assert caught.value.name == str(path)
    assert caught.value.reason
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_missing_file_is_unreadable(tmp_path):
    with pytest.raises(UnreadableImage, match="No such file"):
        load_rgb(tmp_path / "gone.png")


# photos


@pytest.mark.slow
def test_photos_are_real_patches_the_same_every_time():
    train, test = (build_source("photos", None, split, False) for split in ("train", "test"))
    assert len(train) >= 2700
    assert len(test) >= 900
    assert train.classes == test.classes
    assert len(train.classes) == 18
    assert set(train.labels) == set(test.labels) == set(range(18))
    again = build_source("photos", None, "train", False)
    for index in (0, 1234, len(train) - 1):
        patch = train.load(index)
        assert patch.size == (PATCH_PIXELS, PATCH_PIXELS)
        assert patch.tobytes() == again.load(index).tobytes()
        assert train.name(index) == again.name(index)
        assert train.classes[train.labels[index]] in train.name(index)
    distinct = {train.load(i).tobytes() for i in range(len(train))}
    assert len(distinct) > 0.99 * len(train)


def test_train_and_test_patches_share_no_pixel(monkeypatch):
    """Each patch of a photo whose pixels tell their column stays inside its part of the width."""
    from dino_ds.data import photos

    columns = np.broadcast_to((np.arange(200) * 255 // 199).astype(np.uint8), (256, 200))
    monkeypatch.setattr(photos, "_load_photos", lambda: iter([("ramp", Image.fromarray(columns).convert("RGB"))]))
    monkeypatch.setattr(photos, "_SIDES", (40, 56))
    train, test = photos.PhotoPatches("train"), photos.PhotoPatches("test")
    assert max(np.asarray(train.load(i)).max() for i in range(len(train))) <= 0.6 * 255
    assert min(np.asarray(test.load(i)).min() for i in range(len(test))) >= 0.7 * 255 - 1


def test_every_photo_is_in_the_notice_and_all_are_small():
    import dino_ds.data

    here = Path(dino_ds.data.__file__).parent / "photos"
    files = sorted(here.glob("*.jpg"))
    notice = (here / "NOTICE.md").read_text()
    assert [file.name for file in files if f"| {file.name} |" not in notice] == []
    assert sum(file.stat().st_size for file in files) < 400_000


# by name


def test_unknown_source_and_missing_root():
    with pytest.raises(ConfigError, match=r"'cifar11' is unknown; allowed are folder, photos, .*Did you mean cifar10"):
        build_source("cifar11", None, "train", False)
    for source in set(SOURCES) - {"photos"}:
        with pytest.raises(DataError, match=r"--data\.root DIR"):
            build_source(source, None, "train", False)


@pytest.mark.parametrize("source", sorted(torchvision_sets.TORCHVISION_SETS))
def test_torchvision_set_that_is_not_there(tmp_path, source):
    with pytest.raises(DataError) as caught:
        build_source(source, str(tmp_path), "train", False)
    assert f"{source} is not under {tmp_path}" in str(caught.value)
    assert "--data.download true" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cifar10_by_name(tmp_path, monkeypatch):
    """Against files in CIFAR's own layout; torchvision's check of their MD5 is switched off."""
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(CIFAR10, "_load_meta", lambda self: setattr(self, "classes", [*"abcdefghij"]))
    base = tmp_path / CIFAR10.base_folder
    base.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (4, 3072), dtype=np.uint8)
    names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    for name in names:
        (base / name).write_bytes(pickle.dumps({"data": pixels, "labels": [3, 1, 4, 1]}))
    source = build_source("cifar10", str(tmp_path), "train", False)
    assert len(source) == 20
    assert source.labels == [3, 1, 4, 1] * 5
    assert source.classes == [*"abcdefghij"]
    assert source.name(17) == "cifar10/train/17"
    np.testing.assert_array_equal(np.asarray(source.load(1)), pixels[1].reshape(3, 32, 32).transpose(1, 2, 0))
    assert len(build_source("cifar10", str(tmp_path), "test", False)) == 4


def test_download_happens_only_where_asked_for_and_needed(tmp_path, monkeypatch):
    calls = []

    class Fake(list):
        targets = (0, 1)
        classes = ("a", ("b", "bee"))

    def build(datasets, dataset, root, split, download):
        calls.append(download)
        if not download:
            raise RuntimeError("Dataset not found.\nYou can use download=True to download it")
        return [Fake([(Image.new("L", (4, 4), 9), 0), (None, 1)])]

    monkeypatch.setattr(torchvision_sets, "_build", build)
    with pytest.raises(
        DataError, match=r"--data\.download true; for .*--data\.source folder \(torchvision: Dataset not found\. You"
    ):
        build_source("cifar10", str(tmp_path), "train", False)
    assert calls == [False]
    source = build_source("cifar10", str(tmp_path), "train", True)
    assert calls[-1] is True
    assert source.classes == ["a", "b"]
    assert source.load(0).getpixel((0, 0)) == (9, 9, 9)
    with pytest.raises(UnreadableImage, match="cifar10/train/1"):
        source.load(1)


def test_failed_download_is_one_line(tmp_path, monkeypatch):
    def build(datasets, dataset, root, split, download):
        raise OSError("no route\nto host")

    monkeypatch.setattr(torchvision_sets, "_build", build)
    with pytest.raises(DataError, match=r"download of pets into .* failed: no route to host"):
        build_source("pets", str(tmp_path), "train", True)


def test_the_recipe_knows_these_sources():
    """The schema names them without importing torchvision."""
    assert set(SOURCES) == {"folder", "photos", *torchvision_sets.TORCHVISION_SETS}
