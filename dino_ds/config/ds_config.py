"""Loads a ds JSON (how fast, on what hardware), read as DeepSpeed reads it (hjson), and decides what it leaves open:
batches, buckets, overlap, dtypes. No torch, no DeepSpeed: a wrong file must be refused before anything starts."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from dino_ds.basics.files import is_file, read_text
from dino_ds.basics.names import did_you_mean
from dino_ds.config import ds_schema
from dino_ds.errors import ConfigError, one_line

CHECKOUT = Path(__file__).resolve().parents[2]
# Largest bucket. DeepSpeed's default, 5e8, is more than a ViT-L has: one bucket of a gigabyte, and no overlap.
BUCKET_ELEMENTS = 50_000_000
# Buckets of a small network on several ranks: while one is reduced, the backward pass fills the next.
REDUCE_BUCKETS = 8
# In a checkout the package's ds_configs is a link to the folder beside the package.
_SHIPPED = (CHECKOUT / "dino_ds/ds_configs").resolve()


def find_ds_config(path: str) -> str:
    """`path` as given, or the shipped file [ds_configs/]NAME[.json]. Raises ConfigError with the nearest file name."""
    if is_file(path):
        return path
    names = [path] if path.endswith((".json", ".hjson")) else [path, f"{path}.json"]
    folders = [_SHIPPED.parent, _SHIPPED, _SHIPPED / "tiers"]
    for shipped in (str(folder / name) for name in names for folder in folders):
        if is_file(shipped):
            return shipped
    shipped_names = sorted(file.stem for file in _SHIPPED.glob("*.json"))
    near = did_you_mean(Path(path).stem, shipped_names)
    raise ConfigError(f"{path} is neither a file nor a shipped ds JSON: there is {', '.join(shipped_names)}.{near}")


def load_ds_config(path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Load the JSON at `path` with `overrides` (dotted key without "ds." -> text or a value). Raises ConfigError."""
    return change_ds_config(_read(find_ds_config(path)), path, overrides)


