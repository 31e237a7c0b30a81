"""Images that are elsewhere: the same ones in the same order as from a copy, whatever the network does."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
import threading
import time
from itertools import islice

import pytest
import torch

from dino_ds.basics.files import unusable_text
from dino_ds.config.crops import dino_groups
from dino_ds.config.sections import MixturePart
from dino_ds.data.batches import LoaderOptions
from dino_ds.data.feed import Position
from dino_ds.data.images import prepare_images
from dino_ds.data.loader import Loader
from dino_ds.data.mixture import Mixture
from dino_ds.data.multicrop import MultiCrop
from dino_ds.data.remote import FilePiece, RemoteCache, _opened
from dino_ds.data.remote_request import _driver_of
from dino_ds.data.root import open_files
from dino_ds.data.tar_members import index_line
from dino_ds.errors import DataError, UserError
from dino_ds.options.commands import TRAIN
from dino_ds.options.flags import parse_flags
from tests.data.files import encoded, members, photo, png, read, tar
from tests.data.servers import serving
from tests.data.test_parquet import write
from tests.ranks import run_on_ranks
from tests.run.harness import image_folder, losses_of, train_tiny

SHARDS, IN_SHARD = 12, 3
IMAGES = SHARDS * IN_SHARD


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards with classes beside single images, a list of these and Parquet files."""
    folder = tmp_path_factory.mktemp("served")
    files = [encoded(photo(40 + n, 30), "JPEG") for n in range(IMAGES)]
    noise = [os.urandom(40_000) for _ in range(IN_SHARD)]  # a footer is then read without the images
    for shard in range(SHARDS):
        content = dict[str, bytes]()
        for n in range(shard * IN_SHARD, (shard + 1) * IN_SHARD):
            content |= {f"{n:03d}.jpg": files[n], f"{n:03d}.cls": str(n % 2).encode()}
        tar(folder / f"set/{shard:03d}.tar", content)
        (folder / f"{shard}.jpg").write_bytes(files[shard])
        write(folder / f"rows/{shard}.parquet", {"image": files[shard * IN_SHARD :][:IN_SHARD], "other": noise})
    (folder / "set/classes.txt").write_text("cat\ndog\n")
    shutil.copytree(folder / "set", folder / "indexed")
    write_index(folder / "indexed")
    (folder / "list.txt").write_text("".join(f"{n}.jpg\tc{n % 2}\n" for n in range(SHARDS)))
    return folder


