"""Builds the command of a launch: the argument list of DeepSpeed's launcher or of torchrun.

DeepSpeed's launcher runs `pdsh`, which joins its words with spaces for a remote shell. Each word is quoted here so that
it arrives unchanged, or refused with the character that can't be forwarded.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from dino_ds.errors import ConfigError
from dino_ds.launching.plan import SCRIPT, LaunchPlan

# Beginnings of the variables that DeepSpeed's launcher exports to the other machines.
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def build_command(plan: LaunchPlan) -> list[str]:
    """The words to execute, without a shell. Raises ConfigError for what can't be forwarded."""
    return _torchrun(plan) if plan.options.launcher == "torchrun" else _deepspeed(plan)


def _deepspeed(plan: LaunchPlan) -> list[str]:
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", f"--master_port={plan.master_port}"]
    if plan.hosts:
        command += [f"--hostfile={plan.hostfile}"]
        command += [f"--include={plan.options.include}"] if plan.options.include else []
        command += [f"--exclude={plan.options.exclude}"] if plan.options.exclude else []
        command += [f"--num_gpus={plan.ranks}"] if plan.options.ranks else []
        command += [f"--master_addr={plan.master_addr}"] if plan.master_addr else []
        if plan.options.no_ssh:
            command += ["--no_ssh", f"--node_rank={plan.options.node_rank}"]
        else:
            command += ["--force_multi"]  # else a single machine of the hostfile is taken for this one
    elif plan.devices:
        # It would take the first GPUs and drop CUDA_VISIBLE_DEVICES.
        command += ["--include=localhost:" + ",".join(map(str, plan.devices))]
    else:
        command += [f"--num_gpus={plan.ranks}"]
    words = [quote_for_pdsh(word) for word in plan.words] if plan.uses_ssh else list(plan.words)
    return [*command, str(SCRIPT), *words]


def _torchrun(plan: LaunchPlan) -> list[str]:
    least, most = plan.nodes
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={plan.ranks}"]
    if most == 1:
        command += ["--master_addr=127.0.0.1", f"--master_port={plan.master_port}"]
    else:
        command += [
            f"--nnodes={least}:{most}",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint={plan.master_addr}:{plan.master_port}",
            "--rdzv_id=dino_ds",
        ]
    if plan.elastic:
        # A machine that joins later waits for an address that torch writes down in the first round only, if shared.
        command = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *command]
        command += [
            f"--max_restarts={plan.options.max_restarts}",
            "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGUSR2",
        ]
    return [*command, str(SCRIPT), *plan.words]


def quote_for_pdsh(word: str) -> str:
    """`word` so that it arrives as it is, through DeepSpeed's launcher, pdsh and the remote shell.

    The launcher puts a word with a space into double quotes and escapes those in it; pdsh replaces %h, %n and %u.
    """
    for character in word:
        if not character.isprintable():
            raise ConfigError(f"refusing to forward {word!r} to other machines: it contains {character!r}")
    word = word.replace("%", "%%")
    if " " in word:
        return re.sub(r"([\\$`])", r"\\\1", word)
    return shlex.quote(word)


def check_forwarded(plan: LaunchPlan, environment: Mapping[str, str], folder: Path) -> None:
    """Raise ConfigError for paths and exported variables that remote shells would take for commands.

    folder: the working folder, which the other machines change to.
    """
    if not plan.uses_ssh:
        return
    for what, path in (("the working folder", folder), ("Python's path", sys.executable), ("the script", SCRIPT)):
        _refuse(what, str(path), "".join(c for c in str(path) if not _PLAIN.fullmatch(c)))
    for name, value in environment.items():
        if name.startswith(_EXPORTED):
            _check_variable(name, value, f"the variable {name}")
    own = environment.get("DS_ENV_FILE", ".deepspeed_env")
    for path in dict.fromkeys(Path(place, own) for place in (Path.home(), folder)):
        if path.is_file():
            _check_env_file(path)


def _check_env_file(path: Path) -> None:
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError):
        raise ConfigError(f"{path} can't be read; DeepSpeed's launcher takes variables from it: remove it") from None
    for number, line in enumerate(lines, 1):
        name, equals, value = line.partition("=")
        if not equals or not _VARIABLE.fullmatch(name.strip()):
            raise ConfigError(
                f"{path}:{number}: {line[:80]!r} is not NAME=value: DeepSpeed's launcher stops at it, "
                "at empty lines and comments too"
            )
        _check_variable(name.strip(), value, f"{name.strip()} of {path}:{number}")


def _check_variable(name: str, value: str, what: str) -> None:
    # In double quotes, as the launcher writes them, only these act.
    acting = "".join(c for c in value.strip() if c in '$`"\\' or not c.isprintable())
    _refuse(what, value, acting if _VARIABLE.fullmatch(name) else name)


def _refuse(what: str, value: str, acting: str) -> None:
    if acting:
        raise ConfigError(
            f"refusing to forward {what} to other machines: the value {value[:80]!r} contains {acting[0]!r}, "
            "which their shells would act on"
        )