def change_ds_config(config: dict[str, Any], path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config`, which was read from `path`, with `overrides`; checked as by `load_ds_config`."""
    config, problems = copy.deepcopy(config), list[str]()
    for name, value in overrides.items():
        if problem := ds_schema.override(config, name, value):
            problems.append(f"--ds.{name}: {problem}")
    for name, problem in ds_schema.problems_of(config):
        where = f"--ds.{name}" if name in overrides else f"{path}: {name}" if name else path
        problems.append(f"{where}: {problem}")
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return config


def check_ds_config(
    config: dict[str, Any], path: str, global_batch: int, world_size: int, fp16_supported: bool = True
) -> tuple[int, int]:
    """Micro-batch and accumulation of `config`, from `load_ds_config`; times the ranks they make `global_batch`.
    Raises ConfigError if none do, or if `config` asks for what this device or these batches don't allow."""
    if config.get("fp16", {}).get("enabled") and not fp16_supported:
        cure = "take one in bf16 or fp32, such as ds_configs/zero2_bf16.json"
        raise ConfigError(f"this device has no fp16, and {path} asks for it: {cure}")
    micro, accumulation = _batches(config, path, global_batch, world_size)
    if accumulation > 1 and config.get("dino_ds", {}).get("compile") == "reduce-overhead":
        why = f"{accumulation} micro-batches a step, because CUDA graphs overwrite the gradients of the one before"
        how = 'use "default", or gradient_accumulation_steps 1'
        raise ConfigError(f'{path}: dino_ds.compile: "reduce-overhead" does not go with {why}: {how}')
    return micro, accumulation


def resolve_ds_config(
    config: dict[str, Any],
    path: str,
    global_batch: int,
    world_size: int,
    fp16_supported: bool = True,
    parameters: int | None = None,
) -> ds_schema.DsConfig:
    """Decide every "auto" in `config` for `world_size` ranks and `parameters`. Raises as `check_ds_config` does."""
    micro, accumulation = check_ds_config(config, path, global_batch, world_size, fp16_supported)
    raw = copy.deepcopy(config)
    precision = next((name for name in ("fp16", "bf16") if raw.get(name, {}).get("enabled")), "fp32")
    raw |= {"train_batch_size": global_batch, "train_micro_batch_size_per_gpu": micro}
    raw["gradient_accumulation_steps"] = accumulation
    zero, notes = raw.setdefault("zero_optimization", {"stage": 0}), []
    stage, is_alone = zero["stage"], world_size == 1 and not ds_schema.offloads_optimizer(zero)
    if stage in (1, 2) and precision == "fp32" and is_alone:
        raw["zero_optimization"] = {"stage": 0}
        does = "it runs as ZeRO 0, which is the same without its copies"
        notes, stage = [f"ZeRO {stage} shards nothing on one process: {does}"], 0
    _fill_zero(raw, parameters, world_size)
    # Small gradients are lost in the model's dtype.
    if accumulation > 1 and precision != "fp32" and not raw.get("data_types", {}).get("grad_accum_dtype"):
        accumulated = f"{accumulation} micro-batches are accumulated in"
        if stage >= 2:
            raw.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
            notes.append(f"data_types.grad_accum_dtype = fp32: {accumulated} FP32, not {precision}")
        else:
            instead = '"data_types": {"grad_accum_dtype": "fp32"} (a whole FP32 gradient on every rank)'
            notes.append(f"{accumulated} {precision} at stage {stage}: use stage 2, or {instead}")
    checkpointing = raw.get("activation_checkpointing")
    if checkpointing and checkpointing.get("number_checkpoints") == "auto":
        del checkpointing["number_checkpoints"]
    blocks = 0 if checkpointing is None else checkpointing.get("number_checkpoints", "all")
    scales, clipping = precision == "fp16" and not raw["fp16"].get("loss_scale", 0), float(raw["gradient_clipping"])
    options = ds_schema.PerformanceOptions(**raw.get("dino_ds", {}))
    return ds_schema.DsConfig(raw, micro, accumulation, stage, precision, scales, clipping, blocks, options, notes)


def _read(path: str) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]:
            raise ConfigError(f"{path}: {', '.join(twice)} is set twice")
        return dict(pairs)

    text = read_text(path, "JSON")
    if not text.strip():  # to hjson an empty object
        raise ConfigError(f"{path} is empty (was it cut off?): write a DeepSpeed JSON into it, or take a shipped one")
    try:
        config = hjson.loads(text, object_pairs_hook=refuse_duplicates)
    except RecursionError:
        raise ConfigError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # hjson's own, and Python's about numbers of 4301 digits, 1e999
        raise ConfigError(f"{path} cannot be read as JSON: {one_line(error)}") from None
    if half := re.search('[^"]*([\ud800-\udfff]|\\\\u0000)[^"]*', json.dumps(config, ensure_ascii=False)):
        raise ConfigError(f"{path} cannot be read as JSON: {half[0][:40]!r} has half a character or a NUL")
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a ds config: it must hold one JSON object")
    return config


def _batches(config: dict[str, Any], path: str, global_batch: int, world_size: int) -> tuple[int, int]:
    total = config.get("train_batch_size", "auto")
    if total not in ("auto", global_batch):
        why = f"is not the recipe's data.global_batch {global_batch}"
        how = f"remove it from {path}, or set --data.global_batch {total}"
        raise ConfigError(f"train_batch_size {total} in {path} {why}: {how}")
    micro = config.get("train_micro_batch_size_per_gpu", "auto")
    accumulation = config.get("gradient_accumulation_steps", "auto" if micro != "auto" else 1)
    if micro == "auto":
        accumulation = 1 if accumulation == "auto" else accumulation
        known, product = world_size * accumulation, f"ranks {world_size} x accumulation {accumulation}"
    elif accumulation == "auto":
        known, product = world_size * micro, f"ranks {world_size} x micro-batch {micro}"
    elif (whole := micro * accumulation * world_size) == global_batch:
        return micro, accumulation
    else:
        product = f"micro-batch {micro} x accumulation {accumulation} x ranks {world_size} = {whole}"
        how = f'set --data.global_batch {whole}, or one of the two to "auto" in {path}'
        raise ConfigError(f"global batch {global_batch} is not {product}; {how}")
    if global_batch % known:
        below, above = global_batch // known * known, -(-global_batch // known) * known
        choices = " or ".join(f"--data.global_batch {size}" for size in (below, above) if size)
        raise ConfigError(f"global batch {global_batch} is not a multiple of {product} = {known}; set {choices}")
    quotient = global_batch // known
    return (quotient, accumulation) if micro == "auto" else (micro, quotient)


def _fill_zero(raw: dict[str, Any], parameters: int | None, world_size: int) -> None:
    """Decide "auto" and the missing bucket sizes of the ZeRO section, and whether anything can overlap."""
    zero = raw["zero_optimization"]
    stage, weights = zero["stage"], parameters or REDUCE_BUCKETS * BUCKET_ELEMENTS
    reduced = -(-weights // REDUCE_BUCKETS) if world_size > 1 else weights
    sizes = {"reduce_bucket_size": ((1, 2, 3), reduced), "allgather_bucket_size": ((1, 2), weights)}
    for key, (stages, size) in sizes.items():
        if stage in stages and zero.get(key, "auto") == "auto":
            zero[key] = min(size, BUCKET_ELEMENTS)
    # On one process, overlap_comm only makes each backward pass wait for the device, unless copies to the host overlap.
    to_host = ds_schema.offloads_optimizer(zero) or ds_schema.offloads_weights(zero)
    if world_size == 1 and stage and not to_host:
        zero["overlap_comm"] = False
    for key in [key for key, value in zero.items() if value == "auto"]:
        del zero[key]
    if ds_schema.offloads_optimizer(zero):
        raw["zero_force_ds_cpu_optimizer"] = False  # else DeepSpeed refuses every optimizer but its own
