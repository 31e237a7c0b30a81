"""Two hosts of one machine: network, names, mounts and an sshd of their own, and a cable between them. Needs root.

with two_hosts(folder) as (near, far):
    near.start(["deepspeed", "--hostfile", folder / "hostfile", ...])

They share the machine's files. Each host's own name resolves to 127.0.1.1, as on a new Debian or Ubuntu.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.inject import Fault

NAMES = {"ha": "10.9.0.1", "hb": "10.9.0.2"}
_SSHD = """\
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
SetEnv {variables}
"""
_SSH = """\
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
_UP = """\
hostname {name}
mount --bind {folder}/hosts.{name} /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
exec /usr/sbin/sshd -D -f {folder}/sshd_config
"""


def environment(**more: object) -> dict[str, str]:
    """The environment of a command that starts ranks: no rank itself, on the CPU, one thread each."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    told = {"PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}
    return kept | {name: str(value) for name, value in told.items()}


def start(
    words: list[object], output: Path, folder: Path | None = None, **variables: object
) -> subprocess.Popen[bytes]:
    """A command that starts ranks, in a session of its own; what it prints is added to `output`."""
    with output.open("a") as file:
        return subprocess.Popen(
            list(map(str, words)),
            env=environment(**variables),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Tests that nohup or a shell's & has started would hand on that they are ignored.
            preexec_fn=lambda: [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGHUP, signal.SIGINT)],
        )


@dataclass
class Host:
    """A host by its name and the process that holds its namespaces. `started`: commands that tests have started."""

    name: str
    folder: Path
    holder: subprocess.Popen[bytes]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return NAMES[self.name]

    def run(self, *words: object) -> str:
        return subprocess.run([*self._enter(), *map(str, words)], check=True, capture_output=True, text=True).stdout

    def start(self, words: list[object], output: Path, **variables: object) -> subprocess.Popen[bytes]:
        process = start([*self._enter(), *words], output, self.folder, **variables)
        self.started.append(process)
        return process

    def cable(self, state: str) -> None:
        self.run("ip", "link", "set", "cable", state)

    def processes(self, word: str = "") -> list[psutil.Process]:
        """The running processes on this host, but for its sshd, that have `word` in their command lines."""
        here, there = os.readlink(f"/proc/{self.holder.pid}/ns/uts"), []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                inside = os.readlink(f"/proc/{process.pid}/ns/uts") == here and process.pid != self.holder.pid
                if inside and process.status() != psutil.STATUS_ZOMBIE and word in " ".join(process.cmdline()):
                    there.append(process)
        return there

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "-n", "-m", "-u", "--"]


@dataclass(frozen=True)
class OnHosts:
    """A fault that first moves each rank to a host, by the process that holds its namespaces; then `fault` happens."""

    holders: tuple[int, ...]
    fault: Fault | None = None

    def __call__(self, rank: int) -> None:
        folder = os.getcwd()
        for kind in ("net", "uts", "mnt"):
            namespace = os.open(f"/proc/{self.holders[rank]}/ns/{kind}", os.O_RDONLY)
            assert ctypes.CDLL(None).setns(namespace, 0) == 0  # os.setns: Python 3.12
            os.close(namespace)
        os.chdir(folder)
        os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1")
        if self.fault:
            self.fault(rank)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts, ha and hb, whose files are in `folder`. Skips the test where root or a program is missing."""
    programs = ("ip", "nsenter", "unshare", "ssh-keygen", "/usr/sbin/sshd", "pdsh", "mount")
    missing = [name for name in programs if shutil.which(name) is None]
    if os.getuid() or missing:
        pytest.skip(f"needs {', '.join(missing)}" if missing else "needs root")
    variables = f"DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 DINO_DS_CACHE={folder}/cache"
    os.makedirs("/run/sshd", exist_ok=True)
    for name in NAMES:
        others = "".join(f"{address} {other}\n" for other, address in NAMES.items() if other != name)
        (folder / f"hosts.{name}").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))
    (folder / "sshd_config").write_text(_SSHD.format(folder=folder, variables=variables))
    (folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in NAMES))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    hosts = []
    try:
        for name in NAMES:
            up = _UP.format(name=name, folder=folder)
            holder = subprocess.Popen(["unshare", "-n", "-u", "-m", "sh", "-ec", up], start_new_session=True)
            _wait_for(lambda holder=holder: holder.poll() or psutil.Process(holder.pid).name() == "sshd")
            if holder.returncode:
                raise subprocess.CalledProcessError(holder.returncode, up, stderr="unshare or sshd has ended")
            hosts.append(Host(name, folder, holder))
        near, far = hosts
        link = "link add cable type veth peer name cable netns"
        near.run("ip", *link.split(), far.holder.pid)
        for host in hosts:
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                host.run("ip", "link", "set", device, "up")
        yield near, far
    except subprocess.CalledProcessError as error:
        pytest.skip(f"namespaces can't be made here: {error.stderr}")
    finally:
        for host in hosts:
            for process in host.processes():
                with suppress(psutil.Error):
                    process.kill()
            host.holder.kill()
            for process in (*host.started, host.holder):
                process.wait()


def _wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
