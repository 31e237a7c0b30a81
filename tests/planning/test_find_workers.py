"""`find-workers`: it measures through the loader of training, advises by what it measured, and leaves no process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from dino_ds.config.loading import load_recipe
from dino_ds.data.sources import build_source
from dino_ds.errors import DataError
from dino_ds.options.data import FindWorkersOptions
from dino_ds.planning import find_workers
from dino_ds.planning.find_workers import _bottleneck, _counts, _ideal, _recommend

SMALL = {"crops.global_size": "32", "crops.local_size": "16", "crops.num_local": "2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 255, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{number}.jpg")
    (path / "broken.jpg").write_bytes(b"no image")
    return path


@pytest.fixture(scope="module")
def found(folder):
    """What is printed with data.augment device and worker, and the loader processes that are left."""
    results, before = {}, loader_processes()
    for augment in ("device", "worker"):
        recipe = load_recipe(None, {"data.root": str(folder), "data.augment": augment, **SMALL})
        with contextlib.redirect_stdout(io.StringIO()) as said:
            find_workers.run(FindWorkersOptions(seconds=0.3, max_workers=1, json=True), recipe=recipe)
        results[augment] = json.loads(said.getvalue())
    _, alive = psutil.wait_procs([process for process in loader_processes() if process not in before], timeout=60)
    return results, alive


def loader_processes() -> list[psutil.Process]:
    """Grandchildren: the children are the server that forks them, and torch's resource tracker."""
    children = psutil.Process().children()
    return [process for process in psutil.Process().children(recursive=True) if process not in children]


@pytest.mark.slow
def test_every_number_is_measured_and_no_process_is_left(found):
    results, alive = found
    assert alive == []
    for augment, result in results.items():
        assert [row["workers"] for row in result["workers"]] == [0, 1]
        for row in result["workers"]:
            rate = row["images_per_second"]
            assert 0 < rate["low"] <= rate["median"] <= rate["high"] and len(rate["rounds"]) == 3 and row["ideal"] > 0
        assert list(result["stages"]) == ["read", "decode", "crops", "hand over", "device"]
        for stage in result["stages"].values():
            assert 0 < stage["milliseconds"]["low"] <= stage["milliseconds"]["median"] <= stage["milliseconds"]["high"]
            assert stage["images_per_second"] == pytest.approx(1000 / stage["milliseconds"]["median"])
        shares = [stage["share"] for stage in result["stages"].values() if stage["where"] == "loader process"]
        assert sum(shares) == pytest.approx(1)
        assert result["bottleneck"]["stage"] in result["stages"]
        assert result["recommended"]["workers"] in (0, 1) and result["recommended"]["step_waits"] is None
        assert result["images"] == 41 and result["augment"] == augment and result["host"]["versions"]["torch"]


@pytest.mark.slow
def test_the_place_of_augmentation_moves_its_cost(found):
    """Blur and colours cost more than cropping: they are found in the stage where the recipe puts them."""
    low = {augment: result["stages"]["crops"]["milliseconds"]["low"] for augment, result in found[0].items()}
    assert low["worker"] > 1.5 * low["device"]


@pytest.mark.slow
def test_text_has_the_numbers_and_the_advice(found):
    result = found[0]["device"]
    rates = {row["workers"]: row["images_per_second"]["median"] for row in result["workers"]}
    text = find_workers._page({**result, "recommended": _recommend(rates, 2, 1e9)})
    for words in ("| 0 ", "| 1 ", "decoding", "storage", "bottleneck ", "recommended  --data.workers ", "41 images"):
        assert words in text, words
    assert "WARNING      the step takes 1,000,000,000 images/s: it would wait for data 100% of the time" in text
    assert "would not wait" in find_workers._page({**result, "recommended": _recommend(rates, 2, 1e-3)})


@pytest.mark.slow
def test_fewer_images_than_a_batch_and_a_source_without_files(tmp_path):
    """Which has one stage for its loading."""
    Image.new("RGB", (40, 40), "red").save(tmp_path / "a.png")
    cpu = torch.device("cpu")
    recipe = load_recipe(None, {"data.root": str(tmp_path), **SMALL})
    source = build_source("folder", str(tmp_path), "train", False)
    assert all(rate > 0 for rate in find_workers._measure(source, recipe, cpu, [0], 0.1)[0])
    assert len(find_workers.measure_stages(source, recipe, cpu, 16, 0.1)["read"]) >= 3
    photos = build_source("photos", None, "train", False)
    stages = find_workers.measure_stages(photos, load_recipe("quickstart", {}), cpu, 4, 0.1)
    assert [*stages] == ["load", "crops", "device", "hand over"]


