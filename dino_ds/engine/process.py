"""This process: its device and memory, DeepSpeed's import without warnings, and joining the launcher's process
group."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import ipaddress
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dino_ds.basics.machine import check_ranks, find_free_port
from dino_ds.basics.ranges import rehearsing
from dino_ds.engine import distributed
from dino_ds.engine.muon import on_amd, take_onednn
from dino_ds.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PATIENCE_SECONDS = 25.0  # time after which a rank that waits for others says so
_TELLING_SECONDS, _ASKING_SECONDS = 10.0, 2.0
"""How long a rank that can't start tells the others why, and how often waiting ranks ask whether one can't."""
_called_roll: list[None] = []
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # environment variables that name network interfaces


def init_distributed(timeout_minutes: float = 30.0) -> None:
    """Join the process group of the launcher (deepspeed, torchrun), or make one of a single process. Raises ConfigError
    if the variables of a rank are wrong, there is no GPU for this process, or another program uses rank 0's port."""
    # Inductor's default is up to 32 compile processes per rank, but a step has only some 15 small kernels.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(4, len(distributed.usable_cores()))))
    if not dist.is_initialized():
        check_ranks(os.environ)  # for every command that joins; `train` has checked before its imports
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed finds this too, but warns on every rank
    _quiet_deepspeed()
    if dist.is_initialized():
        return
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        _join(timeout)
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed's engine reads it
    # Without these DeepSpeed looks for MPI. They are removed again: jobs started from here are no ranks of this group.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    added = alone.keys() - os.environ.keys()
    os.environ.update(alone)
    try:
        _join(timeout)
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def rendezvous(timeout: timedelta) -> Iterator[tuple[dist.Store | None, timedelta]]:
    """Wrap joining a process group. Yields a store to join by (None without torchrun), and the time that connecting may
    take now that all ranks are there. torchrun's agent keeps one store for all starts, with addresses under the same
    names: ranks that start again would read those of dead ranks. On several machines gloo gets the interface that
    reaches rank 0's machine, unless the user has named one. Raises ConfigError if ranks disagree on the world size,
    machines can't connect, or another program uses rank 0's port."""
    mine, ranks = distributed.rank(), distributed.world_size()
    several = False
    try:
        if (ranks, mine) == (1, 0):
            yield None, timeout
            return
        store = _store(timeout)  # the server is shared with the process group's store: same port, same process
        several, start = _call_roll(store, mine, ranks, timeout)
        joins = dist.PrefixStore(f"dino_ds/{start}", store) if _agent_serves() else None
        yield joins, timedelta(seconds=_PATIENCE_SECONDS + ranks / 4)
        del store
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            where = f"port {os.environ.get('MASTER_PORT')} of {socket.gethostname()}"
            raise ConfigError(f"{where} is in use: give another --master_port") from error
        if several:
            first_line = next(iter(str(error).splitlines()), "")
            why = f"rank {mine} does not get through to the ranks of other machines ({first_line[:160]})"
            raise ConfigError(f"{why}: name the interface between them, {GLOO}=eth0 (and {NCCL} for GPUs)") from error
        raise


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _serves() -> bool:
    return distributed.rank() == 0 and not _agent_serves()


def _connect(timeout: timedelta) -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(
        address, port, None, is_master=_serves(), timeout=timeout, wait_for_workers=False, multi_tenant=True
    )


def _store(timeout: timedelta) -> dist.Store:
    """Connect to rank 0's store; prints a line if rank 0 is not reached for a while."""
    try:
        return _connect(timedelta(seconds=_PATIENCE_SECONDS))
    except dist.DistNetworkError:
        if _serves():
            raise
    address = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
    _say(f"rank {distributed.rank()} does not reach rank 0 at {address}, for {_PATIENCE_SECONDS:.0f} s")
    return _connect(timeout)


