"""Every shipped ds JSON trains on two processes, and each of its sections takes effect."""

from __future__ import annotations

import json

import pytest

from tests.ranks import run_on_ranks
from tests.training.harness import REPOSITORY, image_folder, losses_of, read_metrics, train_tiny

CONFIGS = sorted(path.name for path in (REPOSITORY / "ds_configs").glob("*.json"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def references(images, tmp_path_factory):
    """Losses of one process, by precision."""
    losses = {}
    for precision, config in (("fp32", "zero0_fp32.json"), ("bf16", "zero1_bf16.json")):
        run = tmp_path_factory.mktemp("reference") / "run"
        assert run_on_ranks(train_tiny, images, run, config, max_steps=3, world=1) == [None]
        losses[precision] = [loss for _, loss in losses_of(run)]
    return losses


@pytest.mark.parametrize("config", CONFIGS)
def test_shipped_config_trains(config, images, references, tmp_path):
    """Swapping the JSON does not change what is learned beyond rounding: the losses of one process.

    fp32: 1e-5. bf16: 2e-3 of one bf16 process (gradients are summed over ranks in bf16), 5e-2 of fp32.
    fp16 starts with skipped windows, which use up images: only that it trains is compared.
    """
    run = tmp_path / "run"
    assert run_on_ranks(train_tiny, images, run, config, 3) == [None, None]
    losses = [loss for _, loss in losses_of(run)]
    if "fp32" in config:
        assert losses == pytest.approx(references["fp32"], rel=1e-5)
    elif "bf16" in config:
        assert losses == pytest.approx(references["bf16"], rel=2e-3)
        assert losses == pytest.approx(references["fp32"], rel=5e-2)
    assert len(losses) == 3 and all(loss == loss for loss in losses)
    records = read_metrics(run)
    resolved = json.loads((run / "ds_config.json").read_text())
    assert (records[-1]["loss_scale"] > 1) == ("fp16" in config)
    assert "auto" not in json.dumps(resolved)
    assert (run / "teacher.safetensors").is_file()


def test_shipped_configs_have_the_fixed_names():
    assert {f"zero{s}_{p}.json" for s in (1, 2, 3) for p in ("fp32", "bf16", "fp16")} < set(CONFIGS)
    assert "zero0_fp32.json" in CONFIGS
