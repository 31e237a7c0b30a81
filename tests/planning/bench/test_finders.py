"""`bench batch-size`: what is measured, what is recommended, and what is refused."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from dino_ds.engine.process import init_distributed
from dino_ds.errors import ConfigError
from dino_ds.options.commands import BenchBatchSizeOptions
from dino_ds.planning.bench import batch_size
from dino_ds.planning.bench.batch_size import Tried, search
from dino_ds.planning.measure.memory import ChildResult
from tests.planning.measure.tiny import tiny_ds, tiny_recipe


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
    return batch_size.run(options, recipe=recipe, ds=tiny_ds(0), ds_path="test.json")


@pytest.mark.slow
def test_the_real_step_is_measured(monkeypatch):
    """In this process: test_trial.py has the processes."""

    def here(function, ranks, threads, limit_mib, **arguments):
        return [ChildResult(batch_size.measure(**json.loads(json.dumps(arguments))), 300.0, 250.0)]

    init_distributed()
    monkeypatch.setattr(batch_size, "run_in_children", here)
    page = _bench_batch_size("1", memory_gib=20.0).page
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