def _call_roll(store: dist.Store, mine: int, ranks: int, timeout: timedelta) -> tuple[bool, str]:
    """Wait until all ranks are there and choose gloo's interface; returns whether they are on several machines, and
    a name that no other start has."""
    _called_roll.append(None)
    prefix = _prefix()
    # This machine's address towards the machine of rank 0, and that machine's address as it is known here.
    (family, _, _, _, address), *_ = socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    source = master = str(address[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(address)  # sends nothing
        source = str(probe.getsockname()[0])
    store.set(f"{prefix}/{mine}", json.dumps([ranks, socket.gethostname(), master]))
    if mine == 0:
        answers = [json.loads(_take(store, f"{prefix}/{rank}")) for rank in _present(store, prefix, ranks, timeout)]
        seen = next((address for _, _, address in answers if not _is_loopback(address)), master)
        sizes: dict[int, int] = {}
        for rank, (size, _, _) in enumerate(answers):
            sizes.setdefault(size, rank)
        roll = json.dumps([sizes, len({host for _, host, _ in answers}) > 1, seen, secrets.token_hex(8)])
        for rank in range(ranks):
            store.set(f"{prefix}/roll/{rank}", roll)
    else:
        _wait_for(f"{prefix}/roll/{mine}", store, timeout.total_seconds())
    sizes, several, seen, start = json.loads(_take(store, f"{prefix}/roll/{mine}"))
    if len(sizes) > 1:
        text = " and ".join(f"WORLD_SIZE {size} by rank {rank}" for size, rank in sizes.items())
        raise ConfigError(f"ranks disagree on how many they are: {text}; give all of them the same WORLD_SIZE")
    reached = seen if _is_loopback(source) else source
    if several and GLOO not in os.environ and not _is_loopback(reached):
        # By itself gloo takes the interface of the machine's name, which many machines resolve to 127.0.1.1.
        for name, addresses in psutil.net_if_addrs().items():
            if reached in [entry.address.partition("%")[0] for entry in addresses]:
                os.environ.setdefault(GLOO, name)
    return bool(several), str(start)


def _prefix() -> str:
    return f"dino_ds/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def tell_other_machines(message: str) -> None:
    """Tell ranks of other machines that this rank can't start, and why: some launchers would let them wait for it.
    Rank 0 keeps its store open for a few seconds, in which they can read the message."""
    if _called_roll:
        return
    with contextlib.suppress(RuntimeError, KeyError, ValueError):  # nobody is there, or they can't be found
        store = _connect(timedelta(seconds=_TELLING_SECONDS))
        store.set(f"{_prefix()}/ended", f"{socket.gethostname()} has not started: {message}")
        if _serves():
            time.sleep(_TELLING_SECONDS)


def _wait_for(key: str, store: dist.Store, seconds: float) -> None:
    """Wait for a key. Raises DistStoreError after `seconds`, ConfigError if a machine can't start."""
    due, ended = time.monotonic() + seconds, f"{_prefix()}/ended"
    while True:
        left = due - time.monotonic()
        try:
            return store.wait([key], timedelta(seconds=max(0.01, min(left, _ASKING_SECONDS))))
        except dist.DistStoreError:
            if store.check([ended]):
                if _serves():
                    time.sleep(2 * _ASKING_SECONDS)  # until the others have asked too
                raise ConfigError(store.get(ended).decode()) from None
            if left < _ASKING_SECONDS:
                raise


def _take(store: dist.Store, key: str) -> bytes:
    """Read and delete a value: torchrun's agent keeps the store for later starts, which must not find it."""
    value = store.get(key)
    store.delete_key(key)
    return value


def _present(store: dist.Store, prefix: str, ranks: int, timeout: timedelta) -> Iterator[int]:
    """Yield each rank once it is there, up to the first with another world size; prints late ranks after a while."""
    due, said = time.monotonic() + _PATIENCE_SECONDS, False
    for rank in range(ranks):
        key = f"{prefix}/{rank}"
        try:
            _wait_for(key, store, timeout.total_seconds() if said else due - time.monotonic())
        except dist.DistStoreError:
            if said:
                raise
            said, missing = True, [str(late) for late in range(rank, ranks) if not store.check([f"{prefix}/{late}"])]
            names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:8])}{' ...' if missing[8:] else ''}"
            _say(f"{names} of {ranks} did not come within {_PATIENCE_SECONDS:.0f} s: look at what they print")
            _wait_for(key, store, timeout.total_seconds())
        differs = json.loads(store.get(key))[0] != ranks
        yield rank
        if differs:
            return


