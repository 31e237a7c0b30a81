"""What `doctor` finds about the machine: GPUs, memory, limits of processes, disks, network."""

from __future__ import annotations

import ipaddress
import os
import resource
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from dino_ds.basics.host_memory import host_memory_gib
from dino_ds.config.ds_config import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.costs.flops import tokens_of
from dino_ds.data.listing import cache_folder
from dino_ds.data.workers import check_shared_memory
from dino_ds.engine.device import DTYPES
from dino_ds.engine.distributed import usable_cores
from dino_ds.engine.gpu_sensors import GpuReading, open_sensors
from dino_ds.errors import DataError
from dino_ds.models.attention import chosen_kernel
from dino_ds.models.specs.backbones import ViTSpec
from dino_ds.planning.doctor_software import Finding, failure, fine, warning
from dino_ds.planning.measure.machine import Gpu, find_gpus

_DRIVER = "/proc/driver/nvidia/version"
_SHARED_MEMORY = "/dev/shm"
_FILES = 4096
_RUN_GIB, _TEMPORARY_GIB = 20, 2
_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali")


def look_at_gpus(config: DsConfig, recipe: Recipe) -> list[Finding]:
    """Reports the GPUs, and whether the training device has the ds config's precision and the attention kernels."""
    complaint = _complaint()
    gpus = find_gpus()
    if not gpus:
        return [_none(complaint), *_precision(config, recipe, torch.device("cpu"))]
    return [*_each(gpus), *_architectures(gpus), *_peers(len(gpus)), *_precision(config, recipe, torch.device("cuda"))]


def look_at_system(recipe: Recipe, run_dir: Path) -> list[Finding]:
    """recipe: whose batches shared memory must hold; run_dir: where runs go."""
    return [_memory(), _shared_memory(recipe), *_limits(), *_disks(run_dir)]


def look_at_network() -> list[Finding]:
    return [*_libraries(), _interfaces(), *_own_name(), *_infiniband()]


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
    cure = "collectives go through the host; in a virtual machine ask for peer access (nvidia-smi topo -m)"
    yield fine("gpu", text) if direct == len(pairs) else warning("gpu", text, cure)


def _precision(config: DsConfig, recipe: Recipe, device: torch.device) -> Iterator[Finding]:
    """FP32, bf16, fp16 and the attention kernel of each, for global crops of one of our ViTs."""
    on_gpu = device.type == "cuda"
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else True
    fp16 = True if on_gpu else bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    good = {"fp32": True, "bf16": bf16, "fp16": fp16}
    parts = []
    for name, able in good.items():
        parts.append(f"{name}{_kernel(recipe, DTYPES[name], device)}" if able else f"no {name}")
    text = ", ".join(parts)
    if not good[config.precision]:
        yield failure("precision", text, f"the ds config wants {config.precision}: take another --ds_config")
    elif on_gpu and not bf16:
        yield warning("precision", text, "take an fp16 ds config, such as ds_configs/zero2_fp16.json")
    else:
        yield fine("precision", text)


