"""The shipped small recipes, as `make train` and the README start them, for a few steps."""

from __future__ import annotations

from dino_ds.config.ds_config import load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.run.train_options import TrainOptions
from tests.ranks import run_on_ranks
from tests.run.harness import REPOSITORY, losses_of, read_metrics


def _start(recipe, run, overrides):
    from dino_ds.train import train

    path = str(REPOSITORY / "ds_configs/zero0_fp32.json")
    learned = load_recipe(recipe, {"log_every": "1", "data.workers": "0", **overrides})
    train(
        TrainOptions(run_dir=str(run), max_steps=2, resume=False),
        recipe=learned,
        ds=load_ds_config(path, {}),
        ds_path=path,
    )


def test_quickstart_trains_on_the_embedded_photographs(tmp_path):
    """Order of the verdict at the start: chance < raw pixels < untrained network."""
    run_on_ranks(_start, "quickstart", tmp_path / "run", {"eval.every": "1000 steps"})
    assert [step for step, _ in losses_of(tmp_path / "run")] == [1, 2]
    first = next(r for r in read_metrics(tmp_path / "run") if "knn_top1" in r)
    assert first["knn_chance"] + 10 < first["knn_raw_pixels"] < first["knn_top1"] - 10