def _say(text: str) -> None:
    print(f"dino_ds: {socket.gethostname()}: {text}; waiting", file=sys.stderr, flush=True)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _join(timeout: timedelta) -> None:
    deepspeed = import_deepspeed()
    accelerator = deepspeed.accelerator.get_accelerator()
    local, gpus, ranks = distributed.local_rank(), accelerator.device_count(), distributed.local_world_size()
    on_cpu = accelerator.device_name() == "cpu"
    backend = "gloo" if on_cpu else accelerator.communication_backend_name()
    if on_cpu:
        # DeepSpeed's shared-memory collectives compile for minutes at first use; gloo compiles nothing.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # The C library keeps the memory that a step frees for the next step, instead of asking the kernel for new pages
        # each time: 80,000 per step for a ViT-Ti/16 on a CPU. The peak grows by fragmentation only.
        chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # by the user
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
        if mallopt is not None and not any(name in os.environ for name in chosen):
            mallopt(-1, -1)  # M_TRIM_THRESHOLD
            mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD: glibc accepts no larger one
        if on_amd():
            take_onednn()
    elif local >= gpus:
        raise ConfigError(
            f"process {local} of this machine (they count from 0) has no GPU, it sees {gpus}: start one a "
            "GPU, and let each process see all of them (srun --gpus-per-node, not --gpus-per-task)",
            said_by_me=local == gpus,  # the first such rank; rank 0 has no error
        )
    else:
        accelerator.set_device(local)
    # Ranks with GPUs share the cores too: an offloaded optimizer steps on the host.
    if "OMP_NUM_THREADS" not in os.environ and (on_cpu or ranks > 1):
        torch.set_num_threads(max(1, len(distributed.usable_cores()) // ranks))
    with rendezvous(timeout) as (store, connecting):
        connecting = connecting if on_cpu else timeout
        if store is not None:  # make the process group that DeepSpeed then finds
            card = torch.device("cuda", local) if not on_cpu and torch.cuda.is_available() else None
            rank, world = distributed.rank(), distributed.world_size()
            dist.init_process_group(
                backend, timeout=connecting, world_size=world, rank=rank, store=store, device_id=card
            )
        deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=connecting)
    if on_cpu:
        distributed.set_timeouts(timeout.total_seconds())


def leave() -> None:
    """Leave the process group at the end of the program (NCCL warns about ranks that do not); one may join again."""
    if dist.is_initialized():
        import deepspeed.comm

        deepspeed.comm.destroy_process_group()  # torch's own leaves DeepSpeed with groups that are gone


def device() -> torch.device:
    """The device of this process; in a rehearsal the CPU, whatever device is rehearsed."""
    if rehearsing():
        return torch.device("cpu")
    name = import_deepspeed().accelerator.get_accelerator().device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, distributed.local_rank())


def fp16_supported() -> bool:
    return bool(import_deepspeed().accelerator.get_accelerator().is_fp16_supported())


def memory_gib() -> float:
    """Peak memory of this process: a GPU's if it has one, else the peak resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resident_mib(peak=True) / 1024


def resident_mib(peak: bool = False) -> float:
    """Resident set of this process, now or at its peak. From /proc if it exists: getrusage's maximum begins with the
    parent's."""
    status, wanted = Path("/proc/self/status"), "VmHWM:" if peak else "VmRSS:"
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith(wanted):
            return int(line.split()[1]) / 1024
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
    return largest if peak else psutil.Process().memory_info().rss / 2**20


def free_memory() -> str:
    host = psutil.virtual_memory()
    places = {"host": (host.available, host.total)}
    if torch.cuda.is_available():
        places = {"GPU": torch.cuda.mem_get_info(), **places}
    return ", ".join(f"{f / 2**30:.2f} of {t / 2**30:.1f} GiB are free on the {at}" for at, (f, t) in places.items())


def release_memory() -> None:
    """Free the memory of ended trials and runs: DeepSpeed's hooks make reference cycles, which need the collector."""
    for _ in range(2):  # our engine, freed in the first pass, releases DeepSpeed's
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def use_deterministic_kernels() -> None:
    """Make kernels sum in the same order in every run; call this before anything is computed on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    torch.use_deterministic_algorithms(True)
    # Else torch fills all new memory with NaN to expose reads of it, which costs a pass over the memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def import_deepspeed() -> Any:
    """Import DeepSpeed, with its prints sent to stderr: standard output is for results such as a bench's JSON."""
    with contextlib.ExitStack() as stack:
        if "deepspeed" not in sys.modules:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            if "mlflow" not in sys.modules:
                # DeepSpeed's autotuner, unused here, would import MLflow, which costs 1.5 seconds and a thread.
                sys.modules["mlflow"] = None  # type: ignore[assignment]
                stack.callback(sys.modules.pop, "mlflow")
        import deepspeed
    return deepspeed


def _quiet_deepspeed() -> None:
    logger = import_deepspeed().utils.logger
    logger.setLevel(logging.WARNING if distributed.rank() == 0 else logging.ERROR)
    # To stderr, by logging's last resort: standard output is for results, such as a bench's JSON.
    logger.handlers.clear()
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())  # untested by DeepSpeed
    logger.propagate = True