def write_index(folder):
    lines = [index_line(shard, shard.name) for shard in sorted(folder.glob("*.tar"))]
    (folder / "index.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


def contents(source):
    return [source.read(index) for index in range(len(source))]


def batches(source, count, workers=0, samples=0, patience=None):
    how = LoaderOptions(global_batch=8, micro_batch=4, workers=workers, patience=patience)
    crops = MultiCrop(dino_groups(32, (0.4, 1.0), 16, (0.1, 0.4), 2), "low_res")
    with contextlib.closing(Loader(source, crops, how, Position(0, samples))) as loader:
        return [
            (batch.names, {name: crops.clone() for name, crops in batch.crops.items()})
            for batch in islice(loader, count)
        ]


def check_alike(found, expected):
    for (names, crops), (others, same) in zip(found, expected, strict=True):
        assert [*map(os.path.basename, names)] == [*map(os.path.basename, others)]
        assert all(torch.equal(crops[name], same[name]) for name in crops)


@pytest.mark.parametrize(
    "place",
    ["set", "set/{000..011}.tar", "set/*.tar", "indexed/{009..001}.tar", "list.txt", "rows"],
)
def test_a_server_gives_the_images_of_its_folder(server, folder, place):
    local, remote = read(folder / place), read(f"{server.url}/{place}")
    assert members(remote) == members(local)
    assert (remote.classes, remote.labels) == (local.classes, local.labels)
    assert contents(remote) == contents(local)


@pytest.mark.parametrize("place", ["set", "rows"])
def test_what_was_read_once_is_kept_on_the_disk(server, folder, place, tmp_path):
    first = open_files(f"{server.url}/{place}", 1.0)
    assert contents(first) == contents(read(folder / place))
    server.requests.clear()
    again = pickle.loads(pickle.dumps(first))
    prepare_images(again, range(len(again)))
    assert contents(again) == contents(first)
    assert not server.requests
    for file in (tmp_path / "cache/remote").glob("*.part"):  # as a disk may damage them
        data = bytearray(file.read_bytes())
        data[1000:1100] = bytes(100)
        file.write_bytes(data)
    assert contents(pickle.loads(pickle.dumps(first))) == contents(read(folder / place))
    assert server.requests


def test_an_index_beside_the_shards_is_read_in_place_of_them(server, folder, tmp_path):
    remote, local = open_files(f"{server.url}/indexed", 1.0), read(folder / "set")
    assert (members(remote), remote.labels, remote.classes) == (members(local), local.labels, local.classes)
    assert {count for path, count in server.requests.items() if path.endswith(".tar")} == {2}, "its size and its end"
    assert server.bytes_sent < sum(remote.file_bytes(index) for index in range(IMAGES))
    server.bytes_sent = 0
    prepare_images(remote, range(0, IMAGES, 5))
    assert [remote.read(index) for index in range(0, IMAGES, 5)] == contents(local)[::5]
    assert server.bytes_sent == sum(remote.file_bytes(index) for index in range(0, IMAGES, 5))


def test_shards_that_are_not_those_of_the_index_are_never_read_as_others(tmp_path):
    folder = tmp_path / "set"
    for name in ("0.tar", "1.tar"):
        tar(folder / name, {"a.png": png(1), "b.png": png(2)})
    write_index(folder)
    tar(folder / "2.tar", {"c.png": png(5)})
    with serving(tmp_path) as server:
        remote = read(f"{server.url}/set")
        assert contents(remote) == contents(read(folder))
        tar(folder / "1.tar", {"a.png": png(3), "b.png": png(4)})  # of the same size
        for source in (remote, read(f"{server.url}/set"), open_files(f"{server.url}/set", 1.0)):
            assert source.read(0) == remote.read(0)
            with pytest.raises(DataError, match=r"1\.tar is gone or is another file than index\.jsonl says"):
                source.read(2)
        write_index(folder)
        assert contents(open_files(f"{server.url}/set", 1.0)) == contents(read(folder))
        beyond = '{"format": 1, "shard": "0.tar", "bytes": 9, "end": 9, "images": [["a.png", 0, 10, 0, null]]}'
        for damage in ("[]", "{", beyond):
            (folder / "index.jsonl").write_text(f"{damage}\n")
            with pytest.raises(DataError, match=r"index\.jsonl is damaged: copy it there again"):
                read(f"{server.url}/set")


@pytest.mark.parametrize("length", [9000, 900])
def test_the_cache_keeps_to_its_size_and_drops_what_is_oldest(tmp_path, length: int):
    piece, data = FilePiece("s3://b/a.tar", 1 << 20, 7, 512, length), os.urandom(length)
    old, new = RemoteCache(40_000), RemoteCache(40_000)
    for cache, url in ((old, "s3://b/old.tar"), (new, "s3://b/new.tar")):
        cache.make_room([FilePiece(url, 1 << 20, 7)], 30_000)
        for begin in range(0, 300 * 1024, 10240):
            cache.put(piece._replace(url=url, begin=begin), data)
        used = sum(512 * file.stat().st_blocks for file in (tmp_path / "cache/remote").glob("*.part"))
        assert 18_000 < used < 50_000
        assert cache.get(piece._replace(url=url, begin=0)) == data
    _opened.cache_clear()  # a file that is open stays until it is closed
    assert old.get(piece._replace(url="s3://b/old.tar", begin=0)) is None
    assert new.get(piece._replace(url="s3://b/new.tar", begin=0, tag=8)) is None


def test_the_loader_gives_the_same_crops_and_resumes_at_any_batch(server, folder):
    server.delay = 0.01
    mixed = [MixturePart("set", 0.5), MixturePart("list.txt", 0.5)]
    for local, remote, workers in (
        (read(folder / "set"), open_files(f"{server.url}/set", 1.0), 2),
        (Mixture(mixed, str(folder)), Mixture([MixturePart(f"{server.url}/set", 0.5), mixed[1]], str(folder)), 0),
    ):
        expected = batches(local, 12)
        check_alike(batches(remote, 12, workers=workers), expected)
        check_alike(batches(remote, 4, samples=16), expected[4:8])


def test_an_epoch_asks_for_little_more_than_its_images_and_for_neighbors_together(server):
    remote = read(f"{server.url}/set")
    server.bytes_sent = 0
    batches(remote, IMAGES // 4)
    size = sum(remote.file_bytes(index) for index in range(IMAGES))
    assert server.bytes_sent <= 1.3 * size  # one more batch is ahead at the end; of a real epoch that is nothing
    remote = read(f"{server.url}/set")
    server.requests.clear()
    prepare_images(remote, range(IMAGES))
    contents(remote)
    assert server.requests.total() == SHARDS


def test_row_groups_of_a_batch_come_together_and_once(server, folder):
    remote, local = read(f"{server.url}/rows"), read(folder / "rows")
    server.requests.clear()
    again = pickle.loads(pickle.dumps(remote))
    prepare_images(again, range(IMAGES))
    deadline = time.monotonic() + 30
    while server.requests.total() < SHARDS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert contents(again) == contents(local)
    assert server.requests.total() == SHARDS, "a footer, or a group once more"
    check_alike(batches(remote, 6), batches(local, 6))


@pytest.mark.parametrize(
    ("faults", "seconds"),
    [([429], 1), ([500, "cut", "drop", 503], 0), ([30.0], 1)],
    ids=["throttled", "several", "silent"],
)
def test_faults_that_pass_change_nothing(server, folder, faults, seconds, monkeypatch):
    monkeypatch.setattr("dino_ds.data.remote_request._REQUEST_SECONDS", 1.0)
    local, remote = read(folder / "set"), read(f"{server.url}/set")
    server.faults, server.retry_after = [*faults], "1" if 429 in faults else "0"
    begin = time.monotonic()
    assert remote.read(4) == local.read(4)
    assert seconds <= time.monotonic() - begin < 20
    assert not server.faults


def test_two_ranks_whose_server_stops_and_returns_learn_as_from_a_copy(tmp_path):
    images = sorted(image_folder(tmp_path / "images", 32).iterdir())
    for shard in range(4):
        tar(tmp_path / f"set/{shard}.tar", {path.name: path.read_bytes() for path in images[shard::4]})
    changes, metrics = {"length": "12 steps", "crops.num_local": "1"}, tmp_path / "remote/metrics.jsonl"
    steps, finished = list[int](), threading.Event()

    def stop_and_return():
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 5) and not finished.wait(0.01):
            pass
        server.dead = True
        finished.wait(3)
        steps.append(metrics.read_bytes().count(b"\n"))
        server.dead = False

    with serving(tmp_path) as server:
        server.delay = 0.02
        thread = threading.Thread(target=stop_and_return)
        thread.start()
        try:
            url = f"{server.url}/set/{{0..3}}.tar"
            assert run_on_ranks(train_tiny, url, tmp_path / "remote", changes=changes) == [None, None]
        finally:
            finished.set()
            thread.join()
    assert run_on_ranks(train_tiny, tmp_path / "set", tmp_path / "local", changes=changes) == [None, None]
    assert 5 <= steps[0] < 11
    assert losses_of(tmp_path / "remote") == losses_of(tmp_path / "local")


def test_what_does_not_come_ends_the_loader_with_place_and_count(server):
    remote = read(f"{server.url}/set")
    server.dead = True
    with pytest.raises(DataError, match=r"set/\d+\.tar can't be read, tried \d+ times in \d+ s \(Server") as caught:
        batches(remote, 1, patience=3.0)
    assert "\n" not in str(caught.value)
    server.dead, server.faults = False, [400] * IMAGES
    with pytest.raises(DataError, match=r"set/\d+\.tar can't be read, tried 1 times in \d s \(HTTP 400\)"):
        batches(remote, 1, workers=1)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("ftp://host/a.tar", "nor one of s3://"),
        ("gs://bucket/*.tar", "gs:// needs gcsfs: pip install gcsfs"),
        ("hf://datasets/owner/name/a.parquet", "hf:// needs huggingface_hub: pip install huggingface_hub"),
        ("{}/empty", "an address is of .tar or .parquet files"),
        ("{}/a.h5:/images", "read on a disk: copy them"),
        ("{}/none.tar", "1 of 1 files are not there"),
        ("{}/set/000.tar", "no ranges of bytes"),
    ],
)
def test_places_that_cannot_be_read_are_named(server, folder, place, error, monkeypatch):
    server.ranges = "ranges" not in error
    for driver in ("gcsfs", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, driver, None)
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(Exception, match=error):
        read(place.format(server.url))


