"""Two machines on one: an sshd of our own at 127.0.0.1 and 127.0.0.2, with its own keys, in a temporary folder.

Nothing of the user's ~/.ssh is read or written: `ssh` comes first in PATH as a script that names our config.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from dino_ds.basics.ports import find_free_port

REPOSITORY = Path(__file__).parent.parent.parent
HOSTS = ("127.0.0.1", "127.0.0.2")
_SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def environment(**more: str) -> dict[str, str]:
    """The environment of a command that starts ranks: no rank itself, on the CPU, one thread each."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}


def dino_ds(*words: object) -> list[str]:
    """`dino-ds WORDS` of this checkout, whichever is installed."""
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from dino_ds.cli.main import main; main()"
    return [sys.executable, "-c", code, *map(str, words)]


def started_by(supervisor: int) -> list[psutil.Process]:
    """Living processes of a supervised run, orphans too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("DINO_DS_SUPERVISOR", "").startswith(f"{supervisor}."):
                found.append(process)
    return found


@contextmanager
def ssh_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `ssh` and `pdsh` reach both machines; skips the test where programs are missing."""
    missing = [name for name in ("ssh", "ssh-keygen", "pdsh") if shutil.which(name) is None]
    if missing or _SSHD is None:
        pytest.skip(f"needs {', '.join([*missing, *([] if _SSHD else ['sshd'])])}")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it of root
    port = find_free_port()
    _write_configs(folder, port)
    log = folder / "sshd.log"
    server = subprocess.Popen([_SSHD, "-D", "-f", str(folder / "sshd_config"), "-E", str(log)])
    found = environment(PATH=f"{folder / 'bin'}:{environment()['PATH']}")
    try:
        _wait_until_reachable(found, server, log)
        yield found
    finally:
        server.terminate()
        server.wait(60)


def _write_configs(folder: Path, port: int) -> None:
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    listen = "\n".join(f"ListenAddress {host}" for host in HOSTS)
    (folder / "sshd_config").write_text(
        f"Port {port}\n{listen}\nHostKey {folder}/host_key\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "SetEnv OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n Port {port}\n IdentityFile {folder}/user_key\n IdentitiesOnly yes\n LogLevel ERROR\n"
        f" UserKnownHostsFile {folder}/known_hosts\n GlobalKnownHostsFile none\n StrictHostKeyChecking no\n"
    )
    (folder / "bin").mkdir()
    script = folder / "bin/ssh"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    script.chmod(0o755)


def _wait_until_reachable(found: Mapping[str, str], server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end and server.poll() is None:
        tried = [subprocess.run(["ssh", host, "true"], env=found, capture_output=True, text=True) for host in HOSTS]
        if all(one.returncode == 0 for one in tried):
            return
        time.sleep(0.2)
    pytest.skip(f"sshd of our own can't be reached: {log.read_text()[-300:] if log.exists() else 'no log'}")
