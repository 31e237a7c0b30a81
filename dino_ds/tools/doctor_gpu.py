"""The doctor's look at GPUs: which there are, what they can compute, and whether this torch has code for them."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator

import torch

from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.flops import tokens_of
from dino_ds.engine.device import DTYPES
from dino_ds.engine.gpu_sensors import GpuReading, open_sensors
from dino_ds.measure.machine import Gpu, find_gpus
from dino_ds.models.attention import chosen_kernel
from dino_ds.tools.doctor_finding import Finding, failure, fine, warning

_DRIVER = "/proc/driver/nvidia/version"


def look_at_gpus(config: DsConfig, recipe: Recipe) -> list[Finding]:
    """GPUs, and what the ds config's precision and the recipe's attention find on the device that would train."""
    complaint = _complaint()
    gpus = find_gpus()
    if not gpus:
        return [_none(complaint), *_precision(config, recipe, torch.device("cpu"))]
    return [*_each(gpus), *_architectures(gpus), *_peers(len(gpus)), *_precision(config, recipe, torch.device("cuda"))]


def _complaint() -> str:
    """What torch says where there is a driver that it can't use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    return " ".join(str(caught[0].message).split())[:200] if caught else ""


def _none(complaint: str) -> Finding:
    driver = os.path.exists(_DRIVER) or shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None and torch.version.hip is None and driver:
        return failure("gpu", "a driver is here, and this torch is built for CPUs", "install torch with CUDA")
    if driver:
        text = f"a driver is here, and torch (CUDA {torch.version.cuda}) finds no GPU"
        text += f": {complaint}" if complaint else ""
        return failure("gpu", text, "nvidia-smi must list the GPUs; a driver older than torch's CUDA must be updated")
    cure = "with a GPU in this machine: install its driver; in a container: docker run --gpus all"
    return warning("gpu", "no GPU: training runs on the CPU, with gloo", cure)


def _each(gpus: list[Gpu]) -> Iterator[Finding]:
    for number, gpu in enumerate(gpus):
        text = f"{number}: {gpu.name}, capability {gpu.capability}, {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
        sensors = open_sensors(torch.device("cuda", number))
        if sensors is not None:
            sensors.start()
        now = (sensors.finish() if sensors is not None else None) or GpuReading()
        text += "" if now.celsius is None else f", {now.celsius:.0f} °C"
        text += "" if now.watts is None else f", {now.watts:.0f} W"
        if now.slowed_by:
            yield warning("gpu", text, f"its clock is lowered because of {now.slowed_by}: look at cooling and power")
        elif gpu.free_gib < 0.9 * gpu.memory_gib:
            yield warning("gpu", text, "other processes hold memory: nvidia-smi lists them")
        else:
            yield fine("gpu", text)
    if len({(gpu.name, round(gpu.memory_gib)) for gpu in gpus}) > 1:
        yield warning("gpu", "the GPUs differ", "choose equal ones: the slowest and the smallest decide")


def _architectures(gpus: list[Gpu]) -> Iterator[Finding]:
    """Whether torch was built for the GPUs: code of their major version, or older PTX, which the driver compiles."""
    built = torch.cuda.get_arch_list()
    if torch.version.hip is not None:
        return
    numbers = {
        kind: [int(name.split("_")[1].rstrip("af")) for name in built if name.startswith(kind)]
        for kind in ("sm", "compute")
    }
    for capability in sorted({gpu.capability for gpu in gpus}):
        here = int(capability.replace(".", ""))
        binary = any(number <= here and number // 10 == here // 10 for number in numbers["sm"])
        if not binary and not any(number <= here for number in numbers["compute"]):
            text = f"torch {torch.__version__} has no code for capability {capability}, only for {', '.join(built)}"
            yield failure("gpu", text, "install a build of torch for this GPU: https://pytorch.org/get-started")


def _peers(count: int) -> Iterator[Finding]:
    if count < 2:
        return
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    text = f"{direct} of {len(pairs)} pairs reach each other's memory directly"
    yield (
        fine("gpu", text)
        if direct == len(pairs)
        else warning(
            "gpu",
            text,
            "collectives go through the host; in a virtual machine ask for peer access (nvidia-smi topo -m)",
        )
    )


def _precision(config: DsConfig, recipe: Recipe, device: torch.device) -> Iterator[Finding]:
    """FP32, bf16, fp16 and the attention kernel of each, for global crops."""
    arch = recipe.model.architecture()
    tokens = tokens_of(arch, recipe.crops.global_size)
    on_gpu = device.type == "cuda"
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else True
    fp16 = True if on_gpu else bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    good = {"fp32": True, "bf16": bf16, "fp16": fp16}
    parts = []
    for name, able in good.items():
        kernel = chosen_kernel(arch.heads, arch.width // arch.heads, tokens, DTYPES[name], device) if able else ""
        parts.append(f"{name} ({kernel} attention)" if able else f"no {name}")
    text = ", ".join(parts)
    if not good[config.precision]:
        yield failure("precision", text, f"the ds config wants {config.precision}: take another --ds_config")
    elif on_gpu and not bf16:
        yield warning("precision", text, "take an fp16 ds config, such as ds_configs/zero2_fp16.json")
    else:
        yield fine("precision", text)