@pytest.mark.parametrize("url", ["https://me:secret@host/a.tar", "https://host/a.tar?X-Amz-Signature=secret"])
def test_credentials_are_refused_and_not_repeated(url, tmp_path):
    (tmp_path / "list.txt").write_text(f"{url}\n")
    refused = [(read, url), (read, tmp_path / "list.txt")]
    refused += [(lambda words: parse_flags(TRAIN, words), words) for words in ([url], ["--data.root", url])]
    for act, place in refused:
        with pytest.raises(UserError, match="drivers find credentials by themselves") as caught:
            act(place)
        assert "secret" not in str(caught.value)
    assert "secret" not in unusable_text(url)


@pytest.fixture(scope="module")
def bucket(folder):
    """The folder in a bucket of moto's server, which the driver finds as it finds any."""
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from moto.server import ThreadedMotoServer

    _driver_of.cache_clear()  # one that another test has made knows no endpoint
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ENDPOINT_URL": endpoint, **keys}.items():
            patch.setenv(f"AWS_{name}", value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="images")
        for path in filter(os.path.isfile, map(str, folder.rglob("*"))):
            client.upload_file(path, "images", os.path.relpath(path, folder))
        yield client
    server.stop()


@pytest.mark.parametrize("place", ["set", "set/*.tar", "list.txt", "rows/*.parquet"])
def test_a_bucket_gives_the_images_of_its_folder(bucket, folder, place):
    local, remote = read(folder / place), open_files(f"s3://images/{place}", 1.0)
    assert members(remote) == members(local)
    assert remote.labels == local.labels
    prepare_images(remote, range(5))
    assert contents(remote) == contents(local)


def test_an_object_that_is_replaced_is_noticed(bucket, tmp_path):
    bucket.put_object(Bucket="images", Key="more/0.tar", Body=tar(tmp_path / "0.tar", ("a.png", 1)).read_bytes())
    remote = read("s3://images/more/0.tar")
    bucket.put_object(Bucket="images", Key="more/0.tar", Body=tar(tmp_path / "0.tar", ("a.png", 2)).read_bytes())
    with pytest.raises(DataError, match="is another file than when"):
        remote.read(0)
    assert read("s3://images/more/0.tar").load(0).getpixel((0, 0)) == (2, 0, 0)
    for missing in ("images/more/1.tar", "other/more/1.tar"):
        with pytest.raises(DataError, match="not there"):
            read(f"s3://{missing}")
