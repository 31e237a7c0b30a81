"""Shards are the images of a folder and come back byte for byte, also after an interruption."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from dino_ds.commands import shard
from dino_ds.data.sources import build_source
from dino_ds.errors import ConfigError
from dino_ds.options.commands import ShardOptions
from dino_ds.options.definition import Result
from tests.data.files import png, png16

pytestmark = pytest.mark.slow


def noise(width: int, height: int, form: str = "JPEG", seed: int = 0, **options) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(stream, form, **options)
    return stream.getvalue()


def tree(root: Path) -> dict[str, bytes]:
    """Names of every awkward kind, and their files."""
    files = {f"cat/{i:02d}.png": png(i) for i in range(9)}
    files |= {"dog/a.b.jpg": noise(20, 10), "dog/a.c.jpg": noise(10, 20), "dog/a.png": png(3), "dog/ü ö.PNG": png(4)}
    files |= {f"eel/{'deep' * 20}/{'long' * 20}.webp": noise(8, 8, "WEBP"), "eel/not really.jpg": b"<html>"}
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return files


def make(root: Path, out: Path, **options) -> Result:
    return shard.run(ShardOptions(root=str(root), out=str(out), workers=2, **options))


def read(root: Path):
    return build_source("folder", str(root), "train", False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("shards")
    files = tree(place / "images")
    return place, files, make(place / "images", place / "shards", shard_size=4).data


def test_shards_have_the_images_and_classes_of_the_folder(made):
    place, files, said = made
    assert said["images"] == len(files) == 15 and said["shards"] == 4 and said["unreadable"] == 0
    folder, shards = read(place / "images"), read(place / "shards")
    assert [shards.member(i) for i in range(15)] == [folder.member(i) for i in range(15)]
    assert shards.labels == folder.labels and shards.classes == folder.classes == ["cat", "dog", "eel"]


def test_checksums_are_sha256sums_and_other_readers_see_webdataset(made):
    place, files, _ = made
    subprocess.run(["sha256sum", "--quiet", "-c", "checksums.sha256"], cwd=place / "shards", check=True)
    found = {}
    for path in sorted((place / "shards").glob("*.tar")):
        with tarfile.open(path) as archive:
            found |= {member.name: archive.extractfile(member).read() for member in archive}
    assert {name: data for name, data in found.items() if not name.endswith(".cls")} == files
    assert found["cat/00.cls"] == b"0" and found["dog/ü ö.cls"] == b"1"


def test_shrink_makes_the_shorter_side_small_and_leaves_small_images_alone(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    files = {
        "wide.png": noise(200, 100, "PNG"),
        "tall.jpg": noise(64, 320),
        "turned.jpg": noise(200, 100, exif=turned),
        "small.png": noise(40, 32, "PNG"),
        "deep.png": png16(np.full((100, 200), 999, np.uint16)),
        "broken.jpg": noise(200, 100)[:300],
        "words.jpg": b"not an image",
    }
    for name, data in files.items():
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / name).write_bytes(data)
    assert make(tmp_path / "images", tmp_path / "shards", shrink=32).data["unreadable"] == 2
    unreadable = (tmp_path / "shards/unreadable.txt").read_text()
    assert "broken.jpg" in unreadable and "words.jpg (not an image)\n" in unreadable
    source = read(tmp_path / "shards")
    names = [source.member(i) for i in range(5)]
    sizes = {name: source.load(i).size for i, name in enumerate(names) if name != "deep.png"}
    assert sizes == {"wide.jpg": (64, 32), "tall.jpg": (32, 160), "turned.jpg": (32, 64), "small.png": (40, 32)}
    for same in ("small.png", "deep.png"):
        assert source.read(names.index(same)) == files[same]


def test_an_interrupted_job_goes_on_and_gives_the_same_shards(tmp_path):
    """Killed with its workers in the middle; no process stays, and no shard is there in part."""
    (tmp_path / "images").mkdir()
    for i in range(60):
        (tmp_path / f"images/{i:02d}.png").write_bytes(noise(90, 90, "PNG", seed=i))
    make(tmp_path / "images", tmp_path / "whole", shard_size=3, shrink=45)
    paths = [tmp_path / f"images/{i}.png" for i in (30, 33)]
    held = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
    for path in held:  # one for each worker, which never gets further
        path.unlink()
        os.mkfifo(path)
    code = f"""
        from dino_ds.options.commands import ShardOptions
        from dino_ds.commands import shard
        root, out = {str(tmp_path / "images")!r}, {str(tmp_path / "out")!r}
        shard.run(ShardOptions(root=root, out=out, shard_size=3, shrink=45, workers=2))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    job = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment, stderr=subprocess.DEVNULL)
    records = tmp_path / "out/checksums.sha256"
    while not (records.is_file() and records.read_text().count("\n") >= 2):
        assert job.poll() is None
        time.sleep(0.01)
    family = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    job.wait()
    assert psutil.wait_procs(family, timeout=60)[1] == []
    for path, (data, time_ns) in held.items():
        path.unlink()
        path.write_bytes(data)
        os.utime(path, ns=(time_ns, time_ns))
    shutil.copy(tmp_path / "whole/shards.json", tmp_path / "out")  # the pipes were other files
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    assert 2 <= len(done) < 20
    with records.open("a") as file:
        file.write("0" * 64 + "  00000")  # the line that was being written
    with (tmp_path / "out/index.jsonl").open("a") as file:
        file.write('{"shard": "00000')
    make(tmp_path / "images", tmp_path / "out", shard_size=3, shrink=45)
    kept = sum(path.stat().st_mtime_ns == done.get(path.name) for path in (tmp_path / "out").glob("*.tar"))
    assert kept >= 2
    for path in (tmp_path / "whole").iterdir():
        if path.suffix in (".tar", ".sha256", ".jsonl"):
            assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert len(read(tmp_path / "out")) == 60
    assert not list((tmp_path / "out").glob(".*"))


def test_folders_of_something_else_are_left_alone(made, tmp_path):
    images, shards = made[0] / "images", made[0] / "shards"
    other = "holds other shards, of other images, --shard_size or --shrink than now"
    with pytest.raises(ConfigError, match=other):
        make(images, shards, shard_size=5)
    more = shutil.copytree(images, tmp_path / "more")
    (more / "cat/00.png").write_bytes(bytes(reversed(png(0))))  # of the same name and size
    with pytest.raises(ConfigError, match=other):
        make(more, shards, shard_size=4)
    with pytest.raises(ConfigError, match="is not empty"):
        make(images, more)


def test_images_of_one_name_and_of_one_key_keep_their_own_files_and_classes(made, tmp_path):
    (tmp_path / "list.txt").write_text("".join(f"{made[0]}/images/dog/a.{end}.jpg\t{end}\n" for end in "bcb"))
    make(tmp_path / "list.txt", tmp_path / "shards")
    source = read(tmp_path / "shards")
    assert [Path(source.member(i)).name for i in range(3)] == ["a.b.jpg", "a.c.jpg", "a.b~2.jpg"]
    assert [source.classes[source.labels[i]] for i in range(3)] == ["b", "c", "b"]
