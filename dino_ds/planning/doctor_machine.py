"""Findings of `doctor` about the machine: GPUs, memory, limits of processes, disks, network."""

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

from dino_ds.basics.durable import cache_folder
from dino_ds.basics.host_memory import host_memory_gib
from dino_ds.config.ds_values import DsConfig
from dino_ds.config.recipe import Recipe
from dino_ds.data.workers import check_shared_memory
from dino_ds.engine.device import DTYPES
from dino_ds.engine.distributed import usable_cores
from dino_ds.engine.gpu_sensors import GpuReading, open_sensors
from dino_ds.errors import DataError, one_line
from dino_ds.models.attention import chosen_kernel
from dino_ds.planning.doctor_software import FAILURE, FINE, Finding, judge
from dino_ds.planning.measure.machine import Gpu, find_gpus

_DRIVER = "/proc/driver/nvidia/version"
_SHARED_MEMORY, _INFINIBAND = "/dev/shm", Path("/sys/class/infiniband")
_FILES = 4096
_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali")


def look_at_gpus(config: DsConfig, recipe: Recipe) -> Iterator[Finding]:
    """The GPUs, and whether the training device has the ds config's precision and the attention kernels."""
    gpus = find_gpus()
    if gpus:
        yield from _each(gpus)
        yield from _architectures(gpus)
        yield from _peers(len(gpus))
    else:
        with warnings.catch_warnings(record=True) as caught:  # what torch says of a driver that it can't use
            warnings.simplefilter("always")
            torch.cuda.is_available()
        yield _none(one_line(caught[0].message, 200) if caught else "")
    yield _precision(config, recipe, torch.device("cuda" if gpus else "cpu"))


def look_at_system(recipe: Recipe, run_dir: Path) -> Iterator[Finding]:
    """Memory, shared memory for the recipe's batches, limits of processes, and the disks."""
    total, free = host_memory_gib()
    text = f"{len(usable_cores())} cores, {free:.1f} of {total:.1f} GiB memory free"
    yield judge("memory", text, "end other programs, or give the container more: a rank needs about 2 GiB", free < 2)
    yield _shared_memory(recipe)
    yield from _limits()
    yield _disk("runs", run_dir, 20)
    yield _disk("temporary files", Path(tempfile.gettempdir()), 2)
    yield _disk("lists of images", cache_folder(), 1)


def look_at_network() -> Iterator[Finding]:
    """The libraries of collectives and their settings, the interfaces, the machine's own name, InfiniBand."""
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if dist.is_nccl_available() else "no NCCL"
    lacking = torch.cuda.is_available() and not dist.is_nccl_available()
    yield judge("network", f"{gloo}, {nccl}", "several GPUs need NCCL: install a torch built with it", lacking)
    chosen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))]
    if chosen:
        yield judge("network", ", ".join(chosen))
    yield _interfaces()
    yield _own_name()
    for port in sorted(_INFINIBAND.glob("*/ports/*")):
        state, rate = ((port / name).read_text().strip() for name in ("state", "rate"))
        text = f"{port.parent.parent.name}:{port.name}: {state}, {rate}"
        yield judge(
            "network", text, "it is not active: look at its cable and the subnet manager", "ACTIVE" not in state
        )


def _none(complaint: str) -> Finding:
    if not os.path.exists(_DRIVER) and shutil.which("nvidia-smi") is None:
        cure = "with a GPU in this machine: install its driver; in a container: docker run --gpus all"
        return judge("gpu", "no GPU: training runs on the CPU, with gloo", cure)
    if torch.version.cuda is None and torch.version.hip is None:
        text, cure = "a driver is here, and this torch is built for CPUs", "install torch with CUDA"
    else:
        text = f"a driver is here, and torch (CUDA {torch.version.cuda}) finds no GPU{complaint and f': {complaint}'}"
        cure = "nvidia-smi must list the GPUs; a driver older than torch's CUDA must be updated"
    return judge("gpu", text, cure, level=FAILURE)


def _each(gpus: list[Gpu]) -> Iterator[Finding]:
    for number, gpu in enumerate(gpus):
        text = f"{number}: {gpu.name}, capability {gpu.capability}, {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
        sensors = open_sensors(torch.device("cuda", number))
        if sensors is not None:
            sensors.start()
        now = (sensors.finish() if sensors is not None else None) or GpuReading()
        text += "" if now.celsius is None else f", {now.celsius:.0f} °C"
        text += "" if now.watts is None else f", {now.watts:.0f} W"
        cure = "other processes hold memory: nvidia-smi lists them" if gpu.free_gib < 0.9 * gpu.memory_gib else ""
        if now.slowed_by:
            cure = f"its clock is lowered because of {now.slowed_by}: look at cooling and power"
        yield judge("gpu", text, cure)
    if len({(gpu.name, round(gpu.memory_gib)) for gpu in gpus}) > 1:
        yield judge("gpu", "the GPUs differ", "choose equal ones: the slowest and the smallest decide")