def _kernel(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> str:
    arch = recipe.model.spec()
    if not isinstance(arch, ViTSpec):
        return ""
    tokens = tokens_of(arch, recipe.crops.global_size)
    return f" ({chosen_kernel(arch.heads, arch.width // arch.heads, tokens, dtype, device)} attention)"


def _memory() -> Finding:
    """Memory of the machine, or of the container where that has less."""
    total, free = host_memory_gib()
    text = f"{len(usable_cores())} cores, {free:.1f} of {total:.1f} GiB memory free"
    if free < 2:
        return warning("memory", text, "end other programs, or give the container more: a rank needs about 2 GiB")
    return fine("memory", text)


def _shared_memory(recipe: Recipe) -> Finding:
    """For this machine alone, a rank on each GPU."""
    if not os.path.isdir(_SHARED_MEMORY):
        return fine("shm", "this system has no /dev/shm")
    room = os.statvfs(_SHARED_MEMORY)
    free = f"{room.f_bavail * room.f_frsize / 2**30:.2f} GiB of shared memory free"
    data, ranks = recipe.data, torch.cuda.device_count() or 1
    workers = max(0, len(usable_cores()) // ranks - 1) if data.workers is None else data.workers
    images = max(1, data.global_batch // ranks)
    try:
        check_shared_memory(ranks * recipe.batch_bytes(images), workers)
    except DataError as error:
        return failure("shm", free, str(error))
    return fine("shm", f"{free}, enough for {ranks} ranks with {workers} loader processes each")


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FILES:
        cure = f"ulimit -n {most}" if most >= _FILES else f"raise the hard limit to {_FILES} in limits.conf"
        yield warning("limits", f"{files} open files", cure)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = locked != resource.RLIM_INFINITY
    text = f"{locked / 2**20:.0f} MiB of locked memory" if limited else "no limit of locked memory"
    if limited and os.path.isdir("/sys/class/infiniband"):
        yield warning("limits", text, "InfiniBand needs more: ulimit -l unlimited (docker run --ulimit memlock=-1)")
    else:
        yield fine("limits", f"{files if files >= 0 else 'any number of'} open files, {text}")


def _disks(run_dir: Path) -> Iterator[Finding]:
    places = {"runs": (run_dir, _RUN_GIB), "temporary files": (Path(tempfile.gettempdir()), _TEMPORARY_GIB)}
    places["lists of images"] = (cache_folder(), 1)
    for what, (path, wanted) in places.items():
        here = next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())
        free = shutil.disk_usage(here).free / 2**30
        text = f"{what}: {free:.1f} GiB free in {here}"
        if not os.access(here, os.W_OK | os.X_OK):
            yield failure("disk", f"{what}: {here} can't be written to", "fix its rights, or name another place")
        elif free < wanted:
            yield warning("disk", text, f"{wanted} GiB are a fair start: remove old runs, or take another disk")
        else:
            yield fine("disk", text)


def _libraries() -> Iterator[Finding]:
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if dist.is_nccl_available() else "no NCCL"
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield warning("network", f"{gloo}, {nccl}", "several GPUs need NCCL: install a torch built with it")
    else:
        yield fine("network", f"{gloo}, {nccl}")
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))}
    if chosen:
        yield fine("network", ", ".join(f"{name}={value}" for name, value in chosen.items()))


def _interfaces() -> Finding:
    """The network interfaces that are up, with IPv4 address and speed."""
    states, shown, outside = psutil.net_if_stats(), list[str](), list[str]()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        numbers = [address.address for address in addresses if address.family == socket.AF_INET]
        if not numbers or name not in states or not states[name].isup:
            continue
        speed = f", {states[name].speed / 1000:g} Gbit/s" if 0 < states[name].speed < 65535 else ""
        shown.append(f"{name} {numbers[0]}{speed}")
        if not ipaddress.ip_address(numbers[0]).is_loopback and not name.startswith(_VIRTUAL):
            outside.append(name)
    if len(outside) > 1:
        remedy = f"if ranks don't find each other: export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME ({outside[0]}, ...)"
        return Finding("network", "ok", ", ".join(shown), remedy)
    return fine("network", ", ".join(shown) or "no interface is up")


def _own_name() -> Iterator[Finding]:
    """gloo listens at the address that the machine's name stands for."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        cure = f"add a line with {name} and this machine's address to /etc/hosts"
        yield warning("network", f"the machine's own name {name} has no address", cure)
        return
    if ipaddress.ip_address(address).is_loopback:
        cure = "alone that is fine; among several machines put its real address into /etc/hosts"
        yield warning("network", f"{name} is {address} to itself: others can't reach that", cure)
    else:
        yield fine("network", f"{name} is {address}")


def _infiniband() -> Iterator[Finding]:
    root = Path("/sys/class/infiniband")
    for port in sorted(root.glob("*/ports/*")):
        state, rate = ((port / name).read_text().strip() for name in ("state", "rate"))
        text = f"{port.parent.parent.name}:{port.name}: {state}, {rate}"
        if "ACTIVE" in state:
            yield fine("network", text)
        else:
            yield warning("network", text, "it is not active: look at its cable and the subnet manager")