def test_data_that_cannot_be_loaded(tmp_path):
    before = loader_processes()
    recipe = load_recipe(None, {"data.root": str(tmp_path), **SMALL})
    with pytest.raises(DataError, match="no images under"):
        find_workers.run(FindWorkersOptions(max_workers=1), recipe=recipe)
    (tmp_path / "a.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"only 0 of 1000 images can be read: dino-ds look-data names the others"):
        find_workers.run(FindWorkersOptions(max_workers=1), recipe=recipe)
    assert set(loader_processes()) <= set(before)


# advice, on numbers that are given


def test_numbers_of_workers_double():
    assert [_counts(most) for most in (1, 3, 12)] == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 4, 8, 12]]


RATES = {0: 50.0, 1: 60.0, 2: 118.0, 4: 230.0, 8: 238.0, 16: 300.0}


@pytest.mark.parametrize(
    "cores,wanted,workers,waits",
    [
        (16, None, 4, None),  # 8 give 3 % more, and 16 would leave no core to training
        (17, None, 16, None),
        (4, None, 2, None),
        (1, None, 0, None),
        (16, 100.0, 2, 0.0),
        (16, 40.0, 0, 0.0),
        (16, 460.0, 4, 0.5),
    ],
)
def test_the_fewest_workers_that_are_enough_are_recommended(cores, wanted, workers, waits):
    found = _recommend(RATES, cores, wanted)
    assert found["workers"] == workers
    assert found["step_waits"] == (waits if waits is None else pytest.approx(waits))
    assert found["images_per_second"] == RATES[workers]


def test_bottleneck_is_the_costliest_stage_or_the_training_process():
    seconds = {"read": [0.001], "decode": [0.004], "crops": [0.014], "hand over": [0.001], "device": [0.002]}
    assert _bottleneck(seconds, 4) == {"stage": "crops", "share": pytest.approx(0.7)}
    assert _bottleneck(seconds, 16)["stage"] == "device"
    assert _bottleneck({**seconds, "read": [0.1]}, 4)["stage"] == "read"
    assert _bottleneck({**seconds, "device": [0.02]}, 0)["stage"] == "device"
    assert [_ideal(seconds, workers) for workers in (0, 2, 100)] == pytest.approx([1 / 0.021, 100, 500])


_JOB = """
import signal
import sys
from dino_ds.config.loading import load_recipe
from dino_ds.data.prefetcher import DevicePrefetcher
from dino_ds.options.data import FindWorkersOptions
from dino_ds.planning import find_workers

def bring(feed, bring=DevicePrefetcher.__next__):
    views = bring(feed)
    if feed._loader._batches is not None and hasattr(feed._loader._batches, "_workers"):
        print("a loader process works", flush=True)
    return views

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & hands on that it is ignored
    DevicePrefetcher.__next__ = bring
    find_workers.measure_stages, find_workers._counts = lambda *_: {}, lambda most: [1]  # at once to what is tested
    find_workers.run(
        FindWorkersOptions(seconds=600.0, max_workers=1, json=True),
        recipe=load_recipe(None, {"data.root": sys.argv[1], "data.augment": "worker"}),  # so it waits for the loader
    )
"""


def _interrupt(job):
    """Ctrl-C, and again after a while: Python drops one that comes inside a finaliser."""
    for _ in range(12):
        job.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.wait(10)
    raise AssertionError("it goes on after twelve Ctrl-C")


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_its_processes(folder, tmp_path):
    """The traceback that Python prints still refers to the loader; its processes must end all the same."""
    script = tmp_path / "job.py"
    script.write_text(_JOB)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, script, folder], **pipes, text=True, env=environment) as job:
        assert job.stdout is not None and job.stdout.readline() == "a loader process works\n"
        family = psutil.Process(job.pid).children(recursive=True)
        try:
            code = _interrupt(job)
        finally:
            job.kill()
        _, alive = psutil.wait_procs(family, timeout=60)
    assert len(family) >= 3  # resource tracker, server, loader process
    assert code != 0
    assert alive == []