def _architectures(gpus: list[Gpu]) -> Iterator[Finding]:
    """GPUs that torch was not built for: it needs code of their major version, or older PTX for the driver."""
    built = [] if torch.version.hip is not None else torch.cuda.get_arch_list()
    codes = [(kind, int(number.rstrip("af"))) for kind, _, number in (name.partition("_") for name in built)]
    for capability in sorted({gpu.capability for gpu in gpus} if built else ()):
        here = int(capability.replace(".", ""))
        if not any(code <= here and (kind == "compute" or code // 10 == here // 10) for kind, code in codes):
            text = f"torch {torch.__version__} has no code for capability {capability}, only for {', '.join(built)}"
            cure = "install a build of torch for this GPU: https://pytorch.org/get-started"
            yield judge("gpu", text, cure, level=FAILURE)


def _peers(count: int) -> Iterator[Finding]:
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    text = f"{direct} of {len(pairs)} pairs reach each other's memory directly"
    cure = "collectives go through the host; in a virtual machine ask for peer access (nvidia-smi topo -m)"
    if pairs:
        yield judge("gpu", text, cure, direct < len(pairs))


def _precision(config: DsConfig, recipe: Recipe, device: torch.device) -> Finding:
    """FP32, bf16, fp16 and the attention kernel of each, for global crops of one of our ViTs."""
    on_gpu, attention = device.type == "cuda", recipe.model.spec().attention(recipe.crops.global_size)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else True
    fp16 = True if on_gpu else bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    able, parts = {"fp32": True, "bf16": bf16, "fp16": fp16}, []
    for name, has in able.items():
        kernel = ""
        if has and attention:
            kernel = f" ({chosen_kernel(*attention, DTYPES[name], device)} attention)"
        parts.append(f"{name}{kernel}" if has else f"no {name}")
    if not able[config.precision]:
        cure = f"the ds config wants {config.precision}: take another --ds_config"
        return judge("precision", ", ".join(parts), cure, level=FAILURE)
    return judge("precision", ", ".join(parts), "take an fp16 ds config, such as ds_configs/zero2_fp16.json", not bf16)


def _shared_memory(recipe: Recipe) -> Finding:
    """Shared memory for this machine alone, with a rank on each GPU."""
    if not os.path.isdir(_SHARED_MEMORY):
        return judge("shm", "this system has no /dev/shm")
    disk = os.statvfs(_SHARED_MEMORY)
    free = f"{disk.f_bavail * disk.f_frsize / 2**30:.2f} GiB of shared memory free"
    data, ranks = recipe.data, torch.cuda.device_count() or 1
    workers = max(0, len(usable_cores()) // ranks - 1) if data.workers is None else data.workers
    try:
        check_shared_memory(ranks * recipe.batch_bytes(max(1, data.global_batch // ranks)), workers)
    except DataError as error:
        return judge("shm", free, str(error), level=FAILURE)
    return judge("shm", f"{free}, enough for {ranks} ranks with {workers} loader processes each")


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FILES:
        cure = f"ulimit -n {most}" if most >= _FILES else f"raise the hard limit to {_FILES} in limits.conf"
        yield judge("limits", f"{files} open files", cure)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = locked != resource.RLIM_INFINITY
    text = f"{locked / 2**20:.0f} MiB of locked memory" if limited else "no limit of locked memory"
    bad = limited and _INFINIBAND.is_dir()
    text = text if bad else f"{files if files >= 0 else 'any number of'} open files, {text}"
    yield judge("limits", text, "InfiniBand needs more: ulimit -l unlimited (docker run --ulimit memlock=-1)", bad)


def _disk(what: str, path: Path, wanted: int) -> Finding:
    here = next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(here).free / 2**30
    if not os.access(here, os.W_OK | os.X_OK):
        cure = "fix its rights, or name another place"
        return judge("disk", f"{what}: {here} can't be written to", cure, level=FAILURE)
    cure = f"{wanted} GiB are a fair start: remove old runs, or take another disk"
    return judge("disk", f"{what}: {free:.1f} GiB free in {here}", cure, free < wanted)


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
    several = len(outside) > 1
    named = f"export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME ({outside[0]}, ...)" if several else ""
    hint = f"if ranks don't find each other: {named}" if several else ""
    return Finding("network", FINE, ", ".join(shown) or "no interface is up", hint)


def _own_name() -> Finding:
    """The machine's own address: gloo listens at it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        cure = f"add a line with {name} and this machine's address to /etc/hosts"
        return judge("network", f"the machine's own name {name} has no address", cure)
    if not ipaddress.ip_address(address).is_loopback:
        return judge("network", f"{name} is {address}")
    cure = "alone that is fine; among several machines put its real address into /etc/hosts"
    return judge("network", f"{name} is {address} to itself: others can't reach that", cure)
