"""`bench workers` and `bench batch-size`: what is measured, what is recommended, and what is refused."""

from __future__ import annotations

import itertools
import json
import re

import psutil
import pytest

from dino_ds.config.loading import load_recipe
from dino_ds.engine.process import init_distributed
from dino_ds.errors import ConfigError, DataError
from dino_ds.options.bench import BenchBatchSizeOptions, BenchWorkersOptions
from dino_ds.planning.bench import batch_size, workers
from dino_ds.planning.bench.batch_size import Tried, search
from dino_ds.planning.measure.memory import ChildResult
from tests.planning.measure.tiny import tiny_ds, tiny_recipe
from tests.run.harness import image_folder

SMALL = {"crops.global_size": "32", "crops.local_size": "16", "crops.num_local": "2"}


def loader_processes() -> list[psutil.Process]:
    """Grandchildren: the children are the server that forks them, and torch's resource tracker."""
    children = psutil.Process().children()
    return [process for process in psutil.Process().children(recursive=True) if process not in children]


@pytest.mark.slow
def test_workers_are_measured_and_none_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workers, "_ROUNDS", 1)
    recipe, before = load_recipe(None, {"data.root": str(image_folder(tmp_path)), **SMALL}), loader_processes()
    workers.run(BenchWorkersOptions(seconds=0.3, max_workers=1, json=True), recipe=recipe)
    result = json.loads(capsys.readouterr().out)
    _, alive = psutil.wait_procs([process for process in loader_processes() if process not in before], timeout=60)
    assert alive == []
    assert [row["workers"] for row in result["workers"]] == [0, 1]
    for row in result["workers"]:
        rate = row["images_per_second"]
        assert 0 < rate["low"] <= rate["median"] <= rate["high"] and len(rate["rounds"]) == 1
    assert result["recommended"]["workers"] in (0, 1)
    assert result["images"] == 20 and result["host"]["versions"]["torch"]
    result["host"]["load_average"] = [3.5]
    page = workers._page(result)
    assert "| 1 " in page and "recommended  --data.workers " in page and "load average 3.5" in page


def test_images_that_cannot_be_loaded(tmp_path):
    recipe = load_recipe(None, {"data.root": str(tmp_path), **SMALL})
    with pytest.raises(DataError, match="no images under"):
        workers.run(BenchWorkersOptions(max_workers=1), recipe=recipe)


def test_numbers_of_workers_double():
    assert [workers.worker_counts(most) for most in (1, 3, 12)] == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 4, 8, 12]]


RATES = {0: 50.0, 1: 60.0, 2: 118.0, 4: 230.0, 8: 238.0, 16: 300.0}


@pytest.mark.parametrize(
    ("cores", "count"),
    [
        (16, 4),  # 8 give 3 % more, and 16 would leave no core to training
        (17, 16),
        (4, 2),
        (1, 0),
    ],
)
def test_the_fewest_workers_that_are_enough_are_recommended(cores, count):
    chosen = workers.recommend(RATES, cores)
    assert (chosen["workers"], chosen["images_per_second"]) == (count, RATES[count])


@pytest.mark.parametrize("images", [1, 7, 100, 720])
def test_the_search_finds_the_limit_among_the_divisors_that_it_tries(images):
    tried = {}
    for limit in (0, 1, 3, 5, 47, 48, 63, 65, 300, 511, 512, 5000):

        def take(size, limit=limit):
            return Tried(size, 1.0 if size <= limit else None)

        tried[limit] = search(images, take)
        sizes = [one.micro_batch for one in tried[limit]]
        assert len(sizes) == len(set(sizes)) <= 15 and all(images % size == 0 for size in sizes)
        fitting = [one.micro_batch for one in tried[limit] if one.fits]
        assert (max(fitting) if fitting else 0) <= limit and bool(fitting) == (limit > 0)
        assert images <= limit or any(not one.fits for one in tried[limit])
    assert tried[5000][-1].micro_batch == images
    largest = [max((one.micro_batch for one in tries if one.fits), default=0) for tries in tried.values()]
    assert all(a <= b for a, b in itertools.pairwise(largest))


def _bench_batch_size(global_batch="2", memory_gib=1.0, ranks=1):
    options = BenchBatchSizeOptions(memory_gib=memory_gib, ranks=ranks, steps=1, threads=1)
    recipe = tiny_recipe(data__global_batch=global_batch)
    batch_size.run(options, recipe=recipe, ds=tiny_ds(0), ds_path="test.json")


@pytest.mark.slow
def test_the_real_step_is_measured(capsys, monkeypatch):
    """In this process: test_trial.py has the processes."""

    def here(function, ranks, threads, limit_mib, **arguments):
        return [ChildResult(batch_size.measure(**json.loads(json.dumps(arguments))), 300.0, 250.0)]

    init_distributed()
    monkeypatch.setattr(batch_size, "run_in_children", here)
    _bench_batch_size("1", memory_gib=20.0)
    page = capsys.readouterr().out
    assert "--ds.train_micro_batch_size_per_gpu 1 --ds.gradient_accumulation_steps 1: the fastest" in page
    found = re.search(r"\| 1 +\| *(\S+) \| *(\S+) \|", page)
    assert found and float(found[1]) > 0 and float(found[2]) == 0.29


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory_gib": 0.1}, "not one image fits into 0.1 GiB: recompute activations"),
        ({"global_batch": "3", "ranks": 2}, "global batch 3 is not a multiple of 2 ranks"),
    ],
)
def test_what_can_not_be_is_one_line(changes, says):
    with pytest.raises(ConfigError, match=says):
        _bench_batch_size(**changes)
