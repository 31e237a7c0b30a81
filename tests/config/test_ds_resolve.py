"""How a ds JSON becomes the numbers of one run: batch sizes, dtypes, what is filled in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dino_ds.config.ds_config import DsConfig, load_ds_config, resolve_ds_config
from dino_ds.errors import ConfigError


def _resolve(content: dict[str, Any], global_batch: int = 512, ranks: int = 4, **more: Any) -> DsConfig:
    return resolve_ds_config({"gradient_clipping": 1.0} | content, "x.json", global_batch, ranks, **more)


@pytest.mark.parametrize(
    ("content", "micro", "accumulation"),
    [
        ({}, 128, 1),
        ({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}, 128, 1),
        ({"gradient_accumulation_steps": 4}, 32, 4),
        ({"train_micro_batch_size_per_gpu": 64}, 64, 2),
        ({"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": "auto"}, 64, 2),
        ({"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 2, "train_batch_size": 512}, 64, 2),
    ],
)
def test_auto_batch_sizes(content: dict[str, Any], micro: int, accumulation: int):
    config = _resolve(content)
    assert (config.micro_batch, config.accumulation) == (micro, accumulation)
    assert config.raw["train_batch_size"] == 512


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 1},
            "global batch 512 is not micro-batch 64 x accumulation 1 x ranks 4 = 256; "
            "set gradient_accumulation_steps to 2 in x.json or --data.global_batch 256",
        ),
        (
            {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4},
            "global batch 512 is not micro-batch 3 x accumulation 4 x ranks 4 = 48; "
            "set train_micro_batch_size_per_gpu to 32 in x.json or --data.global_batch 48",
        ),
        (
            {"gradient_accumulation_steps": 3},
            "global batch 512 is not a multiple of ranks 4 x accumulation 3 = 12; "
            "set --data.global_batch 504 or --data.global_batch 516",
        ),
        (
            {"train_micro_batch_size_per_gpu": 1000},
            "global batch 512 is not a multiple of ranks 4 x micro-batch 1000 = 4000; set --data.global_batch 4000",
        ),
        (
            {"train_batch_size": 256},
            "train_batch_size 256 in x.json is not the recipe's data.global_batch 512: "
            "remove it from x.json, or set --data.global_batch 256",
        ),
    ],
)
def test_batch_sizes_that_disagree(content: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as caught:
        _resolve(content)
    assert str(caught.value) == says


def test_input_is_left_alone():
    config = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    before = copy.deepcopy(config)
    resolved = _resolve(config)
    assert config == before
    assert resolved.raw["zero_optimization"]["reduce_bucket_size"] == 50_000_000


@pytest.mark.parametrize(
    ("parameters", "reduced", "gathered"),
    [(43_952_256, 5_494_032, 43_952_256), (326_898_944, 40_862_368, 50_000_000), (10**9, 50_000_000, 50_000_000)],
)
def test_buckets_follow_the_network(parameters: int, reduced: int, gathered: int):
    """A small network's gradients come in eight: while one is reduced the backward pass goes on."""
    zero = {"stage": 2, "reduce_bucket_size": "auto"}
    filled = _resolve({"zero_optimization": zero}, parameters=parameters).raw["zero_optimization"]
    assert (filled["reduce_bucket_size"], filled["allgather_bucket_size"]) == (reduced, gathered)
    alone = _resolve({"zero_optimization": zero, "bf16": {"enabled": True}}, ranks=1, parameters=parameters)
    assert alone.raw["zero_optimization"]["reduce_bucket_size"] == gathered  # nothing to overlap
    given = {"zero_optimization": zero | {"reduce_bucket_size": 7}}
    assert _resolve(given, parameters=parameters).raw["zero_optimization"]["reduce_bucket_size"] == 7


@pytest.mark.parametrize(
    ("ranks", "zero", "overlaps"),
    [
        (1, {"stage": 2, "overlap_comm": True}, False),
        (1, {"stage": 3}, False),
        (1, {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}, True),
        (4, {"stage": 2, "overlap_comm": True}, True),
        (4, {"stage": 1}, None),
    ],
)
def test_one_process_overlaps_nothing_but_copies_to_the_host(ranks: int, zero: dict[str, Any], overlaps: bool | None):
    config = _resolve({"zero_optimization": zero, "bf16": {"enabled": True}}, ranks=ranks)
    assert config.raw["zero_optimization"].get("overlap_comm") == overlaps


@pytest.mark.parametrize("path", sorted(Path("ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_configs_leave_the_buckets_to_the_network(path: Path):
    zero = load_ds_config(str(path), {})["zero_optimization"]
    assert zero.get("reduce_bucket_size", "auto") == zero.get("allgather_bucket_size", "auto") == "auto"


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "filled", "notes"),
    [
        (2, "bf16", 4, "fp32", 1),
        (3, "fp16", 2, "fp32", 1),
        (1, "bf16", 4, None, 1),
        (2, "bf16", 1, None, 0),
        (2, "fp32", 4, None, 0),
    ],
)
def test_low_precision_accumulates_in_fp32(
    stage: int, precision: str, accumulation: int, filled: str | None, notes: int
):
    content: dict[str, Any] = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": accumulation}
    if precision != "fp32":
        content[precision] = {"enabled": True}
    config = _resolve(content)
    assert config.raw.get("data_types", {}).get("grad_accum_dtype") == filled
    assert len(config.notes) == notes


def test_explicit_accumulation_dtype_is_kept():
    content = {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    config = _resolve(content)
    assert config.notes == [] and config.raw["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("section", "blocks", "on_cpu"),
    [
        (None, 0, False),
        ({}, "all", False),
        ({"number_checkpoints": "auto"}, "all", False),
        ({"number_checkpoints": 3}, 3, False),
        ({"number_checkpoints": 0}, 0, False),
        ({"cpu_checkpointing": True}, "all", True),
    ],
)
def test_activation_checkpointing(section: dict[str, Any] | None, blocks: int | str, on_cpu: bool):
    config = _resolve({} if section is None else {"activation_checkpointing": section})
    assert (config.checkpoint_blocks, config.checkpoint_on_cpu) == (blocks, on_cpu)
    assert "auto" not in json.dumps(config.raw)


def test_offload_lets_torch_s_optimizer_in():
    config = _resolve({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    assert config.raw["zero_force_ds_cpu_optimizer"] is False
    without = _resolve({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}})
    assert "zero_force_ds_cpu_optimizer" not in without.raw


def test_dynamic_loss_scale_is_told_from_a_static_one():
    fp16 = {"enabled": True}
    stage = {"zero_optimization": {"stage": 1}}
    assert _resolve({**stage, "fp16": fp16}).dynamic_loss_scale
    assert not _resolve({**stage, "fp16": {**fp16, "loss_scale": 128}}).dynamic_loss_scale
    assert not _resolve(stage).dynamic_loss_scale


def test_switched_off_comms_logger_is_off():
    """DeepSpeed logs as soon as the section is there."""
    assert "comms_logger" not in _resolve({"comms_logger": {"enabled": False}}).raw


def test_fp16_where_there_is_none_is_refused():
    config = load_ds_config("ds_configs/zero3_fp16.json", {})
    with pytest.raises(
        ConfigError, match=r"no fp16, and mine.json asks for it: take one in bf16 or fp32, such as ds_con"
    ):
        resolve_ds_config(config, "mine.json", 8, 1, fp16_supported=False)
    assert resolve_ds_config(config, "mine.json", 8, 1, fp16_supported=True).precision == "fp16"
